//! `POST /v1/chat/completions`, streamed and not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::chat_request::ChatRequest;
use super::errors::{self, ApiError};
use super::{Gateway, body, sse};
use crate::decode::{Event, FinishReason, GenerateRequest, Generation, JobEvent};
use crate::text::{ReplyEvent, ReplyParser, TextError, ToolCall, prompt_opens_thinking};

/// Time for a whole body, counted once and not per read.
const BODY_TIME: Duration = Duration::from_secs(60);

/// Answers one request.
///
/// # Errors
/// The envelope of the first thing that is wrong, before the engine sees the request.
pub async fn completions(
    State(gateway): State<Arc<Gateway>>,
    request: Request,
) -> Result<Response, ApiError> {
    let bytes = read_body(request, gateway.config.max_body_bytes, BODY_TIME).await?;
    let prepared = {
        let _turn = gateway.preparing.acquire().await;
        let gateway = gateway.clone();
        // Templates and tokenizers are arithmetic: they do not belong on the network's threads.
        let work = tokio::task::spawn_blocking(move || prepare(&gateway, &bytes));
        work.await.map_err(|_| ApiError::from(internal("the request could not be prepared")))??
    };
    let job = gateway.engine.submit(prepared.generate.clone())?;
    gateway.totals.started();
    let envelope = Envelope::new(&gateway);
    let reply = Reply::new(&prepared);
    let ignored = HeaderValue::from_str(&prepared.request.ignored.join(", ")).ok().filter(|v| !v.is_empty());
    let mut response = if prepared.request.stream {
        sse::respond(gateway, job, envelope, reply, prepared.request)
    } else {
        whole(&gateway, job, &envelope, reply, &prepared.request).await?
    };
    if let Some(ignored) = ignored {
        response.headers_mut().insert("x-ignored-fields", ignored);
    }
    Ok(response)
}

/// Reads a body; one that says it is too large is refused before it comes.
async fn read_body(request: Request, limit: usize, time: Duration) -> Result<Bytes, ApiError> {
    check_head(request.headers(), limit)?;
    let body = tokio::time::timeout(time, Bytes::from_request(request, &())).await;
    let body = body.map_err(|_| errors::request_timeout(time.as_secs()))?;
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => errors::request_too_large(limit),
        _ => errors::invalid_json("it ended early"),
    })
}

/// What can be said of a body before it is read.
fn check_head(headers: &HeaderMap, limit: usize) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
    if let Some(encoding) = text(header::CONTENT_ENCODING).filter(|e| !e.eq_ignore_ascii_case("identity")) {
        return Err(errors::unsupported_encoding(encoding));
    }
    let length = text(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(errors::request_too_large(limit));
    }
    Ok(())
}

fn internal(message: &str) -> crate::decode::DecodeError {
    crate::decode::DecodeError::Internal { message: message.to_owned() }
}

/// A request ready for the engine.
struct Prepared {
    request: ChatRequest,
    generate: GenerateRequest,
    in_thinking: bool,
}

fn prepare(gateway: &Gateway, bytes: &[u8]) -> Result<Prepared, ApiError> {
    let object = body::parse(bytes)?;
    let seed = getrandom::u64().map_err(|_| ApiError::from(internal("the system has no randomness")))?;
    let request = ChatRequest::parse(&object, gateway, seed)?;
    let text = &gateway.engine.engine().text;
    let refused = |e: TextError| ApiError::bad_request("invalid_value", "messages", e.to_string());
    let rendered = text.render_chat(&request.chat).map_err(refused)?;
    let prompt = text.encode(&rendered).map_err(refused)?;
    let config = &gateway.config;
    let room = config.context_tokens.saturating_sub(prompt.len());
    if room == 0 {
        return Err(errors::context_exceeded(config.context_tokens, prompt.len(), request.max_tokens));
    }
    let generate = GenerateRequest {
        prompt,
        sampling: request.sampling.clone(),
        max_tokens: request.max_tokens.unwrap_or(room).min(room),
        stop_ids: config.stop_ids.clone(),
        stop_strings: request.stop.clone(),
        drafts: config.drafts,
        prefill_chunk: config.prefill_chunk,
    };
    Ok(Prepared { in_thinking: prompt_opens_thinking(&rendered), request, generate })
}

/// Splits the reply and counts reasoning tokens while it arrives.
pub struct Reply {
    parser: ReplyParser,
    /// Tokens of the think block.
    pub reasoning_tokens: usize,
    /// Whether a complete call was made.
    pub called: bool,
}

impl Reply {
    fn new(prepared: &Prepared) -> Self {
        Self {
            parser: ReplyParser::new(prepared.in_thinking, &prepared.request.chat.tools),
            reasoning_tokens: 0,
            called: false,
        }
    }

    /// What an engine event makes certain.
    pub fn event(&mut self, event: Event) -> Vec<ReplyEvent> {
        let (text, tokens) = match event {
            Event::Prefill { .. } => return Vec::new(),
            Event::Token { text, .. } => (text, 1),
            Event::Tail { text } => (text, 0),
        };
        let began_in_reasoning = self.parser.is_reasoning();
        let pieces = if text.is_empty() { Vec::new() } else { self.parser.push(&text) };
        self.note(&pieces);
        // The tags around the reasoning are part of it.
        if began_in_reasoning || self.parser.is_reasoning() {
            self.reasoning_tokens += tokens;
        }
        pieces
    }

    /// The rest, at the end.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        let pieces = self.parser.finish();
        self.note(&pieces);
        pieces
    }

    fn note(&mut self, pieces: &[ReplyEvent]) {
        self.called |= pieces.iter().any(|p| matches!(p, ReplyEvent::ToolCall(_)));
    }

    /// `stop`, `length` or `tool_calls`.
    pub fn finish_reason(&self, finish: &FinishReason) -> &'static str {
        match finish {
            FinishReason::Length | FinishReason::Cancelled => "length",
            _ if self.called => "tool_calls",
            FinishReason::StopId(_) | FinishReason::StopString(_) => "stop",
        }
    }
}

/// What all chunks of one response share.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
}

impl Envelope {
    fn new(gateway: &Gateway) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self {
            id: unique("chatcmpl-"),
            created,
            model: gateway.config.model_id.clone(),
            system_fingerprint: gateway.config.system_fingerprint.clone(),
        }
    }

    /// A response object around `choices`.
    pub fn wrap(&self, object: &str, choices: Value) -> Map<String, Value> {
        let Value::Object(map) = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }) else {
            return Map::new();
        };
        map
    }
}

/// An identifier that does not repeat within this process and hardly across processes.
pub fn unique(prefix: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let random = getrandom::u64().unwrap_or(0);
    format!("{prefix}{random:016x}{count:04x}")
}

/// A call as responses carry it.
pub fn call_json(call: &ToolCall) -> Value {
    json!({
        "id": unique("call_"),
        "type": "function",
        "function": { "name": call.name, "arguments": Value::Object(call.arguments.clone()).to_string() },
    })
}

/// `usage` and `timings` of a finished generation.
pub fn usage(generation: &Generation, reasoning_tokens: usize) -> (Value, Value) {
    let stats = &generation.stats;
    let per_second = if stats.decode_s > 0.0 { stats.generated_tokens as f64 / stats.decode_s } else { 0.0 };
    let usage = json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": { "cached_tokens": stats.reused_tokens },
        "completion_tokens_details": { "reasoning_tokens": reasoning_tokens },
    });
    let timings = json!({
        "prompt_n": stats.prompt_tokens.saturating_sub(stats.reused_tokens),
        "prompt_ms": stats.prefill_s * 1e3,
        "cache_n": stats.reused_tokens,
        "predicted_n": stats.generated_tokens,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_second": per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "draft_choice": stats.drafting,
    });
    (usage, timings)
}

/// Waits for the whole answer. When the client goes away this future is dropped, and with it the job.
async fn whole(
    gateway: &Gateway,
    mut job: crate::decode::JobReceiver,
    envelope: &Envelope,
    mut reply: Reply,
    request: &ChatRequest,
) -> Result<Response, ApiError> {
    let mut pieces = Vec::new();
    let generation = loop {
        match job.recv().await {
            Some(JobEvent::Event(event)) => pieces.extend(reply.event(event)),
            Some(JobEvent::Done(result)) => break result?,
            None => return Err(ApiError::from(crate::decode::SubmitError::Stopped)),
        }
    };
    pieces.extend(reply.finish());
    gateway.totals.finished(&generation);
    let (usage, timings) = usage(&generation, reply.reasoning_tokens);
    let choice = json!({
        "index": 0,
        "message": message(&pieces, request.include_reasoning),
        "logprobs": null,
        "finish_reason": reply.finish_reason(&generation.finish),
        "stop_reason": stop_reason(&generation.finish),
    });
    let mut response = envelope.wrap("chat.completion", json!([choice]));
    response.insert("usage".into(), usage);
    response.insert("timings".into(), timings);
    Ok(Json(response).into_response())
}

/// The stop string that ended the answer, if one did.
pub fn stop_reason(finish: &FinishReason) -> Value {
    match finish {
        FinishReason::StopString(text) => Value::from(text.clone()),
        _ => Value::Null,
    }
}

fn message(pieces: &[ReplyEvent], include_reasoning: bool) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for piece in pieces {
        match piece {
            ReplyEvent::Reasoning(text) => reasoning.push_str(text),
            ReplyEvent::Content(text) | ReplyEvent::BrokenToolCall(text) => content.push_str(text),
            ReplyEvent::ToolCall(call) => calls.push(call_json(call)),
        }
    }
    let content = if content.is_empty() && !calls.is_empty() { Value::Null } else { content.into() };
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if include_reasoning && !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_hold_what_there_is_and_nothing_empty() {
        let plain = message(&[ReplyEvent::Content("a".into()), ReplyEvent::Content("b".into())], true);
        assert_eq!(plain, json!({ "role": "assistant", "content": "ab", "refusal": null }));
        let call = ToolCall { name: "f".into(), arguments: Map::new() };
        let called = message(&[ReplyEvent::Reasoning("r".into()), ReplyEvent::ToolCall(call)], true);
        assert_eq!(called["content"], Value::Null);
        assert_eq!(called["reasoning_content"], "r");
        assert_eq!(called["tool_calls"][0]["function"]["arguments"], "{}");
        assert_eq!(message(&[ReplyEvent::Reasoning("r".into())], false)["reasoning_content"], Value::Null);
    }

    #[test]
    fn calls_are_not_counted_as_reasoning() {
        let mut reply = Reply { parser: ReplyParser::new(true, &[]), reasoning_tokens: 0, called: false };
        for text in ["I", " call.", "</think>", "<tool_call>", "f", "</tool_call>"] {
            reply.event(Event::Token { id: 0, text: text.into() });
        }
        reply.finish();
        assert_eq!((reply.reasoning_tokens, reply.called), (3, true));
    }

    #[tokio::test]
    async fn bodies_have_a_size_an_encoding_and_a_time() {
        let read = |name: &'static str, value: &'static str, body: axum::body::Body| {
            let mut request = Request::new(body);
            request.headers_mut().insert(name, value.parse().unwrap());
            read_body(request, 10, Duration::from_millis(50))
        };
        let never =
            || axum::body::Body::from_stream(tokio_stream::pending::<Result<Bytes, std::io::Error>>());
        assert_eq!(read("content-length", "11", never()).await.unwrap_err().code, "request_too_large");
        assert_eq!(read("content-encoding", "gzip", never()).await.unwrap_err().code, "unsupported_encoding");
        assert_eq!(read("content-length", "10", never()).await.unwrap_err().code, "request_timeout");
        assert_eq!(read("content-length", "2", "{}".into()).await.unwrap(), "{}");
    }

    #[test]
    fn identifiers_do_not_repeat() {
        let ids: std::collections::BTreeSet<String> = (0..100).map(|_| unique("x")).collect();
        assert_eq!(ids.len(), 100);
    }
}
