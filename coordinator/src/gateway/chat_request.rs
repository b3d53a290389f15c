//! A chat request's fields, their ranges and their meaning (one value per parameter, or a 400).

use serde_json::{Map, Value};

use super::body::Fields;
use super::errors::{self, ApiError};
use super::{Gateway, SamplingDefaults};
use crate::decode::SamplingParams;
use crate::text::ChatInput;

/// Most messages of one request.
const MAX_MESSAGES: usize = 20_000;
/// Most tools of one request.
const MAX_TOOLS: usize = 512;
/// Most stop strings of one request.
const MAX_STOPS: usize = 16;
/// Longest stop string in bytes.
const MAX_STOP_BYTES: usize = 256;

/// A checked request.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// What the template renders.
    pub chat: ChatInput,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Upper bound of generated tokens, before clamping to the context.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// Names of fields that mean nothing here, for the response header that says so.
    pub ignored: Vec<String>,
    /// Whether reasoning is part of the response.
    pub include_reasoning: bool,
}

impl ChatRequest {
    /// Checks every field; `random_seed` is used when the request has none.
    ///
    /// # Errors
    /// 400 or 404 naming the parameter.
    pub fn parse(body: &Map<String, Value>, gateway: &Gateway, random_seed: u64) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        check_model(&fields, &gateway.config.model_id)?;
        refuse_unsupported(&fields)?;
        let messages = fields.array("messages")?.ok_or_else(|| {
            ApiError::bad_request("missing_required_parameter", "messages", "messages is missing")
        })?;
        if messages.is_empty() || messages.len() > MAX_MESSAGES {
            let expected = format!("a list of 1 to {MAX_MESSAGES} messages");
            return Err(errors::invalid_value("messages", &Value::from(messages.len()), &expected));
        }
        let messages = messages.iter().enumerate().map(|(i, m)| message(m, i)).collect::<Result<_, _>>()?;
        let mut chat =
            ChatInput { messages, tools: tools(&fields)?, kwargs: Map::new(), add_generation_prompt: true };
        thinking(&fields, gateway.config.thinking, &mut chat)?;
        let stream_options = fields.object("stream_options")?;
        let include_usage =
            stream_options.map(|o| Fields::new(o).boolean("include_usage")).transpose()?.flatten();
        Ok(Self {
            chat,
            sampling: sampling(&fields, &gateway.config.sampling, random_seed)?,
            max_tokens: max_tokens(&fields)?,
            stop: stops(&fields)?,
            stream: fields.boolean("stream")?.unwrap_or(false),
            include_usage: include_usage.unwrap_or(false),
            ignored: ignored(body),
            include_reasoning: fields.boolean("include_reasoning")?.unwrap_or(true),
        })
    }
}

/// Fields that are read, besides those that [`refuse_unsupported`] looks at.
const READ: [&str; 22] = [
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "enable_thinking",
    "thinking",
    "reasoning_effort",
    "reasoning",
    "include_reasoning",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_sequences",
    "max_tokens",
    "max_completion_tokens",
    "user",
    "metadata",
];
/// Fields that [`refuse_unsupported`] looks at.
const REFUSED: [&str; 32] = [
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "modalities",
    "tool_choice",
    "functions",
    "function_call",
    "use_beam_search",
    "ignore_eos",
    "continue_final_message",
    "parallel_tool_calls",
    "audio",
    "min_tokens",
    "stop_token_ids",
    "web_search_options",
    "repeat_last_n",
    "typical_p",
    "grammar",
    "json_schema",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "add_generation_prompt",
];
/// Names listed at most, and the longest one listed.
const MAX_IGNORED: usize = 10;
const MAX_IGNORED_BYTES: usize = 64;

/// The names of fields that neither are read nor would be refused.
fn ignored(body: &Map<String, Value>) -> Vec<String> {
    let plain = |name: &&String| {
        (1..=MAX_IGNORED_BYTES).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    body.keys()
        .filter(|name| !READ.contains(&name.as_str()) && !REFUSED.contains(&name.as_str()))
        .filter(plain)
        .take(MAX_IGNORED)
        .cloned()
        .collect()
}

fn check_model(fields: &Fields<'_>, served: &str) -> Result<(), ApiError> {
    match fields.get("model") {
        None => Ok(()),
        Some(Value::String(name)) if name.is_empty() || name == "default" || name == served => Ok(()),
        Some(value @ Value::String(_)) => Err(errors::model_not_found(value, served)),
        Some(value) => Err(errors::invalid_type("model", value, "a text")),
    }
}

/// Whether a value asks for nothing special.
type Harmless<'a> = &'a dyn Fn(&Value) -> bool;

/// Fields whose meaning this server cannot honour, unless they ask for the default.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    let zero = |v: &Value| v.as_f64() == Some(0.0);
    let one = |v: &Value| v.as_f64() == Some(1.0);
    let off = |v: &Value| *v == Value::Bool(false);
    let empty =
        |v: &Value| v.as_object().is_some_and(Map::is_empty) || v.as_array().is_some_and(Vec::is_empty);
    let empty_text = |v: &Value| *v == "";
    let text_only = |v: &Value| v["type"] == "text" || *v == serde_json::json!(["text"]);
    let free_choice = |v: &Value| *v == "auto" || *v == "none";
    let never = |_: &Value| false;
    let harmless: [(&str, Harmless<'_>); 32] = [
        ("n", &one),
        ("best_of", &one),
        ("presence_penalty", &zero),
        ("frequency_penalty", &zero),
        ("repetition_penalty", &one),
        ("repeat_penalty", &one),
        ("logprobs", &off),
        ("top_logprobs", &zero),
        ("logit_bias", &empty),
        ("response_format", &text_only),
        ("modalities", &text_only),
        ("tool_choice", &free_choice),
        ("functions", &empty),
        ("function_call", &free_choice),
        ("use_beam_search", &off),
        ("ignore_eos", &off),
        ("continue_final_message", &off),
        ("parallel_tool_calls", &|v| *v == Value::Bool(true)),
        ("audio", &empty),
        ("min_tokens", &zero),
        ("stop_token_ids", &empty),
        ("web_search_options", &never),
        ("repeat_last_n", &zero),
        ("typical_p", &one),
        ("grammar", &empty_text),
        ("json_schema", &empty),
        ("structured_outputs", &empty),
        ("guided_json", &empty),
        ("guided_regex", &empty_text),
        ("guided_choice", &empty),
        ("guided_grammar", &empty_text),
        ("add_generation_prompt", &|v| *v == Value::Bool(true)),
    ];
    for (name, is_harmless) in harmless {
        if let Some(value) = fields.get(name).filter(|v| !is_harmless(v)) {
            return Err(errors::unsupported(name, value));
        }
    }
    Ok(())
}

/// One message in the form the template wants: known role, content joined to one text.
fn message(message: &Value, index: usize) -> Result<Value, ApiError> {
    let path = |field: &str| format!("messages.{index}{field}");
    let mut object = match message {
        Value::Object(object) => object.clone(),
        other => return Err(errors::invalid_type(&path(""), other, "an object with role and content")),
    };
    let role = match object.get("role").unwrap_or(&Value::Null).as_str() {
        Some("developer") => "system",
        Some("function") => "tool",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => {
            let given = object.get("role").unwrap_or(&Value::Null);
            return Err(errors::invalid_value(
                &path(".role"),
                given,
                "system, developer, user, assistant or tool",
            ));
        }
    };
    object.insert("role".into(), role.into());
    if object.get("prefix").is_some_and(|prefix| *prefix != Value::Bool(false) && !prefix.is_null()) {
        return Err(errors::unsupported(&path(".prefix"), &object["prefix"]));
    }
    object.get_mut("tool_calls").into_iter().for_each(keep_broken_arguments);
    let content = match object.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let parts: Result<Vec<&str>, ApiError> =
                parts.iter().enumerate().map(|(i, p)| part(p, &path(&format!(".content.{i}")))).collect();
            parts?.concat()
        }
        Some(other) => {
            return Err(errors::invalid_type(&path(".content"), other, "a text or a list of text parts"));
        }
    };
    object.insert("content".into(), content.into());
    if let (None, Some(reasoning)) = (object.get("reasoning_content"), object.get("reasoning").cloned()) {
        object.insert("reasoning_content".into(), reasoning);
    }
    Ok(Value::Object(object))
}

/// Arguments that are no JSON object were once produced by a model and come back in its history: the
/// template gets them as one argument that holds their text.
fn keep_broken_arguments(tool_calls: &mut Value) {
    for call in tool_calls.as_array_mut().into_iter().flatten() {
        let function = if call["function"].is_object() { &mut call["function"] } else { call };
        let Some(arguments) = function.get_mut("arguments") else { continue };
        let Some(text) = arguments.as_str().filter(|text| !text.trim().is_empty()) else { continue };
        if serde_json::from_str::<Map<String, Value>>(text).is_err() {
            *arguments = serde_json::json!({ "arguments": text });
        }
    }
}

fn part<'a>(part: &'a Value, path: &str) -> Result<&'a str, ApiError> {
    if let Some(text) = part.as_str() {
        return Ok(text);
    }
    match part["type"].as_str() {
        Some("text" | "input_text" | "output_text") => {
            part["text"].as_str().ok_or_else(|| errors::invalid_type(path, part, "a part with a text"))
        }
        Some("refusal") => Ok(part["refusal"].as_str().unwrap_or_default()),
        _ => {
            let message = format!("{path} is {}; this model reads text only", errors::shown(part));
            Err(ApiError::bad_request("unsupported_content_type", path, message))
        }
    }
}

/// Tools in the nested form; none when `tool_choice` is none.
fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let Some(tools) = fields.array("tools")? else { return Ok(Vec::new()) };
    if tools.len() > MAX_TOOLS {
        return Err(errors::invalid_value(
            "tools",
            &Value::from(tools.len()),
            &format!("at most {MAX_TOOLS} tools"),
        ));
    }
    if fields.get("tool_choice").is_some_and(|c| *c == "none") {
        return Ok(Vec::new());
    }
    let mut out = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let path = format!("tools.{index}");
        if tool["type"] != "function" {
            return Err(errors::invalid_value(&format!("{path}.type"), &tool["type"], "\"function\""));
        }
        let nested = tool["function"].is_object();
        let function = if nested { &tool["function"] } else { tool };
        let valid = |name: &str| {
            (1..=128).contains(&name.len())
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        };
        if !function["name"].as_str().is_some_and(valid) {
            let expected = "1 to 128 letters, digits, _, . or -";
            return Err(errors::invalid_value(&format!("{path}.function.name"), &function["name"], expected));
        }
        out.push(if nested {
            tool.clone()
        } else {
            let mut function = function.as_object().cloned().unwrap_or_default();
            function.remove("type");
            serde_json::json!({ "type": "function", "function": function })
        });
    }
    Ok(out)
}

/// Thinking controls; the first one present wins, the operator's default comes last.
fn thinking(fields: &Fields<'_>, default: Option<bool>, chat: &mut ChatInput) -> Result<(), ApiError> {
    if let Some(kwargs) = fields.object("chat_template_kwargs")? {
        chat.kwargs = kwargs.clone();
    }
    let explicit = match chat.kwargs.get("enable_thinking") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(on)) => Some(*on),
        Some(other) => {
            return Err(errors::invalid_type("chat_template_kwargs.enable_thinking", other, "true or false"));
        }
    };
    let explicit = explicit.or(fields.boolean("enable_thinking")?);
    let explicit = match (explicit, fields.object("thinking")?) {
        (None, Some(thinking)) => match thinking.get("type").and_then(Value::as_str) {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            _ => {
                let given = thinking.get("type").unwrap_or(&Value::Null);
                return Err(errors::invalid_value("thinking.type", given, "enabled or disabled"));
            }
        },
        (explicit, _) => explicit,
    };
    let effort = match (fields.get("reasoning_effort"), fields.object("reasoning")?) {
        (Some(effort), _) => Some(("reasoning_effort", effort)),
        (None, Some(reasoning)) => {
            reasoning.get("effort").filter(|e| !e.is_null()).map(|e| ("reasoning.effort", e))
        }
        (None, None) => None,
    };
    let mut effort_off = None;
    if let Some((param, effort)) = effort {
        let word = effort.as_str().ok_or_else(|| errors::invalid_type(param, effort, "a word"))?;
        if explicit == Some(false) && word != "none" {
            return Err(errors::invalid_value(param, effort, "none when thinking is switched off"));
        }
        if !(word == "none" && explicit == Some(true)) {
            chat.set_reasoning_effort(word).map_err(|_| {
                errors::invalid_value(param, effort, "none, minimal, low, medium, high, xhigh or max")
            })?;
            effort_off = Some(word != "none");
        }
    }
    if let Some(on) = explicit.or(effort_off).or(default) {
        chat.kwargs.insert("enable_thinking".into(), on.into());
    }
    Ok(())
}

fn sampling(
    fields: &Fields<'_>,
    defaults: &SamplingDefaults,
    random_seed: u64,
) -> Result<SamplingParams, ApiError> {
    let top_p = fields.number("top_p", 0.0, 1.0)?;
    let top_k = match fields.integer("top_k")? {
        None => None,
        Some(-1) => Some(0),
        Some(k) => Some(usize::try_from(k).map_err(|_| range("top_k", k, "0 (off) or more"))?),
    };
    let seed = match fields.integer("seed")? {
        None | Some(-1) => random_seed,
        // Negative seeds keep their bits.
        Some(seed) => u64::try_from(seed)
            .or_else(|_| i64::try_from(seed).map(i64::cast_unsigned))
            .map_err(|_| range("seed", seed, "a 64-bit integer"))?,
    };
    let params = SamplingParams {
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(defaults.temperature),
        // No mass at all means: the most probable token.
        top_k: if top_p == Some(0.0) { 1 } else { top_k.unwrap_or(defaults.top_k) },
        top_p: top_p.filter(|p| *p > 0.0).unwrap_or(if top_p.is_some() { 1.0 } else { defaults.top_p }),
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(defaults.min_p),
        seed,
    };
    params.validate().map_err(ApiError::from)?;
    Ok(params)
}

fn range(param: &str, value: i128, expected: &str) -> ApiError {
    ApiError::bad_request("invalid_value", param, format!("{param} is {value}; it must be {expected}"))
}

fn max_tokens(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    for name in ["max_completion_tokens", "max_tokens"] {
        match fields.integer(name)? {
            None => {}
            Some(-1) => return Ok(None),
            Some(n) if n >= 1 => return Ok(Some(usize::try_from(n).unwrap_or(usize::MAX))),
            Some(n) => return Err(range(name, n, "1 or more")),
        }
    }
    Ok(None)
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let name = if fields.get("stop").is_some() { "stop" } else { "stop_sequences" };
    let values: Vec<&Value> = match fields.get(name) {
        None => return Ok(Vec::new()),
        Some(value @ Value::String(_)) => vec![value],
        Some(Value::Array(list)) => list.iter().collect(),
        Some(other) => return Err(errors::invalid_type(name, other, "a text or a list of texts")),
    };
    if values.len() > MAX_STOPS {
        return Err(errors::invalid_value(
            name,
            &Value::from(values.len()),
            &format!("at most {MAX_STOPS} texts"),
        ));
    }
    let text = |value: &Value| {
        let text = value.as_str().ok_or_else(|| errors::invalid_type(name, value, "a text"))?;
        if (1..=MAX_STOP_BYTES).contains(&text.len()) {
            Ok(text.to_owned())
        } else {
            Err(errors::invalid_value(name, value, &format!("1 to {MAX_STOP_BYTES} bytes long")))
        }
    };
    values.into_iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DEFAULTS: SamplingDefaults =
        SamplingDefaults { temperature: 0.7, top_p: 0.95, top_k: 0, min_p: 0.0 };

    fn with<T>(body: Value, check: impl Fn(&Fields<'_>) -> T) -> T {
        check(&Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn sampling_follows_request_then_defaults() {
        let params =
            with(json!({ "top_k": -1, "seed": -5, "top_p": 0.5 }), |f| sampling(f, &DEFAULTS, 1)).unwrap();
        assert_eq!((params.temperature, params.top_p, params.top_k), (0.7, 0.5, 0));
        assert_eq!(params.seed, (-5i64).cast_unsigned());
        let none = with(json!({ "top_p": 0, "seed": null }), |f| sampling(f, &DEFAULTS, 42)).unwrap();
        assert_eq!((none.top_k, none.seed), (1, 42));
        for body in [json!({ "temperature": 2.1 }), json!({ "top_k": -2 }), json!({ "min_p": 1.5 })] {
            assert_eq!(with(body, |f| sampling(f, &DEFAULTS, 1)).unwrap_err().code, "invalid_value");
        }
    }

    #[test]
    fn the_first_token_limit_present_wins() {
        let limit = |body| with(body, max_tokens);
        assert_eq!(limit(json!({ "max_completion_tokens": 5, "max_tokens": 9 })).unwrap(), Some(5));
        assert_eq!(limit(json!({ "max_tokens": -1 })).unwrap(), None);
        assert_eq!(limit(json!({ "max_tokens": 0 })).unwrap_err().code, "invalid_value");
    }

    #[test]
    fn stop_strings_are_one_or_many_and_never_empty() {
        let stop = |body| with(body, stops);
        assert_eq!(stop(json!({ "stop": "a" })).unwrap(), ["a"]);
        assert_eq!(stop(json!({ "stop_sequences": ["a", "b"] })).unwrap(), ["a", "b"]);
        assert!(stop(json!({ "stop": [] })).unwrap().is_empty());
        assert_eq!(stop(json!({ "stop": [""] })).unwrap_err().code, "invalid_value");
        assert_eq!(stop(json!({ "stop": 5 })).unwrap_err().code, "invalid_type");
    }

    #[test]
    fn thinking_controls_have_an_order() {
        let run = |body: Value, default| {
            let mut chat = ChatInput::default();
            thinking(&Fields::new(body.as_object().unwrap()), default, &mut chat)?;
            Ok::<_, ApiError>(chat.kwargs.get("enable_thinking").and_then(Value::as_bool))
        };
        assert_eq!(run(json!({}), None).unwrap(), None);
        assert_eq!(run(json!({}), Some(false)).unwrap(), Some(false));
        assert_eq!(
            run(
                json!({ "chat_template_kwargs": { "enable_thinking": true }, "enable_thinking": false }),
                None
            )
            .unwrap(),
            Some(true)
        );
        assert_eq!(run(json!({ "thinking": { "type": "disabled" } }), Some(true)).unwrap(), Some(false));
        assert_eq!(run(json!({ "reasoning_effort": "none" }), Some(true)).unwrap(), Some(false));
        assert_eq!(run(json!({ "reasoning": { "effort": "high" } }), Some(false)).unwrap(), Some(true));
        assert_eq!(
            run(json!({ "enable_thinking": false, "reasoning_effort": "high" }), None).unwrap_err().code,
            "invalid_value"
        );
    }

    #[test]
    fn messages_are_brought_into_the_templates_form() {
        let parts = json!({ "role": "developer", "content": ["a", { "type": "input_text", "text": "b" }] });
        let message_of = |value: &Value| message(value, 3);
        assert_eq!(message_of(&parts).unwrap(), json!({ "role": "system", "content": "ab" }));
        assert_eq!(message_of(&json!({ "role": "assistant", "content": null })).unwrap()["content"], "");
        let prefix = json!({ "role": "assistant", "content": "The", "prefix": true });
        assert_eq!(message_of(&prefix).unwrap_err().param.as_deref(), Some("messages.3.prefix"));
        let broken = json!({ "role": "assistant", "tool_calls": [
            { "function": { "name": "f", "arguments": "{bad" } }, { "function": { "name": "f", "arguments": "{}" } }, 5,
        ] });
        let calls = &message_of(&broken).unwrap()["tool_calls"];
        assert_eq!(calls[0]["function"]["arguments"], json!({ "arguments": "{bad" }));
        assert_eq!(calls[1]["function"]["arguments"], "{}");
        let image = json!({ "role": "user", "content": [{ "type": "image_url" }] });
        assert_eq!(message_of(&image).unwrap_err().param.as_deref(), Some("messages.3.content.0"));
    }

    #[test]
    fn tools_may_be_flat_and_need_names() {
        let flat = json!({ "tools": [{ "type": "function", "name": "f", "parameters": {} }] });
        let nested = with(flat, tools).unwrap();
        assert_eq!(nested[0]["function"]["name"], "f");
        assert!(
            with(json!({ "tools": [{ "type": "function", "name": "f" }], "tool_choice": "none" }), tools)
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            with(json!({ "tools": [{ "type": "function", "name": "ä" }] }), tools).unwrap_err().code,
            "invalid_value"
        );
    }

    #[test]
    fn what_is_ignored_is_said() {
        let body = json!({ "messages": [], "n": 1, "colour": "red", "a b": 1, "mirostat": 2, "grammar": "" });
        assert_eq!(ignored(body.as_object().unwrap()), ["colour", "mirostat"]);
        let many: Map<String, Value> = (0..30).map(|i| (format!("x{i}"), Value::Null)).collect();
        assert_eq!(ignored(&many).len(), MAX_IGNORED);
        let named = |name: &str| with(json!({ name: { "odd": true } }), refuse_unsupported).is_err();
        assert!(REFUSED.into_iter().all(named), "every name in the list is looked at");
    }

    #[test]
    fn meaning_that_cannot_be_honoured_is_refused() {
        for body in [
            json!({ "n": 2 }),
            json!({ "logprobs": true }),
            json!({ "response_format": { "type": "json_object" } }),
            json!({ "tool_choice": "required" }),
            json!({ "min_tokens": 5 }),
            json!({ "stop_token_ids": [5] }),
            json!({ "web_search_options": {} }),
            json!({ "guided_regex": "a+" }),
            json!({ "grammar": "root ::= a" }),
        ] {
            assert_eq!(with(body, refuse_unsupported).unwrap_err().code, "unsupported_parameter");
        }
        let defaults = json!({ "n": 1, "logprobs": false, "presence_penalty": 0.0, "logit_bias": {}, "tool_choice": "auto" });
        assert!(with(defaults, refuse_unsupported).is_ok());
    }
}
