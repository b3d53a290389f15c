//! What a generation is asked for, what it reports and why it may fail.

use super::{DraftReport, TimeReport};
use crate::model::ModelError;

/// How the next token is drawn. Order: temperature, top-k, top-p, min-p, renormalise (docs/model.md §9).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = argmax, lowest id on a tie.
    pub temperature: f64,
    /// Keeps the `top_k` most probable tokens; 0 = off.
    pub top_k: usize,
    /// Keeps tokens while the mass before them is below `top_p` (at least one); 1 = off.
    pub top_p: f64,
    /// Keeps tokens at least `min_p` times as probable as the most probable one; 0 = off.
    pub min_p: f64,
    /// Key of the counter-based generator (rule N8).
    pub seed: u64,
}

impl SamplingParams {
    /// Argmax decoding.
    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }

    /// Checks the ranges: temperature finite and ≥ 0, `top_p` and `min_p` in 0..=1.
    ///
    /// # Errors
    /// [`DecodeError::BadSampling`] naming the field.
    pub fn validate(&self) -> Result<(), DecodeError> {
        let bad = |field, value, allowed| Err(DecodeError::BadSampling { field, value, allowed });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return bad("temperature", self.temperature, "a finite number from 0 up");
        }
        if !(0.0..=1.0).contains(&self.top_p) {
            return bad("top_p", self.top_p, "a number from 0 to 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min_p", self.min_p, "a number from 0 to 1");
        }
        Ok(())
    }
}

/// How many tokens the MTP layer drafts per round. Never changes a token, only the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftPolicy {
    /// The engine chooses from measured acceptance and time (see [`super::DraftControl`]).
    Auto,
    /// No drafts.
    Off,
    /// Exactly this many, fewer only where the context ends.
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
    /// Ids that end the answer (not emitted as text); empty = none.
    pub stop_ids: Vec<u32>,
    /// Strings that end the answer, exact across token boundaries; never emitted. Empty strings are ignored.
    pub stop_strings: Vec<String>,
    /// Drafting.
    pub drafts: DraftPolicy,
    /// Rows per prefill step (0 = the whole prompt at once); any value gives the same bits.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Prompt rows processed so far: first those the session already had, then after each chunk.
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
        /// Text, possibly empty: incomplete characters and possible beginnings of stop strings are held back.
        text: String,
    },
    /// Text that was held back and became certain when the answer ended.
    Tail {
        /// Text, never empty.
        text: String,
    },
}

/// Counters of one generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateStats {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that were already in the session's caches.
    pub reused_tokens: usize,
    /// Generated tokens (stop id included).
    pub generated_tokens: usize,
    /// Target forward passes after prefill.
    pub rounds: usize,
    /// Drafted tokens.
    pub drafted: usize,
    /// Drafts that verification accepted, including those of the last round that lie past the answer's end.
    pub accepted: usize,
    /// What the engine chose and why, where it had the choice.
    pub drafting: Option<DraftReport>,
    /// Seconds of prefill.
    pub prefill_s: f64,
    /// Seconds of decoding.
    pub decode_s: f64,
    /// Where these seconds went.
    pub time: Box<TimeReport>,
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated ids, stop id included.
    pub ids: Vec<u32>,
    /// Text without stop id and stop string; equals the texts of all events joined.
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
    /// The logits hold NaN or infinity.
    #[error("the logits at position {position} are not finite; the model's weights are damaged")]
    NotFinite {
        /// Position whose next token was to be drawn.
        position: usize,
    },
    /// A sampling parameter is out of range.
    #[error("{field} is {value}; it must be {allowed}")]
    BadSampling {
        /// Field of [`SamplingParams`].
        field: &'static str,
        /// Its value.
        value: f64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The engine broke on this request (a bug); it goes on with the next one.
    #[error("the engine failed on this request ({message}); this is a bug, please report it")]
    Internal {
        /// The panic's message.
        message: String,
    },
}
