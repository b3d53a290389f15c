//! One `<tool_call>` block, read piece by piece.
//!
//! ```text
//! <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>
//! ```
//! Text between the tags other than NAME, K and V (newlines, as older GLM wrote them) is ignored. A value ends
//! at `</arg_value>` only, so it may contain any other tag.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// A complete call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Function name, trimmed.
    pub name: String,
    /// Arguments in the order the model wrote them.
    pub arguments: Map<String, Value>,
}

/// The request's argument schemas: function name → argument name → JSON schema.
#[derive(Debug, Default)]
pub(super) struct ArgumentSchemas(HashMap<String, Map<String, Value>>);

impl ArgumentSchemas {
    /// Reads OpenAI-style tool objects, with or without the `function` wrapper.
    pub(super) fn new(tools: &[Value]) -> Self {
        let schema_of = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let properties = function.get("parameters")?.get("properties")?.as_object()?;
            Some((function.get("name")?.as_str()?.to_owned(), properties.clone()))
        };
        ArgumentSchemas(tools.iter().filter_map(schema_of).collect())
    }

    /// A string stays as written where the schema says string; everything else is JSON, or as written if it is none.
    fn read(&self, function: &str, argument: &str, raw: &str) -> Value {
        let schema = self.0.get(function).and_then(|properties| properties.get(argument));
        let may_be = |kind: &str| schema.is_some_and(|schema| allows(schema, kind));
        let null_literal = raw.trim() == "null" && may_be("null");
        if may_be("string") && !null_literal {
            return raw.into();
        }
        serde_json::from_str(raw.trim()).unwrap_or_else(|_| raw.into())
    }
}

/// Whether `schema` names the JSON type `kind`: by `type`, by its `enum` or `const`, or in one of its alternatives.
fn allows(schema: &Value, kind: &str) -> bool {
    let is_kind = |value: &Value| match kind {
        "string" => value.is_string(),
        _ => value.is_null(),
    };
    match schema.get("type") {
        Some(Value::String(name)) => return name == kind,
        Some(Value::Array(names)) => return names.iter().any(|name| name == kind),
        _ => {}
    }
    let listed = |key| schema.get(key).and_then(Value::as_array);
    if let Some(values) = listed("enum") {
        return values.iter().any(is_kind);
    }
    if let Some(value) = schema.get("const") {
        return is_kind(value);
    }
    let mut alternatives = ["anyOf", "oneOf"].into_iter().filter_map(listed).flatten();
    alternatives.any(|alternative| allows(alternative, kind))
}

/// What the next tag is expected to end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Name,
    Key,
    BeforeValue,
    Value,
    BetweenArguments,
}

impl Part {
    fn tags(self) -> &'static [&'static str] {
        match self {
            Part::Name | Part::BetweenArguments => &["<arg_key>", "</tool_call>"],
            Part::Key => &["</arg_key>"],
            Part::BeforeValue => &["<arg_value>", "</tool_call>"],
            Part::Value => &["</arg_value>"],
        }
    }
}

/// How a block ended.
#[derive(Debug, PartialEq)]
pub(super) enum CallEnd {
    Complete(ToolCall),
    /// No function named, or a key without a value: the block's text.
    Broken(String),
}

/// A block whose `<tool_call>` was seen.
#[derive(Debug)]
pub(super) struct CallBlock {
    part: Part,
    name: String,
    key: String,
    arguments: Map<String, Value>,
    /// The block so far, for the report about a broken one; text from `part_start` on is not used up.
    text: String,
    part_start: usize,
    /// Everything before was searched for tags.
    searched: usize,
}

impl CallBlock {
    pub(super) fn new() -> Self {
        let text = String::from("<tool_call>");
        CallBlock {
            part: Part::Name,
            name: String::new(),
            key: String::new(),
            arguments: Map::new(),
            part_start: text.len(),
            searched: text.len(),
            text,
        }
    }

    /// Adds text. When the block is complete: its result and the text after it.
    pub(super) fn push(&mut self, text: &str, schemas: &ArgumentSchemas) -> Option<(CallEnd, String)> {
        self.text.push_str(text);
        while let Some((tag, at)) = self.next_tag() {
            let body = self.text[self.part_start..at].to_owned();
            self.part_start = at + tag.len();
            self.searched = self.part_start;
            if let Some(end) = self.advance(tag, body, schemas) {
                return Some((end, self.text[self.part_start..].to_owned()));
            }
        }
        None
    }

    /// The text of a block that the reply's end cut off.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn next_tag(&mut self) -> Option<(&'static str, usize)> {
        let tags = self.part.tags();
        let found =
            tags.iter().filter_map(|&tag| Some((tag, self.text[self.searched..].find(tag)? + self.searched)));
        let first = found.min_by_key(|&(_, at)| at);
        if first.is_none() {
            // A tag may have begun in the last bytes.
            let longest = tags.iter().map(|tag| tag.len()).max().unwrap_or(0);
            let mut searched = self.text.len().saturating_sub(longest).max(self.searched);
            while !self.text.is_char_boundary(searched) {
                searched -= 1;
            }
            self.searched = searched;
        }
        first
    }

    fn advance(&mut self, tag: &str, body: String, schemas: &ArgumentSchemas) -> Option<CallEnd> {
        match self.part {
            Part::Name => self.name = body.trim().to_owned(),
            Part::Key => self.key = body.trim().to_owned(),
            Part::Value => {
                let value = schemas.read(&self.name, &self.key, &body);
                self.arguments.insert(std::mem::take(&mut self.key), value);
            }
            Part::BeforeValue | Part::BetweenArguments => {}
        }
        if tag == "</tool_call>" {
            return Some(if self.name.is_empty() || self.part == Part::BeforeValue {
                CallEnd::Broken(self.text[..self.part_start].to_owned())
            } else {
                let (name, arguments) = (std::mem::take(&mut self.name), std::mem::take(&mut self.arguments));
                CallEnd::Complete(ToolCall { name, arguments })
            });
        }
        self.part = match tag {
            "<arg_key>" => Part::Key,
            "</arg_key>" => Part::BeforeValue,
            "<arg_value>" => Part::Value,
            _ => Part::BetweenArguments,
        };
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(schema: Value, raw: &str) -> Value {
        let tool = json!({"function": {"name": "f", "parameters": {"properties": {"a": schema}}}});
        ArgumentSchemas::new(&[tool]).read("f", "a", raw)
    }

    #[test]
    fn the_schema_decides_what_a_value_is() {
        assert_eq!(read(json!({"type": "string"}), "5"), "5");
        assert_eq!(read(json!({"type": "string"}), " {} \n"), " {} \n");
        assert_eq!(read(json!({"type": ["null", "string"]}), "null"), Value::Null);
        assert_eq!(read(json!({"type": ["null", "string"]}), "5"), "5");
        assert_eq!(read(json!({"enum": ["1", "2"]}), "1"), "1");
        assert_eq!(read(json!({"enum": [1, 2]}), "1"), 1);
        assert_eq!(read(json!({"anyOf": [{"type": "null"}, {"type": "string"}]}), "7"), "7");
        assert_eq!(read(json!({"type": "integer"}), "\n5\n"), 5);
        assert_eq!(read(json!({"type": "object"}), r#"{"b":1,"a":[]}"#), json!({"b": 1, "a": []}));
        assert_eq!(read(json!({"type": "integer"}), "five"), "five");
        assert_eq!(read(json!({}), "true"), true);
        assert_eq!(ArgumentSchemas::new(&[json!(3)]).read("g", "a", "x y"), "x y");
    }
}
