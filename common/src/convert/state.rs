//! What a conversion remembers between attempts: `.out-progress.json` in the target.
//!
//! The keys `shards` and `params` are those of colibrì's converter, whose reader and ours take the
//! group size from them; `shimmer` holds what resuming needs. The file names no absolute path and no
//! time, so that equal conversions leave equal directories.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ConvertError;
use super::options::{ConvertOptions, GROUP_SIZE, TargetFormat};
use super::plan::OutputFile;
use crate::container::Fingerprint;
use crate::disk;

pub(super) const STATE: &str = ".out-progress.json";
const MTP_PARAMS: &str = ".out-mtp-params.json";
const VERSION: u32 = 1;
const MAX_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    /// Source shard to output file of the main model.
    shards: BTreeMap<String, String>,
    params: Params,
    shimmer: Resume,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Params {
    /// Columns per scale of grouped int4 matrices, 0 for none.
    group_size: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Resume {
    version: u32,
    /// Fingerprint of the source.
    source: String,
    options: ConvertOptions,
    /// Finished files.
    files: BTreeMap<String, Finished>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Finished {
    bytes: u64,
    blake3: String,
}

impl State {
    pub(super) fn new(source: Fingerprint, options: ConvertOptions) -> Self {
        let grouped = [options.experts, options.dense].contains(&TargetFormat::Int4G64);
        Self {
            shards: BTreeMap::new(),
            params: Params { group_size: if grouped { GROUP_SIZE } else { 0 } },
            shimmer: Resume { version: VERSION, source: source.to_string(), options, files: BTreeMap::new() },
        }
    }

    /// The state an earlier attempt left in `to`, if any.
    ///
    /// # Errors
    /// [`ConvertError::Target`] when it belongs to another source, other options or another program.
    pub(super) fn load(to: &Path, fresh: &Self) -> Result<Option<Self>, ConvertError> {
        let path = to.join(STATE);
        let len = match std::fs::metadata(&path) {
            Ok(meta) => meta.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ConvertError::io("read", &path)(error)),
        };
        let target = |what: String| ConvertError::Target { path: to.to_owned(), what };
        if len > MAX_BYTES {
            return Err(target(format!("{STATE} has {len} bytes and cannot be ours; name another target")));
        }
        let bytes = std::fs::read(&path).map_err(ConvertError::io("read", &path))?;
        let state: Self = serde_json::from_slice(&bytes).map_err(|error| {
            target(format!("{STATE} was not written by this program ({error}); name another target"))
        })?;
        let (found, asked) = (&state.shimmer, &fresh.shimmer);
        if found.version != asked.version {
            let version = found.version;
            return Err(target(format!(
                "it was begun by another version of the converter ({version}); remove it and start again"
            )));
        }
        if found.source != asked.source {
            return Err(target(
                "it was begun from another source; name another target or the same source".into(),
            ));
        }
        let pairs = found.options.named().into_iter().zip(asked.options.named());
        if let Some(((name, before), (_, now))) = pairs.into_iter().find(|(before, now)| before.1 != now.1) {
            return Err(target(format!(
                "it was begun with {name} = {before}, now {name} = {now} is asked for; use the same options or another target"
            )));
        }
        Ok(Some(state))
    }

    /// Whether `file` is finished and still what was written.
    pub(super) fn is_intact(&self, to: &Path, file: &OutputFile) -> bool {
        let Some(finished) = self.shimmer.files.get(&file.name) else { return false };
        let path = to.join(&file.name);
        finished.bytes == file.bytes
            && std::fs::metadata(&path).is_ok_and(|meta| meta.len() == finished.bytes)
            && super::shard::hash_file(&path).is_ok_and(|hash| hash.to_hex().as_str() == finished.blake3)
    }

    pub(super) fn finish(&mut self, file: &OutputFile, hash: blake3::Hash) {
        let finished = Finished { bytes: file.bytes, blake3: hash.to_hex().to_string() };
        self.shimmer.files.insert(file.name.clone(), finished);
        self.shards.entry(file.source.clone()).or_insert_with(|| file.name.clone());
    }

    pub(super) fn save(&self, to: &Path) -> Result<(), ConvertError> {
        let path = to.join(STATE);
        let bytes = serde_json::to_vec_pretty(self).expect("plain data with string keys always serialises");
        disk::write_atomic(&path, &bytes).map_err(ConvertError::io("write", &path))?;
        if self.shimmer.options.mtp == TargetFormat::Int4G64 {
            let path = to.join(MTP_PARAMS);
            let params = format!("{{\"group_size\": {GROUP_SIZE}}}\n");
            disk::write_atomic(&path, params.as_bytes()).map_err(ConvertError::io("write", &path))?;
        }
        Ok(())
    }
}
