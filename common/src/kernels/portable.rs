//! The integer kernels in plain Rust: the definition every other instruction set must match bit for bit.
//!
//! The bodies are inlined into functions compiled for several instruction sets (plain, and with FMA:
//! without that feature `mul_add` is a call into libm, exact but slow).

use super::activations::{GROUP, QuantRow, QuantRows};
use super::ops::{FloatOp, NibbleScales, Ops};
use crate::math::{LANES, PlainStripes, tree16};

/// Compiled for the baseline of the target.
#[derive(Debug)]
pub(super) struct Portable;

impl Ops for Portable {
    fn int4(
        &self,
        weights: &[u8],
        scales: NibbleScales<'_>,
        x: &QuantRows,
        x_rows: &[usize],
        out: &mut [f32],
    ) {
        int4_body(weights, scales, x, x_rows, out);
    }

    fn int8(&self, weights: &[i8], scales: Option<&[f32]>, x: &QuantRows, x_rows: &[usize], out: &mut [f32]) {
        int8_body(weights, scales, x, x_rows, out);
    }

    fn float(&self, op: FloatOp<'_>) {
        op.run(PlainStripes);
    }
}

/// See [`Ops::int4`].
#[inline(always)]
pub(super) fn int4_body(
    weights: &[u8],
    scales: NibbleScales<'_>,
    x: &QuantRows,
    x_rows: &[usize],
    out: &mut [f32],
) {
    for (&row, out) in x_rows.iter().zip(out) {
        *out = int4_dot(weights, scales, x.row(row));
    }
}

/// See [`Ops::int8`].
#[inline(always)]
pub(super) fn int8_body(
    weights: &[i8],
    scales: Option<&[f32]>,
    x: &QuantRows,
    x_rows: &[usize],
    out: &mut [f32],
) {
    for (&row, out) in x_rows.iter().zip(out) {
        *out = int8_dot(weights, scales, x.row(row));
    }
}

/// One nibble row with one activation row.
#[inline(always)]
fn int4_dot(weights: &[u8], scales: NibbleScales<'_>, x: QuantRow<'_>) -> f32 {
    let (groups, tail) = weights.as_chunks::<{ GROUP / 2 }>();
    let mut acc = [0.0; LANES];
    for (g, w) in groups.iter().enumerate() {
        int4_group(w, g, scales, x, &mut acc);
    }
    if !tail.is_empty() {
        int4_group(&padded(tail, 0), groups.len(), scales, x, &mut acc);
    }
    tree16(&acc)
}

/// Adds group `g` of a nibble row to the accumulators.
#[inline(always)]
fn int4_group(
    w: &[u8; GROUP / 2],
    g: usize,
    scales: NibbleScales<'_>,
    x: QuantRow<'_>,
    acc: &mut [f32; LANES],
) {
    let pair: &[i8; 2 * GROUP] = chunk(x.split, g / 2 * 2 * GROUP);
    let even: &[i8; GROUP / 2] = chunk(pair, g % 2 * GROUP / 2);
    let odd: &[i8; GROUP / 2] = chunk(pair, g % 2 * GROUP / 2 + GROUP);
    // A column pair is at most 2 · 15 · 127, a stripe of four pairs at most 15240: all fit an i16.
    let mut products = [0i16; GROUP / 2];
    for k in 0..GROUP / 2 {
        let low = i16::from(w[k] & 15).wrapping_mul(i16::from(even[k]));
        let high = i16::from(w[k] >> 4).wrapping_mul(i16::from(odd[k]));
        products[k] = low.wrapping_add(high);
    }
    let offsets: &[i32; 8] = chunk(x.nibble_offsets, 8 * g);
    let mut sums = [0.0; 8];
    for s in 0..8 {
        let p = &products[4 * s..4 * s + 4];
        let stripe = p[0].wrapping_add(p[1]).wrapping_add(p[2].wrapping_add(p[3]));
        sums[s] = i32::from(stripe).wrapping_add(offsets[s]) as f32;
    }
    let x_scale = x.scales[g];
    let mut scale = [x_scale; 8];
    match scales {
        NibbleScales::Row => {}
        NibbleScales::PerGroup(w) => scale = [w[g] * x_scale; 8],
        NibbleScales::PerStripe(w) => {
            for (scale, w) in scale.iter_mut().zip(chunk::<f32, 8>(w, 8 * g)) {
                *scale *= w;
            }
        }
    }
    let acc = &mut acc[g % 2 * 8..][..8];
    for s in 0..8 {
        acc[s] = sums[s].mul_add(scale[s], acc[s]);
    }
}

/// One int8 row with one activation row.
#[inline(always)]
fn int8_dot(weights: &[i8], scales: Option<&[f32]>, x: QuantRow<'_>) -> f32 {
    let (groups, tail) = weights.as_chunks::<GROUP>();
    let (values, x_tail) = x.values.as_chunks::<GROUP>();
    let mut acc = [0.0; LANES];
    for (g, (w, q)) in groups.iter().zip(values).enumerate() {
        let scale = scales.map_or(x.scales[g], |w| w[g] * x.scales[g]);
        int8_group(w, q, scale, &mut acc);
    }
    if !tail.is_empty() {
        let g = groups.len();
        let scale = scales.map_or(x.scales[g], |w| w[g] * x.scales[g]);
        int8_group(&padded(tail, 0), &padded(x_tail, 0), scale, &mut acc);
    }
    tree16(&acc)
}

/// Adds one group of an int8 row to the accumulators.
#[inline(always)]
fn int8_group(w: &[i8; GROUP], q: &[i8; GROUP], scale: f32, acc: &mut [f32; LANES]) {
    // A product is at most 128 · 127 and a pair of them 32512: both fit an i16.
    let mut products = [0i16; GROUP];
    for k in 0..GROUP {
        products[k] = i16::from(w[k]).wrapping_mul(i16::from(q[k]));
    }
    for s in 0..LANES {
        let p = &products[4 * s..4 * s + 4];
        let pairs = (p[0].wrapping_add(p[1]), p[2].wrapping_add(p[3]));
        let sum = i32::from(pairs.0).wrapping_add(i32::from(pairs.1));
        acc[s] = (sum as f32).mul_add(scale, acc[s]);
    }
}

/// `N` elements from `start`; activation rows are padded to whole groups.
#[inline(always)]
pub(super) fn chunk<T, const N: usize>(x: &[T], start: usize) -> &[T; N] {
    x[start..].first_chunk().expect("activation rows are padded to whole groups")
}

/// `N` elements from `start`, zero-padded beyond the end.
#[inline(always)]
pub(super) fn padded<T: Copy + Default, const N: usize>(x: &[T], start: usize) -> [T; N] {
    if let Some(whole) = x.get(start..).and_then(|rest| rest.first_chunk()) {
        return *whole;
    }
    let mut out = [T::default(); N];
    let tail = &x[start.min(x.len())..];
    out[..tail.len()].copy_from_slice(tail);
    out
}
