//! The integer kernels (rule N2), written once over [`Engine`].
//!
//! A *tile* is the dot products of `R` weight rows with `C` activation rows: their accumulators stay in
//! registers, every code fetched meets `C` rows and every activation fetched `R` rows. One activation row
//! takes the weights as they are stored; more take rows that were unpacked once into a small buffer.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::GROUP;
use super::arrange::{Arranged, QUAD, QUAD_GROUPS, XQuad, XRow};
use super::engine::Engine;
use super::scales::{GroupScales, HalfScales, StripeScales};
use crate::math::LANES;
use crate::quant::{Format, MatrixRef};

/// Quads whose scales fill one vector.
const BLOCK_QUADS: usize = LANES / QUAD_GROUPS;

/// Above this many activation rows weights are unpacked once per tile instead of once per four of them.
const UNPACK_ABOVE: usize = 8;

/// Activation rows that stay in the second cache while weight rows pass by; there are as many passes over the
/// weights as blocks of this many rows.
const X_BLOCK: usize = 64;

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

    /// Number of quads.
    fn quads(&self) -> usize;

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

    #[inline(always)]
    fn quads(&self) -> usize {
        self.whole.len() + 1
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

    #[inline(always)]
    fn quads(&self) -> usize {
        self.0.len()
    }
}

/// Computes a task with tiles of `R` weight rows and up to `C` (4 or 1) activation rows.
#[inline(always)]
pub(super) fn integer<E: Engine, const R: usize, const C: usize>(e: E, task: IntTask<'_, '_>) {
    match task.w.format {
        Format::Int4Grouped { group } if !group.is_multiple_of(64) => split_groups(e, task, group as usize),
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
    if task.x_rows.len() == 1 {
        one_row::<E, P, N, GROUPED>(e, task);
        return;
    }
    let IntTask { w, rows, x, x_rows, outs } = task;
    for (x_rows, outs) in x_rows.chunks(X_BLOCK).zip(outs.chunks_mut(X_BLOCK)) {
        let task = IntTask { w, rows: rows.clone(), x, x_rows, outs };
        if C == 1 || x_rows.len() > UNPACK_ABOVE {
            many_rows::<E, P, N, BYTES, GROUPED, R, C>(e, task);
        } else {
            few_rows::<E, P, N, GROUPED, R>(e, task);
        }
    }
}

/// One activation row: weights are read as stored, in order.
#[inline(always)]
fn one_row<E: Engine, P: Packed<N>, const N: usize, const GROUPED: bool>(e: E, task: IntTask<'_, '_>) {
    let IntTask { w, rows, x, x_rows, outs } = task;
    let mut scales = GroupScales::default();
    let x = [x.row(x_rows[0])];
    for (row, out) in rows.zip(outs[0].iter_mut()) {
        let bytes = w.row_weights(row);
        let codes = [PackedRow::<P, N>::new(bytes)];
        let groups = [if GROUPED { scales.of_row(w, row) } else { &[] }];
        let [[dot]] = tile::<E, _, GROUPED, 1, 1>(e, &codes, groups, &x);
        *out = if GROUPED { dot } else { dot * w.row_scales(row)[0] };
    }
}

/// A few activation rows: weights are unpacked in registers, for up to four at a time. (Unpacking the next tile
/// or prefetching it meanwhile was measured to be slower.)
#[inline(always)]
fn few_rows<E: Engine, P: Packed<N>, const N: usize, const GROUPED: bool, const R: usize>(
    e: E,
    task: IntTask<'_, '_>,
) {
    let IntTask { w, rows, x, x_rows, outs } = task;
    let mut tile_rows = TileRows::<R>::new(rows.clone());
    for start in rows.step_by(R) {
        tile_rows.set::<GROUPED>(w, start);
        let mut codes = [PackedRow::<P, N>::new(&[]); R];
        for (codes, row) in codes.iter_mut().zip(tile_rows.rows) {
            *codes = PackedRow::new(w.row_weights(row));
        }
        let mut done = 0;
        while done < x_rows.len() {
            let groups = tile_rows.groups();
            let (x_rows, outs) = (&x_rows[done..], &mut outs[done..]);
            done += match *x_rows {
                [] => 0,
                // One row more than blocks of 64.
                [a] => {
                    let dots = tile::<E, _, GROUPED, R, 2>(e, &codes, groups, &[x.row(a), x.row(a)]);
                    tile_rows.write::<GROUPED, 2>(&dots, outs)
                }
                [a, b] => {
                    let dots = tile::<E, _, GROUPED, R, 2>(e, &codes, groups, &[x.row(a), x.row(b)]);
                    tile_rows.write::<GROUPED, 2>(&dots, outs)
                }
                [a, b, c] | [a, b, c, _, _] | [a, b, c, _, _, _] => {
                    let x = [x.row(a), x.row(b), x.row(c)];
                    let dots = tile::<E, _, GROUPED, R, 3>(e, &codes, groups, &x);
                    tile_rows.write::<GROUPED, 3>(&dots, outs)
                }
                [a, b, c, d, ..] => {
                    let x = [x.row(a), x.row(b), x.row(c), x.row(d)];
                    let dots = tile::<E, _, GROUPED, R, 4>(e, &codes, groups, &x);
                    tile_rows.write::<GROUPED, 4>(&dots, outs)
                }
            };
        }
    }
}

/// Many activation rows: `R` weight rows are unpacked into a small buffer and meet all of them.
#[inline(always)]
fn many_rows<E, P, const N: usize, const BYTES: bool, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    task: IntTask<'_, '_>,
) where
    E: Engine,
    P: Packed<N>,
{
    let IntTask { w, rows, x, x_rows, outs } = task;
    let row_quads = w.cols.div_ceil(QUAD);
    let mut buffer = vec![CodeQuad([[0; 64]; 4]); R * row_quads];
    let mut tile_rows = TileRows::<R>::new(rows.clone());
    for start in rows.step_by(R) {
        tile_rows.set::<GROUPED>(w, start);
        let mut codes = [UnpackedRow::<BYTES>(&[]); R];
        for ((buffer, codes), row) in
            buffer.chunks_exact_mut(row_quads.max(1)).zip(&mut codes).zip(tile_rows.rows)
        {
            unpack_row(e, &PackedRow::<P, N>::new(w.row_weights(row)), buffer);
            *codes = UnpackedRow(buffer);
        }
        for (x_rows, outs) in x_rows.chunks(C).zip(outs.chunks_mut(C)) {
            // The last tile may repeat an activation row.
            let mut rows = [x.row(x_rows[0]); C];
            for (row, &index) in rows.iter_mut().zip(x_rows) {
                *row = x.row(index);
            }
            let dots = tile::<E, _, GROUPED, R, C>(e, &codes, tile_rows.groups(), &rows);
            tile_rows.write::<GROUPED, C>(&dots, outs);
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

/// The weight rows of a tile; the last tile of a task may repeat its last row.
struct TileRows<const R: usize> {
    first: usize,
    last: usize,
    rows: [usize; R],
    row_scales: [f32; R],
    scales: [GroupScales; R],
}

impl<const R: usize> TileRows<R> {
    fn new(rows: Range<usize>) -> Self {
        Self {
            first: rows.start,
            last: rows.end.saturating_sub(1),
            rows: [0; R],
            row_scales: [1.0; R],
            scales: std::array::from_fn(|_| GroupScales::default()),
        }
    }

    /// The rows from `start` on.
    #[inline(always)]
    fn set<const GROUPED: bool>(&mut self, w: MatrixRef<'_>, start: usize) {
        for r in 0..R {
            self.rows[r] = self.last.min(start + r);
            if GROUPED {
                self.scales[r].load(w, self.rows[r]);
            } else {
                self.row_scales[r] = w.row_scales(self.rows[r])[0];
            }
        }
    }

    #[inline(always)]
    fn groups(&self) -> [&[[f32; LANES]]; R] {
        let mut groups: [&[[f32; LANES]]; R] = [&[]; R];
        for (groups, scales) in groups.iter_mut().zip(&self.scales) {
            *groups = scales.loaded();
        }
        groups
    }

    /// Writes the results of a tile to the first of `outs` and returns how many activation rows it had; a
    /// repeated weight row writes the same value again.
    #[inline(always)]
    fn write<const GROUPED: bool, const C: usize>(
        &self,
        dots: &[[f32; C]; R],
        outs: &mut [&mut [f32]],
    ) -> usize {
        for (c, out) in outs.iter_mut().enumerate().take(C) {
            for r in 0..R {
                let dot = dots[r][c];
                out[self.rows[r] - self.first] = if GROUPED { dot } else { dot * self.row_scales[r] };
            }
        }
        C
    }
}

/// Dot products of `R` (1 or 4) weight rows with `C` (at most 4) activation rows of one width; `w_scales` are
/// the scales of 64 columns each, 16 at a time, where the weights have such.
///
/// Accumulators stay in registers only where every index is a constant before the optimiser unrolls loops;
/// hence the calls written out here and below. Closures (`map` and the like) would be compiled without the
/// instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "several arrays are walked together")]
fn tile<E: Engine, W: Source, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    w: &[W; R],
    w_scales: [&[[f32; LANES]]; R],
    x: &[XRow<'_>; C],
) -> [[f32; C]; R] {
    let quads = x[0].quads.len();
    let blocks = x[0].scales.len();
    for x in x {
        assert!(x.quads.len() == quads && x.scales.len() == blocks, "activation rows of one width");
    }
    for (w, w_scales) in w.iter().zip(w_scales) {
        assert!(w.quads() >= quads && (!GROUPED || w_scales.len() >= blocks), "weights as wide");
    }
    let zero = e.splat(0.0);
    let mut pairs = [[[zero; 2]; C]; 2];
    for block in 0..blocks {
        let mut scales = [[[zero; 2]; C]; 2];
        for c in 0..C {
            let x_scales = e.load(&x[c].scales[block]);
            for r in 0..R {
                scales[r / 2][c][r % 2] =
                    if GROUPED { e.mul(e.load(&w_scales[r][block]), x_scales) } else { x_scales };
            }
        }
        let first = block * BLOCK_QUADS;
        let last = quads.min(first + BLOCK_QUADS);
        for q in first..last {
            let k = q - first;
            if R == 1 {
                single(e, &w[0], x, q, k, &scales[0], &mut pairs[0]);
                continue;
            }
            pair(e, [&w[0], &w[1 % R]], x, q, k, &scales[0], &mut pairs[0]);
            if R > 2 {
                pair(e, [&w[2 % R], &w[3 % R]], x, q, k, &scales[1], &mut pairs[1]);
            }
        }
    }
    let mut dots = [[0.0; 4]; 4];
    trees(e, &pairs[0], 0, R, &mut dots);
    if R > 2 {
        trees(e, &pairs[1], 2, R, &mut dots);
    }
    let mut out = [[0.0; C]; R];
    for (out, dots) in out.iter_mut().zip(&dots) {
        out.copy_from_slice(&dots[..C]);
    }
    out
}

/// Adds up the accumulators of weight rows `r` and `r + 1` of `rows`.
#[inline(always)]
fn trees<E: Engine, const C: usize>(
    e: E,
    acc: &[[E::Acc; 2]; C],
    r: usize,
    rows: usize,
    dots: &mut [[f32; 4]; 4],
) {
    if C > 0 {
        dots[r][0] = e.tree(acc[0][0]);
    }
    if C > 1 {
        dots[r][1] = e.tree(acc[1 % C][0]);
    }
    if C > 2 {
        dots[r][2] = e.tree(acc[2 % C][0]);
    }
    if C > 3 {
        dots[r][3] = e.tree(acc[3 % C][0]);
    }
    if rows > 1 {
        if C > 0 {
            dots[r + 1][0] = e.tree(acc[0][1]);
        }
        if C > 1 {
            dots[r + 1][1] = e.tree(acc[1 % C][1]);
        }
        if C > 2 {
            dots[r + 1][2] = e.tree(acc[2 % C][1]);
        }
        if C > 3 {
            dots[r + 1][3] = e.tree(acc[3 % C][1]);
        }
    }
}

/// Adds quad `q`, the `k`-th of its block, of one weight row to the accumulators.
#[inline(always)]
fn single<E: Engine, W: Source, const C: usize>(
    e: E,
    w: &W,
    x: &[XRow<'_>; C],
    q: usize,
    k: usize,
    scales: &[[E::Acc; 2]; C],
    acc: &mut [[E::Acc; 2]; C],
) {
    let codes = w.quad(e, q);
    if C > 0 {
        acc[0][0] = column::<E, W>(e, &codes, &x[0].quads[q], k, scales[0][0], acc[0][0]);
    }
    if C > 1 {
        acc[1 % C][0] = column::<E, W>(e, &codes, &x[1 % C].quads[q], k, scales[1 % C][0], acc[1 % C][0]);
    }
    if C > 2 {
        acc[2 % C][0] = column::<E, W>(e, &codes, &x[2 % C].quads[q], k, scales[2 % C][0], acc[2 % C][0]);
    }
    if C > 3 {
        acc[3 % C][0] = column::<E, W>(e, &codes, &x[3 % C].quads[q], k, scales[3 % C][0], acc[3 % C][0]);
    }
}

/// As [`single`] for two weight rows.
#[inline(always)]
fn pair<E: Engine, W: Source, const C: usize>(
    e: E,
    w: [&W; 2],
    x: &[XRow<'_>; C],
    q: usize,
    k: usize,
    scales: &[[E::Acc; 2]; C],
    acc: &mut [[E::Acc; 2]; C],
) {
    let codes = [w[0].quad(e, q), w[1].quad(e, q)];
    if C > 0 {
        acc[0] = two::<E, W>(e, &codes, &x[0].quads[q], k, scales[0], acc[0]);
    }
    if C > 1 {
        acc[1 % C] = two::<E, W>(e, &codes, &x[1 % C].quads[q], k, scales[1 % C], acc[1 % C]);
    }
    if C > 2 {
        acc[2 % C] = two::<E, W>(e, &codes, &x[2 % C].quads[q], k, scales[2 % C], acc[2 % C]);
    }
    if C > 3 {
        acc[3 % C] = two::<E, W>(e, &codes, &x[3 % C].quads[q], k, scales[3 % C], acc[3 % C]);
    }
}

/// Two weight rows and one activation row.
#[inline(always)]
fn two<E: Engine, W: Source>(
    e: E,
    codes: &[[E::Codes; 4]; 2],
    x: &XQuad,
    k: usize,
    scales: [E::Acc; 2],
    acc: [E::Acc; 2],
) -> [E::Acc; 2] {
    [
        column::<E, W>(e, &codes[0], x, k, scales[0], acc[0]),
        column::<E, W>(e, &codes[1], x, k, scales[1], acc[1]),
    ]
}

/// One weight row and one activation row: the exact sums, times the scales, onto the accumulators.
#[inline(always)]
fn column<E: Engine, W: Source>(
    e: E,
    codes: &[E::Codes; 4],
    x: &XQuad,
    k: usize,
    scales: E::Acc,
    acc: E::Acc,
) -> E::Acc {
    let sums = e.add(W::BYTES, codes[0], &x.values[0], e.begin(&x.offsets));
    let sums = e.add(W::BYTES, codes[1], &x.values[1], sums);
    let sums = e.add(W::BYTES, codes[2], &x.values[2], sums);
    let sums = e.add(W::BYTES, codes[3], &x.values[3], sums);
    e.mul_add(e.finish(W::BYTES, sums, &x.offsets), e.spread(scales, k), acc)
}

/// Nibble rows whose groups are no multiples of 64 columns: a stripe is 8 neighbouring columns, the stripes of
/// the first half of a group of 64 join their accumulators before those of the second half.
#[inline(always)]
fn split_groups<E: Engine>(e: E, task: IntTask<'_, '_>, group: usize) {
    let IntTask { w, rows, x, x_rows, outs } = task;
    let first = rows.start;
    let mut stripe_scales = StripeScales::default();
    let mut half_scales = HalfScales::default();
    for row in rows {
        let codes = PackedRow::<Int4, 128>::new(w.row_weights(row));
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

/// One row of [`split_groups`].
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
