//! From a Hugging Face checkpoint to a quantised container (docs/formats.md).
//!
//! The source is opened through [`Container`], so everything that is missing or odd is reported before
//! a byte is written. Then one output file after the other is made: matrices are streamed row by row
//! (the source is never in memory as a whole), encoded, written under a temporary name, read back,
//! compared, renamed and noted with their hash in `.out-progress.json`. A conversion that was
//! interrupted goes on with the first file that is not there or not intact. The same source and
//! options always give the same bytes.

mod options;
mod plan;
mod shard;
mod state;

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub use options::{ConvertOptions, TargetFormat};

use self::plan::OutputFile;
use self::state::{STATE, State};
use crate::container::{Container, ContainerError};
use crate::disk;
use crate::quant::{EncodeError, Format};

/// Copied byte for byte; only the first must be there.
const SIDE_FILES: [&str; 5] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
];

/// Present while a conversion runs or after one was interrupted; readers warn about it.
const LOCK: &str = crate::container::CONVERSION_LOCK;

const PARTIAL: &str = ".partial";

/// Room for side files and the file system's own records.
const RESERVE_BYTES: u64 = 64 << 20;

/// Why a checkpoint cannot be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source, or the finished result, cannot be opened.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// The options ask for something that is not offered.
    #[error("{0}")]
    Options(String),
    /// The source is readable but cannot be converted.
    #[error("{0}")]
    Source(String),
    /// Reading a source tensor failed.
    #[error("cannot read {name} from {path}: {source}")]
    Read {
        /// The source shard.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Operating system error.
        source: std::io::Error,
    },
    /// A source weight cannot be stored.
    #[error("{name}, row {row}: {error}")]
    Weight {
        /// The tensor.
        name: String,
        /// Its row.
        row: usize,
        /// What is wrong with it.
        error: EncodeError,
    },
    /// The target directory cannot be used.
    #[error("{path}: {what}")]
    Target {
        /// The directory.
        path: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// The result would not fit.
    #[error(
        "{path} has {free_bytes} bytes free but the container needs {needed_bytes}; free some space or name another disk"
    )]
    Space {
        /// The target.
        path: PathBuf,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes available.
        free_bytes: u64,
    },
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
    /// What the disk gives back is not what was written.
    #[error("{path}: {name} reads back differently from what was written; the disk may be failing")]
    Verify {
        /// The output file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The caller stopped the work.
    #[error("the conversion was cancelled; the same command continues it")]
    Cancelled,
}

impl ConvertError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// How far a conversion has come. Files kept from an earlier attempt count as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertProgress {
    /// Output files finished.
    pub files: usize,
    /// Output files in total.
    pub total_files: usize,
    /// Source bytes converted.
    pub bytes: u64,
    /// Source bytes in total.
    pub total_bytes: u64,
}

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertReport {
    /// Output files written now.
    pub written_files: usize,
    /// Output files kept from an earlier attempt.
    pub kept_files: usize,
    /// Bytes of all output files.
    pub bytes: u64,
    /// What the reader says about the finished container.
    pub summary: String,
    /// Its warnings.
    pub warnings: Vec<String>,
}

/// Converts the checkpoint `from` into a container at `to` (a new or empty directory, or the same
/// conversion's unfinished one). `progress` is called several times a second at least on real models
/// and stops the work by returning `Break`; finished files then stay for the next attempt.
///
/// # Errors
/// [`ConvertError`]; before the first write for everything that headers, options, target directory
/// and free space can tell. No unfinished file is left behind.
pub fn convert(
    from: &Path,
    to: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(ConvertProgress) -> ControlFlow<()>,
) -> Result<ConvertReport, ConvertError> {
    options.check().map_err(ConvertError::Options)?;
    let source = Container::open(&[from.to_owned()])?;
    let outputs = plan::plan(&source, options)?;
    refuse_nested(from, to)?;
    let fresh = State::new(source.fingerprint()?, *options);
    let mut state = match State::load(to, &fresh)? {
        Some(state) => state,
        None => {
            refuse_occupied(to)?;
            fresh
        }
    };
    let mut done = ConvertProgress {
        files: 0,
        total_files: outputs.len(),
        bytes: 0,
        total_bytes: outputs.iter().map(source_bytes).sum(),
    };
    let mut missing = Vec::new();
    for output in &outputs {
        // Hashing what is there takes minutes on a real model.
        if !state.is_intact(to, output) {
            missing.push(output);
            continue;
        }
        done.files += 1;
        done.bytes += source_bytes(output);
        if progress(done).is_break() {
            return Err(ConvertError::Cancelled);
        }
    }
    check_space(to, missing.iter().map(|output| output.bytes).sum())?;
    std::fs::create_dir_all(to).map_err(ConvertError::io("create", to))?;
    let lock = take_lock(to)?;
    remove_partials(to)?;
    // First of all, so that a target with anything in it is known as ours.
    state.save(to)?;
    copy_side_files(from, to)?;

    let kept_files = done.files;
    for output in missing {
        let hash = write_file(&source, output, to, &mut |consumed| {
            done.bytes += consumed;
            progress(done)
        })?;
        state.finish(output, hash);
        state.save(to)?;
        done.files += 1;
    }
    check_result(to, &outputs, kept_files, lock, &mut || {
        // A last call so that a progress bar ends full; nothing is left to cancel.
        let _ = progress(done);
    })
}

fn source_bytes(output: &OutputFile) -> u64 {
    output.tensors.iter().map(|tensor| tensor.source_weights.bytes).sum()
}

/// Makes one output file under a temporary name and moves it into place.
fn write_file(
    source: &Container,
    output: &OutputFile,
    to: &Path,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<blake3::Hash, ConvertError> {
    let partial = to.join(format!("{}{PARTIAL}", output.name));
    let result = shard::write(source, output, &partial, progress).and_then(|hash| {
        let target = to.join(&output.name);
        std::fs::rename(&partial, &target).map_err(ConvertError::io("rename", &partial))?;
        disk::sync_dir(to).map_err(ConvertError::io("write", to))?;
        Ok(hash)
    });
    if result.is_err() {
        // The first error is the one worth telling.
        let _ = std::fs::remove_file(&partial);
    }
    result
}

/// Opens the finished container as any user would and compares every matrix with the plan.
fn check_result(
    to: &Path,
    outputs: &[OutputFile],
    kept_files: usize,
    lock: File,
    finished: &mut dyn FnMut(),
) -> Result<ConvertReport, ConvertError> {
    let path = to.join(LOCK);
    drop(lock);
    std::fs::remove_file(&path).map_err(ConvertError::io("remove", &path))?;
    let result = Container::open(&[to.to_owned()])?;
    for tensor in outputs.iter().flat_map(|output| &output.tensors) {
        let planned = tensor.target();
        let one_group = planned.cols <= options::GROUP_SIZE as usize;
        let same = |read: Format| match planned.format {
            // A row of one group has the bytes of a row with one scale.
            Format::Int4Grouped { .. } if one_group => read == Format::Int4Row || read == planned.format,
            format => read == format,
        };
        if let Some(read) = result.matrix_spec(&tensor.name).filter(|read| !same(read.format)) {
            let (path, format) = (to.to_owned(), read.format);
            let what = format!("{} was written as {} but reads as {format}", tensor.name, planned.format);
            return Err(ConvertError::Target { path, what });
        }
    }
    finished();
    Ok(ConvertReport {
        written_files: outputs.len() - kept_files,
        kept_files,
        bytes: outputs.iter().map(|output| output.bytes).sum(),
        summary: result.summary().line.clone(),
        warnings: result.summary().warnings.clone(),
    })
}

/// The source stays untouched: neither directory may lie in the other.
fn refuse_nested(from: &Path, to: &Path) -> Result<(), ConvertError> {
    let from = from.canonicalize().map_err(ConvertError::io("read", from))?;
    let absolute = std::path::absolute(to).map_err(ConvertError::io("read", to))?;
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(&absolute);
    let rest = absolute.strip_prefix(existing).unwrap_or(Path::new(""));
    let to_real = existing.canonicalize().map_err(ConvertError::io("read", existing))?.join(rest);
    if to_real.starts_with(&from) || from.starts_with(&to_real) {
        let what =
            "the target must not be the source or lie inside it, nor contain it; name another directory";
        return Err(ConvertError::Target { path: to.to_owned(), what: what.into() });
    }
    Ok(())
}

fn refuse_occupied(to: &Path) -> Result<(), ConvertError> {
    let entries = match std::fs::read_dir(to) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(ConvertError::io("read", to))?,
    };
    for entry in entries {
        let name = entry.map_err(ConvertError::io("read", to))?.file_name();
        // What a conversion killed before its first save leaves behind.
        if name != LOCK && !name.to_string_lossy().starts_with(TEMPORARY) {
            let what =
                format!("it is not empty and holds no unfinished conversion ({STATE}); name a new directory");
            return Err(ConvertError::Target { path: to.to_owned(), what });
        }
    }
    Ok(())
}

fn check_space(to: &Path, missing_bytes: u64) -> Result<(), ConvertError> {
    if missing_bytes == 0 {
        return Ok(());
    }
    let needed_bytes = missing_bytes.saturating_add(RESERVE_BYTES);
    let free_bytes = disk::free_bytes(to).map_err(ConvertError::io("read", to))?;
    if free_bytes < needed_bytes {
        return Err(ConvertError::Space { path: to.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

fn take_lock(to: &Path) -> Result<File, ConvertError> {
    let path = to.join(LOCK);
    let lock = File::options().create(true).truncate(false).write(true).open(&path);
    let lock = lock.map_err(ConvertError::io("create", &path))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => {
            let what = "another conversion is writing there; wait for it or stop it".into();
            Err(ConvertError::Target { path: to.to_owned(), what })
        }
        Err(std::fs::TryLockError::Error(error)) => Err(ConvertError::io("lock", &path)(error)),
    }
}

/// Removes what a killed conversion left half written.
fn remove_partials(to: &Path) -> Result<(), ConvertError> {
    for entry in std::fs::read_dir(to).map_err(ConvertError::io("read", to))? {
        let entry = entry.map_err(ConvertError::io("read", to))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = name.starts_with(TEMPORARY) || (name.starts_with("out-") && name.ends_with(PARTIAL));
        if ours {
            std::fs::remove_file(entry.path()).map_err(ConvertError::io("remove", &entry.path()))?;
        }
    }
    Ok(())
}

/// Start of the names of files that [`disk::write_atomic`] has not finished.
const TEMPORARY: &str = ".tmp-";

/// Tokenizers of large vocabularies have some 20 MB.
const MAX_SIDE_FILE_BYTES: u64 = 256 << 20;

fn copy_side_files(from: &Path, to: &Path) -> Result<(), ConvertError> {
    for name in SIDE_FILES {
        let path = from.join(name);
        match disk::read_small(&path, MAX_SIDE_FILE_BYTES) {
            Ok(bytes) => {
                let copy = to.join(name);
                disk::write_atomic(&copy, &bytes).map_err(ConvertError::io("write", &copy))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && name != "config.json" => {}
            Err(error) => return Err(ConvertError::io("read", &path)(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
