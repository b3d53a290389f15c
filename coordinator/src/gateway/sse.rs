//! Streamed answers: the order of frames, keep-alives while nothing happens, disconnects.
//!
//! One task per response reads the engine's events and writes frames into a bounded channel. A client
//! that goes away closes the channel, which ends the task and with it the job.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, header};
use axum::response::sse::{Event as Frame, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::Gateway;
use super::chat::{self, Envelope, Reply};
use super::chat_request::ChatRequest;
use super::errors::ApiError;
use crate::decode::{Event, JobEvent, JobReceiver, SubmitError};
use crate::text::ReplyEvent;

/// A comment is sent after this long without a frame: it feeds byte-level time-outs.
const COMMENT_EVERY: Duration = Duration::from_secs(10);
/// An empty chunk is sent after this long without data: it feeds clients that count parsed events.
const NOOP_EVERY: Duration = Duration::from_secs(25);
/// Frames a slow client may lag behind before the writer waits for it.
const CHANNEL_FRAMES: usize = 1024;

/// The streaming response of a submitted job.
pub fn respond(
    gateway: Arc<Gateway>,
    job: JobReceiver,
    envelope: Envelope,
    reply: Reply,
    request: ChatRequest,
) -> Response {
    let (frames, receiver) = mpsc::channel(CHANNEL_FRAMES);
    let writer = Writer { frames, envelope, request, calls: 0, prefill: None, last_data: Instant::now() };
    tokio::spawn(write(gateway, job, reply, writer));
    let mut response = Sse::new(ReceiverStream::new(receiver)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The client went away.
struct Gone;

struct Writer {
    frames: mpsc::Sender<Result<Frame, Infallible>>,
    envelope: Envelope,
    request: ChatRequest,
    /// Tool calls sent so far.
    calls: usize,
    /// Prompt rows done and in all, while prefilling.
    prefill: Option<(usize, usize)>,
    last_data: Instant,
}

async fn write(gateway: Arc<Gateway>, job: JobReceiver, reply: Reply, mut writer: Writer) {
    // `Gone` needs no handling beyond ending: dropping the job's receiver cancels it.
    let _ = run(&gateway, job, reply, &mut writer).await;
}

async fn run(
    gateway: &Gateway,
    mut job: JobReceiver,
    mut reply: Reply,
    writer: &mut Writer,
) -> Result<(), Gone> {
    writer.delta(json!({ "role": "assistant", "content": "" })).await?;
    let outcome = loop {
        let event = tokio::select! {
            event = job.recv() => event,
            () = tokio::time::sleep(COMMENT_EVERY) => {
                writer.keep_alive().await?;
                continue;
            }
            () = writer.frames.closed() => return Err(Gone),
        };
        match event {
            Some(JobEvent::Event(event)) => {
                writer.prefill = match &event {
                    Event::Prefill { done, total } => Some((*done, *total)),
                    _ => None,
                };
                for piece in reply.event(event) {
                    writer.piece(piece).await?;
                }
            }
            Some(JobEvent::Done(result)) => break result.map_err(ApiError::from),
            None => break Err(ApiError::from(SubmitError::Stopped)),
        }
    };
    let generation = match outcome {
        Ok(generation) => generation,
        // In-band, and without [DONE]: clients that need the terminator then fail closed.
        Err(error) => return writer.data(&error.body()).await,
    };
    for piece in reply.finish() {
        writer.piece(piece).await?;
    }
    gateway.totals.finished(&generation);
    let (usage, timings) = chat::usage(&generation, reply.reasoning_tokens);
    let choice = json!([{
        "index": 0,
        "delta": {},
        "logprobs": null,
        "finish_reason": reply.finish_reason(&generation.finish),
        "stop_reason": chat::stop_reason(&generation.finish),
    }]);
    let mut last = writer.chunk(choice);
    last.insert("timings".into(), timings);
    writer.data(&Value::Object(last)).await?;
    if writer.request.include_usage {
        let mut chunk = writer.chunk(json!([]));
        chunk.insert("usage".into(), usage);
        writer.data(&Value::Object(chunk)).await?;
    }
    writer.send(Frame::default().data("[DONE]")).await
}

impl Writer {
    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut chunk = self.envelope.wrap("chat.completion.chunk", choices);
        if self.request.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk
    }

    async fn send(&mut self, frame: Frame) -> Result<(), Gone> {
        self.frames.send(Ok(frame)).await.map_err(|_| Gone)
    }

    async fn data(&mut self, value: &Value) -> Result<(), Gone> {
        self.last_data = Instant::now();
        self.send(Frame::default().data(value.to_string())).await
    }

    async fn delta(&mut self, delta: Value) -> Result<(), Gone> {
        let chunk =
            self.chunk(json!([{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": null }]));
        self.data(&Value::Object(chunk)).await
    }

    async fn piece(&mut self, piece: ReplyEvent) -> Result<(), Gone> {
        match piece {
            ReplyEvent::Reasoning(_) if !self.request.include_reasoning => Ok(()),
            ReplyEvent::Reasoning(text) => self.delta(json!({ "reasoning_content": text })).await,
            ReplyEvent::Content(text) | ReplyEvent::BrokenToolCall(text) => {
                self.delta(json!({ "content": text })).await
            }
            ReplyEvent::ToolCall(call) => {
                let index = self.calls;
                self.calls += 1;
                let mut opening = chat::call_json(&call);
                let arguments = opening["function"]["arguments"].take();
                opening["index"] = index.into();
                opening["function"]["arguments"] = "".into();
                self.delta(json!({ "tool_calls": [opening] })).await?;
                let rest = json!({ "index": index, "function": { "arguments": arguments } });
                self.delta(json!({ "tool_calls": [rest] })).await
            }
        }
    }

    async fn keep_alive(&mut self) -> Result<(), Gone> {
        if self.last_data.elapsed() >= NOOP_EVERY {
            return self.delta(json!({})).await;
        }
        let comment = match self.prefill {
            Some((done, total)) => format!("prefill {done}/{total}"),
            None => "waiting".to_owned(),
        };
        self.send(Frame::default().comment(comment)).await
    }
}
