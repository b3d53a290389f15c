//! A conversation, and what must be put right in it before a chat template sees it (docs/model.md §13).

use serde_json::{Map, Value};

use super::TextError;

/// What a conversation is rendered with.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// OpenAI-style message objects.
    pub messages: Vec<Value>,
    /// OpenAI-style tool objects.
    pub tools: Vec<Value>,
    /// Extra template variables (`enable_thinking`, `clear_thinking`, `reasoning_effort`, …), handed to the
    /// template as they are; only `reasoning_effort: "none"` also sets `enable_thinking` to false unless given.
    pub kwargs: Map<String, Value>,
    /// Whether the assistant's turn is opened.
    pub add_generation_prompt: bool,
}

impl ChatInput {
    /// Sets the template variables for an API's `reasoning_effort`. GLM's template knows only "High" and "Max",
    /// and turns everything but `high` into Max, so that `low` would think longest. Therefore: `none` switches
    /// thinking off; `minimal`, `low`, `medium` and `high` become `high`, the least there is; `xhigh` and `max`
    /// become `max`.
    ///
    /// # Errors
    /// [`TextError::Template`] for any other word.
    pub fn set_reasoning_effort(&mut self, effort: &str) -> Result<(), TextError> {
        let level = match effort {
            "none" => {
                self.kwargs.insert("enable_thinking".into(), Value::Bool(false));
                return Ok(());
            }
            "minimal" | "low" | "medium" | "high" => "high",
            "xhigh" | "max" => "max",
            other => {
                return Err(TextError::Template(format!(
                    "reasoning_effort is {other:?}; use none, minimal, low, medium, high, xhigh or max"
                )));
            }
        };
        self.kwargs.insert("reasoning_effort".into(), level.into());
        Ok(())
    }

    /// The variables for the template; its own may not be replaced by `kwargs`.
    pub(super) fn variables(&self) -> Result<Map<String, Value>, TextError> {
        let mut variables = self.kwargs.clone();
        if variables.get("reasoning_effort").and_then(Value::as_str) == Some("none") {
            variables.entry("enable_thinking").or_insert(Value::Bool(false));
        }
        let messages = self.messages.iter().enumerate().map(|(i, message)| normalise(message, i));
        variables.insert("messages".into(), messages.collect::<Result<Vec<Value>, _>>()?.into());
        let tools = if self.tools.is_empty() { Value::Null } else { self.tools.clone().into() };
        variables.insert("tools".into(), tools);
        variables.insert("add_generation_prompt".into(), self.add_generation_prompt.into());
        Ok(variables)
    }
}

/// Roles the templates render; one they do not know would vanish without a word.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

fn normalise(message: &Value, index: usize) -> Result<Value, TextError> {
    let refuse = |what: String| TextError::Template(format!("message {index}: {what}"));
    let mut message = message
        .as_object()
        .cloned()
        .ok_or_else(|| refuse("is not an object; give role and content".into()))?;
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default().to_owned();
    if role == "developer" {
        message.insert("role".into(), "system".into());
    } else if !ROLES.contains(&role.as_str()) {
        return Err(refuse(format!("the role is {role:?}; use one of {}", ROLES.join(", "))));
    }
    match message.get("content") {
        // A template would print "None".
        None | Some(Value::Null) => drop(message.insert("content".into(), "".into())),
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            for part in parts {
                check_part(part, role == "tool").map_err(refuse)?;
            }
        }
        Some(_) => return Err(refuse("content is neither a text nor a list of parts".into())),
    }
    if let Some(calls) = message.get_mut("tool_calls").filter(|calls| !calls.is_null()) {
        let calls = calls.as_array_mut().ok_or_else(|| refuse("tool_calls is not a list".into()))?;
        for call in calls {
            parse_arguments(call).map_err(refuse)?;
        }
    }
    Ok(Value::Object(message))
}

/// Text parts only: these models have no vision or audio tower. Tool results may also be `{output}` parts.
fn check_part(part: &Value, tool_result: bool) -> Result<(), String> {
    let Some(object) = part.as_object() else {
        return if part.is_string() {
            Ok(())
        } else {
            Err("a content part is neither a text nor an object".into())
        };
    };
    if tool_result && object.get("output").is_some_and(Value::is_string) {
        return Ok(());
    }
    match object.get("type").and_then(Value::as_str) {
        Some("text") if object.get("text").is_some_and(Value::is_string) => Ok(()),
        Some("text") => Err("a content part of type \"text\" has no text".into()),
        Some(other) => {
            Err(format!("content parts of type {other:?} are not supported; this model reads text only"))
        }
        None => Err("a content part has no type; use {\"type\": \"text\", \"text\": …}".into()),
    }
}

/// OpenAI clients send `arguments` as a JSON string; templates iterate over an object.
fn parse_arguments(call: &mut Value) -> Result<(), String> {
    let function = if call.get("function").is_some() { call.get_mut("function") } else { Some(call) };
    let function = function.and_then(Value::as_object_mut).ok_or("a tool call is not an object")?;
    let name = match function.get("name").and_then(Value::as_str) {
        Some(name) => name.to_owned(),
        None => return Err("a tool call names no function".into()),
    };
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) if text.trim().is_empty() => Map::new().into(),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|error| format!("the arguments of the call to {name:?} are not JSON ({error})"))?,
        None | Some(Value::Null) => Map::new().into(),
        Some(value) => value.clone(),
    };
    if !arguments.is_object() {
        return Err(format!("the arguments of the call to {name:?} are not a JSON object"));
    }
    function.insert("arguments".into(), arguments);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn variables(messages: Value) -> Result<Map<String, Value>, TextError> {
        let messages = messages.as_array().unwrap().clone();
        ChatInput { messages, ..ChatInput::default() }.variables()
    }

    #[test]
    fn null_content_and_argument_strings_are_put_right() {
        let call =
            json!({"type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": \"x\"}"}});
        let bare = json!({"name": "g", "arguments": ""});
        let input = json!([{"role": "assistant", "content": null, "tool_calls": [call, bare]}, {"role": "developer"}]);
        let messages = variables(input).unwrap()["messages"].clone();
        assert_eq!(messages[0]["content"], "");
        assert_eq!(messages[0]["tool_calls"][0]["function"]["arguments"].to_string(), r#"{"b":1,"a":"x"}"#);
        assert_eq!(messages[0]["tool_calls"][1]["arguments"], json!({}));
        assert_eq!(messages[1], json!({"role": "system", "content": ""}));
    }

    #[test]
    fn what_cannot_be_rendered_is_refused_by_name() {
        for (message, part) in [
            (json!("hi"), "not an object"),
            (json!({"role": "wizard", "content": "x"}), "\"wizard\""),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "\"image_url\""),
            (json!({"role": "user", "content": [{"type": "text"}]}), "has no text"),
            (json!({"role": "user", "content": 3}), "neither"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
                "\"f\"",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}),
                "object",
            ),
            (json!({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}), "no function"),
        ] {
            let error =
                variables(json!([{"role": "user", "content": "x"}, message])).unwrap_err().to_string();
            assert!(error.contains("message 1") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn efforts_map_to_what_the_template_can_do() {
        let mut chat = ChatInput::default();
        chat.set_reasoning_effort("low").unwrap();
        assert_eq!(chat.kwargs["reasoning_effort"], "high");
        chat.set_reasoning_effort("none").unwrap();
        assert_eq!(chat.kwargs["enable_thinking"], false);
        assert!(chat.set_reasoning_effort("heroic").is_err());

        let kwargs = json!({"reasoning_effort": "none", "messages": 1}).as_object().unwrap().clone();
        let variables = ChatInput { kwargs, ..ChatInput::default() }.variables().unwrap();
        assert_eq!(variables["enable_thinking"], false);
        assert_eq!(variables["messages"], json!([]));
    }
}
