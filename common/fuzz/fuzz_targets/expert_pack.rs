//! Manifest and index of an expert pack. The input is the manifest without its hash, a zero byte, then
//! the fields of index entries, 56 bytes each; hashes are put in here, or nothing would get past them.

#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use libfuzzer_sys::fuzz_target;
use shimmer_common::experts::pack;

const DATA_FILE_BYTES: u64 = 1 << 30;

fuzz_target!(|input: &[u8]| {
    let end = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (body, entries) = (&input[..end], input.get(end + 1..).unwrap_or(&[]));
    let hash = blake3::hash(body).to_hex();
    let manifest = [body, format!(",\"blake3\":\"{hash}\"}}\n").as_bytes()].concat();
    let mut index = Vec::new();
    for (position, fields) in entries.as_chunks::<56>().0.iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        // The seeds' fingerprint is all zeros.
        hasher.update(&[0; 32]).update(&(position as u64).to_le_bytes()).update(fields);
        index.extend_from_slice(fields);
        index.extend_from_slice(&hasher.finalize().as_bytes()[..8]);
    }
    let files = BTreeMap::from([(0, DATA_FILE_BYTES), (1, DATA_FILE_BYTES)]);
    if let Ok(ids) = pack::check(&manifest, &index, &files) {
        assert!(ids.len() <= index.len() / 64);
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
    }
});
