//! Weight rows on their way into tiles: as stored, or unpacked before.

use std::marker::PhantomData;
use std::ops::Range;

use super::arrange::QUAD_GROUPS;
use super::engine::Engine;
use super::prefetch;
use super::scales::GroupScales;
use crate::math::LANES;
use crate::quant::MatrixRef;

/// Stored codes of one kind, `N` bytes per quad.
pub(super) trait Packed<const N: usize>: Copy {
    /// Whether the codes are int8 (see [`Engine`]).
    const BYTES: bool;

    fn unpack<E: Engine>(e: E, bytes: &[u8; N]) -> [E::Codes; 4];
}

#[derive(Clone, Copy)]
pub(super) struct Int4;
#[derive(Clone, Copy)]
pub(super) struct Int8;
#[derive(Clone, Copy)]
pub(super) struct Int2;
#[derive(Clone, Copy)]
pub(super) struct Int3;

impl Packed<128> for Int4 {
    const BYTES: bool = false;

    #[inline(always)]
    fn unpack<E: Engine>(e: E, bytes: &[u8; 128]) -> [E::Codes; 4] {
        e.int4(bytes)
    }
}

impl Packed<256> for Int8 {
    const BYTES: bool = true;

    #[inline(always)]
    fn unpack<E: Engine>(e: E, bytes: &[u8; 256]) -> [E::Codes; 4] {
        e.int8(bytes)
    }
}

impl Packed<64> for Int2 {
    const BYTES: bool = false;

    #[inline(always)]
    fn unpack<E: Engine>(e: E, bytes: &[u8; 64]) -> [E::Codes; 4] {
        e.int2(bytes)
    }
}

impl Packed<96> for Int3 {
    const BYTES: bool = false;

    #[inline(always)]
    fn unpack<E: Engine>(e: E, bytes: &[u8; 96]) -> [E::Codes; 4] {
        e.int3(bytes)
    }
}

/// Where a tile finds the codes of a weight row.
pub(super) trait Source: Copy {
    /// Whether the codes are int8.
    const BYTES: bool;

    /// The first `quads` quads, which must exist.
    fn first(self, quads: usize) -> Self;

    /// Asks for the memory of scales that will be needed later, `scales` being a vector of those of this row.
    fn ask_for_scales(&self, scales: &[f32]);

    /// The codes of quad `q`; asks for the memory of some that will be needed later.
    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4];
}

/// A row as stored.
#[derive(Clone, Copy)]
pub(super) struct PackedRow<'a, P, const N: usize> {
    whole: &'a [[u8; N]],
    /// The zero-padded rest, which follows the last of `whole`.
    tail: &'a [u8; N],
    /// Distance, in bytes, to what is asked for.
    ahead: usize,
    code: PhantomData<P>,
}

impl<'a, P: Packed<N>, const N: usize> PackedRow<'a, P, N> {
    pub(super) const EMPTY: Self = Self { whole: &[], tail: &[0; N], ahead: 0, code: PhantomData };

    /// `tail` is zero, or was used for a row of the same matrix.
    #[inline(always)]
    pub(super) fn new(bytes: &'a [u8], ahead: usize, tail: &'a mut [u8; N]) -> Self {
        let (whole, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            tail[..rest.len()].copy_from_slice(rest);
        }
        Self { whole, tail, ahead, code: PhantomData }
    }
}

impl<P: Packed<N>, const N: usize> Source for PackedRow<'_, P, N> {
    const BYTES: bool = P::BYTES;

    #[inline(always)]
    fn first(self, quads: usize) -> Self {
        assert!(quads <= self.whole.len() + 1, "weights are as wide as activations");
        self
    }

    #[inline(always)]
    fn ask_for_scales(&self, scales: &[f32]) {
        // As far ahead as the weights: a quad has four.
        let ahead = self.ahead / N * (QUAD_GROUPS * size_of::<f32>());
        prefetch::displaced::<{ LANES * size_of::<f32>() }>(scales.as_ptr().cast(), ahead);
    }

    #[inline(always)]
    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4] {
        prefetch::displaced(self.whole.as_ptr().wrapping_add(q), self.ahead);
        P::unpack(e, self.whole.get(q).unwrap_or(self.tail))
    }
}

/// One quad of unpacked codes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CodeQuad(pub(super) [[u8; 64]; 4]);

/// A row unpacked before.
#[derive(Clone, Copy)]
pub(super) struct UnpackedRow<'a, const BYTES: bool>(pub(super) &'a [CodeQuad]);

impl<const BYTES: bool> Source for UnpackedRow<'_, BYTES> {
    const BYTES: bool = BYTES;

    #[inline(always)]
    fn first(self, quads: usize) -> Self {
        Self(&self.0[..quads])
    }

    #[inline(always)]
    fn ask_for_scales(&self, _scales: &[f32]) {}

    #[inline(always)]
    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4] {
        let CodeQuad([a, b, c, d]) = &self.0[q];
        [e.load_codes(a), e.load_codes(b), e.load_codes(c), e.load_codes(d)]
    }
}

/// Unpacks some quads of a row into the first of `out`.
#[inline(always)]
pub(super) fn unpack<E: Engine>(e: E, row: &impl Source, quads: Range<usize>, out: &mut [CodeQuad]) {
    for (q, CodeQuad(out)) in quads.zip(out) {
        let [a, b, c, d] = row.quad(e, q);
        e.store_codes(a, &mut out[0]);
        e.store_codes(b, &mut out[1]);
        e.store_codes(c, &mut out[2]);
        e.store_codes(d, &mut out[3]);
    }
}

/// A matrix and how long its rows are.
#[derive(Clone, Copy)]
pub(super) struct StoredRows<'a> {
    pub(super) matrix: MatrixRef<'a>,
    pub(super) row_bytes: usize,
    row_scales: usize,
}

impl<'a> StoredRows<'a> {
    pub(super) fn new(matrix: MatrixRef<'a>) -> Self {
        let row_scales = matrix.format.scale_count(1, matrix.cols);
        Self { matrix, row_bytes: matrix.format.row_bytes(matrix.cols), row_scales }
    }

    #[inline(always)]
    pub(super) fn weights(&self, row: usize) -> &'a [u8] {
        &self.matrix.weights[row * self.row_bytes..][..self.row_bytes]
    }

    #[inline(always)]
    pub(super) fn scales(&self, row: usize) -> &'a [f32] {
        &self.matrix.scales[row * self.row_scales..][..self.row_scales]
    }
}

/// The weight rows of a tile; the last tile of a task may repeat its last row.
pub(super) struct TileRows<const R: usize> {
    pub(super) rows: [usize; R],
    /// The place of the first in the output.
    first: usize,
    /// How many are not repeated.
    count: usize,
    row_scales: [f32; R],
}

impl<const R: usize> TileRows<R> {
    /// Those of `rows` from `start` on.
    #[inline(always)]
    pub(super) fn new<const GROUPED: bool>(w: StoredRows<'_>, rows: &Range<usize>, start: usize) -> Self {
        let count = R.min(rows.end - start);
        let mut tile = Self { rows: [start; R], first: start - rows.start, count, row_scales: [1.0; R] };
        for r in 0..R {
            tile.rows[r] = start + r.min(count - 1);
            if !GROUPED {
                tile.row_scales[r] = w.scales(tile.rows[r])[0];
            }
        }
        tile
    }

    /// The scales of the rows' groups, where there are such.
    #[inline(always)]
    pub(super) fn groups<'a, const GROUPED: bool>(
        &self,
        w: StoredRows<'a>,
        scales: &'a mut [GroupScales; R],
    ) -> [&'a [f32]; R] {
        let mut groups: [&[f32]; R] = [&[]; R];
        if GROUPED {
            for ((groups, scales), row) in groups.iter_mut().zip(scales).zip(self.rows) {
                *groups = scales.of_row(w.matrix, w.scales(row));
            }
        }
        groups
    }

    /// Writes the results of a tile to the first of `outs` and returns how many activation rows it had.
    #[inline(always)]
    pub(super) fn write<const GROUPED: bool>(&self, dots: &[[f32; R]], outs: &mut [&mut [f32]]) -> usize {
        for (dots, out) in dots.iter().zip(outs) {
            let mut results = *dots;
            if !GROUPED {
                for (result, scale) in results.iter_mut().zip(self.row_scales) {
                    *result *= scale;
                }
            }
            let out = &mut out[self.first..];
            match out.first_chunk_mut::<R>() {
                Some(out) if self.count == R => *out = results,
                _ => out[..self.count].copy_from_slice(&results[..self.count]),
            }
        }
        dots.len()
    }
}
