//! Small layouts for the unit tests of this crate.

use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec};
use shimmer_common::quant::Format;

/// `experts` int8 experts in each of `layers`.
pub(crate) fn synthetic_layout(hidden: usize, inner: usize, layers: &[u16], experts: usize) -> ExpertLayout {
    let matrix = |rows, cols| MatrixSpec { format: Format::Int8Row, rows, cols };
    let spec =
        ExpertSpec { gate: matrix(inner, hidden), up: matrix(inner, hidden), down: matrix(hidden, inner) };
    let layers = layers.iter().map(|&l| (l, vec![0; experts])).collect();
    ExpertLayout { hidden_size: hidden, specs: vec![spec], layers }
}
