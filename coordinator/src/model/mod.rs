//! Model families behind one trait: `glm_moe_dsa` and `olmoe`.
//!
//! A model turns tokens into post-final-norm hidden rows and logits; routed experts are computed by
//! whatever stands behind the expert seam ([`shimmer_common::experts::ExpertCompute`]).

mod glm;
mod lookahead;
mod olmoe;
mod routed;
mod rows;
mod sequence;
mod step;
mod trace;
mod weights;

pub use lookahead::{LOOKAHEAD_DEPTH, LookaheadStats, Recall};
pub use rows::Rows;
pub use sequence::Sequence;
pub use trace::{Trace, TraceLevel, TraceTensor};
pub use weights::decoded_bytes;

use std::sync::Arc;

use shimmer_common::container::config::ModelConfig;
use shimmer_common::container::{Container, ContainerError};
use shimmer_common::experts::{ExpertCompute, ExpertError, ExpertTimes};
use shimmer_common::kernels::Kernels;

/// Facts about a loaded model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// `model_type` of the configuration.
    pub family: &'static str,
    /// Vocabulary size (logit width).
    pub vocab_size: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Main layers.
    pub num_layers: usize,
    /// Longest sequence in tokens.
    pub max_positions: usize,
    /// Whether an MTP layer can draft.
    pub has_mtp: bool,
    /// Bytes of cache per token.
    pub cache_bytes_per_token: usize,
}

/// Why a forward step failed. The sequence is unchanged (rows of the failed step are truncated).
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A routed expert could not be computed.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// The sequence would exceed the model's context.
    #[error("{wanted} tokens exceed the context of {limit}")]
    ContextExceeded {
        /// Tokens after this step.
        wanted: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// A token id is not below the vocabulary size.
    #[error("token id {id} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
}

/// A language model. Every operator is row-independent (rule N6): neither chunking nor batching
/// changes a bit.
pub trait LanguageModel: Send + Sync {
    /// Facts about the model.
    fn info(&self) -> &ModelInfo;

    /// An empty sequence. With `with_mtp` the sequence keeps what [`LanguageModel::draft`] needs.
    fn new_sequence(&self, with_mtp: bool) -> Sequence;

    /// Processes `tokens` at the next positions; returns post-final-norm hidden rows
    /// `[tokens.len(), hidden_size]`. On error the sequence is as before.
    ///
    /// # Errors
    /// [`ModelError`].
    fn forward(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        trace: Option<&mut Trace>,
    ) -> Result<Rows, ModelError>;

    /// Output head: `[rows, hidden_size]` → `[rows, vocab_size]`.
    fn logits(&self, hidden: &Rows) -> Rows;

    /// Runs the MTP layer over every processed row whose successor token is known (tokens already in
    /// the sequence, then `next`). A no-op without MTP. With `trace`, records `mtp_logits` etc.
    ///
    /// # Errors
    /// [`ModelError`].
    fn extend_mtp(
        &self,
        seq: &mut Sequence,
        next: Option<u32>,
        trace: Option<&mut Trace>,
    ) -> Result<(), ModelError>;

    /// Drops what drafting has not processed yet, down to the newest rows, where that is long: for rounds
    /// without drafts, whose backlog would make the next draft expensive. Costs acceptance at most.
    fn skip_mtp(&self, _seq: &mut Sequence) {}

    /// Drafts `k` tokens that may follow `next`, the sampled but unprocessed token at position
    /// `seq.len()` (docs/model.md, MTP section: draft-extend, then chained steps in mode "union";
    /// scratch rows are dropped). Empty without MTP.
    ///
    /// # Errors
    /// [`ModelError`].
    fn draft(&self, seq: &mut Sequence, next: u32, k: usize) -> Result<Vec<u32>, ModelError>;

    /// Drops everything at positions `len..` from every cache.
    fn truncate(&self, seq: &mut Sequence, len: usize);

    /// How well the experts of coming layers were guessed since the model was loaded.
    fn lookahead(&self) -> LookaheadStats {
        LookaheadStats::default()
    }

    /// Where the time of routed experts went since the model was loaded.
    fn expert_times(&self) -> ExpertTimes {
        ExpertTimes::default()
    }
}

/// Progress of loading the dense part: bytes done and total.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64);

/// Loads the dense part of any supported family.
///
/// # Errors
/// [`ContainerError`] of the first tensor that cannot be read.
pub fn load(
    container: &Container,
    kernels: Kernels,
    experts: Arc<dyn ExpertCompute>,
    progress: LoadProgress<'_>,
) -> Result<Arc<dyn LanguageModel>, ContainerError> {
    let mut loader = weights::Loader::new(container, progress);
    Ok(match container.config() {
        ModelConfig::Glm(config) => {
            Arc::new(glm::Glm::load(config, container, &mut loader, kernels, experts)?)
        }
        ModelConfig::Olmoe(config) => Arc::new(olmoe::Olmoe::load(config, &mut loader, kernels, experts)?),
    })
}

/// Refuses a step that the model cannot process.
fn check_step(info: &ModelInfo, seq: &Sequence, tokens: &[u32]) -> Result<(), ModelError> {
    let wanted = seq.len() + tokens.len();
    if wanted > info.max_positions {
        return Err(ModelError::ContextExceeded { wanted, limit: info.max_positions });
    }
    tokens.iter().try_for_each(|&id| check_token(info, id))
}

/// Refuses a token the vocabulary lacks.
fn check_token(info: &ModelInfo, id: u32) -> Result<(), ModelError> {
    let vocab_size = info.vocab_size;
    if (id as usize) < vocab_size { Ok(()) } else { Err(ModelError::UnknownToken { id, vocab_size }) }
}

#[cfg(test)]
mod tests;
