//! Matrices of floats (rule N3), written once over [`Widen`]: tiles of weight rows and activation rows whose
//! accumulators stay in registers; weights are widened there, once per tile.

use std::ops::Range;

use crate::math::{LANES, PlainStripes, Stripes, load_lanes};
use crate::quant::decode::{Bf16, ChunkDecoder, F16, Fp8};
use crate::quant::{Format, MatrixRef};

/// Weight rows `rows` times activation rows `x_rows`.
pub(super) struct FloatTask<'a, 'o> {
    /// A float matrix.
    pub(super) w: MatrixRef<'a>,
    /// Its rows to compute.
    pub(super) rows: Range<usize>,
    /// Activations, `[_, w.cols]`.
    pub(super) x: &'a [f32],
    /// Activation rows to compute.
    pub(super) x_rows: &'a [usize],
    /// Per activation row, the results of `rows`.
    pub(super) outs: &'a mut [&'o mut [f32]],
}

/// Activation rows that stay in the second cache while weight rows pass by.
const X_BLOCK: usize = 32;

/// Columns that share one scale of [`Format::Fp8Block`], in chunks.
const FP8_CHUNKS: usize = crate::quant::decode::FP8_BLOCK / LANES;

/// Exact conversions of 16 stored values.
pub(super) trait Widen: Stripes {
    /// bfloat16.
    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> Self::Acc {
        self.load(&Bf16.decode(bytes, 0))
    }

    /// IEEE half.
    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> Self::Acc {
        self.load(&F16.decode(bytes, 0))
    }

    /// e4m3fn.
    #[inline(always)]
    fn e4m3(self, bytes: &[u8; 16]) -> Self::Acc {
        self.load(&Fp8 { scales: &[1.0] }.decode(bytes, 0))
    }
}

impl Widen for PlainStripes {}

/// A stored row whose chunks of 16 columns are `N` bytes.
trait Row<'a, const N: usize>: Copy {
    fn new(w: MatrixRef<'a>, row: usize) -> Self;
    fn bytes(self) -> &'a [u8];
    fn widen<S: Widen>(self, s: S, bytes: &[u8; N], chunk: usize) -> S::Acc;
}

#[derive(Clone, Copy)]
struct F32Row<'a>(&'a [u8]);
#[derive(Clone, Copy)]
struct F16Row<'a>(&'a [u8]);
#[derive(Clone, Copy)]
struct Bf16Row<'a>(&'a [u8]);
#[derive(Clone, Copy)]
struct Fp8Row<'a>(&'a [u8], &'a [f32]);

impl<'a> Row<'a, 64> for F32Row<'a> {
    #[inline(always)]
    fn new(w: MatrixRef<'a>, row: usize) -> Self {
        Self(w.row_weights(row))
    }

    #[inline(always)]
    fn bytes(self) -> &'a [u8] {
        self.0
    }

    #[inline(always)]
    fn widen<S: Widen>(self, s: S, bytes: &[u8; 64], _chunk: usize) -> S::Acc {
        s.load(&crate::quant::decode::F32.decode(bytes, 0))
    }
}

impl<'a> Row<'a, 32> for F16Row<'a> {
    #[inline(always)]
    fn new(w: MatrixRef<'a>, row: usize) -> Self {
        Self(w.row_weights(row))
    }

    #[inline(always)]
    fn bytes(self) -> &'a [u8] {
        self.0
    }

    #[inline(always)]
    fn widen<S: Widen>(self, s: S, bytes: &[u8; 32], _chunk: usize) -> S::Acc {
        s.f16(bytes)
    }
}

impl<'a> Row<'a, 32> for Bf16Row<'a> {
    #[inline(always)]
    fn new(w: MatrixRef<'a>, row: usize) -> Self {
        Self(w.row_weights(row))
    }

    #[inline(always)]
    fn bytes(self) -> &'a [u8] {
        self.0
    }

    #[inline(always)]
    fn widen<S: Widen>(self, s: S, bytes: &[u8; 32], _chunk: usize) -> S::Acc {
        s.bf16(bytes)
    }
}

impl<'a> Row<'a, 16> for Fp8Row<'a> {
    #[inline(always)]
    fn new(w: MatrixRef<'a>, row: usize) -> Self {
        Self(w.row_weights(row), w.row_scales(row))
    }

    #[inline(always)]
    fn bytes(self) -> &'a [u8] {
        self.0
    }

    #[inline(always)]
    fn widen<S: Widen>(self, s: S, bytes: &[u8; 16], chunk: usize) -> S::Acc {
        s.mul(s.e4m3(bytes), s.splat(self.1[chunk / FP8_CHUNKS]))
    }
}

/// Computes a task with tiles of `R` weight rows and `C` activation rows; one activation row alone meets `ONE`
/// weight rows at a time, which hides the latency of the additions.
#[inline(always)]
pub(super) fn float<S: Widen, const R: usize, const C: usize, const ONE: usize>(
    s: S,
    task: FloatTask<'_, '_>,
) {
    match task.w.format {
        Format::F32 => by_count::<S, F32Row<'_>, 64, R, C, ONE>(s, task),
        Format::F16 => by_count::<S, F16Row<'_>, 32, R, C, ONE>(s, task),
        Format::Bf16 => by_count::<S, Bf16Row<'_>, 32, R, C, ONE>(s, task),
        Format::Fp8Block => by_count::<S, Fp8Row<'_>, 16, R, C, ONE>(s, task),
        _ => unreachable!("integer formats take int8 activations"),
    }
}

#[inline(always)]
fn by_count<'a, S, W, const N: usize, const R: usize, const C: usize, const ONE: usize>(
    s: S,
    task: FloatTask<'a, '_>,
) where
    S: Widen,
    W: Row<'a, N>,
{
    let FloatTask { w, rows, x, x_rows, outs } = task;
    if x_rows.len() == 1 {
        all_tiles::<S, W, N, ONE, 1>(s, FloatTask { w, rows, x, x_rows, outs });
        return;
    }
    for (x_rows, outs) in x_rows.chunks(X_BLOCK).zip(outs.chunks_mut(X_BLOCK)) {
        all_tiles::<S, W, N, R, C>(s, FloatTask { w, rows: rows.clone(), x, x_rows, outs });
    }
}

/// The last tiles may repeat a row; it is written once or twice with the same value.
#[inline(always)]
fn all_tiles<'a, S, W, const N: usize, const R: usize, const C: usize>(s: S, task: FloatTask<'a, '_>)
where
    S: Widen,
    W: Row<'a, N>,
{
    let FloatTask { w, rows, x, x_rows, outs } = task;
    let (first, last) = (rows.start, rows.end.saturating_sub(1));
    for start in rows.step_by(R) {
        let mut index = [last; R];
        let mut tile_rows = [W::new(w, start); R];
        for r in 0..R {
            index[r] = last.min(start + r);
            tile_rows[r] = W::new(w, index[r]);
        }
        for (x_rows, outs) in x_rows.chunks(C).zip(outs.chunks_mut(C)) {
            let mut x_tile = [&x[..0]; C];
            for (c, x_tile) in x_tile.iter_mut().enumerate() {
                let row = x_rows[c.min(x_rows.len() - 1)];
                *x_tile = &x[row * w.cols..(row + 1) * w.cols];
            }
            let dots = tile::<S, W, N, R, C>(s, tile_rows, x_tile);
            for (c, out) in outs.iter_mut().enumerate() {
                for r in 0..R {
                    out[index[r] - first] = dots[r][c];
                }
            }
        }
    }
}

/// `R × C` dot products side by side.
#[inline(always)]
fn tile<'a, S, W, const N: usize, const R: usize, const C: usize>(
    s: S,
    w: [W; R],
    x: [&[f32]; C],
) -> [[f32; C]; R]
where
    S: Widen,
    W: Row<'a, N>,
{
    let (x_first, x_tail) = x[0].as_chunks::<LANES>();
    let chunks = x_first.len();
    let mut x_chunks = [x_first; C];
    for c in 0..C {
        x_chunks[c] = &x[c].as_chunks::<LANES>().0[..chunks];
    }
    let mut w_chunks: [&[[u8; N]]; R] = [&[]; R];
    for r in 0..R {
        w_chunks[r] = &w[r].bytes().as_chunks::<N>().0[..chunks];
    }
    let mut acc = [[s.zero(); C]; R];
    for k in 0..chunks {
        let mut weights = [s.zero(); R];
        for r in 0..R {
            weights[r] = w[r].widen(s, &w_chunks[r][k], k);
        }
        for c in 0..C {
            let x = s.load(&x_chunks[c][k]);
            for r in 0..R {
                acc[r][c] = s.mul_add(weights[r], x, acc[r][c]);
            }
        }
    }
    if !x_tail.is_empty() {
        for r in 0..R {
            let mut bytes = [0; N];
            let rest = &w[r].bytes()[chunks * N..];
            bytes[..rest.len()].copy_from_slice(rest);
            let weights = w[r].widen(s, &bytes, chunks);
            for c in 0..C {
                let x = s.load(&load_lanes(&x[c][chunks * LANES..]));
                acc[r][c] = s.mul_add(weights, x, acc[r][c]);
            }
        }
    }
    // Constant indices, or the accumulators would also be kept in memory all along.
    let mut dots = [[0.0; C]; R];
    dots[0] = trees(s, &acc[0]);
    if R > 1 {
        dots[1 % R] = trees(s, &acc[1 % R]);
    }
    if R > 2 {
        dots[2 % R] = trees(s, &acc[2 % R]);
    }
    if R > 3 {
        dots[3 % R] = trees(s, &acc[3 % R]);
    }
    dots
}

/// Adds up at most four accumulators.
#[inline(always)]
fn trees<S: Stripes, const C: usize>(s: S, acc: &[S::Acc; C]) -> [f32; C] {
    let mut dots = [0.0; C];
    dots[0] = s.tree(acc[0]);
    if C > 1 {
        dots[1 % C] = s.tree(acc[1 % C]);
    }
    if C > 2 {
        dots[2 % C] = s.tree(acc[2 % C]);
    }
    if C > 3 {
        dots[3 % C] = s.tree(acc[3 % C]);
    }
    dots
}
