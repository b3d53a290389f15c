//! The expert pack: our on-disk form of a set of experts.
//!
//! A pack is a directory. It is a pure re-arrangement: every record holds the same bytes as
//! [`ExpertSource::read`](super::ExpertSource::read) of the container it was made from.
//!
//! | file | content |
//! |---|---|
//! | `manifest.json` | format version, model fingerprint, [`ExpertLayout`](super::ExpertLayout), the seal of a finished pack; ends with the BLAKE3 of everything before it |
//! | `records.idx` | 64 bytes per record: id, file, offset, length, BLAKE3 of the record, checksum of the entry; only ever appended to |
//! | `experts-NNNNN.pack` | records back to back, each a multiple of 4 KiB, 4 GiB per file |
//! | `partial-…` | the beginning of a record that is arriving, see [`Partial`] |
//! | `.lock` | held while a process may write |
//!
//! A *growing* pack (an expert node's shard) has no seal: a torn tail is cut and fetched again. A
//! *sealed* pack (written by `shimmer pack`) promises the length and hash of its index and the length
//! of every data file, so that a lost tail is damage, not an early stage.
//!
//! Nothing read from disk is believed: manifest and index carry checksums (an index entry's also
//! covers its position and the model), every offset is checked against layout and file sizes before
//! use, and a record is hashed **when it is first read**, by [`ExpertSource::read`](super::ExpertSource::read)
//! at every read; what is served is what was stored.

mod index;
mod manifest;
mod partial;
mod reader;
mod store;
mod writer;

use std::path::{Path, PathBuf};

pub use partial::{Partial, PartialInfo, parse_partial_name};
pub use reader::{Pack, VerifyReport, check};
pub use store::PackStore;
pub use writer::{PackProgress, PackReport, write_pack};

use super::{ExpertError, ExpertId};

const MANIFEST: &str = "manifest.json";
const INDEX: &str = "records.idx";
const LOCK: &str = ".lock";

/// Records start on this boundary, so that direct reads need no rounding.
const ALIGN_BYTES: u64 = 4096;

/// A new data file is begun when the current one would pass this size: small enough for every file
/// system and for copying piecewise, large enough that a 400 GB pack has some hundred files.
const FILE_BYTES: u64 = 4 << 30;

fn data_file_name(number: u32) -> String {
    format!("experts-{number:05}.pack")
}

/// Why a pack cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// "read", "write", ….
        action: &'static str,
        /// File or directory.
        path: PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The directory holds no pack.
    #[error("{path} is not an expert pack: it has no manifest.json")]
    NotAPack {
        /// The directory.
        path: PathBuf,
    },
    /// A checksum, size or offset is wrong.
    #[error("the expert pack is damaged: {path}: {what}; restore the file or write the pack again")]
    Damaged {
        /// File concerned.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The pack belongs to another model or was written by a newer version.
    #[error("{path}: {what}")]
    Mismatch {
        /// The pack's directory.
        path: PathBuf,
        /// What differs and what to do.
        what: String,
    },
    /// The target directory is in use for something else.
    #[error("{path} exists and is not empty; name a new directory for the pack")]
    Occupied {
        /// The directory.
        path: PathBuf,
    },
    /// Another process writes to the pack.
    #[error("the expert pack {path} is in use by another process; stop it first")]
    Busy {
        /// The pack's directory.
        path: PathBuf,
    },
    /// The records would not fit.
    #[error(
        "{path} has {free_bytes} bytes free but the experts need {needed_bytes}; free some space or name another disk"
    )]
    Space {
        /// Target directory.
        path: PathBuf,
        /// Bytes to be written.
        needed_bytes: u64,
        /// Bytes available.
        free_bytes: u64,
    },
    /// A record offered for storage is not what was promised.
    #[error("the record of {id} was refused: {what}")]
    WrongRecord {
        /// The expert.
        id: ExpertId,
        /// What does not fit.
        what: String,
    },
    /// The source could not deliver a record.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// The caller stopped the work; what was written stays and is used by the next attempt.
    #[error("writing the expert pack was cancelled; the same command continues it")]
    Cancelled,
}

impl PackError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), what: what.into() }
    }
}

#[cfg(test)]
mod tests;
