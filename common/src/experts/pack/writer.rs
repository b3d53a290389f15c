//! Making a finished pack from any source of records (`shimmer pack`).

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::super::{ExpertError, ExpertId, ExpertSource};
use super::store::PackStore;
use super::{LOCK, PackError};
use crate::container::Fingerprint;
use crate::disk;
use crate::mem::AlignedBuf;

/// Room for the index, the manifest and the file system's own records.
const RESERVE_BYTES: u64 = 16 << 20;

/// How far [`write_pack`] has come; records already there from an earlier attempt count as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackProgress {
    /// Records stored.
    pub records: usize,
    /// Records to be stored.
    pub total_records: usize,
    /// Bytes stored.
    pub bytes: u64,
    /// Bytes to be stored.
    pub total_bytes: u64,
}

/// What [`write_pack`] made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackReport {
    /// Records in the pack.
    pub records: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Records that an interrupted earlier attempt had already stored.
    pub resumed_records: usize,
}

/// Writes the records of `experts` (any order, duplicates allowed) from `source` to a new pack at
/// `to`.
///
/// The pack grows in `TO.partial` and is renamed when it is complete and on disk. After a kill or a
/// cancellation (`progress` returns `Break`) the same call continues there; after an error nothing is
/// left that was not there before.
///
/// # Errors
/// [`PackError::Occupied`] when `to` is not empty, [`PackError::Expert`] when the source lacks an
/// expert or cannot read it, [`PackError::Space`] before anything is written, and those of
/// [`PackStore`].
pub fn write_pack(
    source: &dyn ExpertSource,
    experts: &[ExpertId],
    fingerprint: Fingerprint,
    to: &Path,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackReport, PackError> {
    refuse_occupied(to)?;
    let experts = checked(source, experts)?;
    let partial = partial_path(to);
    let resuming = partial.exists();
    let written = write_partial(source, &experts, fingerprint, &partial, progress);
    let report = match written {
        Ok(report) => report,
        Err(error) => {
            if !resuming && !matches!(error, PackError::Cancelled) {
                // The first error is the one worth telling.
                let _ = std::fs::remove_dir_all(&partial);
            }
            return Err(error);
        }
    };
    if to.exists() {
        std::fs::remove_dir(to).map_err(PackError::io("replace", to))?;
    }
    std::fs::rename(&partial, to).map_err(PackError::io("rename", &partial))?;
    disk::sync_dir(disk::parent(to)).map_err(PackError::io("write", disk::parent(to)))?;
    Ok(report)
}

fn refuse_occupied(to: &Path) -> Result<(), PackError> {
    let mut entries = match std::fs::read_dir(to) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(PackError::io("read", to))?,
    };
    if entries.next().is_some() { Err(PackError::Occupied { path: to.to_owned() }) } else { Ok(()) }
}

/// Sorts out duplicates and makes sure that the source has every expert. With sizes.
fn checked(source: &dyn ExpertSource, experts: &[ExpertId]) -> Result<Vec<(ExpertId, usize)>, PackError> {
    let mut ids = experts.to_vec();
    ids.sort_unstable();
    ids.dedup();
    let sized = |id: ExpertId| match source.layout().record_bytes(id) {
        Some(bytes) if source.contains(id) => Ok((id, bytes)),
        _ => Err(PackError::Expert(ExpertError::Missing {
            id,
            holder: source.describe(),
            remedy: "leave it out of the list, or pack from a complete model".into(),
        })),
    };
    ids.into_iter().map(sized).collect()
}

fn partial_path(to: &Path) -> PathBuf {
    let mut name = to.file_name().map_or_else(|| OsString::from("pack"), OsString::from);
    name.push(".partial");
    to.with_file_name(name)
}

fn write_partial(
    source: &dyn ExpertSource,
    experts: &[(ExpertId, usize)],
    fingerprint: Fingerprint,
    partial: &Path,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackReport, PackError> {
    let store = PackStore::open_or_create(partial, fingerprint, source.layout())?;
    let total_bytes = experts.iter().map(|&(_, bytes)| bytes as u64).sum();
    let mut state = PackProgress { records: 0, total_records: experts.len(), bytes: 0, total_bytes };
    let (held, needed): (Vec<_>, Vec<_>) = experts.iter().partition(|&&(id, _)| store.contains(id));
    state.records = held.len();
    state.bytes = held.iter().map(|&(_, bytes)| bytes as u64).sum();
    check_space(partial, total_bytes.saturating_sub(state.bytes))?;
    let mut buf =
        AlignedBuf::zeroed(source.layout().max_record_bytes()).map_err(PackError::io("write", partial))?;
    for (id, bytes) in needed {
        if progress(state).is_break() {
            store.flush()?;
            return Err(PackError::Cancelled);
        }
        let record = buf
            .get_mut(..bytes)
            .ok_or_else(|| PackError::WrongRecord { id, what: "its size contradicts the layout".into() })?;
        source.read(id, record)?;
        store.append(id, record, *blake3::hash(record).as_bytes())?;
        state.records += 1;
        state.bytes += bytes as u64;
    }
    store.seal()?;
    drop(store);
    let lock = partial.join(LOCK);
    std::fs::remove_file(&lock).map_err(PackError::io("remove", &lock))?;
    // A last call so that a progress bar ends full; nothing is left to cancel.
    let _ = progress(state);
    Ok(PackReport { records: state.records, bytes: state.bytes, resumed_records: held.len() })
}

fn check_space(partial: &Path, needed_bytes: u64) -> Result<(), PackError> {
    let needed_bytes = needed_bytes.saturating_add(RESERVE_BYTES);
    let free_bytes = disk::free_bytes(partial).map_err(PackError::io("read", partial))?;
    if free_bytes < needed_bytes {
        return Err(PackError::Space { path: partial.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}
