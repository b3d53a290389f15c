//! Saying what is missing as shortly as it can be said truthfully.
//!
//! An incomplete download lacks whole shards, and a GLM-5.2 shard holds hundreds of tensors: when the
//! checkpoint's `*.safetensors.index.json` tells which file a missing tensor belongs to, the file is
//! named once. The index is only a hint and is read only when something is missing.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::Problem;
use super::index::Index;

const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The problems of tensors that are in no shard.
pub(super) fn problems(missing: Vec<String>, index: &Index, dirs: &[PathBuf]) -> Vec<Problem> {
    let dir = dirs.first();
    let Some(first) = missing.first() else { return Vec::new() };
    if index.unreadable_shards > 0 {
        let what = format!(
            "{} tensors are missing, {first} first; they may lie in the unreadable files above",
            missing.len()
        );
        return vec![Problem { file: dir.cloned(), tensor: None, what }];
    }
    let homes = dirs.iter().find_map(|dir| weight_map(dir)).unwrap_or_default();
    let present = |file: &str| index.shards.iter().any(|s| s.path().file_name().is_some_and(|n| n == file));
    let mut by_file: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut problems = Vec::new();
    for name in missing {
        match homes.get(&name) {
            Some(file) if !present(file) => by_file.entry(file).or_default().push(name),
            _ => problems.push(Problem {
                file: dir.cloned(),
                tensor: Some(name),
                what: "missing from every shard; download or convert the model again".into(),
            }),
        }
    }
    let gone = by_file.into_iter().map(|(file, names)| {
        let what = format!(
            "the file is missing and {} tensors of the model with it; finish the download",
            names.len()
        );
        Problem { file: dir.map(|d| d.join(file)), tensor: names.into_iter().next(), what }
    });
    problems.extend(gone);
    problems
}

/// Tensor name → file name, from the index file of a Hugging Face checkpoint.
fn weight_map(dir: &Path) -> Option<HashMap<String, String>> {
    let entries = std::fs::read_dir(dir).ok()?;
    let path = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.to_string_lossy().ends_with(".safetensors.index.json"))?;
    let json = crate::disk::read_small(&path, MAX_INDEX_BYTES).ok()?;
    let mut root: Value = serde_json::from_slice(&json).ok()?;
    serde_json::from_value(root.get_mut("weight_map")?.take()).ok()
}
