//! A record that is still arriving: its first bytes, in a file beside the growing pack.
//!
//! The file is called `partial-LAYER-EXPERT-BLAKE3` after the record it shall become, and only ever
//! appended to. Whoever dies at any byte leaves a shorter file, and the rest can be asked for. What it
//! holds is believed only when the whole matches the BLAKE3.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;

use super::super::{ExpertId, ExpertSource as _};
use super::{PackError, PackStore};
use crate::disk;

/// A record of which the beginning has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialInfo {
    /// The expert.
    pub id: ExpertId,
    /// What the whole record must hash to.
    pub hash: [u8; 32],
    /// Bytes that are here.
    pub bytes: u64,
}

/// The name of the file that holds the beginning of a record.
fn partial_name(id: ExpertId, hash: &[u8; 32]) -> String {
    format!("partial-{}-{}-{}", id.layer, id.index, blake3::Hash::from_bytes(*hash).to_hex())
}

/// The record a file of this name would be the beginning of; `None` for any other name.
pub fn parse_partial_name(name: &str) -> Option<(ExpertId, [u8; 32])> {
    let mut fields = name.strip_prefix("partial-")?.splitn(3, '-');
    let id = ExpertId { layer: fields.next()?.parse().ok()?, index: fields.next()?.parse().ok()? };
    let hash = super::manifest::parse_hex(fields.next()?)?;
    (partial_name(id, &hash) == name).then_some((id, hash))
}

impl PackStore {
    /// The records that have begun to arrive, ascending. Files of that kind that are of no use (of a
    /// record held by now, or longer than it can be) are removed.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn partials(&self) -> Result<Vec<PartialInfo>, PackError> {
        let dir = self.dir();
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(PackError::io("read", dir))? {
            let entry = entry.map_err(PackError::io("read", dir))?;
            let Some((id, hash)) = entry.file_name().to_str().and_then(parse_partial_name) else { continue };
            // One that vanishes meanwhile has become a record.
            let Ok(bytes) = entry.metadata().map(|meta| meta.len()) else { continue };
            let useful = !self.contains(id)
                && self.layout().record_bytes(id).is_some_and(|record| bytes <= record as u64);
            if useful {
                found.push(PartialInfo { id, hash, bytes });
            } else {
                self.drop_partial(id, hash)?;
            }
        }
        found.sort_unstable_by_key(|partial| (partial.id, partial.hash));
        Ok(found)
    }

    /// Opens the beginning of a record, or begins it. `keep` is the number of bytes that are used of
    /// what is there; the rest is cut.
    ///
    /// # Errors
    /// [`PackError::Io`]; [`PackError::WrongRecord`] when the model has no such expert or fewer than
    /// `keep` bytes are there.
    pub fn open_partial(&self, id: ExpertId, hash: [u8; 32], keep: u64) -> Result<Partial, PackError> {
        let wrong = |what: String| PackError::WrongRecord { id, what };
        let len =
            self.layout().record_bytes(id).ok_or_else(|| wrong("the model has no such expert".into()))?;
        let path = self.dir().join(partial_name(id, &hash));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(PackError::io("create", &path))?;
        let there = file.metadata().map_err(PackError::io("read", &path))?.len();
        if keep > there || keep > len as u64 {
            return Err(wrong(format!("{keep} bytes of it should be here, {there} are")));
        }
        file.set_len(keep).map_err(PackError::io("write", &path))?;
        let mut bytes = Vec::with_capacity(len);
        bytes.resize(usize::try_from(keep).unwrap_or(len), 0);
        disk::read_exact_at(&file, &mut bytes, 0).map_err(PackError::io("read", &path))?;
        Ok(Partial { id, hash, path, file, bytes, len })
    }

    /// Forgets the beginning of a record.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn drop_partial(&self, id: ExpertId, hash: [u8; 32]) -> Result<(), PackError> {
        let path = self.dir().join(partial_name(id, &hash));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(PackError::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// A record that is arriving.
#[derive(Debug)]
pub struct Partial {
    id: ExpertId,
    hash: [u8; 32],
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
    len: usize,
}

impl Partial {
    /// The expert.
    pub fn id(&self) -> ExpertId {
        self.id
    }

    /// Bytes still to come.
    pub fn wanted(&self) -> usize {
        self.len - self.bytes.len()
    }

    /// Takes the next bytes, at most [`Partial::wanted`].
    ///
    /// # Errors
    /// [`PackError::Io`], e.g. on a full disk: what was here before still is;
    /// [`PackError::WrongRecord`] for too many bytes.
    pub fn push(&mut self, data: &[u8]) -> Result<(), PackError> {
        if data.len() > self.wanted() {
            let what = format!("{} bytes came where {} were wanted", data.len(), self.wanted());
            return Err(PackError::WrongRecord { id: self.id, what });
        }
        let at = self.bytes.len() as u64;
        disk::write_all_at(&self.file, data, at).map_err(PackError::io("write", &self.path))?;
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Moves a complete record into the pack. `false` when the pack held it already.
    ///
    /// # Errors
    /// [`PackError::WrongRecord`] when it is not what it should be: then its bytes are forgotten.
    /// [`PackError::Io`], e.g. on a full disk: then they are kept.
    pub fn finish(self, store: &PackStore) -> Result<bool, PackError> {
        match store.append(self.id, &self.bytes, self.hash) {
            Err(error @ PackError::WrongRecord { .. }) => {
                store.drop_partial(self.id, self.hash)?;
                Err(error)
            }
            Err(error) => Err(error),
            Ok(new) => {
                // Kept records are noticed and cleared when a kill comes between the two.
                store.drop_partial(self.id, self.hash)?;
                Ok(new)
            }
        }
    }
}
