//! int8 activation rows in the order in which the integer kernels meet the weights' bytes.
//!
//! 256 columns, a *quad* of four groups, are taken together: the weights of a quad unpack to four vectors of
//! 64 bytes, and a quad of activations has its columns in the same places, so that 16 dot products of four
//! bytes, four times accumulated, are the 16 stripe sums of the quad (rule N2, [`super`]). Lane `4·g + s` is
//! stripe `s` of group `g` of the quad; byte `16·g + i` of vector `v` is, within group `g`, column
//!
//! * int4: `32·(v / 2) + 2·i + v mod 2` (low and high nibbles of the first and last 16 bytes),
//! * int8: `16·v + i`,
//! * int2, int3: `4·i + v` (the four bit pairs of a byte).

use std::ops::Range;

use rayon::prelude::*;

use super::activations::GROUP;
use super::code::Code;
use crate::math::LANES;

/// Groups that share one vector of stripe sums.
pub(super) const QUAD_GROUPS: usize = 4;

/// Columns of a quad.
pub(super) const QUAD: usize = QUAD_GROUPS * GROUP;

/// One quad of an activation row.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct XQuad {
    /// Four vectors of 64 values, zero beyond the row's width.
    pub(super) values: [[i8; 64]; 4],
    /// Per lane `−zero · Σ x`: takes the unsigned code of a zero weight out of the sum again.
    pub(super) offsets: [i32; LANES],
}

/// Activation rows for one kind of weights.
#[derive(Clone, Debug)]
pub(super) struct Arranged {
    row_quads: usize,
    quads: Vec<XQuad>,
    /// Per row, padded with zeros to whole vectors of 16 groups.
    scales: Vec<f32>,
}

/// One row of [`Arranged`].
#[derive(Clone, Copy, Debug)]
pub(super) struct XRow<'a> {
    /// `[ceil(cols / 256)]`.
    pub(super) quads: &'a [XQuad],
    /// Scales of 16 groups each, zero beyond the last group: `[ceil(quads / 4)]`.
    pub(super) scales: &'a [[f32; LANES]],
}

impl<'a> XRow<'a> {
    /// Some quads, of which the first is the first of a vector of scales.
    pub(super) fn part(self, quads: Range<usize>) -> Self {
        let first_scales = quads.start * QUAD_GROUPS / LANES;
        let last_scales = (quads.end * QUAD_GROUPS).div_ceil(LANES);
        Self { quads: &self.quads[quads], scales: &self.scales[first_scales..last_scales] }
    }
}

impl Arranged {
    /// Arranges `[rows, cols]` values and `[rows, ceil(cols / 64)]` scales for weights of `code`.
    pub(super) fn new(code: Code, rows: usize, cols: usize, values: &[i8], scales: &[f32]) -> Self {
        let mut quads = Vec::with_capacity(rows * cols.div_ceil(QUAD));
        for values in values.chunks_exact(cols.max(1)) {
            arrange_row(code, values, &mut quads);
        }
        Self::of_quads(rows, cols, quads, scales)
    }

    /// As [`Arranged::new`], rows spread over the current rayon pool.
    pub(super) fn on_pool(code: Code, rows: usize, cols: usize, values: &[i8], scales: &[f32]) -> Self {
        const ROWS_PER_TASK: usize = 8;
        let parts = values.par_chunks((ROWS_PER_TASK * cols).max(1)).map(|values| {
            let mut quads = Vec::with_capacity(ROWS_PER_TASK * cols.div_ceil(QUAD));
            values.chunks_exact(cols).for_each(|values| arrange_row(code, values, &mut quads));
            quads
        });
        let parts: Vec<Vec<XQuad>> = parts.collect();
        Self::of_quads(rows, cols, parts.concat(), scales)
    }

    fn of_quads(rows: usize, cols: usize, quads: Vec<XQuad>, scales: &[f32]) -> Self {
        let row_quads = cols.div_ceil(QUAD);
        let mut padded = vec![0.0; rows * padded_groups(row_quads)];
        let groups = cols.div_ceil(GROUP).max(1);
        let padded_rows = padded.chunks_exact_mut(padded_groups(row_quads).max(1));
        for (scales, padded) in scales.chunks_exact(groups).zip(padded_rows) {
            padded[..groups].copy_from_slice(scales);
        }
        Self { row_quads, quads, scales: padded }
    }

    /// Bytes of a row's values.
    pub(super) fn row_bytes(&self) -> usize {
        self.row_quads * size_of::<XQuad>()
    }

    /// Row `row`.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> XRow<'_> {
        let scales = padded_groups(self.row_quads);
        XRow {
            quads: &self.quads[row * self.row_quads..(row + 1) * self.row_quads],
            scales: self.scales[row * scales..(row + 1) * scales].as_chunks().0,
        }
    }
}

/// Appends the quads of one row.
fn arrange_row(code: Code, values: &[i8], quads: &mut Vec<XQuad>) {
    let (whole, tail) = values.as_chunks::<QUAD>();
    quads.extend(whole.iter().map(|values| XQuad::new(code, values)));
    if !tail.is_empty() {
        let mut padded = [0; QUAD];
        padded[..tail.len()].copy_from_slice(tail);
        quads.push(XQuad::new(code, &padded));
    }
}

/// Groups of a row of `quads`, padded to whole vectors.
fn padded_groups(quads: usize) -> usize {
    (quads * QUAD_GROUPS).next_multiple_of(LANES)
}

impl XQuad {
    fn new(code: Code, columns: &[i8; QUAD]) -> Self {
        let mut quad = Self { values: [[0; 64]; 4], offsets: [0; LANES] };
        for (g, group) in columns.as_chunks::<GROUP>().0.iter().enumerate() {
            for v in 0..4 {
                let place: &mut [i8] = &mut quad.values[v][16 * g..16 * g + 16];
                match code {
                    Code::Int4 => gather::<2>(&group[v / 2 * 32 + v % 2..], place),
                    Code::Int8 => gather::<1>(&group[16 * v..], place),
                    Code::Int2 | Code::Int3 => gather::<4>(&group[v..], place),
                }
            }
        }
        let bytes = |v: usize, lane: usize| -> i16 {
            let x = &quad.values[v][4 * lane..4 * lane + 4];
            i16::from(x[0]) + i16::from(x[1]) + (i16::from(x[2]) + i16::from(x[3]))
        };
        for (lane, offset) in quad.offsets.iter_mut().enumerate() {
            // 16 values of at most 127 each.
            let sum = bytes(0, lane) + bytes(1, lane) + (bytes(2, lane) + bytes(3, lane));
            *offset = -code.zero() * i32::from(sum);
        }
        quad
    }
}

/// Every `STEP`th column.
#[inline(always)]
fn gather<const STEP: usize>(columns: &[i8], place: &mut [i8]) {
    for (place, columns) in place.iter_mut().zip(columns.chunks(STEP)) {
        *place = columns[0];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the module's header says column `col` of a quad is.
    fn place(code: Code, col: usize) -> (usize, usize) {
        let (g, within) = (col / 64, col % 64);
        let (v, i) = match code {
            Code::Int4 => (within / 32 * 2 + within % 2, within % 32 / 2),
            Code::Int8 => (within / 16, within % 16),
            Code::Int2 | Code::Int3 => (within % 4, within / 4),
        };
        (v, 16 * g + i)
    }

    #[test]
    fn every_column_is_in_its_place() {
        let cols = 256 + 131;
        let values: Vec<i8> = (0..2 * cols as i32).map(|i| (i * 91 % 255 - 127) as i8).collect();
        let scales: Vec<f32> = (0..14).map(|i| i as f32 + 1.0).collect();
        for code in [Code::Int4, Code::Int8, Code::Int2, Code::Int3] {
            let on_pool = Arranged::on_pool(code, 2, cols, &values, &scales);
            let arranged = Arranged::new(code, 2, cols, &values, &scales);
            let row = arranged.row(1);
            assert_eq!(on_pool.row(1).scales, row.scales);
            for (one, other) in on_pool.row(1).quads.iter().zip(row.quads) {
                assert_eq!((one.values, one.offsets), (other.values, other.offsets));
            }
            assert_eq!(row.quads.len(), 2);
            let mut sums = [[0; LANES]; 2];
            for col in 0..2 * QUAD {
                let want = values[cols..].get(col).copied().unwrap_or(0);
                let (v, at) = place(code, col % QUAD);
                assert_eq!(row.quads[col / QUAD].values[v][at], want, "{code:?} column {col}");
                sums[col / QUAD][at / 4] -= code.zero() * i32::from(want);
            }
            assert_eq!([row.quads[0].offsets, row.quads[1].offsets], sums, "{code:?}");
            let padded: Vec<f32> = (0..16).map(|g| if g < 7 { g as f32 + 8.0 } else { 0.0 }).collect();
            assert_eq!(row.scales, padded.as_chunks().0);
        }
    }
}
