//! A small HTTP/1.1 client for `chat --url`: one request per connection, streamed answers, http only.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::chat_session::ChatSetup;
use super::error::CliError;
use super::interrupt::Interrupt;
use crate::text::{ReplyEvent, ToolCall};

/// How often a silent connection looks for Ctrl-C.
const POLL: Duration = Duration::from_millis(200);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest response header taken.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// An OpenAI-compatible server.
#[derive(Clone)]
pub struct Server {
    /// `host:port`.
    authority: String,
    /// Path before `/v1/…`, without a final slash.
    prefix: String,
    api_key: Option<String>,
}

impl Server {
    /// Parses `http://host[:port][/prefix]`.
    ///
    /// # Errors
    /// [`CliError::Usage`].
    pub fn parse(url: &str, api_key: Option<String>) -> Result<Self, CliError> {
        let bad = |what: &str| CliError::Usage(format!("--url {url}: {what}"));
        let rest = url
            .strip_prefix("http://")
            .ok_or_else(|| bad("write http://host:port (https is not supported)"))?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let clean = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && b != b'@');
        if !clean(authority) || !(path.is_empty() || clean(path)) {
            return Err(bad("write http://host:port"));
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        let path = path.trim_end_matches('/').trim_end_matches("v1").trim_end_matches('/');
        let prefix = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Self { authority, prefix, api_key })
    }

    /// Asks for a streamed answer, hands its pieces to `sink` and returns the assistant's message.
    /// Ctrl-C closes the connection, which stops the server's work.
    ///
    /// # Errors
    /// [`CliError::Unreachable`] without a server, [`CliError::Failed`] with its message.
    pub fn chat(
        &self,
        messages: &[Value],
        setup: &ChatSetup,
        interrupt: &Interrupt,
        sink: &mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>,
    ) -> Result<Value, CliError> {
        let mut stream = self.connect()?;
        let body = request_body(messages, setup).to_string();
        let key =
            self.api_key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "POST {}/v1/chat/completions HTTP/1.1\r\nHost: {}\r\n{key}Content-Type: application/json\r\n\
             Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            self.prefix,
            self.authority,
            body.len()
        );
        stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body.as_bytes()))
            .map_err(|e| self.lost(&e))?;
        let mut response = Response::default();
        let mut assistant = Assistant::default();
        let mut buffer = [0u8; 16 << 10];
        while !response.done && !interrupt.requested() {
            let read = match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(self.lost(&e)),
            };
            response.feed(buffer.get(..read).unwrap_or_default()).map_err(|what| self.odd(&what))?;
            if response.status == Some(200) {
                while let Some(line) = response.line() {
                    assistant.line(&line, sink)?;
                }
            }
        }
        match response.status {
            Some(200) if !assistant.ended && !interrupt.requested() => Err(CliError::Unreachable(format!(
                "the connection to http://{} ended in the middle of the answer; look at the server and ask again",
                self.authority
            ))),
            Some(200) => {
                assistant.finish(sink)?;
                Ok(json!({
                    "role": "assistant",
                    "content": assistant.content,
                    "reasoning_content": assistant.reasoning,
                }))
            }
            Some(status) => Err(CliError::Failed(refusal(status, &response.body))),
            None if interrupt.requested() => Ok(json!({ "role": "assistant", "content": "" })),
            None => Err(self.odd("it closed the connection without an answer")),
        }
    }

    fn connect(&self) -> Result<TcpStream, CliError> {
        let unreachable = |what: String| {
            CliError::Unreachable(format!(
                "cannot reach http://{}: {what}; is the server running?",
                self.authority
            ))
        };
        let addresses = self.authority.to_socket_addrs().map_err(|e| unreachable(e.to_string()))?;
        let mut last = "the name has no address".to_owned();
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(POLL)).map_err(|e| unreachable(e.to_string()))?;
                    return Ok(stream);
                }
                Err(e) => last = e.to_string(),
            }
        }
        Err(unreachable(last))
    }

    fn lost(&self, error: &std::io::Error) -> CliError {
        CliError::Unreachable(format!("the connection to http://{} broke: {error}", self.authority))
    }

    fn odd(&self, what: &str) -> CliError {
        CliError::Failed(format!(
            "http://{} does not answer as a Shimmer server does: {what}",
            self.authority
        ))
    }
}

fn request_body(messages: &[Value], setup: &ChatSetup) -> Value {
    let mut body = Map::new();
    body.insert("messages".into(), messages.into());
    body.insert("stream".into(), true.into());
    let sampling = &setup.sampling;
    let temperature = if sampling.greedy { Some(0.0) } else { sampling.temperature };
    for (name, value) in [
        ("temperature", temperature.map(Value::from)),
        ("top_p", sampling.top_p.map(Value::from)),
        ("top_k", sampling.top_k.map(Value::from)),
        ("min_p", sampling.min_p.map(Value::from)),
        ("seed", sampling.seed.map(Value::from)),
        ("max_tokens", sampling.max_tokens.map(Value::from)),
        ("stop", (!sampling.stop.is_empty()).then(|| sampling.stop.clone().into())),
        ("chat_template_kwargs", setup.think.map(|on| json!({ "enable_thinking": on }))),
    ] {
        if let Some(value) = value {
            body.insert(name.into(), value);
        }
    }
    Value::Object(body)
}

fn refusal(status: u16, body: &[u8]) -> String {
    let message = serde_json::from_slice::<Value>(body)
        .ok()
        .and_then(|v| v["error"]["message"].as_str().map(str::to_owned));
    format!("the server refused ({status}): {}", message.unwrap_or_else(|| "without a reason".to_owned()))
}

/// Decodes one response as its bytes arrive.
#[derive(Default)]
struct Response {
    raw: Vec<u8>,
    status: Option<u16>,
    chunked: bool,
    /// Decoded body not yet taken by [`Response::line`].
    body: Vec<u8>,
    done: bool,
}

impl Response {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.raw.extend_from_slice(bytes);
        if self.status.is_none() {
            let Some(end) = self.raw.windows(4).position(|w| w == b"\r\n\r\n") else {
                return if self.raw.len() > MAX_HEADER_BYTES {
                    Err("its header is too long".into())
                } else {
                    Ok(())
                };
            };
            let header: Vec<u8> = self.raw.drain(..end + 4).collect();
            self.header(&String::from_utf8_lossy(&header))?;
        }
        if !self.chunked {
            self.body.append(&mut self.raw);
            return Ok(());
        }
        while !self.done && self.chunk()? {}
        Ok(())
    }

    fn header(&mut self, text: &str) -> Result<(), String> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let status = first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)?.parse().ok());
        self.status = Some(status.ok_or("its first line is not HTTP/1.1")?);
        self.chunked = lines.any(|line| {
            line.split_once(':').is_some_and(|(name, value)| {
                name.eq_ignore_ascii_case("transfer-encoding") && value.trim().eq_ignore_ascii_case("chunked")
            })
        });
        Ok(())
    }

    /// Takes one chunk out of `raw`; false when it is not complete yet.
    fn chunk(&mut self) -> Result<bool, String> {
        let Some(end) = self.raw.windows(2).position(|w| w == b"\r\n") else { return Ok(false) };
        let line = String::from_utf8_lossy(self.raw.get(..end).unwrap_or_default()).into_owned();
        let digits = line.split(';').next().unwrap_or_default().trim();
        let size =
            usize::from_str_radix(digits, 16).ok().filter(|n| *n <= 1 << 30).ok_or("a chunk has no size")?;
        let (start, stop) = (end + 2, end + 2 + size);
        if self.raw.len() < stop + 2 {
            return Ok(false);
        }
        self.body.extend_from_slice(self.raw.get(start..stop).unwrap_or_default());
        self.raw.drain(..stop + 2);
        self.done = size == 0;
        Ok(true)
    }

    /// The next complete line of the body.
    fn line(&mut self) -> Option<String> {
        let end = self.body.iter().position(|&b| b == b'\n')?;
        let line: Vec<u8> = self.body.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

/// Collects the pieces of an assistant's message.
#[derive(Default)]
struct Assistant {
    content: String,
    reasoning: String,
    /// Names and argument texts of tool calls.
    calls: Vec<(String, String)>,
    /// Whether the server said that the answer is complete.
    ended: bool,
}

impl Assistant {
    fn line(
        &mut self,
        line: &str,
        sink: &mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { return Ok(()) };
        if data == "[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let Ok(chunk) = serde_json::from_str::<Value>(data) else { return Ok(()) };
        if let Some(message) = chunk["error"]["message"].as_str() {
            return Err(CliError::Failed(format!("the server gave up: {message}")));
        }
        self.ended |= chunk["choices"][0]["finish_reason"].is_string();
        let delta = &chunk["choices"][0]["delta"];
        if let Some(text) = delta["reasoning_content"].as_str().filter(|t| !t.is_empty()) {
            self.reasoning.push_str(text);
            sink(&ReplyEvent::Reasoning(text.to_owned()))?;
        }
        if let Some(text) = delta["content"].as_str().filter(|t| !t.is_empty()) {
            self.content.push_str(text);
            sink(&ReplyEvent::Content(text.to_owned()))?;
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if let Some(name) = function["name"].as_str() {
                self.calls.push((name.to_owned(), String::new()));
            }
            if let Some((_, arguments)) = self.calls.last_mut() {
                arguments.push_str(function["arguments"].as_str().unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Hands over the calls, which arrive in pieces.
    fn finish(&mut self, sink: &mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>) -> Result<(), CliError> {
        for (name, arguments) in self.calls.drain(..) {
            let arguments = serde_json::from_str(&arguments).unwrap_or_default();
            sink(&ReplyEvent::ToolCall(ToolCall { name, arguments }))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_http_with_host_and_port() {
        let server = Server::parse("http://box:8000/", None).unwrap();
        assert_eq!((server.authority.as_str(), server.prefix.as_str()), ("box:8000", ""));
        let server = Server::parse("http://box/gpu/v1", None).unwrap();
        assert_eq!((server.authority.as_str(), server.prefix.as_str()), ("box:80", "/gpu"));
        for bad in ["https://box", "box:8000", "http://", "http://a b", "http://user@host"] {
            assert!(Server::parse(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn chunked_bodies_decode_at_every_split() {
        let raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n5;x=1\r\n{}\n\n:\r\n0\r\n\r\n";
        for split in 1..raw.len() {
            let mut response = Response::default();
            response.feed(&raw[..split]).unwrap();
            response.feed(&raw[split..]).unwrap();
            assert!(response.done, "split at {split}");
            assert_eq!(response.line().as_deref(), Some("data: {}"));
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        assert!(Response::default().feed(b"SSH-2.0-x\r\n\r\n").is_err());
        let mut response = Response::default();
        assert!(response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n").is_err());
    }

    #[test]
    fn deltas_become_pieces() {
        let mut assistant = Assistant::default();
        let mut pieces = Vec::new();
        for line in [
            r#"data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
            ": prefill 1/2",
            r#"data: {"choices":[{"delta":{"content":"yes"}}]}"#,
            "data: [DONE]",
        ] {
            assistant
                .line(line, &mut |p| {
                    pieces.push(p.clone());
                    Ok(())
                })
                .unwrap();
        }
        assert_eq!(pieces, [ReplyEvent::Reasoning("hm".into()), ReplyEvent::Content("yes".into())]);
        let error =
            assistant.line(r#"data: {"error":{"message":"node lost"}}"#, &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("node lost"));
    }

    #[test]
    fn an_answer_that_breaks_off_is_an_error() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            assert!(peer.read(&mut request).unwrap() > 0);
            let event = "data: {\"choices\":[{\"delta\":{\"content\":\"Once\"}}]}\n\n";
            write!(
                peer,
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{event}\r\n",
                event.len()
            )
            .unwrap();
            // What is left unread of the request would reset the connection, and the event with it.
            peer.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = std::io::copy(&mut peer, &mut std::io::sink());
        });
        let limits = super::super::answer::Limits {
            context_tokens: 100,
            stop_ids: Vec::new(),
            drafts: crate::decode::DraftPolicy::Auto,
            prefill_chunk: 0,
        };
        let setup =
            ChatSetup { sampling: Default::default(), limits, think: None, system: None, history: None };
        let messages = [json!({ "role": "user", "content": "a story" })];
        let mut heard = String::new();
        let answer =
            Server::parse(&url, None).unwrap().chat(&messages, &setup, &Interrupt::install(), &mut |piece| {
                if let ReplyEvent::Content(text) = piece {
                    heard.push_str(text);
                }
                Ok(())
            });
        server.join().unwrap();
        assert_eq!(heard, "Once");
        assert!(answer.unwrap_err().to_string().contains("in the middle of the answer"));
    }
}
