//! Dot products of several weight rows with several activation rows, side by side.

use super::arrange::{QUAD_GROUPS, XQuad, XRow};
use super::engine::Engine;
use super::prefetch;
use super::rows::Source;
use crate::math::{LANES, Stripes};

/// Quads whose scales fill one vector.
pub(super) const BLOCK_QUADS: usize = LANES / QUAD_GROUPS;

/// The accumulators of up to four weight rows, by pairs of them, and `C` activation rows.
pub(super) type Accumulators<E, const C: usize> = [[[<E as Stripes>::Acc; 2]; C]; 2];

/// Dot products of `R` (1 or 4) weight rows with `C` (at most 4) activation rows of one width; `w_scales` are
/// the scales of 64 columns each, where the weights have such.
#[inline(always)]
pub(super) fn tile<E: Engine, W: Source, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    w: &[W; R],
    w_scales: [&[f32]; R],
    x: &[XRow<'_>; C],
) -> [[f32; R]; C] {
    let mut acc = [[[e.splat(0.0); 2]; C]; 2];
    accumulate::<E, W, GROUPED, R, C>(e, w, w_scales, x, None, &mut acc);
    dots(e, &acc)
}

/// Adds the products of weight rows with activation rows of one width; meanwhile fetches what will be needed of
/// `next`.
///
/// Accumulators stay in registers only where every index is a constant before the optimiser unrolls loops;
/// hence the calls written out here and below. Closures (`map` and the like) would be compiled without the
/// instruction set.
#[inline(always)]
pub(super) fn accumulate<E: Engine, W: Source, const GROUPED: bool, const R: usize, const C: usize>(
    e: E,
    w: &[W; R],
    w_scales: [&[f32]; R],
    x: &[XRow<'_>; C],
    next: Option<&[XRow<'_>; C]>,
    acc: &mut Accumulators<E, C>,
) {
    let (quads, blocks) = (x[0].quads.len(), x[0].scales.len());
    // Slices of one length, so that one check serves them all.
    let (mut w, mut w_scales, mut x) = (*w, w_scales, *x);
    for x in &mut x {
        *x = XRow { quads: &x.quads[..quads], scales: &x.scales[..blocks] };
    }
    for (w, w_scales) in w.iter_mut().zip(&mut w_scales) {
        *w = w.first(quads);
        if GROUPED {
            *w_scales = &w_scales[..w_scales.len().min(blocks * LANES)];
            assert!(w_scales.len() + LANES > blocks * LANES, "scales are as many as columns need");
        }
    }
    let zero = e.splat(0.0);
    let mut pairs = *acc;
    for block in 0..blocks {
        let first = block * BLOCK_QUADS;
        let last = quads.min(first + BLOCK_QUADS);
        for next in next.into_iter().flatten() {
            prefetch::displaced::<64>(next.scales.as_ptr().wrapping_add(block).cast(), 0);
        }
        if GROUPED {
            for (w, scales) in w.iter().zip(w_scales) {
                w.ask_for_scales(&scales[block * LANES..]);
            }
        }
        let mut scales = [[[zero; 2]; C]; 2];
        for c in 0..C {
            let x_scales = e.load(&x[c].scales[block]);
            for r in 0..R {
                scales[r / 2][c][r % 2] = if GROUPED {
                    e.mul(e.load_part(&w_scales[r][block * LANES..]), x_scales)
                } else {
                    x_scales
                };
            }
        }
        // Two weight rows after the other two: the accumulators of all four and what they need meanwhile are
        // more than there are registers.
        for q in first..last {
            if R == 1 {
                single(e, &w[0], &x, q, q - first, &scales[0], &mut pairs[0]);
            } else {
                pair(e, [&w[0], &w[1 % R]], &x, q, q - first, &scales[0], &mut pairs[0]);
            }
        }
        if R > 2 {
            for q in first..last {
                pair(e, [&w[2 % R], &w[3 % R]], &x, q, q - first, &scales[1], &mut pairs[1]);
            }
        }
    }
    *acc = pairs;
}

/// Adds up accumulators, per activation row.
#[inline(always)]
pub(super) fn dots<E: Engine, const R: usize, const C: usize>(
    e: E,
    acc: &Accumulators<E, C>,
) -> [[f32; R]; C] {
    let mut dots = [[0.0; R]; C];
    if C > 0 {
        dots[0] = trees(e, acc, 0);
    }
    if C > 1 {
        dots[1 % C] = trees(e, acc, 1 % C);
    }
    if C > 2 {
        dots[2 % C] = trees(e, acc, 2 % C);
    }
    if C > 3 {
        dots[3 % C] = trees(e, acc, 3 % C);
    }
    dots
}

/// Adds up the accumulators of activation row `c`.
#[inline(always)]
fn trees<E: Engine, const R: usize, const C: usize>(e: E, acc: &Accumulators<E, C>, c: usize) -> [f32; R] {
    let mut dots = [0.0; R];
    match dots.first_chunk_mut() {
        Some(dots) => *dots = e.tree4([acc[0][c][0], acc[0][c][1], acc[1][c][0], acc[1][c][1]]),
        None => dots[0] = e.tree(acc[0][c][0]),
    }
    dots
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
    let sums = e.add_quad(W::BYTES, codes, &x.values, &x.offsets);
    e.mul_add(e.finish(W::BYTES, sums, &x.offsets), e.spread(scales, k), acc)
}
