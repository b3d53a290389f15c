//! A dispatch as a node gets it: whatever the bytes are, the answer is a checked batch or an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec};
use shimmer_common::quant::Format;
use shimmer_node::wire::decode_dispatch;

const HIDDEN: usize = 128;

/// Two layers: one whose rows travel as int8, one whose rows travel as f32.
fn layout() -> ExpertLayout {
    let spec = |format| {
        let matrix = |rows, cols| MatrixSpec { format, rows, cols };
        ExpertSpec { gate: matrix(64, HIDDEN), up: matrix(64, HIDDEN), down: matrix(HIDDEN, 64) }
    };
    ExpertLayout {
        hidden_size: HIDDEN,
        specs: vec![spec(Format::Int4Grouped { group: 64 }), spec(Format::Bf16)],
        layers: [(1, vec![0; 4]), (2, vec![1; 4])].into(),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let layout = layout();
    if let Ok((_, batch)) = decode_dispatch(bytes, &layout) {
        assert_eq!(batch.x.cols(), HIDDEN);
        assert!(batch.work.windows(2).all(|pair| pair[0].expert < pair[1].expert));
        assert!(batch.work.iter().flat_map(|work| &work.rows).all(|r| (r.row as usize) < batch.x.rows()));
    }
});
