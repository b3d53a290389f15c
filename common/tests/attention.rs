//! The attention kernels of every instruction set against the formulas, bit by bit.

#![allow(clippy::unwrap_used, reason = "test helpers")]

use proptest::prelude::*;
use shimmer_common::kernels::{Isa, Kernels, RowsMut, RowsRef, StoredRows};
use shimmer_common::quant::{Format, MatrixRef, encode};

/// Irregular numbers in -2..2 with a varying exponent.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let float =
        |bits: u64| ((bits >> 40) as f32 / (1 << 23) as f32 - 1.0) * [2.0, 1.0, 0.1, 1e-4][bits as usize % 4];
    (0..len).map(|_| float(next())).collect()
}

fn all_kernels() -> Vec<Kernels> {
    Isa::available().into_iter().map(|isa| Kernels::new(isa).unwrap()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Rule N3, written down.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0f32; 16];
    for (j, (&a, &b)) in a.iter().zip(b).enumerate() {
        acc[j % 16] = a.mul_add(b, acc[j % 16]);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            acc[i] += acc[i + half];
        }
    }
    acc[0]
}

/// `sums[i] += Σ_j weights[i][j] · rows[j]`, one row after the other.
fn join(weights: &[Vec<f32>], rows: &[Vec<f32>], sums: &mut [Vec<f32>]) {
    for (weights, sum) in weights.iter().zip(sums) {
        for (&weight, row) in weights.iter().zip(rows) {
            for (y, &x) in sum.iter_mut().zip(row) {
                *y = weight.mul_add(x, *y);
            }
        }
    }
}

fn split(data: &[f32], stride: usize, width: usize, index: impl IntoIterator<Item = usize>) -> Vec<Vec<f32>> {
    index.into_iter().map(|i| data[i * stride..][..width].to_vec()).collect()
}

/// The first `width` values of every row of an output of `rows` rows, one every `stride` values.
fn rows_of(out: &[f32], rows: usize, stride: usize, width: usize) -> Vec<Vec<u32>> {
    split(out, stride, width, 0..rows).iter().map(|row| bits(row)).collect()
}

const FORMATS: [Format; 10] = [
    Format::Int8Row,
    Format::Bf16,
    Format::F32,
    Format::F16,
    Format::Fp8Block,
    Format::Int4Row,
    Format::Int4Grouped { group: 64 },
    Format::Int4Grouped { group: 16 },
    Format::Int4Grouped { group: 48 },
    Format::Int2Row,
];

fn stored(format: Format, rows: usize, cols: usize, seed: u64) -> (Vec<u8>, Vec<f32>) {
    encode(format, rows, cols, &noise(rows * cols, seed)).unwrap_or_else(|_| {
        // Formats nobody writes: any bytes with a clear top exponent bit are finite numbers.
        let bytes = noise(format.weight_bytes(rows, cols), seed);
        let weights = bytes.iter().map(|v| (v.to_bits() >> 3) as u8 & 0xb7).collect();
        (weights, noise(format.scale_count(rows, cols), seed + 1))
    })
}

fn width() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..200, Just(16), Just(64), Just(128), Just(576)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn dots_and_weighted_sums_are_those_of_the_formulas(
        heads in 1usize..14,
        width in width(),
        gap in 0usize..20,
        index in prop::collection::vec(0u32..90, 0..150),
        contiguous: bool,
        scale in prop::sample::select(&[1.0f32, 0.0625, 0.3][..]),
        seed: u64,
    ) {
        let stride = width + gap;
        let data = noise(150 * stride, seed);
        let queries = noise(heads * stride, seed ^ 1);
        let index: Vec<u32> = if contiguous { (0..index.len() as u32).collect() } else { index };
        let count = index.len();
        let rows = split(&data, stride, width, index.iter().map(|&i| i as usize));
        let b = if contiguous {
            RowsRef::new(&data, stride, width, count)
        } else {
            RowsRef::select(&data, stride, width, &index)
        };
        let a = RowsRef::new(&queries, stride, width, heads);
        let query = |i: usize| &queries[i * stride..][..width];
        let want: Vec<Vec<f32>> =
            (0..heads).map(|i| rows.iter().map(|row| dot(query(i), row) * scale).collect()).collect();
        let weights = noise(heads * (count + gap), seed ^ 2);
        let weight_rows = split(&weights, count + gap, count, 0..heads);
        let start = noise(heads * stride, seed ^ 3);
        let mut sums = split(&start, stride, width, 0..heads);
        join(&weight_rows, &rows, &mut sums);
        for kernels in all_kernels() {
            let mut out = vec![0.0; heads * (count + gap)];
            kernels.dots(a, b, scale, RowsMut::new(&mut out, count + gap));
            let want: Vec<_> = want.iter().map(|row| bits(row)).collect();
            prop_assert_eq!(rows_of(&out, heads, count + gap, count), want, "{} dots", kernels.isa());

            let mut out = start.clone();
            kernels.accumulate(RowsRef::new(&weights, count + gap, count, heads), b, RowsMut::new(&mut out, stride));
            let want: Vec<_> = sums.iter().map(|row| bits(row)).collect();
            prop_assert_eq!(rows_of(&out, heads, stride, width), want, "{} sums", kernels.isa());
        }
    }

    #[test]
    fn stored_rows_are_used_as_if_decoded_first(
        format in prop::sample::select(&FORMATS[..]),
        batch in 0usize..8,
        cols in prop_oneof![1usize..100, Just(64), Just(128), Just(512)],
        (first, count) in (0usize..5, 0usize..150),
        seed: u64,
    ) {
        let matrix_rows = first + count + 1;
        let (bytes, scales) = stored(format, matrix_rows, cols, seed);
        let matrix = MatrixRef::new(format, matrix_rows, cols, &bytes, &scales).unwrap();
        let mut decoded = vec![0.0; count * cols];
        for (i, row) in decoded.chunks_mut(cols).enumerate() {
            matrix.decode_row(first + i, row);
        }
        let decoded = split(&decoded, cols, cols, 0..count);
        let w = StoredRows::new(matrix, first, count);

        let x = noise(batch * cols, seed ^ 1);
        let weights = noise(batch * count, seed ^ 2);
        let mut sums = vec![vec![0.5; cols]; batch];
        join(&split(&weights, count, count, 0..batch), &decoded, &mut sums);
        for kernels in all_kernels() {
            let mut out = vec![0.0; batch * count];
            kernels.stored_dots(RowsRef::new(&x, cols, cols, batch), w, RowsMut::new(&mut out, count));
            let want: Vec<f32> =
                x.chunks(cols).flat_map(|x| decoded.iter().map(|row| dot(row, x)).collect::<Vec<_>>()).collect();
            prop_assert_eq!(bits(&out), bits(&want), "{} {} dots", kernels.isa(), format);

            let mut out = vec![0.5; batch * cols];
            kernels.stored_accumulate(RowsRef::new(&weights, count, count, batch), w, RowsMut::new(&mut out, cols));
            prop_assert_eq!(bits(&out), bits(&sums.concat()), "{} {} sums", kernels.isa(), format);
        }
    }

    #[test]
    fn index_scores_are_those_of_the_formula(
        heads in 1usize..10,
        width in width(),
        count in 0usize..200,
        seed: u64,
    ) {
        let (queries, keys) = (noise(heads * width, seed), noise(count * width, seed ^ 1));
        let (weights, scale) = (noise(heads, seed ^ 2), 0.088_388_35);
        let want: Vec<f32> = keys
            .chunks(width)
            .map(|key| {
                let mut score = 0.0;
                for (query, weight) in queries.chunks(width).zip(&weights) {
                    score += weight * (dot(query, key) * scale).max(0.0);
                }
                score
            })
            .collect();
        for kernels in all_kernels() {
            let mut out = vec![7.0; count];
            kernels.index_scores(
                RowsRef::new(&queries, width, width, heads),
                &weights,
                RowsRef::new(&keys, width, width, count),
                scale,
                &mut out,
            );
            prop_assert_eq!(bits(&out), bits(&want), "{}", kernels.isa());
        }
    }
}
