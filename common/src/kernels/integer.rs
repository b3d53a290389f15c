//! The integer kernels (rule N2), written once over [`Engine`].
//!
//! A [`tile`] is the dot products of `R` weight rows with some activation rows: every code fetched meets all of
//! these and every activation fetched `R` rows. One activation row takes the weights as they are stored, up to
//! eight unpack them on the fly, more take rows that were unpacked once into a small buffer.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::GROUP;
use super::arrange::{Arranged, QUAD, QUAD_GROUPS, XRow};
use super::engine::{Engine, Kernel};
use super::prefetch::{AHEAD, tiles_ahead};
use super::rows::{
    CodeQuad, Int2, Int3, Int4, Int8, Packed, PackedRow, Source, StoredRows, TileRows, UnpackedRow, unpack,
};
use super::scales::{GroupScales, HalfScales, StripeScales};
use super::tile::{Accumulators, BLOCK_QUADS, accumulate, dots, tile};
use crate::math::LANES;
use crate::quant::{Format, MatrixRef};

/// Weight rows of up to this many columns that have scales per group are computed several at a time even for one
/// activation row: what is done once per tile outweighs the order in memory.
const SHORT_COLS: usize = 1024;

/// Above this many activation rows weights are unpacked once per tile instead of once per four of them.
const UNPACK_ABOVE: usize = 8;

/// Bytes of activation rows that stay in the second cache while weight rows pass by; there are as many passes
/// over the weights as blocks of that size.
const X_BLOCK_BYTES: usize = 640 << 10;

/// Rows of a block at most: their results are written some at a time and should stay in the first cache.
const X_BLOCK_ROWS: usize = 128;

/// Quads that all activation rows go through before the next, a multiple of [`BLOCK_QUADS`]: four unpacked weight
/// rows and four activation rows of that width stay in the first cache.
const SEGMENT_QUADS: usize = 3 * BLOCK_QUADS;

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

/// Computes a task with tiles of `R` weight rows and up to `C` (4 or 1) activation rows.
#[inline(always)]
pub(super) fn integer<E: Engine, const R: usize, const C: usize>(e: E, task: IntTask<'_, '_>) {
    match task.w.format {
        Format::Int4Grouped { group } if !group.is_multiple_of(64) => e.apart::<SplitGroups>(task),
        Format::Int4Grouped { .. } => by_count::<E, Int4, 128, false, true, R, C>(e, task),
        Format::Int4Row => by_count::<E, Int4, 128, false, false, R, C>(e, task),
        Format::Int8Row => by_count::<E, Int8, 256, true, false, R, C>(e, task),
        Format::Int2Row => by_count::<E, Int2, 64, false, false, R, C>(e, task),
        Format::Int3G64 => by_count::<E, Int3, 96, false, true, R, C>(e, task),
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block => {
            unreachable!("float formats take f32 activations")
        }
    }
}

/// Weight rows that have one scale, or one per group of 64 columns or of a multiple of that (`GROUPED`).
#[inline(always)]
fn by_count<E, P, const N: usize, const BYTES: bool, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    task: IntTask<'_, '_>,
) where
    E: Engine,
    P: Packed<N>,
{
    if task.x_rows.len() == 1 && (R == 1 || !GROUPED || task.w.cols > SHORT_COLS) {
        e.apart::<OneRow<P, N, GROUPED>>(task);
        return;
    }
    let IntTask { w, rows, x, x_rows, outs } = task;
    let most = X_BLOCK_ROWS.min(X_BLOCK_BYTES / x.row_bytes().max(1));
    let x_block = even_block(x_rows.len(), most).next_multiple_of(C);
    for (x_rows, outs) in x_rows.chunks(x_block).zip(outs.chunks_mut(x_block)) {
        let task = IntTask { w, rows: rows.clone(), x, x_rows, outs };
        if C == 1 || x_rows.len() > UNPACK_ABOVE {
            e.apart::<ManyRows<P, N, BYTES, GROUPED, R, C>>(task);
        } else {
            e.apart::<FewRows<P, N, GROUPED, R>>(task);
        }
    }
}

/// The size of the fewest blocks of at most `most` rows that `rows` rows can be cut into.
fn even_block(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most.max(1)).max(1))
}

/// One activation row: weights are read as stored, in order.
struct OneRow<P, const N: usize, const GROUPED: bool>(PhantomData<P>);

impl<P: Packed<N>, const N: usize, const GROUPED: bool> Kernel for OneRow<P, N, GROUPED> {
    #[inline(always)]
    fn run<E: Engine>(e: E, task: IntTask<'_, '_>) {
        let IntTask { w, rows, x, x_rows, outs } = task;
        let w = StoredRows::new(w);
        let mut scales = GroupScales::default();
        let mut tail = [0; N];
        let x = [x.row(x_rows[0])];
        for (row, out) in rows.zip(outs[0].iter_mut()) {
            let codes = [PackedRow::<P, N>::new(w.weights(row), AHEAD, &mut tail)];
            let groups = [if GROUPED { scales.of_row(w.matrix, w.scales(row)) } else { &[] }];
            let [[dot]] = tile::<E, _, GROUPED, 1, 1>(e, &codes, groups, &x);
            *out = if GROUPED { dot } else { dot * w.scales(row)[0] };
        }
    }
}

/// A few activation rows: weights are unpacked in registers, for up to four at a time. (Unpacking the next tile
/// meanwhile was measured to be slower.)
struct FewRows<P, const N: usize, const GROUPED: bool, const R: usize>(PhantomData<P>);

impl<P: Packed<N>, const N: usize, const GROUPED: bool, const R: usize> Kernel for FewRows<P, N, GROUPED, R> {
    #[inline(always)]
    fn run<E: Engine>(e: E, task: IntTask<'_, '_>) {
        let IntTask { w, rows, x, x_rows, outs } = task;
        let w = StoredRows::new(w);
        let ahead = tiles_ahead(R * w.row_bytes);
        let mut scales: [GroupScales; R] = std::array::from_fn(|_| GroupScales::default());
        let mut tails = [[0; N]; R];
        for start in rows.clone().step_by(R) {
            let tile_rows = TileRows::<R>::new::<GROUPED>(w, &rows, start);
            let groups = tile_rows.groups::<GROUPED>(w, &mut scales);
            let mut codes = [PackedRow::<P, N>::EMPTY; R];
            for ((codes, row), tail) in codes.iter_mut().zip(tile_rows.rows).zip(&mut tails) {
                *codes = PackedRow::new(w.weights(row), ahead, tail);
            }
            // At most four of eight are left by each.
            let mut done = 0;
            while done < x_rows.len() {
                let (x_rows, outs) = (&x_rows[done..], &mut outs[done..]);
                done += match x_rows.len() {
                    1 => {
                        let dots = tile::<E, _, GROUPED, R, 1>(e, &codes, groups, &repeated(x, x_rows));
                        tile_rows.write::<GROUPED>(&dots, outs)
                    }
                    2 => {
                        let dots = tile::<E, _, GROUPED, R, 2>(e, &codes, groups, &repeated(x, x_rows));
                        tile_rows.write::<GROUPED>(&dots, outs)
                    }
                    3 | 5 | 6 => {
                        let dots = tile::<E, _, GROUPED, R, 3>(e, &codes, groups, &repeated(x, x_rows));
                        tile_rows.write::<GROUPED>(&dots, outs)
                    }
                    _ => {
                        let dots = tile::<E, _, GROUPED, R, 4>(e, &codes, groups, &repeated(x, x_rows));
                        tile_rows.write::<GROUPED>(&dots, outs)
                    }
                };
            }
        }
    }
}

/// Many activation rows: `R` weight rows are unpacked into a small buffer and meet all of them.
struct ManyRows<P, const N: usize, const BYTES: bool, const GROUPED: bool, const R: usize, const C: usize>(
    PhantomData<P>,
);

impl<P: Packed<N>, const N: usize, const BYTES: bool, const GROUPED: bool, const R: usize, const C: usize>
    Kernel for ManyRows<P, N, BYTES, GROUPED, R, C>
{
    #[inline(always)]
    fn run<E: Engine>(e: E, task: IntTask<'_, '_>) {
        let IntTask { w, rows, x, x_rows, outs } = task;
        let w = StoredRows::new(w);
        let ahead = tiles_ahead(R * w.row_bytes);
        let x_tiles: Vec<[XRow<'_>; C]> = x_rows.chunks(C).map(|x_rows| repeated(x, x_rows)).collect();
        let segments = segments(&x_tiles, w.matrix.cols.div_ceil(QUAD));
        let mut buffer = vec![[CodeQuad([[0; 64]; 4]); SEGMENT_QUADS]; R];
        let zero: Accumulators<E, C> = [[[e.splat(0.0); 2]; C]; 2];
        let mut saved = vec![zero; x_tiles.len()];
        let mut scales: [GroupScales; R] = std::array::from_fn(|_| GroupScales::default());
        let mut tails = [[0; N]; R];
        for start in rows.clone().step_by(R) {
            let tile_rows = TileRows::<R>::new::<GROUPED>(w, &rows, start);
            let groups = tile_rows.groups::<GROUPED>(w, &mut scales);
            let mut stored = [PackedRow::<P, N>::EMPTY; R];
            for ((stored, row), tail) in stored.iter_mut().zip(tile_rows.rows).zip(&mut tails) {
                *stored = PackedRow::new(w.weights(row), ahead, tail);
            }
            for (s, Segment { quads, x_tiles }) in segments.iter().enumerate() {
                let mut codes = [UnpackedRow::<BYTES>(&[]); R];
                let mut groups = groups;
                for ((codes, stored), buffer) in codes.iter_mut().zip(&stored).zip(&mut buffer) {
                    unpack(e, stored, quads.clone(), buffer);
                    *codes = UnpackedRow(&buffer[..quads.len()]);
                }
                if GROUPED {
                    for (groups, stored) in groups.iter_mut().zip(&stored) {
                        *groups = &groups[quads.start * QUAD_GROUPS..];
                        for first in (0..quads.len()).step_by(BLOCK_QUADS) {
                            stored.ask_for_scales(&groups[first * QUAD_GROUPS..]);
                        }
                    }
                }
                let next = x_tiles.iter().skip(1).chain(x_tiles.first());
                for (((x, next), outs), saved) in
                    x_tiles.iter().zip(next).zip(outs.chunks_mut(C)).zip(&mut saved)
                {
                    let mut acc = if s == 0 { zero } else { *saved };
                    accumulate::<E, _, GROUPED, R, C>(e, &codes, groups, x, Some(next), &mut acc);
                    if s + 1 == segments.len() {
                        tile_rows.write::<GROUPED>(&dots(e, &acc), outs);
                    } else {
                        *saved = acc;
                    }
                }
            }
        }
    }
}

/// Columns that all activation rows go through before the next.
struct Segment<'a, const C: usize> {
    quads: Range<usize>,
    /// These columns of all activation rows.
    x_tiles: Vec<[XRow<'a>; C]>,
}

/// Cuts rows of `quads` quads.
fn segments<'a, const C: usize>(x_tiles: &[[XRow<'a>; C]], quads: usize) -> Vec<Segment<'a, C>> {
    let starts = (0..quads).step_by(SEGMENT_QUADS);
    let segment = |start: usize| {
        let quads = start..quads.min(start + SEGMENT_QUADS);
        let x_tiles = x_tiles.iter().map(|tile| tile.map(|x| x.part(quads.clone()))).collect();
        Segment { quads, x_tiles }
    };
    starts.map(segment).collect()
}

/// The first `C` rows `x_rows` of `x`, of which there is at least one; the last is repeated.
#[inline(always)]
fn repeated<'a, const C: usize>(x: &'a Arranged, x_rows: &[usize]) -> [XRow<'a>; C] {
    let mut rows = [x.row(x_rows[0]); C];
    for (row, &index) in rows.iter_mut().zip(x_rows) {
        *row = x.row(index);
    }
    rows
}

/// Nibble rows whose groups are no multiples of 64 columns: a stripe is 8 neighbouring columns, the stripes of
/// the first half of a group of 64 join their accumulators before those of the second half.
struct SplitGroups;

impl Kernel for SplitGroups {
    #[inline(always)]
    fn run<E: Engine>(e: E, task: IntTask<'_, '_>) {
        let IntTask { w, rows, x, x_rows, outs } = task;
        let Format::Int4Grouped { group } = w.format else {
            unreachable!("other formats have no groups to split")
        };
        let group = group as usize;
        let first = rows.start;
        let mut stripe_scales = StripeScales::default();
        let mut half_scales = HalfScales::default();
        let mut tail = [0; 128];
        for row in rows {
            let codes = PackedRow::<Int4, 128>::new(w.row_weights(row), AHEAD, &mut tail);
            if group.is_multiple_of(GROUP / 2) {
                let scales = half_scales.of_row(w.row_scales(row), group, w.cols);
                for (&x_row, out) in x_rows.iter().zip(outs.iter_mut()) {
                    out[row - first] = split_dot(e, &codes, scales, x.row(x_row));
                }
            } else {
                let scales = stripe_scales.of_row(w.row_scales(row), group, w.cols.div_ceil(QUAD));
                for (&x_row, out) in x_rows.iter().zip(outs.iter_mut()) {
                    out[row - first] = split_dot(e, &codes, scales, x.row(x_row));
                }
            }
        }
    }
}

/// The scales of a row's stripes of 8 columns, times those of the activations.
trait SplitScales: Copy {
    /// Those of the given half of quad `q`'s groups.
    fn products<E: Engine>(self, e: E, q: usize, half: usize, x_scales: &[[f32; LANES]]) -> E::Acc;
}

/// As [`StripeScales`] gives them.
impl SplitScales for &[[[f32; LANES]; 2]] {
    #[inline(always)]
    fn products<E: Engine>(self, e: E, q: usize, half: usize, x_scales: &[[f32; LANES]]) -> E::Acc {
        e.mul(e.load(&self[q][half]), e.spread(e.load(&x_scales[q / BLOCK_QUADS]), q % BLOCK_QUADS))
    }
}

/// As [`HalfScales`] gives them.
impl SplitScales for [&[[f32; LANES]]; 2] {
    #[inline(always)]
    fn products<E: Engine>(self, e: E, q: usize, half: usize, x_scales: &[[f32; LANES]]) -> E::Acc {
        let block = q / BLOCK_QUADS;
        e.spread(e.mul(e.load(&self[half][block]), e.load(&x_scales[block])), q % BLOCK_QUADS)
    }
}

/// One row of [`SplitGroups`].
#[inline(always)]
fn split_dot<E: Engine>(e: E, w: &impl Source, w_scales: impl SplitScales, x: XRow<'_>) -> f32 {
    let none = [0; LANES];
    let (eight, minus) = (e.splat_code(8), e.splat(-1.0));
    let mut acc = e.splat(0.0);
    for (q, x_quad) in x.quads.iter().enumerate() {
        let codes = w.quad(e, q);
        for half in 0..2 {
            let (low, high) = (2 * half, 2 * half + 1);
            let (x_low, x_high) = (&x_quad.values[low], &x_quad.values[high]);
            let sums = e.add(false, codes[high], x_high, e.add(false, codes[low], x_low, e.begin(&none)));
            let eights = e.add(false, eight, x_high, e.add(false, eight, x_low, e.begin(&none)));
            // The codes are 8 more than the values; both sums are small integers.
            let sums = e.mul_add(e.finish(false, eights, &none), minus, e.finish(false, sums, &none));
            acc = e.mul_add(sums, w_scales.products(e, q, half, x.scales), acc);
        }
    }
    e.tree(acc)
}
