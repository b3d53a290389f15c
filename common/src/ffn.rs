//! One expert's SwiGLU feed-forward network: `down(silu(gate(x)) ⊙ up(x))`.

use rayon::prelude::*;

use crate::fixed::{FixedError, FixedRows};
use crate::kernels::{Activations, KernelError, Kernels, Threads};
use crate::quant::MatrixRef;

/// The three matrices of one SwiGLU FFN; gate and up are `[inner, hidden]`, down is `[hidden, inner]`.
#[derive(Clone, Copy, Debug)]
pub struct FfnRef<'a> {
    /// Gate projection.
    pub gate: MatrixRef<'a>,
    /// Up projection.
    pub up: MatrixRef<'a>,
    /// Down projection.
    pub down: MatrixRef<'a>,
}

/// One routed row of an expert: the row of the batch and its gate weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutedRow {
    /// Row of the batch.
    pub row: u32,
    /// Router weight of this expert for the row.
    pub gate: f32,
}

/// Why an FFN could not be computed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FfnError {
    /// See [`crate::kernels::KernelError`].
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// See [`crate::fixed::FixedError`].
    #[error(transparent)]
    Fixed(#[from] FixedError),
}

/// Routed rows computed at a time: bounds the memory for intermediate values in a long prefill while the
/// expert's weights are still read once per many rows.
const ROWS_AT_A_TIME: usize = 128;

/// Adds `gate_r · ffn(x_r)` in fixed point to `sums` for every routed row, on the calling thread.
///
/// The bits of a row do not depend on which other rows are routed or on their order.
///
/// # Errors
/// [`FfnError`]; `sums` may then hold part of the rows and must be discarded.
///
/// # Panics
/// When shapes do not fit or a routed row does not exist.
pub fn expert_ffn(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    routed: &[RoutedRow],
    sums: &mut FixedRows,
) -> Result<(), FfnError> {
    weighted_rows(kernels, ffn, x, routed, Threads::One, &mut |row, gate, y| sums.add_weighted(row, gate, y))
}

/// Takes a row, its gate weight and an expert's output for it.
pub(crate) type AddWeighted<'a> = dyn FnMut(usize, f32, &[f32]) -> Result<(), FixedError> + 'a;

/// As [`expert_ffn`] on the threads asked for; every `ffn(x_r)` goes to `add` with its row and gate weight.
pub(crate) fn weighted_rows(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    routed: &[RoutedRow],
    threads: Threads,
    add: &mut AddWeighted<'_>,
) -> Result<(), FfnError> {
    let parts = routed.len().div_ceil(ROWS_AT_A_TIME);
    for routed in routed.chunks(routed.len().div_ceil(parts.max(1)).max(1)) {
        let rows: Vec<usize> = routed.iter().map(|r| r.row as usize).collect();
        let y = routed_rows(kernels, ffn, x, &rows, threads)?;
        for (routed, y) in routed.iter().zip(y.chunks_exact(ffn.down.rows.max(1))) {
            add(routed.row as usize, routed.gate, y)?;
        }
    }
    Ok(())
}

/// `ffn` of the given rows of `x`: `[rows.len(), hidden]`.
fn routed_rows(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    rows: &[usize],
    threads: Threads,
) -> Result<Vec<f32>, KernelError> {
    let wants_quant = ffn.gate.format.is_integer() || ffn.up.format.is_integer();
    if let (true, None, Some(floats)) = (wants_quant, x.quant(), x.floats()) {
        // Gate and up share one quantisation of just these rows.
        let gathered = rows.iter().flat_map(|&r| &floats[r * x.cols()..(r + 1) * x.cols()]);
        let gathered = Activations::from_f32(gathered.copied().collect(), x.cols()).quantized();
        let all: Vec<usize> = (0..rows.len()).collect();
        return routed_rows(kernels, ffn, &gathered, &all, threads);
    }
    let mut gate = vec![0.0; rows.len() * ffn.gate.rows];
    let mut up = vec![0.0; rows.len() * ffn.up.rows];
    kernels.matmul_on(threads, ffn.gate, x, rows, &mut gate)?;
    kernels.matmul_on(threads, ffn.up, x, rows, &mut up)?;
    let inner = inner_activations(kernels, ffn, &gate, &up);
    let all: Vec<usize> = (0..rows.len()).collect();
    let mut y = vec![0.0; rows.len() * ffn.down.rows];
    kernels.matmul_on(threads, ffn.down, &inner, &all, &mut y)?;
    Ok(y)
}

/// `out = ffn(x)` for all rows, parallel on the current rayon pool (shared expert, dense MLP).
///
/// # Errors
/// [`FfnError`].
///
/// # Panics
/// When shapes do not fit; `out` is `[x.rows, hidden]`.
pub fn dense_ffn(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    out: &mut [f32],
) -> Result<(), FfnError> {
    let mut gate = vec![0.0; x.rows() * ffn.gate.rows];
    let mut up = vec![0.0; x.rows() * ffn.up.rows];
    kernels.matmul(ffn.gate, x, &mut gate)?;
    kernels.matmul(ffn.up, x, &mut up)?;
    let mut inner = vec![0.0; gate.len()];
    let parts = inner.par_chunks_mut(SILU_PER_TASK).zip(gate.par_chunks(SILU_PER_TASK));
    let parts = parts.zip(up.par_chunks(SILU_PER_TASK));
    parts.for_each(|((inner, gate), up)| kernels.silu_mul(gate, up, inner));
    let inner = Activations::from_f32(inner, ffn.down.cols);
    let inner = if ffn.down.format.is_integer() { inner.quantized_on_pool() } else { inner };
    kernels.matmul(ffn.down, &inner, out)?;
    Ok(())
}

/// Activation values worth a task of their own (some 20 µs).
const SILU_PER_TASK: usize = 1 << 14;

/// `silu(gate) ⊙ up`, quantised once when the down projection takes int8.
fn inner_activations(kernels: Kernels, ffn: FfnRef<'_>, gate: &[f32], up: &[f32]) -> Activations {
    let mut inner = vec![0.0; gate.len()];
    kernels.silu_mul(gate, up, &mut inner);
    let inner = Activations::from_f32(inner, ffn.down.cols);
    if ffn.down.format.is_integer() { inner.quantized() } else { inner }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;
    use crate::quant::{Format, encode};

    const HIDDEN: usize = 72;
    const INNER: usize = 40;
    const ROWS: usize = 70;

    /// Irregular numbers in -1..1.
    fn noise(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 20_011) as f32 / 10_005.5 - 1.0).collect()
    }

    struct Ffn {
        formats: [Format; 3],
        parts: Vec<(Vec<u8>, Vec<f32>)>,
    }

    impl Ffn {
        fn new(formats: [Format; 3]) -> Self {
            let shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)];
            let parts = shapes.iter().zip(formats).enumerate().map(|(seed, (&(rows, cols), format))| {
                encode(format, rows, cols, &noise(rows * cols, seed)).unwrap()
            });
            Self { formats, parts: parts.collect() }
        }

        fn view(&self) -> FfnRef<'_> {
            let matrix = |i: usize, rows, cols| {
                let (weights, scales) = &self.parts[i];
                MatrixRef::new(self.formats[i], rows, cols, weights, scales).unwrap()
            };
            FfnRef {
                gate: matrix(0, INNER, HIDDEN),
                up: matrix(1, INNER, HIDDEN),
                down: matrix(2, HIDDEN, INNER),
            }
        }
    }

    fn cases() -> Vec<Ffn> {
        let g64 = Format::Int4Grouped { group: 64 };
        [
            [g64; 3],
            [Format::Bf16; 3],
            [Format::Int8Row, g64, Format::F32],
            [Format::F32, Format::Int4Row, Format::Int8Row],
        ]
        .map(Ffn::new)
        .into()
    }

    fn sums_of(kernels: Kernels, ffn: &Ffn, x: &Activations, routed: &[RoutedRow]) -> FixedRows {
        let mut sums = FixedRows::zeroed(ROWS, HIDDEN, 24);
        expert_ffn(kernels, ffn.view(), x, routed, &mut sums).unwrap();
        sums
    }

    #[test]
    fn the_same_bits_whatever_the_subset_and_order() {
        let floats = noise(ROWS * HIDDEN, 9);
        let routed: Vec<RoutedRow> =
            (0..ROWS as u32).map(|row| RoutedRow { row, gate: 0.1 + row as f32 * 0.01 }).collect();
        for ffn in cases() {
            let plain = Activations::from_f32(floats.clone(), HIDDEN);
            let both = plain.clone().quantized();
            let whole = sums_of(Kernels::best(), &ffn, &both, &routed);
            let reversed: Vec<RoutedRow> = routed.iter().rev().copied().collect();
            assert_eq!(sums_of(Kernels::best(), &ffn, &plain, &reversed), whole);
            let one = sums_of(Kernels::best(), &ffn, &both, &routed[3..4]);
            assert_eq!(one.row(3), whole.row(3));
            assert!(one.row(4).iter().all(|&v| v == 0));
            for isa in Isa::available() {
                assert_eq!(sums_of(Kernels::new(isa).unwrap(), &ffn, &both, &routed), whole, "{isa}");
            }
        }
    }

    #[test]
    fn experts_agree_with_the_dense_path_and_with_f64() {
        let floats = noise(ROWS * HIDDEN, 5);
        for ffn in cases() {
            let x = Activations::from_f32(floats.clone(), HIDDEN);
            let mut dense = vec![0.0; ROWS * HIDDEN];
            dense_ffn(Kernels::best(), ffn.view(), &x, &mut dense).unwrap();
            let routed = [RoutedRow { row: 2, gate: 1.0 }];
            let sums = sums_of(Kernels::best(), &ffn, &x, &routed);
            let want = reference(ffn.view(), &floats[2 * HIDDEN..3 * HIDDEN]);
            let size = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let mut got = vec![0.0; HIDDEN];
            sums.row_to_f32(2, &mut got);
            for i in 0..HIDDEN {
                let dense = f64::from(dense[2 * HIDDEN + i]);
                assert!((f64::from(got[i]) - dense).abs() <= 1e-7 + dense.abs() * 1e-7);
                assert!((dense - want[i]).abs() < 0.02 * size, "{dense} against {}", want[i]);
            }
        }
    }

    /// The FFN in f64 over the dequantised weights.
    fn reference(ffn: FfnRef<'_>, x: &[f32]) -> Vec<f64> {
        let apply = |m: MatrixRef<'_>, x: &[f64]| -> Vec<f64> {
            let mut row = vec![0.0; m.cols];
            let dot = |o| {
                m.decode_row(o, &mut row);
                row.iter().zip(x).map(|(&w, &x)| f64::from(w) * x).sum()
            };
            (0..m.rows).map(dot).collect()
        };
        let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        let (gate, up) = (apply(ffn.gate, &x), apply(ffn.up, &x));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(&g, u)| g / (1.0 + (-g).exp()) * u).collect();
        apply(ffn.down, &inner)
    }

    #[test]
    fn wrong_forms_and_non_finite_values_are_errors() {
        let float_ffn = Ffn::new([Format::F32; 3]);
        let quant_only =
            Activations::from_quant(crate::kernels::QuantRows::quantize(&noise(HIDDEN, 1), 1, HIDDEN));
        let routed = [RoutedRow { row: 0, gate: 1.0 }];
        let mut sums = FixedRows::zeroed(1, HIDDEN, 24);
        let result = expert_ffn(Kernels::best(), float_ffn.view(), &quant_only, &routed, &mut sums);
        assert_eq!(result, Err(FfnError::Kernel(KernelError::NeedsFloat { format: Format::F32 })));

        let mut x = noise(HIDDEN, 1);
        x[7] = f32::NAN;
        for ffn in cases() {
            let x = Activations::from_f32(x.clone(), HIDDEN);
            let result = expert_ffn(Kernels::best(), ffn.view(), &x, &routed, &mut sums);
            assert!(matches!(result, Err(FfnError::Fixed(_))), "{:?}", ffn.formats);
        }
    }
}
