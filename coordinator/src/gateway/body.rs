//! Request bodies as clients really send them: JSON with lone surrogate escapes, integral floats, nulls.

use serde_json::{Map, Value};

use super::errors::{self, ApiError};

/// Parses a body that must be a JSON object.
///
/// # Errors
/// 400 `invalid_json`.
pub fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let text = std::str::from_utf8(bytes).map_err(|_| errors::invalid_json("it is not UTF-8"))?;
    let mended = mend_surrogates(text);
    let text = mended.as_deref().unwrap_or(text);
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(errors::invalid_json("it is another JSON value")),
        Err(error) => Err(errors::invalid_json(&error.to_string())),
    }
}

/// Replaces `\uD8xx` escapes without their other half by U+FFFD, which JavaScript string slicing
/// produces and JSON parsers refuse. `None` when there is nothing to mend.
fn mend_surrogates(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = String::new();
    let (mut at, mut copied) = (0, 0);
    while let Some(found) = bytes.get(at..).and_then(|rest| rest.iter().position(|&b| b == b'\\')) {
        at += found;
        if bytes.get(at + 1) != Some(&b'u') {
            at += 2;
            continue;
        }
        let paired = |high: u16| {
            (0xD800..0xDC00).contains(&high)
                && escape(bytes, at + 6).is_some_and(|l| (0xDC00..0xE000).contains(&l))
        };
        match escape(bytes, at) {
            Some(high) if paired(high) => at += 12,
            Some(0xD800..0xE000) => {
                out.push_str(text.get(copied..at)?);
                out.push_str("\\ufffd");
                at += 6;
                copied = at;
            }
            _ => at += 2,
        }
    }
    if copied == 0 {
        return None;
    }
    out.push_str(text.get(copied..)?);
    Some(out)
}

/// The value of a `\uXXXX` escape that starts at `at`.
fn escape(bytes: &[u8], at: usize) -> Option<u16> {
    let hex = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
    u16::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
}

/// Typed access to the fields of a request; null counts as absent.
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Over one object.
    pub fn new(object: &'a Map<String, Value>) -> Self {
        Self { object }
    }

    /// A field that is present and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|v| !v.is_null())
    }

    /// A number within `low..=high`.
    ///
    /// # Errors
    /// 400.
    pub fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| errors::invalid_type(name, value, "a number"))?;
        if (low..=high).contains(&number) {
            Ok(Some(number))
        } else {
            Err(errors::invalid_value(name, value, &format!("a number from {low} to {high}")))
        }
    }

    /// An integer; `128.0` counts as one.
    ///
    /// # Errors
    /// 400.
    pub fn integer(&self, name: &str) -> Result<Option<i128>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let whole = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
        let whole = whole
            .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e18).map(|x| x as i128));
        whole.map(Some).ok_or_else(|| errors::invalid_type(name, value, "an integer"))
    }

    /// A boolean.
    ///
    /// # Errors
    /// 400.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| errors::invalid_type(name, value, "true or false"))
    }

    /// An array.
    ///
    /// # Errors
    /// 400.
    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_array().map(Some).ok_or_else(|| errors::invalid_type(name, value, "a list"))
    }

    /// An object.
    ///
    /// # Errors
    /// 400.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| errors::invalid_type(name, value, "an object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_surrogates_become_replacement_characters() {
        let body = br#"{"a":"x\ud83dy","b":"\ud83d\ude00","c":"\udc00","d":"\\ud83d"}"#;
        let object = parse(body).unwrap();
        assert_eq!(object["a"], "x\u{fffd}y");
        assert_eq!(object["b"], "\u{1f600}");
        assert_eq!(object["c"], "\u{fffd}");
        assert_eq!(object["d"], "\\ud83d");
    }

    #[test]
    fn bad_bodies_are_400() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
        for body in
            [&b"\xff"[..], b"", b"[]", b"{\"a\":NaN}", b"{", deep.as_bytes(), b"{\"a\":\"\\u12\"}", b"\\u"]
        {
            assert_eq!(parse(body).unwrap_err().code, "invalid_json");
        }
    }

    #[test]
    fn integers_may_be_written_as_floats() {
        let object = parse(br#"{"a":128.0,"b":1.5,"c":"1","d":null,"e":true}"#).unwrap();
        let fields = Fields::new(&object);
        assert_eq!(fields.integer("a").unwrap(), Some(128));
        assert_eq!(fields.integer("d").unwrap(), None);
        for name in ["b", "c", "e"] {
            assert_eq!(fields.integer(name).unwrap_err().code, "invalid_type");
        }
    }
}
