//! Decoding: sampling, speculation, stop rules; one engine thread drives a step.
//!
//! [`Session::generate`] is the loop (prefill, then rounds of draft, verify, accept), [`Engine`] what it runs on,
//! [`EngineHandle`] the queue in front of the one thread that runs it. [`sampling`] draws tokens, [`score`] runs
//! given ids.

mod answer;
mod draft_cost;
mod drafts;
pub mod philox;
mod request;
pub mod sampling;
mod scheduler;
pub mod score;
mod session;
pub mod speculative;
mod stop;
mod times;

pub use drafts::{DraftControl, DraftEstimate, DraftReport, Round};
pub use request::{
    DecodeError, DraftPolicy, Event, FinishReason, GenerateRequest, GenerateStats, Generation, SamplingParams,
};
pub use scheduler::{CancelHandle, EngineHandle, JobEvent, JobReceiver, SubmitError};
pub use session::Session;
pub use stop::{StopScan, StopStrings};
pub use times::TimeReport;

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

#[cfg(test)]
mod fake;
#[cfg(test)]
mod real_tests;
#[cfg(test)]
mod tests;
