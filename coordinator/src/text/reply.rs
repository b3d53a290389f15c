//! Streaming parser of the model's output: reasoning, content, tool calls (docs/model.md §13).
//!
//! Reasoning is handed on exactly as written (a template may have to print it again). Content loses the blank
//! lines before it and the white space before a tool call; white space at the end of the reply stays.

use serde_json::Value;

use super::hold::held_back;
use super::tool_call::{ArgumentSchemas, CallBlock, CallEnd, ToolCall};

/// What became certain.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// Text inside the think block.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A complete tool call.
    ToolCall(ToolCall),
    /// A tool call that the reply's end cut off, or that has no name or a key without a value: its text.
    BrokenToolCall(String),
}

enum State {
    Reasoning,
    Content,
    Call(CallBlock),
}

/// Splits a reply into reasoning, content and tool calls as its text arrives.
pub struct ReplyParser {
    schemas: ArgumentSchemas,
    state: State,
    /// Text that may still become a tag.
    pending: String,
    /// White space that is content only if content follows.
    blank: String,
    /// No content was seen since the start, the think block or the last call.
    fresh: bool,
    calls: usize,
}

impl ReplyParser {
    /// `in_thinking`: the prompt opened a think block (see [`super::prompt_opens_thinking`]). `tools`: the
    /// request's OpenAI-style tool objects, whose schemas decide how argument values are read.
    pub fn new(in_thinking: bool, tools: &[Value]) -> Self {
        ReplyParser {
            schemas: ArgumentSchemas::new(tools),
            state: if in_thinking { State::Reasoning } else { State::Content },
            pending: String::new(),
            blank: String::new(),
            fresh: true,
            calls: 0,
        }
    }

    /// Complete tool calls so far; with any, the finish reason is `tool_calls`.
    pub fn tool_calls(&self) -> usize {
        self.calls
    }

    /// Whether the text arriving now is reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Adds text; returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        self.pending.push_str(text);
        while self.step(&mut events) {}
        events
    }

    /// The rest, at the end of the reply.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Reasoning => push_text(&mut events, ReplyEvent::Reasoning, rest),
            State::Content => {
                self.content(&rest, &mut events);
                let blank = std::mem::take(&mut self.blank);
                if !self.fresh {
                    push_text(&mut events, ReplyEvent::Content, blank);
                }
            }
            State::Call(block) => events.push(ReplyEvent::BrokenToolCall(block.into_text() + &rest)),
        }
        events
    }

    /// Uses up pending text; false when more is needed.
    fn step(&mut self, events: &mut Vec<ReplyEvent>) -> bool {
        match &mut self.state {
            State::Reasoning => {
                let (before, tag) = self.take_until(&["</think>"]);
                push_text(events, ReplyEvent::Reasoning, before);
                if tag.is_some() {
                    self.state = State::Content;
                    self.fresh = true;
                }
                tag.is_some()
            }
            State::Content => self.step_content(events),
            State::Call(block) => {
                let text = std::mem::take(&mut self.pending);
                let Some((end, rest)) = block.push(&text, &self.schemas) else { return false };
                self.pending = rest;
                self.state = State::Content;
                events.push(match end {
                    CallEnd::Complete(call) => {
                        self.calls += 1;
                        ReplyEvent::ToolCall(call)
                    }
                    CallEnd::Broken(text) => ReplyEvent::BrokenToolCall(text),
                });
                true
            }
        }
    }

    fn step_content(&mut self, events: &mut Vec<ReplyEvent>) -> bool {
        // Think tags count only before any content: later they are text the model talks about.
        let tags: &[&str] =
            if self.fresh { &["<tool_call>", "<think>", "</think>"] } else { &["<tool_call>"] };
        let (before, tag) = self.take_until(tags);
        let was_fresh = self.fresh;
        self.content(&before, events);
        match tag {
            Some("<tool_call>") => {
                self.blank.clear();
                self.fresh = true;
                self.state = State::Call(CallBlock::new());
            }
            // Content began in the same piece of text as the tag.
            Some(tag) if was_fresh && !self.fresh => self.content(tag, events),
            Some("<think>") => {
                self.blank.clear();
                self.state = State::Reasoning;
            }
            Some(_) => self.blank.clear(),
            // Content began: look again with the shorter list of tags.
            None => return was_fresh && !self.fresh && !self.pending.is_empty(),
        }
        true
    }

    /// Takes the pending text before the first of `tags`, and that tag; without one, all text that cannot be
    /// the beginning of a tag.
    fn take_until<'t>(&mut self, tags: &[&'t str]) -> (String, Option<&'t str>) {
        let found = tags.iter().filter_map(|&tag| Some((self.pending.find(tag)?, tag)));
        if let Some((at, tag)) = found.min_by_key(|&(at, _)| at) {
            let before = self.pending[..at].to_owned();
            self.pending.drain(..at + tag.len());
            return (before, Some(tag));
        }
        let cut = self.pending.len() - held_back(&self.pending, tags.iter().copied());
        (self.pending.drain(..cut).collect(), None)
    }

    fn content(&mut self, text: &str, events: &mut Vec<ReplyEvent>) {
        self.blank.push_str(text);
        let end = self.blank.trim_end().len();
        if end == 0 {
            return;
        }
        let mut solid: String = self.blank.drain(..end).collect();
        if self.fresh {
            self.fresh = false;
            let indent = solid.len() - solid.trim_start().len();
            let first_line = solid[..indent].rfind('\n').map_or(0, |newline| newline + 1);
            solid.drain(..first_line);
        }
        events.push(ReplyEvent::Content(solid));
    }
}

fn push_text(events: &mut Vec<ReplyEvent>, kind: fn(String) -> ReplyEvent, text: String) {
    if !text.is_empty() {
        events.push(kind(text));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Events of `reply` cut after every `size` characters, with neighbouring texts joined.
    fn parse(reply: &str, in_thinking: bool, size: usize) -> Vec<ReplyEvent> {
        let tools = [json!({"type": "function", "function": {"name": "weather", "parameters": {"properties":
            {"city": {"type": "string"}, "days": {"type": "integer"}}}}})];
        let mut parser = ReplyParser::new(in_thinking, &tools);
        let characters: Vec<char> = reply.chars().collect();
        let mut events = Vec::new();
        for piece in characters.chunks(size) {
            events.extend(parser.push(&piece.iter().collect::<String>()));
        }
        events.extend(parser.finish());
        let complete = events.iter().filter(|event| matches!(event, ReplyEvent::ToolCall(_))).count();
        assert_eq!(parser.tool_calls(), complete);
        let mut joined: Vec<ReplyEvent> = Vec::new();
        for event in events {
            match (joined.last_mut(), event) {
                (Some(ReplyEvent::Reasoning(text)), ReplyEvent::Reasoning(more))
                | (Some(ReplyEvent::Content(text)), ReplyEvent::Content(more)) => text.push_str(&more),
                (_, event) => joined.push(event),
            }
        }
        joined
    }

    /// The same events however the text is cut.
    fn assert_reply(reply: &str, in_thinking: bool, expected: &[ReplyEvent]) {
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(parse(reply, in_thinking, size), expected, "{reply:?} in pieces of {size}");
        }
    }

    fn reasoning(text: &str) -> ReplyEvent {
        ReplyEvent::Reasoning(text.into())
    }

    fn content(text: &str) -> ReplyEvent {
        ReplyEvent::Content(text.into())
    }

    fn call(name: &str, arguments: Value) -> ReplyEvent {
        ReplyEvent::ToolCall(ToolCall {
            name: name.into(),
            arguments: arguments.as_object().unwrap().clone(),
        })
    }

    #[test]
    fn reasoning_ends_at_the_first_closing_tag() {
        assert_reply(
            "plan\n</think>\n\nansw</think>er \n",
            true,
            &[reasoning("plan\n"), content("answ</think>er \n")],
        );
        assert_reply("never closed </thin", true, &[reasoning("never closed </thin")]);
        assert_reply("</think>", true, &[]);
        assert_reply("a <tool_call>x</think>b", true, &[reasoning("a <tool_call>x"), content("b")]);
    }

    #[test]
    fn without_thinking_the_reply_is_content() {
        assert_reply("  indented\n", false, &[content("  indented\n")]);
        assert_reply("\n \n  x", false, &[content("  x")]);
        assert_reply("about <think> and <tool_calls>", false, &[content("about <think> and <tool_calls>")]);
        assert_reply("\n<think>hm</think>yes", false, &[reasoning("hm"), content("yes")]);
        assert_reply("</think>yes", false, &[content("yes")]);
        assert_reply("a<think>b</think>c", false, &[content("a<think>b</think>c")]);
        assert_reply("\n\n", false, &[]);
    }

    #[test]
    fn calls_are_read_by_their_schema() {
        let reply = "Looking.\n<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>days\
                     </arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>";
        let expected =
            [content("Looking."), call("weather", json!({"city": "12", "days": 3})), call("now", json!({}))];
        assert_reply(reply, false, &expected);
    }

    #[test]
    fn newlines_around_tags_are_tolerated_and_values_keep_theirs() {
        let reply = "go</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nÅ </tool_call>\n\
                     </arg_value>\n<arg_key>days</arg_key>\n<arg_value>\n[1]\n</arg_value>\n</tool_call>\n\nDone.\n";
        let expected = [
            reasoning("go"),
            call("weather", json!({"city": "\nÅ </tool_call>\n", "days": [1]})),
            content("Done.\n"),
        ];
        assert_reply(reply, true, &expected);
    }

    #[test]
    fn unfinished_and_nameless_calls_are_reported() {
        for cut in [
            "<tool_call>",
            "<tool_call>wea",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Par</arg_val",
        ] {
            let text = format!("a {cut}");
            assert_reply(&text, false, &[content("a"), ReplyEvent::BrokenToolCall(cut.into())]);
        }
        for block in ["<tool_call> </tool_call>", "<tool_call>f<arg_key>k</arg_key></tool_call>"] {
            let text = format!("{block}b");
            assert_reply(&text, false, &[ReplyEvent::BrokenToolCall(block.into()), content("b")]);
        }
        assert_reply("x <tool_cal", false, &[content("x <tool_cal")]);
    }
}
