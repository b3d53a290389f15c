//! Decoding: sampling, speculation, stop rules; one engine thread drives a step.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::model::{LanguageModel, ModelError};
use crate::text::TextModel;

/// How the next token is drawn. Order: temperature, top-k, top-p, min-p, renormalise.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = argmax.
    pub temperature: f32,
    /// 0 = off.
    pub top_k: usize,
    /// 1.0 = off.
    pub top_p: f32,
    /// 0.0 = off.
    pub min_p: f32,
    /// Key of the counter-based generator (rule N8).
    pub seed: u64,
}

/// How many tokens the MTP layer drafts per round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftPolicy {
    /// The engine chooses.
    Auto,
    /// No drafts.
    Off,
    /// Exactly this many.
    Fixed(usize),
}

/// One generation.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt token ids (at least one).
    pub prompt: Vec<u32>,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Upper bound of generated tokens.
    pub max_tokens: usize,
    /// Ids that end the answer (not emitted as text).
    pub stop_ids: Vec<u32>,
    /// Strings that end the answer, exact across token boundaries; never emitted.
    pub stop_strings: Vec<String>,
    /// Drafting.
    pub drafts: DraftPolicy,
    /// Rows per prefill step; any value gives the same bits.
    pub prefill_chunk: usize,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id.
    StopId(u32),
    /// A stop string.
    StopString(String),
    /// `max_tokens` or the context was reached.
    Length,
    /// The receiver asked to stop.
    Cancelled,
}

/// What the receiver of a generation sees.
#[derive(Clone, Debug)]
pub enum Event {
    /// Prompt rows processed so far.
    Prefill {
        /// Rows done.
        done: usize,
        /// Rows in all.
        total: usize,
    },
    /// A generated token (stop ids included) and the text that became certain with it.
    Token {
        /// The id.
        id: u32,
        /// Text, possibly empty.
        text: String,
    },
}

/// Counters of one generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateStats {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Generated tokens (stop id included).
    pub generated_tokens: usize,
    /// Target forward passes after prefill.
    pub rounds: usize,
    /// Drafted tokens.
    pub drafted: usize,
    /// Accepted drafts.
    pub accepted: usize,
    /// Seconds of prefill.
    pub prefill_s: f64,
    /// Seconds of decoding.
    pub decode_s: f64,
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated ids, stop id included.
    pub ids: Vec<u32>,
    /// Text without stop id and stop string.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// Counters.
    pub stats: GenerateStats,
}

/// Why a generation failed.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The prompt is empty.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// The logits are NaN.
    #[error("the logits at position {position} are not finite; the model's weights are damaged")]
    NotFinite {
        /// Position whose logits failed.
        position: usize,
    },
}

/// Model and text of one served checkpoint; generates one answer at a time.
pub struct Engine {
    /// The model.
    pub model: Arc<dyn LanguageModel>,
    /// Its text side.
    pub text: Arc<TextModel>,
}

impl Engine {
    /// Runs one generation on the calling thread; `on_event` may stop it.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn generate(
        &self,
        request: &GenerateRequest,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Generation, DecodeError> {
        let _ = (request, on_event);
        todo!()
    }
}
