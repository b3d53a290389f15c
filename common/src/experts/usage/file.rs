//! The usage file: what was learned about one model, kept from session to session.
//!
//! ```text
//! "SHMUSAGE" | u32 version | 32 bytes BLAKE3 of the rest | rest
//! rest = 32 bytes model fingerprint | f64 tokens in all | 3 × f64 decayed tokens | u32 layers
//!        per layer: u32 layer | u32 experts | per expert 3 × f32 decayed counts
//! ```
//!
//! Little-endian; horizons from the shortest on. The counts are decayed to the moment of saving; the half-lives
//! are the program's: changing them means a new version. Losing the file costs some disk reads and nothing else, so whatever is wrong with it is a reason to begin anew.

use std::path::{Path, PathBuf};

use super::super::ExpertLayout;
use super::counts::{Counts, HORIZONS, SavedLayer, SavedUsage};
use crate::container::Fingerprint;
use crate::disk;

/// Its name beside a model or a shard.
pub const FILE_NAME: &str = ".shimmer-usage";

/// What a usage file begins with.
pub const MAGIC: [u8; 8] = *b"SHMUSAGE";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 44;
/// 80,000 experts take 640 KB.
const MAX_BYTES: u64 = 64 << 20;

/// Why a usage file is not used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsageError {
    /// It is something else or cut.
    #[error("it is not a usage file")]
    NotUsage,
    /// Written by another version.
    #[error("it has version {0}, this program writes version {VERSION}")]
    Version(u32),
    /// Bits have changed.
    #[error("its checksum does not match")]
    Checksum,
    /// It belongs to another model.
    #[error("it belongs to another model")]
    Foreign,
    /// It contradicts itself or the model.
    #[error("{0}")]
    Unfit(&'static str),
    /// The operating system failed.
    #[error("{0}")]
    Io(String),
}

/// The file's bytes.
pub fn encode(saved: &SavedUsage, model: Fingerprint) -> Vec<u8> {
    let mut rest = model.0.to_vec();
    for value in [saved.lifetime_tokens].iter().chain(&saved.tokens) {
        rest.extend_from_slice(&value.to_le_bytes());
    }
    rest.extend_from_slice(&(saved.layers.len() as u32).to_le_bytes());
    for layer in &saved.layers {
        rest.extend_from_slice(&u32::from(layer.layer).to_le_bytes());
        rest.extend_from_slice(&(layer.experts.len() as u32).to_le_bytes());
        for &count in layer.experts.iter().flatten() {
            rest.extend_from_slice(&(count as f32).to_le_bytes());
        }
    }
    [&MAGIC[..], &VERSION.to_le_bytes(), blake3::hash(&rest).as_bytes(), &rest].concat()
}

/// Reads the file's bytes; nothing in them is trusted.
///
/// # Errors
/// [`UsageError`].
pub fn decode(bytes: &[u8], model: Fingerprint) -> Result<SavedUsage, UsageError> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(UsageError::NotUsage)?;
    let mut head = Fields(head);
    if head.take::<8>() != Some(MAGIC) {
        return Err(UsageError::NotUsage);
    }
    match head.u32() {
        Some(VERSION) => {}
        version => return Err(UsageError::Version(version.unwrap_or(0))),
    }
    if head.take::<32>() != Some(*blake3::hash(rest).as_bytes()) {
        return Err(UsageError::Checksum);
    }
    let mut fields = Fields(rest);
    if fields.take::<32>() != Some(model.0) {
        return Err(UsageError::Foreign);
    }
    fields.usage()
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// A count or a number of tokens.
    fn f64(&mut self) -> Result<f64, UsageError> {
        let value = self.take().map(f64::from_le_bytes).ok_or(UsageError::Unfit("it ends too early"))?;
        possible(value)
    }

    fn f32(&mut self) -> Result<f64, UsageError> {
        let value = self.take().map(f32::from_le_bytes).ok_or(UsageError::Unfit("it ends too early"))?;
        possible(value.into())
    }

    fn usage(&mut self) -> Result<SavedUsage, UsageError> {
        const SHORT: UsageError = UsageError::Unfit("it ends too early");
        let lifetime_tokens = self.f64()?;
        let mut tokens = Counts::default();
        for count in &mut tokens {
            *count = self.f64()?;
        }
        let mut layers = Vec::<SavedLayer>::new();
        for _ in 0..self.u32().ok_or(SHORT)? {
            let layer = u16::try_from(self.u32().ok_or(SHORT)?)
                .map_err(|_| UsageError::Unfit("a layer index is impossible"))?;
            if layers.last().is_some_and(|last| last.layer >= layer) {
                return Err(UsageError::Unfit("its layers do not ascend"));
            }
            let count = self.u32().ok_or(SHORT)? as usize;
            if count > 1 << 16 || count > self.0.len() / (4 * HORIZONS) {
                return Err(SHORT);
            }
            let mut experts = vec![Counts::default(); count];
            for count in experts.iter_mut().flatten() {
                *count = self.f32()?;
            }
            layers.push(SavedLayer { layer, experts });
        }
        if self.0.is_empty() {
            Ok(SavedUsage { lifetime_tokens, tokens, layers })
        } else {
            Err(UsageError::Unfit("it goes on after its end"))
        }
    }
}

fn possible(value: f64) -> Result<f64, UsageError> {
    let fits = (0.0..1e18).contains(&value);
    if fits { Ok(value) } else { Err(UsageError::Unfit("a count is negative or no number")) }
}

impl SavedUsage {
    /// Drops layers and experts that the model lacks and gives every layer its number of experts.
    pub fn fit(&mut self, layout: &ExpertLayout) {
        self.layers.retain(|l| layout.layers.contains_key(&l.layer));
        for layer in &mut self.layers {
            layer.experts.resize(layout.layers.get(&layer.layer).map_or(0, Vec::len), Counts::default());
        }
    }
}

/// Reads a usage file; `None` when there is none.
///
/// # Errors
/// [`UsageError`]: the file is there and cannot be used.
pub fn load(path: &Path, model: Fingerprint) -> Result<Option<SavedUsage>, UsageError> {
    match disk::read_small(path, MAX_BYTES) {
        Ok(bytes) => decode(&bytes, model).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(UsageError::Io(error.to_string())),
    }
}

/// Writes a usage file, whole or not at all.
///
/// # Errors
/// The operating system's error.
pub fn save(path: &Path, saved: &SavedUsage, model: Fingerprint) -> std::io::Result<()> {
    disk::write_atomic(path, &encode(saved, model))
}

/// Where usage of the model in `dir` is kept: beside the data when files can be made there, else in the
/// user's cache directory, under a name from the model's fingerprint. `None` when there is no such place.
pub fn place(dir: &Path, model: Fingerprint) -> Option<PathBuf> {
    let beside = dir.join(FILE_NAME);
    // An existing file may lie in a directory that can no longer be written to.
    if tempfile::Builder::new().prefix(".tmp-").tempfile_in(dir).is_ok() {
        return Some(beside);
    }
    let cache = user_cache_dir()?.join("shimmer");
    std::fs::create_dir_all(&cache).ok()?;
    let model = model.to_string();
    Some(cache.join(format!("usage-{}", model.get(..32).unwrap_or(&model))))
}

fn user_cache_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if cfg!(windows) {
        return var("LOCALAPPDATA");
    }
    if cfg!(target_os = "macos") {
        return var("HOME").map(|home| home.join("Library/Caches"));
    }
    var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Fingerprint = Fingerprint([5; 32]);

    fn saved() -> SavedUsage {
        let layers = vec![
            SavedLayer { layer: 3, experts: vec![[0.5, 1.5, 2.0], [0.0, 0.0, 0.25]] },
            SavedLayer { layer: 78, experts: vec![[7.0, 8.0, 9.0]] },
        ];
        SavedUsage { lifetime_tokens: 1e7, tokens: [23.0, 300.0, 4000.5], layers }
    }

    #[test]
    fn counts_come_back_from_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = place(dir.path(), MODEL).unwrap();
        assert_eq!(path, dir.path().join(FILE_NAME));
        assert_eq!(load(&path, MODEL), Ok(None));
        save(&path, &saved(), MODEL).unwrap();
        assert_eq!(load(&path, MODEL), Ok(Some(saved())));
        assert_eq!(load(&path, Fingerprint([6; 32])), Err(UsageError::Foreign));
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_noticed() {
        let bytes = encode(&saved(), MODEL);
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len], MODEL).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(decode(&bad, MODEL).is_err(), "byte {at}");
        }
    }

    /// `change` is made behind the checksum, which is then put right.
    fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<SavedUsage, UsageError> {
        let mut rest = encode(&saved(), MODEL).split_off(HEAD_BYTES);
        change(&mut rest);
        let head = [&MAGIC[..], &VERSION.to_le_bytes(), blake3::hash(&rest).as_bytes()].concat();
        decode(&[head, rest].concat(), MODEL)
    }

    #[test]
    fn nonsense_behind_a_right_checksum_is_refused() {
        assert_eq!(changed(|_| ()), Ok(saved()));
        let layers_at = 32 + 32;
        for (at, value) in [(layers_at, 9), (layers_at + 4, 99), (layers_at + 8, 200), (layers_at + 11, 255)]
        {
            assert!(matches!(changed(|rest| rest[at] = value), Err(UsageError::Unfit(_))), "byte {at}");
        }
        let negative = changed(|rest| rest[layers_at + 12 + 3] |= 0x80);
        assert_eq!(negative, Err(UsageError::Unfit("a count is negative or no number")));
        assert!(changed(|rest| rest.push(0)).is_err());
        assert!(changed(|rest| rest[32..40].copy_from_slice(&f64::NAN.to_le_bytes())).is_err());
    }
}
