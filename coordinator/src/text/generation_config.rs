//! `generation_config.json`: stop ids and sampling defaults.

use std::path::Path;

use serde_json::Value;

use super::{TextError, read_json};

/// What a checkpoint recommends for generation; nothing where the file is missing.
#[derive(Debug, Default, PartialEq)]
pub(super) struct GenerationConfig {
    pub(super) eos_token_ids: Vec<u32>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<usize>,
}

impl GenerationConfig {
    pub(super) fn open(path: &Path) -> Result<Self, TextError> {
        let Some(config) = read_json(path)? else { return Ok(GenerationConfig::default()) };
        let refuse = |key: &str, value: &Value, allowed: &str| TextError::File {
            path: path.to_owned(),
            what: format!("{key} is {value}; it must be {allowed}"),
        };
        let present = |key: &str| config.get(key).filter(|value| !value.is_null());
        let number = |key: &'static str, max: f64, allowed: &str| {
            present(key)
                .map(|value| {
                    let in_range = |x: &f64| (0.0..=max).contains(x);
                    value.as_f64().filter(in_range).ok_or_else(|| refuse(key, value, allowed))
                })
                .transpose()
        };
        let mut temperature = number("temperature", f64::MAX, "a number from 0 up")?;
        if present("do_sample") == Some(&Value::Bool(false)) {
            temperature = Some(0.0);
        }
        let id_of = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| refuse("eos_token_id", value, "a token id or a list of them"))
        };
        let eos_token_ids = match present("eos_token_id") {
            None => Vec::new(),
            Some(Value::Array(ids)) => ids.iter().map(id_of).collect::<Result<_, _>>()?,
            Some(value) => vec![id_of(value)?],
        };
        let top_k = present("top_k")
            .map(|value| {
                let k = value.as_u64().and_then(|k| usize::try_from(k).ok());
                k.ok_or_else(|| refuse("top_k", value, "a whole number from 0 up"))
            })
            .transpose()?;
        let top_p = number("top_p", 1.0, "a number from 0 to 1")?;
        Ok(GenerationConfig { eos_token_ids, temperature, top_p, top_k })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(json: &str) -> Result<GenerationConfig, TextError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation_config.json");
        std::fs::write(&path, json).unwrap();
        GenerationConfig::open(&path)
    }

    #[test]
    fn reads_one_id_or_a_list() {
        assert_eq!(open(r#"{"eos_token_id": 7}"#).unwrap().eos_token_ids, [7]);
        let config =
            open(r#"{"eos_token_id": [7, 2], "temperature": 0.7, "top_p": 0.95, "top_k": 20}"#).unwrap();
        assert_eq!(config.eos_token_ids, [7, 2]);
        assert_eq!((config.temperature, config.top_p, config.top_k), (Some(0.7), Some(0.95), Some(20)));
        assert_eq!(open(r#"{"temperature": 0.7, "do_sample": false}"#).unwrap().temperature, Some(0.0));
        let missing = GenerationConfig::open(Path::new("/nonexistent/generation_config.json")).unwrap();
        assert_eq!(missing, GenerationConfig::default());
    }

    #[test]
    fn nonsense_is_refused_by_key() {
        for (json, key) in [
            (r#"{"eos_token_id": -1}"#, "eos_token_id"),
            (r#"{"eos_token_id": ["x"]}"#, "eos_token_id"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"top_k": -3}"#, "top_k"),
            ("[]", "not a JSON object"),
        ] {
            let error = open(json).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("generation_config.json"), "{error}");
        }
    }
}
