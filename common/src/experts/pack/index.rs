//! `records.idx`: one self-checking entry of 64 bytes per record.

use std::collections::{BTreeMap, HashSet};

use super::super::{ExpertId, ExpertLayout};
use super::{ALIGN_BYTES, data_file_name};
use crate::container::Fingerprint;

pub(super) const ENTRY_BYTES: usize = 64;
const CHECKED_BYTES: usize = 56;

/// Where one record lies and what it must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub id: ExpertId,
    pub file: u32,
    pub offset: u64,
    pub bytes: u64,
    pub hash: [u8; 32],
}

impl Entry {
    /// First byte after the record. Entries are checked by [`Catalog::build`], so this cannot overflow
    /// for those that are in use.
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Layout, little-endian: layer u16, index u16, file u32, offset u64, bytes u64, BLAKE3 (32), then
    /// the first 8 bytes of BLAKE3 over (model fingerprint, position in the index, those 56 bytes).
    pub(super) fn encode(&self, model: &Fingerprint, position: u64) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        let fields: [&[u8]; 6] = [
            &self.id.layer.to_le_bytes(),
            &self.id.index.to_le_bytes(),
            &self.file.to_le_bytes(),
            &self.offset.to_le_bytes(),
            &self.bytes.to_le_bytes(),
            &self.hash,
        ];
        let mut rest = &mut out[..];
        for field in fields {
            let (head, tail) = rest.split_at_mut(field.len());
            head.copy_from_slice(field);
            rest = tail;
        }
        let check = checksum(&out[..CHECKED_BYTES], model, position);
        out[CHECKED_BYTES..].copy_from_slice(&check);
        out
    }

    /// `None` when the checksum does not fit.
    pub(super) fn decode(raw: &[u8; ENTRY_BYTES], model: &Fingerprint, position: u64) -> Option<Self> {
        let (fields, check) = raw.split_first_chunk::<CHECKED_BYTES>()?;
        if checksum(fields, model, position) != *check {
            return None;
        }
        let (layer, rest) = fields.split_first_chunk::<2>()?;
        let (index, rest) = rest.split_first_chunk::<2>()?;
        let (file, rest) = rest.split_first_chunk::<4>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (bytes, rest) = rest.split_first_chunk::<8>()?;
        Some(Self {
            id: ExpertId { layer: u16::from_le_bytes(*layer), index: u16::from_le_bytes(*index) },
            file: u32::from_le_bytes(*file),
            offset: u64::from_le_bytes(*offset),
            bytes: u64::from_le_bytes(*bytes),
            hash: rest.try_into().ok()?,
        })
    }
}

fn checksum(fields: &[u8], model: &Fingerprint, position: u64) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&model.0).update(&position.to_le_bytes()).update(fields);
    let mut out = [0; 8];
    hasher.finalize_xof().fill(&mut out);
    out
}

/// The usable entries of an index and what is wrong with the others.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    /// In order of the index.
    pub entries: Vec<Entry>,
    /// One clause per entry that cannot be used.
    pub problems: Vec<String>,
    /// Bytes after the last usable entry: a write that was cut off.
    pub torn_bytes: usize,
}

impl Catalog {
    /// Checks every entry against its checksum, the layout, the lengths of the data files and all
    /// other entries.
    pub(super) fn build(
        index: &[u8],
        model: &Fingerprint,
        layout: &ExpertLayout,
        file_bytes: &BTreeMap<u32, u64>,
    ) -> Self {
        let (raw, rest) = index.as_chunks::<ENTRY_BYTES>();
        let decoded: Vec<Option<Entry>> =
            raw.iter().enumerate().map(|(i, raw)| Entry::decode(raw, model, i as u64)).collect();
        let usable = decoded.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let mut catalog =
            Self { torn_bytes: (raw.len() - usable) * ENTRY_BYTES + rest.len(), ..Self::default() };
        let mut seen = HashSet::new();
        for (i, entry) in decoded.into_iter().take(usable).enumerate() {
            let problem = match entry {
                None => Some(format!("entry {i} does not match its checksum")),
                Some(entry) => match check_entry(&entry, layout, file_bytes) {
                    Some(problem) => Some(problem),
                    None if !seen.insert(entry.id) => Some(format!("{} is listed twice", entry.id)),
                    None => {
                        catalog.entries.push(entry);
                        None
                    }
                },
            };
            catalog.problems.extend(problem);
        }
        catalog.drop_overlaps();
        catalog
    }

    fn drop_overlaps(&mut self) {
        let mut order: Vec<usize> = (0..self.entries.len()).collect();
        order.sort_by_key(|&i| (self.entries[i].file, self.entries[i].offset));
        let mut overlapping = HashSet::new();
        for pair in order.windows(2) {
            let (first, second) = (&self.entries[pair[0]], &self.entries[pair[1]]);
            if first.file == second.file && first.end() > second.offset {
                let (a, b) = (first.id, second.id);
                self.problems.push(format!("{a} and {b} overlap in {}", data_file_name(first.file)));
                overlapping.extend([a, b]);
            }
        }
        self.entries.retain(|entry| !overlapping.contains(&entry.id));
    }
}

fn check_entry(entry: &Entry, layout: &ExpertLayout, file_bytes: &BTreeMap<u32, u64>) -> Option<String> {
    let Entry { id, file, offset, bytes, .. } = *entry;
    let Some(expected) = layout.record_bytes(id) else {
        return Some(format!("{id} does not exist in this model"));
    };
    if bytes != expected as u64 {
        return Some(format!("{id} has {bytes} bytes instead of {expected}"));
    }
    let name = data_file_name(file);
    let Some(&len) = file_bytes.get(&file) else {
        return Some(format!("{id} lies in {name}, which is missing"));
    };
    match offset.checked_add(bytes) {
        _ if !offset.is_multiple_of(ALIGN_BYTES) => {
            Some(format!("{id} starts at odd offset {offset} of {name}"))
        }
        Some(end) if end <= len => None,
        _ => Some(format!("{id} at offset {offset} ends beyond the {len} bytes of {name}")),
    }
}

/// Encodes a whole index.
pub(super) fn encode_all(entries: &[Entry], model: &Fingerprint) -> Vec<u8> {
    entries.iter().enumerate().flat_map(|(i, entry)| entry.encode(model, i as u64)).collect()
}
