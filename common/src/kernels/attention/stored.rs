//! The two operations with the rows of a stored matrix: decoded in registers for a few rows, else once into a
//! buffer.

use super::{RowsMut, RowsRef, StoredRows, accumulate, dots};
use crate::kernels::float::Widen;
use crate::math::LANES;
use crate::quant::Format;
use crate::quant::decode::decode_row_body;

/// Up to this many rows a stored matrix is decoded in registers; for more it is decoded once, into a buffer.
const FUSED_ROWS_MAX: usize = 4;

/// Rows decoded into the buffer at a time: with them it fits the second cache.
const DECODED_ROWS: usize = 64;

/// Values between the ends of decoded rows, so that a column of them does not fall into one set of the cache.
const DECODED_GAP: usize = LANES;

/// See [`Kernels::stored_dots`].
#[inline(always)]
pub(super) fn stored_dots<S: Widen>(s: S, a: RowsRef<'_>, w: StoredRows<'_>, out: &mut RowsMut<'_>) {
    assert_eq!(a.width, w.matrix.cols, "dot products take rows of one length");
    let fused = if S::WIDE { FUSED_ROWS_MAX } else { FUSED_ROWS_MAX / 2 };
    if a.count <= fused && w.matrix.cols.is_multiple_of(LANES) {
        match (w.matrix.format, nibble_shift(w.matrix.format)) {
            (Format::Int8Row, _) => return fused_dots_of(s, a, Int8Rows(w), w, out),
            (Format::Bf16, _) => return fused_dots_of(s, a, Bf16Rows(w), w, out),
            (_, Some(shift)) => return fused_dots_of(s, a, Int4Rows(w, shift), w, out),
            _ => {}
        }
    }
    let mut panel = Panel::new(w);
    while let Some((first, rows)) = panel.next(s) {
        dots(s, a, rows, 1.0, first, out);
    }
}

/// See [`Kernels::stored_accumulate`].
#[inline(always)]
pub(super) fn stored_accumulate<S: Widen>(
    s: S,
    weights: RowsRef<'_>,
    w: StoredRows<'_>,
    out: &mut RowsMut<'_>,
) {
    if weights.count <= FUSED_ROWS_MAX && w.matrix.cols.is_multiple_of(LANES) {
        match (w.matrix.format, nibble_shift(w.matrix.format)) {
            (Format::Int8Row, _) => return fused_accumulate(s, weights, Int8Rows(w), w, out),
            (Format::Bf16, _) => return fused_accumulate(s, weights, Bf16Rows(w), w, out),
            (_, Some(shift)) => return fused_accumulate(s, weights, Int4Rows(w, shift), w, out),
            _ => {}
        }
    }
    let mut panel = Panel::new(w);
    while let Some((first, rows)) = panel.next(s) {
        accumulate(s, weights, first, rows, out);
    }
}

/// For nibble formats whose groups are whole chunks of 16 columns: by how much a chunk's index is shifted to
/// give the index of its scale.
#[inline(always)]
fn nibble_shift(format: Format) -> Option<u32> {
    match format {
        Format::Int4Row => Some(usize::BITS - 1),
        Format::Int4Grouped { group } if group >= 16 && group.is_power_of_two() => Some(group.ilog2() - 4),
        _ => None,
    }
}

/// Decodes stored rows into a buffer, some at a time.
//
// The loops of this module are no closures: a closure that is not inlined would be compiled without the
// instruction set.
struct Panel<'a> {
    rows: StoredRows<'a>,
    done: usize,
    buffer: Vec<f32>,
}

impl<'a> Panel<'a> {
    fn new(rows: StoredRows<'a>) -> Self {
        let buffer = vec![0.0; DECODED_ROWS.min(rows.count) * (rows.matrix.cols + DECODED_GAP)];
        Self { rows, done: 0, buffer }
    }

    /// The next rows and the number of those before them.
    #[inline(always)]
    fn next<S: Widen>(&mut self, s: S) -> Option<(usize, RowsRef<'_>)> {
        let (cols, before) = (self.rows.matrix.cols, self.done);
        let stride = cols + DECODED_GAP;
        let count = DECODED_ROWS.min(self.rows.count - before);
        for i in 0..count {
            decode(s, self.rows, before + i, &mut self.buffer[i * stride..][..cols]);
        }
        self.done += count;
        (count > 0).then(|| (before, RowsRef::new(&self.buffer, stride, cols, count)))
    }
}

/// Row `i` of `rows`, the values of [`crate::quant::MatrixRef::decode_row`].
#[inline(always)]
fn decode<S: Widen>(s: S, rows: StoredRows<'_>, i: usize, out: &mut [f32]) {
    if rows.matrix.cols.is_multiple_of(LANES) {
        match (rows.matrix.format, nibble_shift(rows.matrix.format)) {
            (Format::Int8Row, _) => return decode_chunks(s, Int8Rows(rows), i, out),
            (_, Some(shift)) => return decode_chunks(s, Int4Rows(rows, shift), i, out),
            _ => {}
        }
    }
    decode_row_body(&rows.matrix, rows.first + i, out);
}

#[inline(always)]
fn decode_chunks<S: Widen, D: Decoded<S>>(s: S, rows: D, i: usize, out: &mut [f32]) {
    let row = rows.row(i);
    for (c, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        s.store(D::chunk(s, row, c), out);
    }
}

/// Stored rows that are decoded in registers.
trait Decoded<S: Widen>: Copy {
    /// A row's chunks of 16 columns and what else they need.
    type Row: Copy;

    /// Row `i`.
    fn row(self, i: usize) -> Self::Row;

    /// Chunk `c` of a row.
    fn chunk(s: S, row: Self::Row, c: usize) -> S::Acc;
}

/// [`Format::Int8Row`].
#[derive(Clone, Copy)]
struct Int8Rows<'a>(StoredRows<'a>);

impl<'a, S: Widen> Decoded<S> for Int8Rows<'a> {
    type Row = (&'a [[i8; LANES]], f32);

    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        let StoredRows { matrix, first, .. } = self.0;
        let stored: &[i8] = bytemuck::cast_slice(matrix.row_weights(first + i));
        (stored.as_chunks().0, matrix.row_scales(first + i)[0])
    }

    #[inline(always)]
    fn chunk(s: S, (chunks, scale): Self::Row, c: usize) -> S::Acc {
        s.mul(s.load_i8(&chunks[c]), s.splat(scale))
    }
}

/// [`Format::Bf16`].
#[derive(Clone, Copy)]
struct Bf16Rows<'a>(StoredRows<'a>);

impl<'a, S: Widen> Decoded<S> for Bf16Rows<'a> {
    type Row = &'a [[u8; 2 * LANES]];

    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        self.0.matrix.row_weights(self.0.first + i).as_chunks().0
    }

    #[inline(always)]
    fn chunk(s: S, chunks: Self::Row, c: usize) -> S::Acc {
        s.bf16(&chunks[c])
    }
}

/// [`Format::Int4Row`] and [`Format::Int4Grouped`], with their [`nibble_shift`].
#[derive(Clone, Copy)]
struct Int4Rows<'a>(StoredRows<'a>, u32);

impl<'a, S: Widen> Decoded<S> for Int4Rows<'a> {
    type Row = (&'a [[u8; LANES / 2]], &'a [f32], u32);

    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        let StoredRows { matrix, first, .. } = self.0;
        (matrix.row_weights(first + i).as_chunks().0, matrix.row_scales(first + i), self.1)
    }

    #[inline(always)]
    fn chunk(s: S, (chunks, scales, shift): Self::Row, c: usize) -> S::Acc {
        s.mul(s.load_nibbles(&chunks[c]), s.splat(scales[c >> shift]))
    }
}

/// Chooses the tile for the number of rows.
#[inline(always)]
fn fused_dots_of<S: Widen, D: Decoded<S>>(
    s: S,
    a: RowsRef<'_>,
    w: D,
    stored: StoredRows<'_>,
    out: &mut RowsMut<'_>,
) {
    match a.count {
        0 => {}
        1 => fused_dots::<S, D, 1>(s, a, w, stored, out),
        2 => fused_dots::<S, D, 2>(s, a, w, stored, out),
        3 => fused_dots::<S, D, 3>(s, a, w, stored, out),
        _ => fused_dots::<S, D, 4>(s, a, w, stored, out),
    }
}

/// `R` rows with four stored rows at a time.
#[inline(always)]
fn fused_dots<S: Widen, D: Decoded<S>, const R: usize>(
    s: S,
    a: RowsRef<'_>,
    w: D,
    stored: StoredRows<'_>,
    out: &mut RowsMut<'_>,
) {
    let (count, chunks) = (stored.count, stored.matrix.cols / LANES);
    let mut rows: [&[[f32; LANES]]; R] = [&[]; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &a.row(r).as_chunks().0[..chunks];
    }
    let a = rows;
    for first in (0..count).step_by(4) {
        // Past the end the last row is computed again and not stored.
        let mut rows = [w.row(first); 4];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = w.row((first + j).min(count - 1));
        }
        let mut acc = [[s.zero(); 4]; R];
        for c in 0..chunks {
            let mut w = [s.zero(); 4];
            for (w, row) in w.iter_mut().zip(rows) {
                *w = D::chunk(s, row, c);
            }
            for (a, acc) in a.iter().zip(&mut acc) {
                let a = s.load(&a[c]);
                for (w, acc) in w.iter().zip(acc) {
                    *acc = s.mul_add(*w, a, *acc);
                }
            }
        }
        let len = 4.min(count - first);
        for (r, acc) in acc.into_iter().enumerate() {
            out.part(r, first, len).copy_from_slice(&s.tree4(acc)[..len]);
        }
    }
}

/// Stored rows joined in one go while they are decoded.
const FUSED_BLOCK: usize = 8;

/// See [`Kernels::stored_accumulate`].
#[inline(always)]
fn fused_accumulate<S: Widen, D: Decoded<S>>(
    s: S,
    weights: RowsRef<'_>,
    w: D,
    stored: StoredRows<'_>,
    out: &mut RowsMut<'_>,
) {
    let (count, chunks) = (stored.count, stored.matrix.cols / LANES);
    let mut first = 0;
    while count - first >= FUSED_BLOCK {
        fused_accumulate_block::<S, D, FUSED_BLOCK>(s, weights, w, first, chunks, out);
        first += FUSED_BLOCK;
    }
    while first < count {
        fused_accumulate_block::<S, D, 1>(s, weights, w, first, chunks, out);
        first += 1;
    }
}

/// Joins stored rows `first .. first + B` to every sum.
#[inline(always)]
fn fused_accumulate_block<S: Widen, D: Decoded<S>, const B: usize>(
    s: S,
    weights: RowsRef<'_>,
    w: D,
    first: usize,
    chunks: usize,
    out: &mut RowsMut<'_>,
) {
    let mut rows = [w.row(first); B];
    for (b, row) in rows.iter_mut().enumerate() {
        *row = w.row(first + b);
    }
    for c in 0..chunks {
        let mut row = [s.zero(); B];
        for (row, stored) in row.iter_mut().zip(rows) {
            *row = D::chunk(s, stored, c);
        }
        for r in 0..weights.count {
            let weights: &[f32; B] = weights.row(r)[first..].first_chunk().expect("a weight per row");
            let sums = &mut out.part(r, c * LANES, LANES).as_chunks_mut::<LANES>().0[0];
            let mut acc = s.load(sums);
            for (row, &weight) in row.iter().zip(weights) {
                acc = s.mul_add(s.splat(weight), *row, acc);
            }
            s.store(acc, sums);
        }
    }
}
