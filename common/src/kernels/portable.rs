//! The integer kernels in plain Rust: the definition every other instruction set must match bit for bit.
//!
//! The bodies are inlined into functions compiled for several instruction sets (plain, and with FMA:
//! without that feature `mul_add` is a call into libm, exact but slow).

use super::activations::{GROUP, QuantRow, QuantRows};
use super::ops::{FloatOp, NibbleScales, Ops};
use crate::math::{LANES, tree16};

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
        op.run();
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
    let mut acc = [0.0; LANES];
    for (g, &x_scale) in x.scales.iter().enumerate() {
        let w: [u8; GROUP / 2] = padded(weights, g * GROUP / 2);
        let even = &x.split[g / 2 * 2 * GROUP + g % 2 * GROUP / 2..][..GROUP / 2];
        let odd = &x.split[g / 2 * 2 * GROUP + g % 2 * GROUP / 2 + GROUP..][..GROUP / 2];
        let offsets = &x.nibble_offsets[8 * g..][..8];
        for s in 0..8 {
            let mut sum = offsets[s];
            for k in 4 * s..4 * s + 4 {
                sum += i32::from(w[k] & 15) * i32::from(even[k]) + i32::from(w[k] >> 4) * i32::from(odd[k]);
            }
            let scale = match scales {
                NibbleScales::Row => x_scale,
                NibbleScales::PerGroup(w_scales) => w_scales[g] * x_scale,
                NibbleScales::PerStripe(w_scales) => w_scales[8 * g + s] * x_scale,
            };
            let acc = &mut acc[g % 2 * 8 + s];
            *acc = (sum as f32).mul_add(scale, *acc);
        }
    }
    tree16(&acc)
}

/// One int8 row with one activation row.
#[inline(always)]
fn int8_dot(weights: &[i8], scales: Option<&[f32]>, x: QuantRow<'_>) -> f32 {
    let mut acc = [0.0; LANES];
    for (g, &x_scale) in x.scales.iter().enumerate() {
        let w: [i8; GROUP] = padded(weights, g * GROUP);
        let q: [i8; GROUP] = padded(x.values, g * GROUP);
        let scale = scales.map_or(x_scale, |w_scales| w_scales[g] * x_scale);
        for s in 0..LANES {
            let mut sum = 0;
            for k in 4 * s..4 * s + 4 {
                sum += i32::from(w[k]) * i32::from(q[k]);
            }
            acc[s] = (sum as f32).mul_add(scale, acc[s]);
        }
    }
    tree16(&acc)
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
