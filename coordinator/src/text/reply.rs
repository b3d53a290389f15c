//! Streaming parser of the model's output: reasoning, content, tool calls (docs/model.md §13).

use serde_json::{Map, Value};

/// A complete call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Function name, trimmed.
    pub name: String,
    /// Arguments in the order the model wrote them.
    pub arguments: Map<String, Value>,
}

/// What became certain.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// Text inside the think block.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A complete tool call.
    ToolCall(ToolCall),
    /// A tool call that the reply's end cut off, or that names no function: its text.
    BrokenToolCall(String),
}

/// Splits a reply into reasoning, content and tool calls as its text arrives.
pub struct ReplyParser {
    _private: (),
}

impl ReplyParser {
    /// `in_thinking`: the prompt opened a think block (see [`super::prompt_opens_thinking`]). `tools`: the
    /// request's OpenAI-style tool objects, whose schemas decide how argument values are read.
    pub fn new(in_thinking: bool, tools: &[Value]) -> Self {
        let _ = (in_thinking, tools);
        todo!()
    }

    /// Adds text; returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<ReplyEvent> {
        let _ = text;
        todo!()
    }

    /// The rest, at the end of the reply.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        todo!()
    }
}
