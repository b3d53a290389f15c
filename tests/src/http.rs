//! A client of `shimmer serve` over any stream: JSON, and answers with the time of every piece.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest silence of a server; it sends comments when it has nothing else to say.
const SILENCE: Duration = Duration::from_secs(60);

/// A streamed answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What was said.
    pub text: String,
    /// Generated tokens.
    pub tokens: u64,
    /// Why it ended.
    pub finish: String,
    /// The longest time between two pieces, or before the first.
    pub longest_pause: Duration,
    /// From request to end.
    pub elapsed: Duration,
}

/// `GET path`, a JSON document.
///
/// # Errors
/// What went wrong, for people.
pub fn get_json(stream: TcpStream, path: &str) -> Result<Value, String> {
    let mut body = String::new();
    let mut lines = request(stream, &format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))?;
    std::io::Read::read_to_string(&mut lines, &mut body).map_err(|e| e.to_string())?;
    serde_json::from_str(&body).map_err(|e| format!("{e} in {body}"))
}

/// Asks for an answer with randomness that depends on `seed` alone; `piece` is told of each piece and
/// how many there were before it.
///
/// # Errors
/// What the server said went wrong, or the connection.
pub fn ask(
    stream: TcpStream,
    prompt: &str,
    seed: u64,
    max_tokens: usize,
    mut piece: impl FnMut(usize),
) -> Result<Answer, String> {
    let body = json!({
        "messages": [{ "role": "user", "content": prompt }],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": max_tokens,
        "stream": true,
        "stream_options": { "include_usage": true },
    })
    .to_string();
    let head = "POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json";
    let started = Instant::now();
    let lines = request(stream, &format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()))?;
    let mut answer = Answer {
        text: String::new(),
        tokens: 0,
        finish: String::new(),
        longest_pause: Duration::ZERO,
        elapsed: Duration::ZERO,
    };
    let (mut last, mut pieces) = (started, 0);
    for line in lines.lines() {
        let line = line.map_err(|e| format!("the stream broke off: {e}"))?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            answer.elapsed = started.elapsed();
            return Ok(answer);
        }
        let chunk: Value = serde_json::from_str(data).map_err(|e| format!("{e} in {data}"))?;
        if let Some(error) = chunk.get("error") {
            return Err(error.to_string());
        }
        answer.tokens = chunk["usage"]["completion_tokens"].as_u64().unwrap_or(answer.tokens);
        let choice = &chunk["choices"][0];
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut answer.finish);
        }
        if let Some(text) = choice["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
            answer.text += text;
            answer.longest_pause = answer.longest_pause.max(last.elapsed());
            last = Instant::now();
            piece(pieces);
            pieces += 1;
        }
    }
    Err(format!("the stream ended after {} characters", answer.text.len()))
}

/// Sends a request and reads the answer's head.
fn request(mut stream: TcpStream, text: &str) -> Result<BufReader<TcpStream>, String> {
    let failed = |e: std::io::Error| e.to_string();
    stream.set_read_timeout(Some(SILENCE)).map_err(failed)?;
    stream.write_all(text.as_bytes()).map_err(failed)?;
    let mut lines = BufReader::new(stream);
    let mut status = String::new();
    lines.read_line(&mut status).map_err(failed)?;
    let mut line = String::from("x");
    while !line.trim().is_empty() {
        line.clear();
        lines.read_line(&mut line).map_err(failed)?;
    }
    if status.split(' ').nth(1) == Some("200") {
        return Ok(lines);
    }
    let mut body = String::new();
    let _ = std::io::Read::read_to_string(&mut lines, &mut body);
    Err(format!("{} {body}", status.trim()))
}
