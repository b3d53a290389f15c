//! Many rows against many rows: attention scores, weighted sums of cached rows, and the same two with the
//! rows of a stored matrix.
//!
//! Every value is that of the plain formulas: a score is one rule-N3 dot product, a weighted sum joins its rows
//! one by one in ascending order by fused multiply-add. Only what is kept in registers meanwhile differs.

mod stored;

use self::stored::{stored_accumulate, stored_dots};
use super::Kernels;
use super::float::Widen;
use super::ops::{FloatOp, Ops};
use crate::math::{LANES, Stripes, dot_body, load_lanes};
use crate::quant::MatrixRef;

/// Rows of equal length somewhere in a buffer: row `i` starts at value `index[i] · stride`, without an index
/// at `i · stride`.
#[derive(Clone, Copy, Debug)]
pub struct RowsRef<'a> {
    data: &'a [f32],
    stride: usize,
    width: usize,
    count: usize,
    index: Option<&'a [u32]>,
}

impl<'a> RowsRef<'a> {
    /// `count` rows of `width` values, one every `stride` values of `data`.
    ///
    /// # Panics
    /// When the last row does not lie in `data`.
    pub fn new(data: &'a [f32], stride: usize, width: usize, count: usize) -> Self {
        assert!(count == 0 || (count - 1) * stride + width <= data.len(), "rows lie in their buffer");
        Self { data, stride, width, count, index: None }
    }

    /// As [`RowsRef::new`] with the rows at `index`.
    ///
    /// # Panics
    /// Later, when a row that is used does not lie in `data`.
    pub fn select(data: &'a [f32], stride: usize, width: usize, index: &'a [u32]) -> Self {
        Self { data, stride, width, count: index.len(), index: Some(index) }
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Values per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `i`.
    #[inline(always)]
    fn row(&self, i: usize) -> &'a [f32] {
        let at = self.index.map_or(i, |index| index[i] as usize) * self.stride;
        &self.data[at..at + self.width]
    }
}

/// Output rows, one every `stride` values.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    stride: usize,
}

impl<'a> RowsMut<'a> {
    /// Rows that start every `stride` values of `data`.
    pub fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    /// `len` values of row `i` from column `at` on.
    #[inline(always)]
    fn part(&mut self, i: usize, at: usize, len: usize) -> &mut [f32] {
        &mut self.data[i * self.stride + at..][..len]
    }
}

/// Consecutive rows of a matrix, used as floats whatever their format.
#[derive(Clone, Copy, Debug)]
pub struct StoredRows<'a> {
    matrix: MatrixRef<'a>,
    first: usize,
    count: usize,
}

impl<'a> StoredRows<'a> {
    /// Rows `first .. first + count` of `matrix`.
    ///
    /// # Panics
    /// When the matrix has fewer rows.
    pub fn new(matrix: MatrixRef<'a>, first: usize, count: usize) -> Self {
        assert!(first + count <= matrix.rows, "rows {first}..{} exist", first + count);
        Self { matrix, first, count }
    }
}

/// The operations of this module, run by [`FloatOp::Attention`].
#[derive(Debug)]
pub(super) enum AttentionOp<'a> {
    /// `out[i, j] = (a[i] · b[j]) · scale`.
    Dots { a: RowsRef<'a>, b: RowsRef<'a>, scale: f32, out: RowsMut<'a> },
    /// `out[i] += Σ_j weights[i, j] · rows[j]`.
    Accumulate { weights: RowsRef<'a>, rows: RowsRef<'a>, out: RowsMut<'a> },
    /// As `Dots` with scale 1 and stored rows in place of `b`.
    StoredDots { a: RowsRef<'a>, w: StoredRows<'a>, out: RowsMut<'a> },
    /// As `Accumulate` with stored rows.
    StoredAccumulate { weights: RowsRef<'a>, w: StoredRows<'a>, out: RowsMut<'a> },
    /// See [`Kernels::index_scores`].
    IndexScores {
        queries: RowsRef<'a>,
        weights: &'a [f32],
        keys: RowsRef<'a>,
        scale: f32,
        scratch: &'a mut Vec<f32>,
        out: &'a mut [f32],
    },
}

impl Kernels {
    /// `out[i, j] = (a[i] · b[j]) · scale`, each product of rows by rule N3, rounded before it is scaled.
    ///
    /// # Panics
    /// When rows differ in length or `out` is too small (as the operations below).
    pub fn dots(self, a: RowsRef<'_>, b: RowsRef<'_>, scale: f32, out: RowsMut<'_>) {
        self.attention(AttentionOp::Dots { a, b, scale, out });
    }

    /// `out[i] += Σ_j weights[i, j] · rows[j]`, j ascending, by fused multiply-add.
    pub fn accumulate(self, weights: RowsRef<'_>, rows: RowsRef<'_>, out: RowsMut<'_>) {
        self.attention(AttentionOp::Accumulate { weights, rows, out });
    }

    /// `out[i, j] = w[j] · a[i]`: [`Kernels::dots`] with decoded rows.
    pub fn stored_dots(self, a: RowsRef<'_>, w: StoredRows<'_>, out: RowsMut<'_>) {
        self.attention(AttentionOp::StoredDots { a, w, out });
    }

    /// `out[i] += Σ_j weights[i, j] · w[j]`: [`Kernels::accumulate`] with decoded rows.
    pub fn stored_accumulate(self, weights: RowsRef<'_>, w: StoredRows<'_>, out: RowsMut<'_>) {
        self.attention(AttentionOp::StoredAccumulate { weights, w, out });
    }

    /// `out[t] = Σ_j weights[j] · max((queries[j] · keys[t]) · scale, 0)`, j ascending from +0, every product
    /// and sum rounded on its own.
    pub fn index_scores(
        self,
        queries: RowsRef<'_>,
        weights: &[f32],
        keys: RowsRef<'_>,
        scale: f32,
        out: &mut [f32],
    ) {
        let scratch = &mut Vec::new();
        self.attention(AttentionOp::IndexScores { queries, weights, keys, scale, scratch, out });
    }

    fn attention(self, op: AttentionOp<'_>) {
        let ops: &dyn Ops = self.ops;
        ops.float(FloatOp::Attention(op));
    }
}

impl AttentionOp<'_> {
    /// Runs the operation with the instructions enabled where this is inlined.
    #[inline(always)]
    pub(super) fn run<S: Widen>(self, s: S) {
        match self {
            AttentionOp::Dots { a, b, scale, mut out } => dots(s, a, b, scale, 0, &mut out),
            AttentionOp::Accumulate { weights, rows, mut out } => accumulate(s, weights, 0, rows, &mut out),
            AttentionOp::StoredDots { a, w, mut out } => stored_dots(s, a, w, &mut out),
            AttentionOp::StoredAccumulate { weights, w, mut out } => {
                stored_accumulate(s, weights, w, &mut out);
            }
            AttentionOp::IndexScores { queries, weights, keys, scale, scratch, out } => {
                index_scores(s, queries, weights, keys, scale, scratch, out);
            }
        }
    }
}

/// See [`Kernels::dots`]; writes from column `at` of `out` on.
#[inline(always)]
fn dots<S: Stripes>(s: S, a: RowsRef<'_>, b: RowsRef<'_>, scale: f32, at: usize, out: &mut RowsMut<'_>) {
    assert!(a.width == b.width || a.count == 0 || b.count == 0, "dot products take rows of one length");
    if S::WIDE {
        tiled_dots::<S, 4>(s, a, b, scale, at, out);
    } else {
        tiled_dots::<S, 2>(s, a, b, scale, at, out);
    }
}

/// Rows of `b` that stay in the first cache while all rows of `a` pass by: two tiles.
const TILES_IN_CACHE: usize = 2;

/// Tiles of `M` rows of `a` with 4 rows of `b`.
#[inline(always)]
fn tiled_dots<S: Stripes, const M: usize>(
    s: S,
    a: RowsRef<'_>,
    b: RowsRef<'_>,
    scale: f32,
    at: usize,
    out: &mut RowsMut<'_>,
) {
    let wide = if S::WIDE { 4 } else { 2 };
    let block = wide * TILES_IN_CACHE;
    for first in (0..b.count).step_by(block) {
        let end = b.count.min(first + block);
        let whole = first + (end - first) / 4 * 4;
        let mut i = 0;
        while i < a.count {
            let rows = if a.count - i >= M { M } else { 1 };
            for j in (first..whole).step_by(4) {
                let b = [b.row(j), b.row(j + 1), b.row(j + 2), b.row(j + 3)];
                if rows == M {
                    let mut rows: [&[f32]; M] = [&[]; M];
                    for (k, row) in rows.iter_mut().enumerate() {
                        *row = a.row(i + k);
                    }
                    let tile = dot_tile::<S, M>(s, rows, b);
                    for (k, dots) in tile.into_iter().enumerate() {
                        put_scaled(dots, scale, out.part(i + k, at + j, 4));
                    }
                } else {
                    let [dots] = dot_tile::<S, 1>(s, [a.row(i)], b);
                    put_scaled(dots, scale, out.part(i, at + j, 4));
                }
            }
            for k in i..i + rows {
                for j in whole..end {
                    out.part(k, at + j, 1)[0] = dot_body(s, a.row(k), b.row(j)) * scale;
                }
            }
            i += rows;
        }
    }
}

#[inline(always)]
fn put_scaled(dots: [f32; 4], scale: f32, out: &mut [f32]) {
    for (out, dot) in out.iter_mut().zip(dots) {
        *out = dot * scale;
    }
}

/// `M × 4` dot products side by side.
#[inline(always)]
fn dot_tile<S: Stripes, const M: usize>(s: S, a: [&[f32]; M], b: [&[f32]; 4]) -> [[f32; 4]; M] {
    let len = b[0].len();
    let mut a_chunks: [&[[f32; LANES]]; M] = [&[]; M];
    let mut b_chunks: [&[[f32; LANES]]; 4] = [&[]; 4];
    for (chunks, row) in a_chunks.iter_mut().zip(a).chain(b_chunks.iter_mut().zip(b)) {
        *chunks = row[..len].as_chunks().0;
    }
    let mut acc = [[s.zero(); 4]; M];
    for c in 0..len / LANES {
        let b = load_each(s, b_chunks, c);
        for (a, acc) in a_chunks.iter().zip(&mut acc) {
            let a = s.load(&a[c]);
            for (b, acc) in b.iter().zip(acc) {
                *acc = s.mul_add(a, *b, *acc);
            }
        }
    }
    if !len.is_multiple_of(LANES) {
        for (a, acc) in a.into_iter().zip(&mut acc) {
            for (b, acc) in b.into_iter().zip(acc) {
                *acc = s.mul_add(tail(s, a), tail(s, b), *acc);
            }
        }
    }
    let mut dots = [[0.0; 4]; M];
    for (dots, acc) in dots.iter_mut().zip(acc) {
        *dots = s.tree4(acc);
    }
    dots
}

/// What is left of a row after its whole chunks.
#[inline(always)]
fn tail<S: Stripes>(s: S, row: &[f32]) -> S::Acc {
    s.load(&load_lanes(row.as_chunks::<LANES>().1))
}

/// Chunk `c` of each of four rows.
#[inline(always)]
fn load_each<S: Stripes>(s: S, rows: [&[[f32; LANES]]; 4], c: usize) -> [S::Acc; 4] {
    [s.load(&rows[0][c]), s.load(&rows[1][c]), s.load(&rows[2][c]), s.load(&rows[3][c])]
}

/// Rows joined in one go while a tile of the sums is in registers: what these rows have in a tile's columns
/// fits the first cache.
const ROWS_PER_BLOCK: usize = 64;

/// See [`Kernels::accumulate`]; `weights` are taken from column `at` on.
#[inline(always)]
fn accumulate<S: Stripes>(s: S, weights: RowsRef<'_>, at: usize, rows: RowsRef<'_>, out: &mut RowsMut<'_>) {
    if S::WIDE {
        tiled_accumulate::<S, 4, 4>(s, weights, at, rows, out);
    } else {
        tiled_accumulate::<S, 2, 2>(s, weights, at, rows, out);
    }
}

/// Tiles of `M` sums and `16 · C` columns.
#[inline(always)]
fn tiled_accumulate<S: Stripes, const M: usize, const C: usize>(
    s: S,
    weights: RowsRef<'_>,
    at: usize,
    rows: RowsRef<'_>,
    out: &mut RowsMut<'_>,
) {
    let chunks = rows.width / LANES;
    let mut chunk = 0;
    while chunk < chunks {
        let wide = chunks - chunk >= C;
        for first in (0..rows.count).step_by(ROWS_PER_BLOCK) {
            let block = Block { first, end: rows.count.min(first + ROWS_PER_BLOCK), chunk, at };
            let mut i = 0;
            while i < weights.count {
                let tall = weights.count - i >= M;
                match (tall, wide) {
                    (true, true) => accumulate_tile::<S, M, C>(s, weights, i, rows, block, out),
                    (true, false) => accumulate_tile::<S, M, 1>(s, weights, i, rows, block, out),
                    (false, true) => accumulate_tile::<S, 1, C>(s, weights, i, rows, block, out),
                    (false, false) => accumulate_tile::<S, 1, 1>(s, weights, i, rows, block, out),
                }
                i += if tall { M } else { 1 };
            }
        }
        chunk += if wide { C } else { 1 };
    }
    let tail = chunks * LANES;
    if tail < rows.width {
        for i in 0..weights.count {
            let (weights, out) = (&weights.row(i)[at..], out.part(i, tail, rows.width - tail));
            for (j, &weight) in weights[..rows.count].iter().enumerate() {
                for (y, &x) in out.iter_mut().zip(&rows.row(j)[tail..]) {
                    *y = weight.mul_add(x, *y);
                }
            }
        }
    }
}

/// Which part of the rows a tile joins.
#[derive(Clone, Copy)]
struct Block {
    /// First row.
    first: usize,
    /// One past the last row.
    end: usize,
    /// First chunk of 16 columns.
    chunk: usize,
    /// Column of the first row's weight.
    at: usize,
}

/// Joins the block's rows to sums `i .. i + M`, `C` chunks wide.
#[inline(always)]
fn accumulate_tile<S: Stripes, const M: usize, const C: usize>(
    s: S,
    weights: RowsRef<'_>,
    i: usize,
    rows: RowsRef<'_>,
    block: Block,
    out: &mut RowsMut<'_>,
) {
    let column = block.chunk * LANES;
    let mut block_weights: [&[f32]; M] = [&[]; M];
    for (m, of_row) in block_weights.iter_mut().enumerate() {
        *of_row = &weights.row(i + m)[block.at + block.first..block.at + block.end];
    }
    let mut acc = [[s.zero(); C]; M];
    for (m, acc) in acc.iter_mut().enumerate() {
        let sums = out.part(i + m, column, C * LANES).as_chunks::<LANES>().0;
        for (acc, sums) in acc.iter_mut().zip(sums) {
            *acc = s.load(sums);
        }
    }
    for k in 0..block.end - block.first {
        let chunks = rows.row(block.first + k)[column..column + C * LANES].as_chunks::<LANES>().0;
        let mut row = [s.zero(); C];
        for (row, chunk) in row.iter_mut().zip(chunks) {
            *row = s.load(chunk);
        }
        for (weights, acc) in block_weights.iter().zip(&mut acc) {
            let weight = s.splat(weights[k]);
            for (row, acc) in row.iter().zip(acc) {
                *acc = s.mul_add(weight, *row, *acc);
            }
        }
    }
    for (m, acc) in acc.into_iter().enumerate() {
        let sums = out.part(i + m, column, C * LANES).as_chunks_mut::<LANES>().0;
        for (acc, sums) in acc.into_iter().zip(sums) {
            s.store(acc, sums);
        }
    }
}

/// Keys scored before their products are weighted.
const KEYS_PER_BLOCK: usize = 64;

/// See [`Kernels::index_scores`].
#[inline(always)]
fn index_scores<S: Stripes>(
    s: S,
    queries: RowsRef<'_>,
    weights: &[f32],
    keys: RowsRef<'_>,
    scale: f32,
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    assert!(out.len() == keys.count && weights.len() == queries.count, "a score per key, a weight per query");
    scratch.resize(queries.count * KEYS_PER_BLOCK, 0.0);
    for (block, out) in out.chunks_mut(KEYS_PER_BLOCK).enumerate() {
        let first = block * KEYS_PER_BLOCK;
        let keys = match keys.index {
            Some(index) => RowsRef { index: Some(&index[first..]), count: out.len(), ..keys },
            None => RowsRef { data: &keys.data[first * keys.stride..], count: out.len(), ..keys },
        };
        dots(s, queries, keys, scale, 0, &mut RowsMut::new(scratch, KEYS_PER_BLOCK));
        out.fill(0.0);
        for (dots, &weight) in scratch.chunks_exact(KEYS_PER_BLOCK).zip(weights) {
            for (out, &dot) in out.iter_mut().zip(dots) {
                *out += weight * dot.max(0.0);
            }
        }
    }
}
