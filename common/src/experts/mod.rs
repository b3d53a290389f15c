//! Routed experts: their identity, record layout, sources, and the one seam that carries the design.
//!
//! The seam is [`ExpertCompute`]: *given a layer and the routed rows, return fixed-point sums*.
//! It is implemented by the [`LocalStore`] here and by the cluster (and its composition with local
//! fallback) in the coordinator.

mod hashes;
mod layout;
pub mod pack;
mod store;
#[cfg(test)]
mod testing;
pub mod times;
pub mod usage;

pub use hashes::RecordHashes;
pub use layout::{ExpertLayout, ExpertMatrix, ExpertSpec, MatrixSpec, RecordPart};
pub use store::{
    CallTally, EvictionPolicy, LearnedFrequency, LocalStore, MemoryWatch, SharedUsage, StoreOptions,
    StoreStats,
};
pub use times::ExpertTimes;

use serde::{Deserialize, Serialize};

pub use crate::ffn::RoutedRow;
use crate::fixed::FixedRows;
use crate::io::{ReadError, Segment};
use crate::kernels::Activations;

/// Address of one routed expert. `layer` is the checkpoint's layer index (the MTP layer is
/// `num_hidden_layers`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExpertId {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Expert index within the layer.
    pub index: u16,
}

impl std::fmt::Display for ExpertId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.index)
    }
}

/// The rows one expert has to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWork {
    /// Expert index within the batch's layer.
    pub expert: u16,
    /// Routed rows with their gate weights.
    pub rows: Vec<RoutedRow>,
}

/// One layer's routed work: activation rows and, per expert, which rows it computes.
#[derive(Clone, Debug)]
pub struct RoutedBatch {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Normed activation rows `[rows, hidden_size]`.
    pub x: Activations,
    /// Work grouped by expert, experts ascending and unique.
    pub work: Vec<ExpertWork>,
}

impl RoutedBatch {
    /// Groups router choices (`ids` and `gates` are `[rows, k]`) by expert.
    pub fn from_routes(layer: u16, x: Activations, ids: &[u16], gates: &[f32], k: usize) -> Self {
        let mut by_expert: std::collections::BTreeMap<u16, Vec<RoutedRow>> =
            std::collections::BTreeMap::new();
        for (i, (&expert, &gate)) in ids.iter().zip(gates).enumerate() {
            by_expert.entry(expert).or_default().push(RoutedRow { row: (i / k.max(1)) as u32, gate });
        }
        let work = by_expert.into_iter().map(|(expert, rows)| ExpertWork { expert, rows }).collect();
        Self { layer, x, work }
    }
}

/// A guess of the experts a coming layer will ask for, made before its router has run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookahead {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Guessed experts, the most probable first.
    pub experts: Vec<u16>,
}

impl Lookahead {
    /// The guessed experts' addresses, the most probable first.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        self.experts.iter().map(|&index| ExpertId { layer: self.layer, index })
    }
}

/// Which guesses are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Coming layers to guess; 0 = none, `usize::MAX` = as many as the model can.
    pub depth: usize,
    /// Whether to guess before [`ExpertCompute::compute`], so that guesses leave with its work, and not in
    /// its `meanwhile`.
    pub before_sending: bool,
}

impl Ahead {
    /// No guesses.
    pub const NONE: Self = Self { depth: 0, before_sending: false };

    /// Every guess the model can make, while others compute.
    pub const MEANWHILE: Self = Self { depth: usize::MAX, before_sending: false };
}

/// Why routed experts could not be computed.
#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    /// Nobody holds the expert.
    #[error("{id} is not held by this {holder}; {remedy}")]
    Missing {
        /// The expert.
        id: ExpertId,
        /// Who was asked ("container", "pack", "node NAME").
        holder: String,
        /// What to do.
        remedy: String,
    },
    /// Reading the expert's bytes failed.
    #[error("cannot read {id} from {path}: {source}")]
    Read {
        /// The expert.
        id: ExpertId,
        /// File read.
        path: std::path::PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The bytes are not what the manifest promised.
    #[error("{id} in {path} is damaged: {what}; restore the file or fetch the shard again")]
    Damaged {
        /// The expert.
        id: ExpertId,
        /// File read.
        path: std::path::PathBuf,
        /// What does not match.
        what: String,
    },
    /// The arithmetic failed (non-finite output, wrong activation form).
    #[error("computing {id} failed: {source}")]
    Compute {
        /// The expert.
        id: ExpertId,
        /// Cause.
        source: crate::ffn::FfnError,
    },
    /// The RAM budget cannot hold even one expert.
    #[error(
        "a RAM budget of {budget_bytes} bytes for experts is below one expert ({needed_bytes} bytes); raise --ram"
    )]
    Budget {
        /// Bytes given.
        budget_bytes: usize,
        /// Bytes one expert needs.
        needed_bytes: usize,
    },
    /// The request itself contradicts the model (a peer with another model, or a bug).
    #[error("a routed batch for layer {layer} does not fit the model: {what}")]
    Unfit {
        /// Layer asked for.
        layer: u16,
        /// What does not fit.
        what: String,
    },
    /// The cluster could not answer and there is no local fallback.
    #[error("{0}")]
    Unreachable(String),
}

impl ExpertError {
    /// The error for a record of which a range could not be read: a file that is too short is damage.
    pub fn unreadable(id: ExpertId, path: std::path::PathBuf, source: std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::UnexpectedEof => Self::Damaged { id, path, what: source.to_string() },
            _ => Self::Read { id, path, source },
        }
    }

    /// The error for a record whose read failed; `holder` is said where no file is to blame.
    pub fn from_read(id: ExpertId, holder: &str, error: ReadError) -> Self {
        match error {
            ReadError::Failed { path, source, .. } => Self::unreadable(id, path, source),
            other => Self::Read { id, path: holder.into(), source: std::io::Error::other(other) },
        }
    }
}

/// The seam between the model and whoever computes its routed experts.
pub trait ExpertCompute: Send + Sync {
    /// Computes `batch` and returns `[rows, hidden_size]` fixed-point sums (rule N5). Work that
    /// leaves the machine is sent before `meanwhile` runs (the caller's shared expert), and
    /// `meanwhile` is run exactly once, on the calling thread, whatever happens.
    ///
    /// # Errors
    /// [`ExpertError`] names the expert that cannot be had anywhere.
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError>;

    /// Where experts live and how they are stored.
    fn layout(&self) -> &ExpertLayout;

    /// Takes a guess of what a coming [`ExpertCompute::compute`] will need. It returns at once and never
    /// changes a result. A guess replaces the earlier one for its layer and ends when `compute` of that
    /// layer begins.
    fn prefetch(&self, ahead: &Lookahead) {
        let _ = ahead;
    }

    /// Which guesses are worth making now: none while every expert is resident anyway.
    fn lookahead(&self) -> Ahead {
        Ahead::NONE
    }

    /// Where the time of the calls so far went.
    fn times(&self) -> ExpertTimes {
        ExpertTimes::default()
    }
}

/// Something expert records can be read from: a container or a pack.
pub trait ExpertSource: Send + Sync {
    /// Formats and sizes of every expert of the model (not only the ones held here).
    fn layout(&self) -> &ExpertLayout;

    /// Whether this source holds `id`.
    fn contains(&self, id: ExpertId) -> bool;

    /// Where the bytes of the record are: segments that fill disjoint parts of it. What they leave out is
    /// put right by [`ExpertSource::finish`].
    ///
    /// # Errors
    /// [`ExpertError::Missing`].
    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError>;

    /// Completes a record whose segments have been read: clears what lies between the parts and checks
    /// what can be checked.
    ///
    /// # Errors
    /// [`ExpertError::Damaged`].
    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError>;

    /// Fills `record` (`layout().record_bytes(id)` bytes) with the expert's record, on this thread.
    ///
    /// # Errors
    /// [`ExpertError::Missing`], [`ExpertError::Read`] or [`ExpertError::Damaged`].
    fn read(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        read_plainly(self, id, record)
    }

    /// BLAKE3 of the record, where this source knows it without reading.
    fn record_hash(&self, id: ExpertId) -> Option<[u8; 32]> {
        let _ = id;
        None
    }

    /// "container" or "pack", with the path, for messages.
    fn describe(&self) -> String;
}

/// What [`ExpertSource::read`] does unless a source has reason to do more: plan, read, finish.
fn read_plainly<S: ExpertSource + ?Sized>(
    from: &S,
    id: ExpertId,
    record: &mut [u8],
) -> Result<(), ExpertError> {
    let segments = from.plan(id)?;
    let wanted = from.layout().record_bytes(id).unwrap_or(0);
    if record.len() != wanted {
        let what = format!("the buffer has {} bytes, the record {wanted}", record.len());
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, what);
        return Err(ExpertError::Read { id, path: from.describe().into(), source });
    }
    for Segment { file, offset, len, at } in segments {
        let part = at.checked_add(len).and_then(|end| record.get_mut(at..end));
        let Some(part) = part else {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "a part leaves the record");
            return Err(ExpertError::Read { id, path: file.path().to_owned(), source });
        };
        file.read_exact_at(part, offset)
            .map_err(|source| ExpertError::unreadable(id, file.path().to_owned(), source))?;
    }
    from.finish(id, record)
}
