//! The answer being generated: ids, text, and the rules that end it.

use std::ops::ControlFlow;

use super::stop::StopStrings;
use super::{Event, FinishReason, GenerateRequest};
use crate::text::{Detokenizer, TextModel};

/// Turns accepted tokens into events. Special tokens are never text; neither are stop ids and stop strings.
pub(super) struct Answer<'a> {
    request: &'a GenerateRequest,
    /// Most tokens that may be generated: `max_tokens`, less where the context ends.
    limit: usize,
    detokenizer: Detokenizer<'a>,
    stop_strings: StopStrings,
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
}

impl<'a> Answer<'a> {
    pub(super) fn new(text: &'a TextModel, request: &'a GenerateRequest, limit: usize) -> Self {
        Answer {
            request,
            limit,
            detokenizer: text.stream(true),
            stop_strings: StopStrings::new(&request.stop_strings),
            ids: Vec::new(),
            text: String::new(),
        }
    }

    /// Tokens that may still be generated.
    pub(super) fn room(&self) -> usize {
        self.limit.saturating_sub(self.ids.len())
    }

    /// Appends the next token; `Some` ends the answer with it.
    pub(super) fn push(
        &mut self,
        id: u32,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Option<FinishReason> {
        self.ids.push(id);
        let mut finish = None;
        let mut text = String::new();
        if self.request.stop_ids.contains(&id) {
            finish = Some(FinishReason::StopId(id));
        } else {
            let piece = self.detokenizer.push(id);
            let scan = self.stop_strings.push(&piece);
            text = scan.text;
            self.text.push_str(&text);
            if let Some(stop) = scan.hit {
                finish = Some(FinishReason::StopString(stop));
            } else if self.room() == 0 {
                finish = Some(FinishReason::Length);
            }
        }
        let cancelled = on_event(Event::Token { id, text }).is_break();
        finish.or(cancelled.then_some(FinishReason::Cancelled))
    }

    /// Emits what was held back, unless a stop string ended the answer. An incomplete character (U+FFFD) may
    /// still complete a stop string.
    pub(super) fn end(
        &mut self,
        finish: FinishReason,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> FinishReason {
        if matches!(finish, FinishReason::StopString(_)) {
            return finish;
        }
        let rest = self.detokenizer.finish();
        let scan = self.stop_strings.push(&rest);
        let text = if scan.hit.is_none() { scan.text + &self.stop_strings.finish() } else { scan.text };
        if !text.is_empty() {
            self.text.push_str(&text);
            // The answer is over either way.
            let _ = on_event(Event::Tail { text });
        }
        scan.hit.map_or(finish, FinishReason::StopString)
    }
}
