//! One conversation's caches and the generation loop.

use std::ops::ControlFlow;

use super::{DecodeError, Engine, Event, GenerateRequest, Generation};
use crate::model::Sequence;

/// The caches of one conversation; the next prompt reuses the longest common token prefix.
#[derive(Default)]
pub struct Session {
    seq: Option<Sequence>,
}

impl Session {
    /// An empty session.
    pub fn new() -> Self {
        Session::default()
    }

    /// Tokens in the caches.
    pub fn tokens(&self) -> &[u32] {
        self.seq.as_ref().map_or(&[], Sequence::tokens)
    }

    /// Runs one generation on the calling thread; `on_event` may stop it. Ids, text and finish reason depend on
    /// neither the session's past, nor drafts, nor the prefill chunk.
    ///
    /// # Errors
    /// [`DecodeError`]; the session stays usable.
    pub fn generate(
        &mut self,
        engine: &Engine,
        request: &GenerateRequest,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Generation, DecodeError> {
        let _ = (engine, request, on_event);
        todo!()
    }
}
