//! The BLAKE3 of every record of a model that somebody vouches for, and its file form.
//!
//! A file is `SHMRHASH`, the model fingerprint, per record layer u16, index u16 and hash (36 bytes,
//! little-endian, ascending by expert), and the BLAKE3 of everything before it.

use std::collections::BTreeMap;

use super::{ExpertId, ExpertLayout};
use crate::container::Fingerprint;

const MAGIC: &[u8; 8] = b"SHMRHASH";
const ENTRY_BYTES: usize = 36;

/// Hashes of records, by expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordHashes(BTreeMap<ExpertId, [u8; 32]>);

impl RecordHashes {
    /// The hash of a record.
    pub fn get(&self, id: ExpertId) -> Option<[u8; 32]> {
        self.0.get(&id).copied()
    }

    /// Notes a hash; whether it was not known before.
    pub fn insert(&mut self, id: ExpertId, hash: [u8; 32]) -> bool {
        self.0.insert(id, hash) != Some(hash)
    }

    /// Number of hashes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no hash is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The file form.
    pub fn encode(&self, model: &Fingerprint) -> Vec<u8> {
        let mut out = Vec::with_capacity(72 + self.0.len() * ENTRY_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&model.0);
        for (id, hash) in &self.0 {
            out.extend_from_slice(&id.layer.to_le_bytes());
            out.extend_from_slice(&id.index.to_le_bytes());
            out.extend_from_slice(hash);
        }
        let check = blake3::hash(&out);
        out.extend_from_slice(check.as_bytes());
        out
    }

    /// Reads the file form; `None` when it is damaged, belongs to another model, or names experts that
    /// the model does not have.
    pub fn decode(bytes: &[u8], model: &Fingerprint, layout: &ExpertLayout) -> Option<Self> {
        let (body, check) = bytes.split_last_chunk::<32>()?;
        let (magic, rest) = body.split_first_chunk::<8>()?;
        let (owner, rest) = rest.split_first_chunk::<32>()?;
        if magic != MAGIC || *owner != model.0 || blake3::hash(body) != *check {
            return None;
        }
        let (entries, []) = rest.as_chunks::<ENTRY_BYTES>() else { return None };
        let mut hashes = Self::default();
        for [l0, l1, i0, i1, hash @ ..] in entries {
            let id =
                ExpertId { layer: u16::from_le_bytes([*l0, *l1]), index: u16::from_le_bytes([*i0, *i1]) };
            layout.spec(id)?;
            hashes.0.insert(id, *hash);
        }
        // Ascending and unique: the only form that is written.
        (hashes.encode(model) == bytes).then_some(hashes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExpertSource as _;
    use super::super::testing::{MODEL, MemorySource};
    use super::*;

    #[test]
    fn hashes_survive_their_file_and_damage_does_not_pass() {
        let source = MemorySource::new(4, 64, 64);
        let mut hashes = RecordHashes::default();
        for (n, id) in source.ids().into_iter().enumerate() {
            assert!(hashes.insert(id, [n as u8; 32]));
            assert!(!hashes.insert(id, [n as u8; 32]));
        }
        let file = hashes.encode(&MODEL);
        let read = |bytes: &[u8]| RecordHashes::decode(bytes, &MODEL, source.layout());
        assert_eq!(read(&file).as_ref(), Some(&hashes));
        assert_eq!(RecordHashes::decode(&file, &Fingerprint([9; 32]), source.layout()), None);
        for at in 0..file.len() {
            let mut bad = file.clone();
            bad[at] ^= 1;
            assert_eq!(read(&bad), None, "bit flipped in byte {at}");
            assert_eq!(read(&file[..at]), None, "cut at {at}");
        }
        let seed = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/record_hashes/three");
        let mut seed = std::fs::read(seed).unwrap();
        seed.extend_from_slice(blake3::hash(&seed).as_bytes());
        let read = RecordHashes::decode(&seed, &Fingerprint([0; 32]), source.layout());
        assert_eq!(read.map(|hashes| hashes.len()), Some(3), "the seed of the fuzz target is valid");
        let mut stranger = hashes.clone();
        stranger.insert(ExpertId { layer: 99, index: 0 }, [0; 32]);
        let read = RecordHashes::decode(&stranger.encode(&MODEL), &MODEL, source.layout());
        assert_eq!(read, None, "an expert the model does not have");
    }
}
