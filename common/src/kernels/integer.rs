//! The integer kernels (rule N2), written once over [`Engine`].
//!
//! A *tile* is the dot products of `R` weight rows with `C` activation rows: their accumulators stay in
//! registers, every code fetched meets `C` rows and every activation fetched `R` rows. One activation row
//! takes the weights as they are stored; more take rows that were unpacked once into a small buffer.

use std::marker::PhantomData;
use std::ops::Range;

use super::arrange::{Arranged, QUAD, QUAD_GROUPS, XRow};
use super::engine::Engine;
use super::scales::{GroupScales, StripeScales};
use crate::math::LANES;
use crate::quant::{Format, MatrixRef};

/// Weight rows `rows` times activation rows `x_rows`.
pub(super) struct IntTask<'a, 'o> {
    /// An integer matrix.
    pub(super) w: MatrixRef<'a>,
    /// Its rows to compute.
    pub(super) rows: Range<usize>,
    /// Activation rows arranged for the matrix's codes.
    pub(super) x: &'a Arranged,
    /// Activation rows to compute.
    pub(super) x_rows: &'a [usize],
    /// Per activation row, the results of `rows`.
    pub(super) outs: &'a mut [&'o mut [f32]],
}

/// Stored codes of one kind, `N` bytes per quad.
trait Packed<const N: usize>: Copy {
    /// Whether the codes are int8 (see [`Engine`]).
    const BYTES: bool;

    fn unpack<E: Engine>(e: E, bytes: &[u8; N]) -> [E::Codes; 4];
}

#[derive(Clone, Copy)]
struct Int4;
#[derive(Clone, Copy)]
struct Int8;
#[derive(Clone, Copy)]
struct Int2;
#[derive(Clone, Copy)]
struct Int3;

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
trait Source: Copy {
    /// Whether the codes are int8.
    const BYTES: bool;

    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4];
}

/// A row as stored.
#[derive(Clone, Copy)]
struct PackedRow<'a, P, const N: usize> {
    whole: &'a [[u8; N]],
    /// The zero-padded rest.
    tail: [u8; N],
    code: PhantomData<P>,
}

impl<'a, P: Packed<N>, const N: usize> PackedRow<'a, P, N> {
    #[inline(always)]
    fn new(bytes: &'a [u8]) -> Self {
        let (whole, rest) = bytes.as_chunks();
        let mut tail = [0; N];
        tail[..rest.len()].copy_from_slice(rest);
        Self { whole, tail, code: PhantomData }
    }
}

impl<P: Packed<N>, const N: usize> Source for PackedRow<'_, P, N> {
    const BYTES: bool = P::BYTES;

    #[inline(always)]
    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4] {
        P::unpack(e, self.whole.get(q).unwrap_or(&self.tail))
    }
}

/// One quad of unpacked codes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CodeQuad([[u8; 64]; 4]);

/// A row unpacked before.
#[derive(Clone, Copy)]
struct UnpackedRow<'a, const BYTES: bool>(&'a [CodeQuad]);

impl<const BYTES: bool> Source for UnpackedRow<'_, BYTES> {
    const BYTES: bool = BYTES;

    #[inline(always)]
    fn quad<E: Engine>(&self, e: E, q: usize) -> [E::Codes; 4] {
        let CodeQuad([a, b, c, d]) = &self.0[q];
        [e.load_codes(a), e.load_codes(b), e.load_codes(c), e.load_codes(d)]
    }
}

/// Computes a task with tiles of `R` weight rows and up to four activation rows.
#[inline(always)]
pub(super) fn integer<E: Engine, const R: usize>(e: E, task: IntTask<'_, '_>) {
    match task.w.format {
        Format::Int4Grouped { group } if !group.is_multiple_of(64) => split_groups(e, task, group as usize),
        Format::Int4Grouped { .. } => few_or_many::<E, Int4, 128, false, true, R>(e, task),
        Format::Int4Row => few_or_many::<E, Int4, 128, false, false, R>(e, task),
        Format::Int8Row => few_or_many::<E, Int8, 256, true, false, R>(e, task),
        Format::Int2Row => few_or_many::<E, Int2, 64, false, false, R>(e, task),
        Format::Int3G64 => few_or_many::<E, Int3, 96, false, true, R>(e, task),
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block => {
            unreachable!("float formats take f32 activations")
        }
    }
}

/// Weight rows that have one scale, or one per group of 64 columns or of a multiple of that (`GROUPED`).
#[inline(always)]
fn few_or_many<E, P, const N: usize, const BYTES: bool, const GROUPED: bool, const R: usize>(
    e: E,
    task: IntTask<'_, '_>,
) where
    E: Engine,
    P: Packed<N>,
{
    let IntTask { w, rows, x, x_rows, outs } = task;
    if let ([x_row], [out]) = (x_rows, &mut *outs) {
        let mut scales = GroupScales::default();
        for (row, out) in rows.zip(out.iter_mut()) {
            let codes = PackedRow::<P, N>::new(w.row_weights(row));
            let groups = if GROUPED { scales.of_row(w, row) } else { &[] };
            let [[dot]] = tile::<E, _, GROUPED, 1, 1>(e, &[codes], [groups], [x.row(*x_row)]);
            *out = if GROUPED { dot } else { dot * w.row_scales(row)[0] };
        }
        return;
    }
    let row_quads = w.cols.div_ceil(QUAD);
    let mut buffer = vec![CodeQuad([[0; 64]; 4]); R * row_quads];
    let mut scales: [GroupScales; R] = std::array::from_fn(|_| GroupScales::default());
    let (first, last) = (rows.start, rows.end.saturating_sub(1));
    for start in rows.step_by(R) {
        // The last tile may repeat the last row.
        let tile_rows: [usize; R] = std::array::from_fn(|r| (start + r).min(last));
        for (r, &row) in tile_rows.iter().enumerate() {
            let codes = PackedRow::<P, N>::new(w.row_weights(row));
            unpack_row(e, &codes, &mut buffer[r * row_quads..(r + 1) * row_quads]);
            if GROUPED {
                scales[r].load(w, row);
            }
        }
        let codes: [UnpackedRow<'_, BYTES>; R] =
            std::array::from_fn(|r| UnpackedRow(&buffer[r * row_quads..(r + 1) * row_quads]));
        let groups: [&[[f32; LANES]]; R] = std::array::from_fn(|r| scales[r].loaded());
        let row_scale = tile_rows.map(|row| if GROUPED { 1.0 } else { w.row_scales(row)[0] });
        for (x_rows, outs) in x_rows.chunks(4).zip(outs.chunks_mut(4)) {
            let write = |r: usize, c: usize, dot: f32| {
                // A repeated row writes the same value again.
                outs[c][tile_rows[r] - first] = if GROUPED { dot } else { dot * row_scale[r] };
            };
            match *x_rows {
                [a] => each(tile::<E, _, GROUPED, R, 1>(e, &codes, groups, [a].map(|a| x.row(a))), write),
                [a, b] => {
                    each(tile::<E, _, GROUPED, R, 2>(e, &codes, groups, [a, b].map(|a| x.row(a))), write)
                }
                [a, b, c] => {
                    each(tile::<E, _, GROUPED, R, 3>(e, &codes, groups, [a, b, c].map(|a| x.row(a))), write)
                }
                [a, b, c, d] => each(
                    tile::<E, _, GROUPED, R, 4>(e, &codes, groups, [a, b, c, d].map(|a| x.row(a))),
                    write,
                ),
                _ => {}
            }
        }
    }
}

/// Unpacks a row into `out`.
#[inline(always)]
fn unpack_row<E: Engine>(e: E, row: &impl Source, out: &mut [CodeQuad]) {
    for (q, CodeQuad(out)) in out.iter_mut().enumerate() {
        let [a, b, c, d] = row.quad(e, q);
        e.store_codes(a, &mut out[0]);
        e.store_codes(b, &mut out[1]);
        e.store_codes(c, &mut out[2]);
        e.store_codes(d, &mut out[3]);
    }
}

/// Hands out the results of a tile.
#[inline(always)]
fn each<const R: usize, const C: usize>(dots: [[f32; C]; R], mut write: impl FnMut(usize, usize, f32)) {
    for (r, dots) in dots.into_iter().enumerate() {
        for (c, dot) in dots.into_iter().enumerate() {
            write(r, c, dot);
        }
    }
}

/// Dot products of `R` weight rows with `C` activation rows of one width; `w_scales` are the scales of 64
/// columns each, 16 at a time, where the weights have such.
///
/// Plain loops throughout: closures passed to `map` and the like are compiled without the instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "several arrays are walked together")]
fn tile<E: Engine, W: Source, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    w: &[W; R],
    w_scales: [&[[f32; LANES]]; R],
    x: [XRow<'_>; C],
) -> [[f32; C]; R] {
    const BLOCK_QUADS: usize = LANES / QUAD_GROUPS;
    let zero = e.splat(0.0);
    let mut acc = [[zero; C]; R];
    let quads = x[0].quads.len();
    for block in 0..x[0].scales.len() {
        let mut scales = [[zero; C]; R];
        for r in 0..R {
            for c in 0..C {
                scales[r][c] = e.load(&x[c].scales[block]);
                if GROUPED {
                    scales[r][c] = e.mul(e.load(&w_scales[r][block]), scales[r][c]);
                }
            }
        }
        let first = block * BLOCK_QUADS;
        for q in first..quads.min(first + BLOCK_QUADS) {
            let mut x_quad = [&x[0].quads[q]; C];
            let mut sums = [[e.begin(&x_quad[0].offsets); C]; R];
            for c in 1..C {
                x_quad[c] = &x[c].quads[q];
                for r in 0..R {
                    sums[r][c] = e.begin(&x_quad[c].offsets);
                }
            }
            let mut codes = [[e.splat_code(0); 4]; R];
            for r in 0..R {
                codes[r] = w[r].quad(e, q);
            }
            for v in 0..4 {
                for c in 0..C {
                    for r in 0..R {
                        sums[r][c] = e.add(W::BYTES, codes[r][v], &x_quad[c].values[v], sums[r][c]);
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    let sums = e.finish(W::BYTES, sums[r][c], &x_quad[c].offsets);
                    acc[r][c] = e.fma(sums, e.spread(scales[r][c], q - first), acc[r][c]);
                }
            }
        }
    }
    let mut dots = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            dots[r][c] = e.tree(acc[r][c]);
        }
    }
    dots
}

/// Nibble rows whose groups are no multiples of 64 columns: a stripe is 8 neighbouring columns, the stripes of
/// the first half of a group of 64 join their accumulators before those of the second half.
#[inline(always)]
fn split_groups<E: Engine>(e: E, task: IntTask<'_, '_>, group: usize) {
    let IntTask { w, rows, x, x_rows, outs } = task;
    let first = rows.start;
    let mut scales = StripeScales::default();
    for row in rows {
        let codes = PackedRow::<Int4, 128>::new(w.row_weights(row));
        let scales = scales.of_row(w.row_scales(row), group, w.cols.div_ceil(QUAD));
        for (&x_row, out) in x_rows.iter().zip(outs.iter_mut()) {
            out[row - first] = split_dot(e, &codes, scales, x.row(x_row));
        }
    }
}

/// One row of [`split_groups`]; `w_scales` are per quad and half those of the 16 stripes.
#[inline(always)]
fn split_dot<E: Engine>(e: E, w: &impl Source, w_scales: &[[[f32; LANES]; 2]], x: XRow<'_>) -> f32 {
    let none = [0; LANES];
    let (eight, minus) = (e.splat_code(8), e.splat(-1.0));
    let mut acc = e.splat(0.0);
    for (q, (x_quad, w_scales)) in x.quads.iter().zip(w_scales).enumerate() {
        let codes = w.quad(e, q);
        let x_scales = e.spread(e.load(&x.scales[q * QUAD_GROUPS / LANES]), q % (LANES / QUAD_GROUPS));
        for (half, w_scales) in w_scales.iter().enumerate() {
            let (low, high) = (2 * half, 2 * half + 1);
            let (x_low, x_high) = (&x_quad.values[low], &x_quad.values[high]);
            let sums = e.add(false, codes[high], x_high, e.add(false, codes[low], x_low, e.begin(&none)));
            let eights = e.add(false, eight, x_high, e.add(false, eight, x_low, e.begin(&none)));
            // The codes are 8 more than the values; both sums are small integers.
            let sums = e.fma(e.finish(false, eights, &none), minus, e.finish(false, sums, &none));
            acc = e.fma(sums, e.mul(e.load(w_scales), x_scales), acc);
        }
    }
    e.tree(acc)
}
