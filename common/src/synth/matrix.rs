//! Random matrices in memory, for benches.

use super::random::{PIECE_ALIGN_BYTES, Payload, SCALE_SPREAD, Stream};
use crate::experts::MatrixSpec;

/// Fills the weights and scales of a matrix with random values whose products with rows of unit deviation
/// have unit deviation. `weights` has [`MatrixSpec::weight_bytes`] bytes, `scales` the format's number.
pub fn fill_matrix(spec: &MatrixSpec, seed: u64, weights: &mut [u8], scales: &mut [f32]) {
    let sigma = 1.0 / (spec.cols as f64).sqrt();
    let payload = Payload::new(spec.format, sigma);
    let mut random = Stream::new(seed, "matrix");
    weights.chunks_mut(PIECE_ALIGN_BYTES << 16).for_each(|piece| payload.fill(&mut random, piece));
    let centre = payload.scale(sigma);
    scales.iter_mut().for_each(|scale| *scale = centre * (1.0 + SCALE_SPREAD * random.symmetric()));
}

/// Token ids below `vocab_size`, the same for the same seed.
pub fn random_ids(vocab_size: usize, count: usize, seed: u64) -> Vec<u32> {
    let mut random = Stream::new(seed, "token ids");
    (0..count).map(|_| random.below(vocab_size) as u32).collect()
}

/// `0..count` in an order that depends on the seed.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut random = Stream::new(seed, "order");
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, random.below(i + 1));
    }
    order
}

/// Numbers in `[-1, 1)`.
pub fn random_values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Stream::new(seed, "values");
    (0..count).map(|_| random.symmetric()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{Format, MatrixRef};

    #[test]
    fn a_filled_matrix_keeps_the_size_of_rows() {
        let spec = MatrixSpec { format: Format::Int4Grouped { group: 64 }, rows: 64, cols: 1024 };
        let mut weights = vec![0; spec.weight_bytes()];
        let mut scales = vec![0.0; spec.scale_bytes() / 4];
        fill_matrix(&spec, 1, &mut weights, &mut scales);
        let matrix = MatrixRef::new(spec.format, spec.rows, spec.cols, &weights, &scales).unwrap();
        let mut row = vec![0.0; spec.cols];
        matrix.decode_row(7, &mut row);
        let square: f32 = row.iter().map(|v| v * v).sum();
        assert!((0.8..1.25).contains(&square), "{square}");
    }

    #[test]
    fn shuffling_loses_nothing() {
        let mut order = shuffled(100, 3);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
        assert!(random_ids(7, 1000, 0).iter().all(|&id| id < 7));
    }
}
