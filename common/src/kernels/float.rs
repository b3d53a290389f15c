//! Matrices of floats (rule N3), written once over [`Widen`]: tiles of weight rows and activation rows whose
//! accumulators stay in registers; weights are widened there, once per tile.

use std::ops::Range;

use super::prefetch;
use crate::math::{LANES, PlainStripes, Stripes, load_lanes};
use crate::quant::decode::{Bf16, ChunkDecoder, F16, F32, Fp8};
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

/// Floats of one format; a chunk of 16 columns is `N` bytes.
trait Stored<const N: usize> {
    /// Chunk number `chunk` of a row.
    fn widen<S: Widen>(s: S, bytes: &[u8; N], scales: &[f32], chunk: usize) -> S::Acc;
}

struct StoredF32;
struct StoredF16;
struct StoredBf16;
struct StoredFp8;

impl Stored<64> for StoredF32 {
    #[inline(always)]
    fn widen<S: Widen>(s: S, bytes: &[u8; 64], _scales: &[f32], _chunk: usize) -> S::Acc {
        s.load(&F32.decode(bytes, 0))
    }
}

impl Stored<32> for StoredF16 {
    #[inline(always)]
    fn widen<S: Widen>(s: S, bytes: &[u8; 32], _scales: &[f32], _chunk: usize) -> S::Acc {
        s.f16(bytes)
    }
}

impl Stored<32> for StoredBf16 {
    #[inline(always)]
    fn widen<S: Widen>(s: S, bytes: &[u8; 32], _scales: &[f32], _chunk: usize) -> S::Acc {
        s.bf16(bytes)
    }
}

impl Stored<16> for StoredFp8 {
    #[inline(always)]
    fn widen<S: Widen>(s: S, bytes: &[u8; 16], scales: &[f32], chunk: usize) -> S::Acc {
        s.mul(s.e4m3(bytes), s.splat(scales[chunk / FP8_CHUNKS]))
    }
}

/// A stored row.
#[derive(Clone, Copy)]
struct Row<'a> {
    bytes: &'a [u8],
    scales: &'a [f32],
}

impl<'a> Row<'a> {
    #[inline(always)]
    fn new(w: MatrixRef<'a>, row: usize) -> Self {
        Self { bytes: w.row_weights(row), scales: w.row_scales(row) }
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
        Format::F32 => by_count::<S, StoredF32, 64, R, C, ONE>(s, task),
        Format::F16 => by_count::<S, StoredF16, 32, R, C, ONE>(s, task),
        Format::Bf16 => by_count::<S, StoredBf16, 32, R, C, ONE>(s, task),
        Format::Fp8Block => by_count::<S, StoredFp8, 16, R, C, ONE>(s, task),
        _ => unreachable!("integer formats take int8 activations"),
    }
}

#[inline(always)]
fn by_count<S, W, const N: usize, const R: usize, const C: usize, const ONE: usize>(
    s: S,
    task: FloatTask<'_, '_>,
) where
    S: Widen,
    W: Stored<N>,
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
fn all_tiles<S, W, const N: usize, const R: usize, const C: usize>(s: S, task: FloatTask<'_, '_>)
where
    S: Widen,
    W: Stored<N>,
{
    let FloatTask { w, rows, x, x_rows, outs } = task;
    let (first, last) = (rows.start, rows.end.saturating_sub(1));
    let ahead = prefetch::tiles_ahead(R * w.format.row_bytes(w.cols));
    for start in rows.step_by(R) {
        let mut index = [last; R];
        let mut tile_rows = [Row::new(w, start); R];
        for r in 0..R {
            index[r] = last.min(start + r);
            tile_rows[r] = Row::new(w, index[r]);
        }
        for (x_rows, outs) in x_rows.chunks(C).zip(outs.chunks_mut(C)) {
            let mut x_tile = [&x[..0]; C];
            for (c, x_tile) in x_tile.iter_mut().enumerate() {
                let row = x_rows[c.min(x_rows.len() - 1)];
                *x_tile = &x[row * w.cols..(row + 1) * w.cols];
            }
            let dots = tile::<S, W, N, R, C>(s, tile_rows, x_tile, ahead);
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
fn tile<S, W, const N: usize, const R: usize, const C: usize>(
    s: S,
    w: [Row<'_>; R],
    x: [&[f32]; C],
    ahead: usize,
) -> [[f32; C]; R]
where
    S: Widen,
    W: Stored<N>,
{
    let (x_first, x_tail) = x[0].as_chunks::<LANES>();
    let chunks = x_first.len();
    let mut x_chunks = [x_first; C];
    for c in 0..C {
        x_chunks[c] = &x[c].as_chunks::<LANES>().0[..chunks];
    }
    let mut w_chunks: [&[[u8; N]]; R] = [&[]; R];
    for r in 0..R {
        w_chunks[r] = &w[r].bytes.as_chunks::<N>().0[..chunks];
    }
    let mut acc = [[s.zero(); C]; R];
    for k in 0..chunks {
        let mut weights = [s.zero(); R];
        for r in 0..R {
            if (k * N).is_multiple_of(64) {
                prefetch::displaced(std::ptr::from_ref(&w_chunks[r][k]), ahead);
            }
            weights[r] = W::widen(s, &w_chunks[r][k], w[r].scales, k);
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
            let rest = &w[r].bytes[chunks * N..];
            bytes[..rest.len()].copy_from_slice(rest);
            let weights = W::widen(s, &bytes, w[r].scales, chunks);
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
