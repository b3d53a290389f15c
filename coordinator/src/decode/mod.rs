//! Decoding: sampling, speculation, stop rules; one engine thread drives a step.

mod request;
mod scheduler;
mod session;

pub use request::{
    DecodeError, DraftPolicy, Event, FinishReason, GenerateRequest, GenerateStats, Generation, SamplingParams,
};
pub use scheduler::{CancelHandle, EngineHandle, JobEvent, JobReceiver, SubmitError};
pub use session::Session;

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::model::LanguageModel;
use crate::text::TextModel;

/// Model and text of one served checkpoint; generates one answer at a time.
pub struct Engine {
    /// The model.
    pub model: Arc<dyn LanguageModel>,
    /// Its text side.
    pub text: Arc<TextModel>,
}

impl Engine {
    /// Runs one generation in a fresh session on the calling thread; `on_event` may stop it.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn generate(
        &self,
        request: &GenerateRequest,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Generation, DecodeError> {
        Session::new().generate(self, request, on_event)
    }
}
