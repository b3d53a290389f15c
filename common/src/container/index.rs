//! Every tensor of a model directory: which shard holds it and where (docs/formats.md §1 and §2).
//!
//! File names carry no meaning beyond sorting and deduplication between directories; the converter's side
//! files give hints and warnings only.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::CONVERSION_LOCK;
use super::error::{ContainerError, Problem};
use super::file::{MAX_OPEN_SHARDS, Shard};
use super::safetensors::{Header, TensorInfo, read_header_with};
use crate::io::SharedFile;

/// Metadata key of colibrì's format stamp.
const STAMP_KEY: &str = "colibri.fmt";
/// Side files are small; anything larger is not read.
const MAX_SIDE_FILE_BYTES: u64 = 64 << 20;

/// Headers are compared in pieces of this size.
const COMPARED_BYTES: u64 = 1 << 20;

/// Where a tensor is.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    /// Index into [`Index::shards`].
    pub shard: u32,
    /// Type, shape and place in the file.
    pub info: TensorInfo,
    /// Whether the model uses it (set while resolving).
    pub used: bool,
}

/// Group sizes the converter recorded, by conversion pass.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupHints {
    pub main: Option<u32>,
    pub mtp: Option<u32>,
    pub indexer: Option<u32>,
}

/// All tensors of a model.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub shards: Vec<Shard>,
    pub tensors: HashMap<Box<str>, Located>,
    /// Format stamps by tensor name; normally empty.
    pub stamps: HashMap<String, String>,
    pub group_hints: GroupHints,
    pub warnings: Vec<String>,
    pub problems: Vec<Problem>,
    /// Whether some shard's header could not be used, so that tensors are missing for that reason.
    pub unreadable_shards: usize,
}

impl Index {
    /// Reads the headers of every shard in `dirs`; damage is collected in [`Index::problems`].
    ///
    /// # Errors
    /// A directory that cannot be listed.
    pub fn scan(dirs: &[PathBuf]) -> Result<Self, ContainerError> {
        let listing = Listing::of(dirs)?;
        let mut index =
            Self { warnings: listing.warnings, group_hints: listing.group_hints, ..Self::default() };
        if listing.shards.is_empty() {
            let file = dirs.first().cloned();
            let what = "holds no *.safetensors file; give the directory of a model".to_owned();
            index.problems.push(Problem { file, tensor: None, what });
        }
        let files = listing.shards.iter().map(|paths| paths.len()).sum::<usize>();
        let keep_open = files <= MAX_OPEN_SHARDS;
        let opened: Vec<_> =
            listing.shards.into_par_iter().map(|paths| open_shard(&paths, keep_open)).collect();
        for Opened { shard, header, warnings } in opened {
            index.warnings.extend(warnings);
            match header {
                Ok(header) => index.add(shard, header),
                Err(e) => index.unreadable(shard, format!("cannot be read: {e}")),
            }
        }
        Ok(index)
    }

    pub fn get(&self, name: &str) -> Option<&Located> {
        self.tensors.get(name)
    }

    pub fn shard(&self, index: u32) -> Option<&Shard> {
        self.shards.get(index as usize)
    }

    /// Whether this is a colibrì container: some matrix has `.qs` scales.
    pub fn is_colibri(&self) -> bool {
        self.tensors.keys().any(|name| name.ends_with(".qs"))
    }

    /// Path of the shard that holds `located`.
    pub fn path(&self, located: &Located) -> Option<PathBuf> {
        self.shard(located.shard).map(|s| s.path().to_owned())
    }

    fn unreadable(&mut self, shard: Shard, what: String) {
        self.problems.push(Problem { file: Some(shard.path().to_owned()), tensor: None, what });
        self.shards.push(shard);
        self.unreadable_shards += 1;
    }

    /// Takes in one shard's header.
    fn add(&mut self, shard: Shard, header: Header) {
        let number = self.shards.len() as u32;
        let path = shard.path().to_owned();
        self.shards.push(shard);
        self.unreadable_shards += usize::from(header.tensors.is_empty() && !header.flaws.is_empty());
        for flaw in header.flaws {
            self.problems.push(Problem { file: Some(path.clone()), tensor: flaw.tensor, what: flaw.what });
        }
        self.add_stamps(&path, &header.metadata);
        self.tensors.reserve(header.tensors.len());
        // Names that are already taken, by the shard that has them.
        let mut taken_by: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (name, info) in header.tensors {
            match self.tensors.entry(name) {
                Entry::Vacant(free) => {
                    free.insert(Located { shard: number, info, used: false });
                }
                // Twice within one file is reported by the header check.
                Entry::Occupied(taken) if taken.get().shard == number => {}
                Entry::Occupied(taken) => {
                    taken_by.entry(taken.get().shard).or_default().push(taken.key().to_string());
                }
            }
        }
        for (shard, names) in taken_by {
            let first = self.shard(shard).map(|s| s.path().to_owned()).unwrap_or_default();
            let what = duplicate(&first, &path, names.len());
            self.problems.push(Problem { file: Some(path.clone()), tensor: names.into_iter().next(), what });
        }
    }

    fn add_stamps(&mut self, path: &Path, metadata: &BTreeMap<String, String>) {
        let Some(text) = metadata.get(STAMP_KEY) else { return };
        match serde_json::from_str::<HashMap<String, String>>(text) {
            Ok(stamps) => self.stamps.extend(stamps),
            Err(e) => self.problems.push(Problem {
                file: Some(path.to_owned()),
                tensor: None,
                what: format!(
                    "its {STAMP_KEY} stamp is not a JSON object of strings ({e}); the file is damaged"
                ),
            }),
        }
    }
}

/// Two shards hold the same names. The usual cause is said when the file names show it.
fn duplicate(first: &Path, second: &Path, names: usize) -> String {
    let is_mtp =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("out-mtp-"));
    let others = if names > 1 { format!(" (and {} more tensors)", names - 1) } else { String::new() };
    let remedy = if is_mtp(first) && is_mtp(second) {
        "two sets of MTP files (an int8 and an int4 head) lie together, keep one set and remove the other"
    } else {
        "remove the file that does not belong to this model"
    };
    format!("it{others} is also in {}; {remedy}", first.display())
}

/// A shard whose header was read, or could not be.
struct Opened {
    shard: Shard,
    header: std::io::Result<Header>,
    warnings: Vec<String>,
}

/// Opens the first of `paths`; the others become copies to read from if they prove to be that.
fn open_shard(paths: &[PathBuf], keep_open: bool) -> Opened {
    let [path, others @ ..] = paths else {
        let header = Err(std::io::ErrorKind::NotFound.into());
        return Opened { shard: Shard::new(PathBuf::new(), None), header, warnings: Vec::new() };
    };
    let mut file = SharedFile::new(path, keep_open);
    let header = read_header_of(&file, path);
    let mut warnings = Vec::new();
    if header.is_ok() {
        for other in others {
            let copy = SharedFile::new(other, keep_open);
            match is_copy(&file, path, &copy, other) {
                Ok(()) => file = file.or(copy),
                Err(why) => warnings.push(format!(
                    "{} is not used: it is no copy of {} ({why})",
                    other.display(),
                    path.display()
                )),
            }
        }
    }
    Opened { shard: Shard::of(file), header, warnings }
}

fn read_header_of(file: &SharedFile, path: &Path) -> std::io::Result<Header> {
    let meta = std::fs::metadata(path)?;
    if !meta.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    read_header_with(meta.len(), |buf, offset| file.read_exact_at(buf, offset))
}

/// Whether `copy` has the size and, byte for byte, the header of `file`.
fn is_copy(file: &SharedFile, path: &Path, copy: &SharedFile, copy_path: &Path) -> Result<(), String> {
    let size = |path: &Path| std::fs::metadata(path).map(|meta| meta.len()).map_err(|e| e.to_string());
    let (expected, found) = (size(path)?, size(copy_path)?);
    if expected != found {
        return Err(format!("it has {found} bytes instead of {expected}"));
    }
    let bytes = |file: &SharedFile, offset: u64, len: usize| {
        let mut buf = vec![0; len];
        file.read_exact_at(&mut buf, offset).map(|()| buf).map_err(|e| e.to_string())
    };
    let length = bytes(file, 0, size_of::<u64>())?;
    let header_bytes = length.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    let end = header_bytes.saturating_add(size_of::<u64>() as u64).min(expected);
    let mut at = 0;
    while at < end {
        let len = (end - at).min(COMPARED_BYTES) as usize;
        if bytes(file, at, len)? != bytes(copy, at, len)? {
            return Err("it has another header".to_owned());
        }
        at += len as u64;
    }
    Ok(())
}

/// What lies in the directories, before any shard is opened.
#[derive(Default)]
struct Listing {
    /// Each with the files of the same name in later directories.
    shards: Vec<Vec<PathBuf>>,
    group_hints: GroupHints,
    warnings: Vec<String>,
}

impl Listing {
    fn of(dirs: &[PathBuf]) -> Result<Self, ContainerError> {
        let mut listing = Self::default();
        let mut seen: HashMap<OsString, usize> = HashMap::new();
        for dir in dirs {
            let io = |source| ContainerError::Io { path: dir.clone(), source };
            let mut paths = Vec::new();
            for entry in std::fs::read_dir(dir).map_err(io)? {
                paths.push(entry.map_err(io)?.path());
            }
            paths.sort();
            for path in paths {
                let Some(name) = path.file_name() else { continue };
                // Symbolic links are followed (the hub's cache consists of them); a dangling one is
                // kept and reported as unreadable.
                let is_shard = name.to_string_lossy().ends_with(".safetensors")
                    && !std::fs::metadata(&path).is_ok_and(|m| !m.is_file());
                if is_shard {
                    let number = *seen.entry(name.to_owned()).or_insert(listing.shards.len());
                    match listing.shards.get_mut(number) {
                        Some(paths) => paths.push(path),
                        None => listing.shards.push(vec![path]),
                    }
                }
            }
            listing.read_side_files(dir);
        }
        Ok(listing)
    }

    fn read_side_files(&mut self, dir: &Path) {
        if dir.join(CONVERSION_LOCK).exists() {
            self.warnings.push(format!(
                "{} holds .convert.lock: a conversion is or was running, this container may be incomplete",
                dir.display()
            ));
        }
        let hint = |pass: &str| {
            ["progress", "params"]
                .iter()
                .find_map(|kind| group_size_hint(&dir.join(format!(".{pass}-{kind}.json"))))
        };
        let hints = &mut self.group_hints;
        hints.main = hints.main.or_else(|| hint("out"));
        hints.mtp = hints.mtp.or_else(|| hint("out-mtp"));
        hints.indexer = hints.indexer.or_else(|| hint("out-idx"));
    }
}

/// `params.group_size` of a converter's side file. A file that cannot be read gives no hint.
fn group_size_hint(path: &Path) -> Option<u32> {
    let json = crate::disk::read_small(path, MAX_SIDE_FILE_BYTES).ok()?;
    let root: Value = serde_json::from_slice(&json).ok()?;
    let params = root.get("params").unwrap_or(&root);
    u32::try_from(params.get("group_size")?.as_u64()?).ok()
}
