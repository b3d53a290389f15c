//! Typed access to the keys of a JSON object; every refusal names key, value and what is supported.

use serde_json::{Map, Value};

/// Largest accepted size of one dimension.
pub(super) const MAX_DIM: usize = 1 << 24;
/// Largest accepted number of rows or columns of one matrix (a product of config keys).
const MAX_MATRIX_SIDE: usize = 1 << 28;
/// Largest accepted number of elements of one matrix; eight bytes each still fit a signed 64-bit offset.
const MAX_MATRIX_ELEMENTS: usize = 1 << 44;

/// The keys of one JSON object. A `null` is the same as an absent key.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Written before every key in messages, e.g. `rope_parameters.`.
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: "" }
    }

    /// The object under `key`, if there is one.
    pub(super) fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Fields<'a>>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, prefix })),
            Some(_) => Err(self.refuse(key, "an object")),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    /// "`key` is `value`; supported is `supported`", or "`key` is missing; …".
    pub(super) fn refuse(&self, key: &str, supported: &str) -> String {
        let prefix = self.prefix;
        match self.get(key) {
            Some(value) => format!("{prefix}{key} is {}; it must be {supported}", shorten(value)),
            None => format!("{prefix}{key} is missing; it must be {supported}"),
        }
    }

    pub(super) fn required_str(&self, key: &str) -> Result<&'a str, String> {
        self.get(key).and_then(Value::as_str).ok_or_else(|| self.refuse(key, "a string"))
    }

    /// A whole number in `min..=max`, `default` when absent.
    pub(super) fn int_or(&self, key: &str, default: usize, min: usize, max: usize) -> Result<usize, String> {
        if self.get(key).is_none() { Ok(default) } else { self.int(key, min, max) }
    }

    /// A whole number in `min..=max`; absence is an error.
    pub(super) fn int(&self, key: &str, min: usize, max: usize) -> Result<usize, String> {
        self.get(key)
            .and_then(Value::as_u64)
            .and_then(|v| usize::try_from(v).ok())
            .filter(|v| (min..=max).contains(v))
            .ok_or_else(|| self.refuse(key, &format!("a whole number from {min} to {max}")))
    }

    /// A dimension: required, from 1 to [`MAX_DIM`].
    pub(super) fn dim(&self, key: &str) -> Result<usize, String> {
        self.int(key, 1, MAX_DIM)
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.refuse(key, "true or false")),
        }
    }

    /// A finite number above 0 that is still finite and above 0 as f32.
    pub(super) fn positive(&self, key: &str) -> Result<f64, String> {
        self.get(key)
            .and_then(Value::as_f64)
            .filter(|v| *v > 0.0 && (*v as f32).is_finite() && (*v as f32) > 0.0)
            .ok_or_else(|| self.refuse(key, "a number above 0"))
    }

    pub(super) fn positive_or(&self, key: &str, default: f64) -> Result<f64, String> {
        if self.get(key).is_none() { Ok(default) } else { self.positive(key) }
    }

    /// Refuses `key` unless it is absent or exactly `supported`.
    pub(super) fn only(&self, key: &str, supported: &Value) -> Result<(), String> {
        match self.get(key) {
            Some(value) if value != supported => Err(self.refuse(key, &supported.to_string())),
            _ => Ok(()),
        }
    }

    /// `eos_token_id`: one id or a list of ids; absent means none.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, String> {
        let id = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(one) => id(one).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.refuse(key, "a token id or a list of token ids"))
    }

    /// A list of exactly `len` strings; absent is `None`.
    pub(super) fn strings(&self, key: &str, len: usize) -> Result<Option<Vec<&'a str>>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        match list {
            Some(list) if list.len() == len => Ok(Some(list)),
            Some(list) => Err(format!(
                "{}{key} has {} entries; it must have one per layer (num_hidden_layers is {len})",
                self.prefix,
                list.len()
            )),
            None => Err(self.refuse(key, "a list of strings")),
        }
    }

    /// RoPE base: `rope_parameters.rope_theta`, else top-level `rope_theta`; only unscaled RoPE.
    pub(super) fn rope_theta(&self) -> Result<f64, String> {
        if self.get("rope_scaling").is_some() {
            return Err(self.refuse("rope_scaling", "null (RoPE scaling is not supported)"));
        }
        if let Some(rope) = self.object("rope_parameters", "rope_parameters.")? {
            rope.only("rope_type", &"default".into())?;
            rope.only("type", &"default".into())?;
            if rope.get("partial_rotary_factor").is_some_and(|v| v.as_f64() != Some(1.0)) {
                return Err(rope.refuse("partial_rotary_factor", "1.0"));
            }
            if rope.get("rope_theta").is_some() {
                return rope.positive("rope_theta");
            }
        }
        self.positive("rope_theta")
    }
}

/// Refuses a matrix `[rows, cols]` whose sides or element count leave the supported range. `rows` and
/// `cols` are products of the factors given; `what` names the keys that make it up.
pub(super) fn check_matrix(what: &str, rows: &[usize], cols: &[usize]) -> Result<(), String> {
    let side = |factors: &[usize]| {
        factors
            .iter()
            .try_fold(1usize, |product, &f| product.checked_mul(f))
            .filter(|&side| side <= MAX_MATRIX_SIDE)
    };
    let fits = side(rows)
        .zip(side(cols))
        .and_then(|(rows, cols)| rows.checked_mul(cols))
        .is_some_and(|elements| elements <= MAX_MATRIX_ELEMENTS);
    if fits {
        Ok(())
    } else {
        Err(format!(
            "{what} make a matrix of more than {MAX_MATRIX_ELEMENTS} elements or {MAX_MATRIX_SIDE} rows; one of these sizes is wrong"
        ))
    }
}

/// A JSON value for a message, cut to one line of sensible length.
fn shorten(value: &Value) -> String {
    const MAX_CHARS: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
