//! JSON as Python's `json.dumps` writes it, for the templates' `tojson` (docs/model.md §13).
//!
//! Template engines' own `tojson` is compact and HTML-safe, which gives a model other bytes than it was
//! trained on.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The options of `json.dumps` that templates use.
#[derive(Debug)]
pub(super) struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    /// One level of indentation; `None` = everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Style {
    /// Reads the filter's keyword arguments; unknown ones are refused.
    pub(super) fn from_kwargs(kwargs: &Kwargs) -> Result<Self, Error> {
        let indent = kwargs.get::<Option<Value>>("indent")?.filter(|v| !v.is_none());
        let indent = indent.map(|v| match v.as_usize() {
            // A template cannot need more, and the repeat below must not be its to size.
            Some(width) => " ".repeat(width.min(64)),
            None => v.to_string(),
        });
        let (item, key) = match kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
            Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
            None => (if indent.is_none() { ", " } else { "," }.to_owned(), ": ".to_owned()),
        };
        let style = Style {
            ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
            sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            indent,
            item_separator: item,
            key_separator: key,
        };
        kwargs.assert_all_used()?;
        Ok(style)
    }

    /// Serialises `value`.
    pub(super) fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list(
                    &items,
                    depth,
                    out,
                    |item, out| self.write(item, depth + 1, out),
                    ('[', ']'),
                )?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                let write_pair = |(key, item): &(String, Value), out: &mut String| {
                    self.write_string(key, out);
                    out.push_str(&self.key_separator);
                    self.write(item, depth + 1, out)
                };
                self.write_list(&pairs, depth, out, write_pair, ('{', '}'))?;
            }
            other => {
                let what = format!("tojson cannot write a value of type {other}");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        }
        Ok(())
    }

    fn write_list<T>(
        &self,
        items: &[T],
        depth: usize,
        out: &mut String,
        mut write_item: impl FnMut(&T, &mut String) -> Result<(), Error>,
        (open, close): (char, char),
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(depth + 1, out);
            write_item(item, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 => escape_units(c, out),
                c if self.ensure_ascii && !(' '..='~').contains(&c) => escape_units(c, out),
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn escape_units(character: char, out: &mut String) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        // Writing to a String cannot fail.
        let _ = write!(out, "\\u{unit:04x}");
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => number(key),
        other => {
            let what = format!("tojson cannot write a key of type {other}");
            Err(Error::new(ErrorKind::InvalidOperation, what))
        }
    }
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    Ok(python_float(f64::try_from(value.clone())?))
}

/// Python's `repr` of a float: the shortest digits that read back, exponents only below 1e-4 and from 1e16.
fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumps(json: &str, kwargs: &[(&str, Value)]) -> String {
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let kwargs: Kwargs = kwargs.iter().cloned().collect();
        Style::from_kwargs(&kwargs).unwrap().dumps(&Value::from(minijinja::value::Serde(value))).unwrap()
    }

    // Expected texts are what CPython 3's json.dumps prints.
    #[test]
    fn writes_what_python_writes() {
        let json = r#"{"z": [1, 2.0, -0.5, true, null], "a": {"<é&'>": "\u0007\n\"\\"}, "e": [], "o": {}}"#;
        assert_eq!(
            dumps(json, &[]),
            r#"{"z": [1, 2.0, -0.5, true, null], "a": {"<é&'>": "\u0007\n\"\\"}, "e": [], "o": {}}"#
        );
        assert_eq!(
            dumps(r#"{"b": "é😀", "a": 1}"#, &[("ensure_ascii", true.into()), ("sort_keys", true.into())]),
            r#"{"a": 1, "b": "\u00e9\ud83d\ude00"}"#
        );
        assert_eq!(
            dumps(r#"{"b": [1, {"c": []}]}"#, &[("indent", 2.into())]),
            "{\n  \"b\": [\n    1,\n    {\n      \"c\": []\n    }\n  ]\n}"
        );
        let tight = Value::from(vec![",", ":"]);
        assert_eq!(dumps(r#"{"b": [1, 2]}"#, &[("separators", tight)]), r#"{"b":[1,2]}"#);
    }

    #[test]
    fn floats_read_as_python_prints_them() {
        for (x, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (0.1, "0.1"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }

    #[test]
    fn unknown_options_are_refused() {
        let kwargs: Kwargs = [("colour", Value::from(1))].into_iter().collect();
        assert!(Style::from_kwargs(&kwargs).is_err());
    }
}
