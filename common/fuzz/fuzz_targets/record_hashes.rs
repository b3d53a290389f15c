//! The coordinator's table of record hashes, and the names of files that hold the beginning of a record.
//! The input is the table without its own hash, which is put in here, or nothing would get past it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::pack::parse_partial_name;
use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec, RecordHashes};
use shimmer_common::quant::Format;

fn layout() -> ExpertLayout {
    let matrix = |rows, cols| MatrixSpec { format: Format::Int8Row, rows, cols };
    let spec = ExpertSpec { gate: matrix(64, 128), up: matrix(64, 128), down: matrix(128, 64) };
    ExpertLayout { hidden_size: 128, specs: vec![spec], layers: [(1, vec![0; 4]), (2, vec![0; 4])].into() }
}

fuzz_target!(|input: &[u8]| {
    let model = Fingerprint([0; 32]);
    let file = [input, blake3::hash(input).as_bytes()].concat();
    if let Some(hashes) = RecordHashes::decode(&file, &model, &layout()) {
        assert!(hashes.len() <= 8);
        assert_eq!(hashes.encode(&model), file);
    }
    if let Some((id, hash)) = std::str::from_utf8(input).ok().and_then(parse_partial_name) {
        assert_eq!(
            format!("partial-{}-{}-{}", id.layer, id.index, blake3::Hash::from_bytes(hash).to_hex()).as_bytes(),
            input
        );
    }
});
