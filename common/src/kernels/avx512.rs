//! AVX-512 kernels with VNNI dot-product instructions.

use std::arch::x86_64::*;

use super::activations::{GROUP, QuantRow, QuantRows};
use super::avx2::chunk;
use super::ops::{FloatOp, NibbleScales, Ops};
use super::portable::padded;
use crate::math::tree16;

/// AVX-512 F, BW, VL, DQ and VNNI; exists only where the CPU has all of them.
#[derive(Debug)]
struct Avx512(());

/// The AVX-512 kernels, if the CPU supports them.
pub(super) fn detect() -> Option<&'static dyn Ops> {
    static OPS: Avx512 = Avx512(());
    let supported = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("fma");
    supported.then_some(&OPS as &dyn Ops)
}

impl Ops for Avx512 {
    fn int4(
        &self,
        weights: &[u8],
        scales: NibbleScales<'_>,
        x: &QuantRows,
        x_rows: &[usize],
        out: &mut [f32],
    ) {
        for (&row, out) in x_rows.iter().zip(out) {
            // SAFETY: `self` exists only after `detect` saw every feature.
            *out = unsafe { int4_dot(weights, scales, x.row(row)) };
        }
    }

    fn int8(&self, weights: &[i8], scales: Option<&[f32]>, x: &QuantRows, x_rows: &[usize], out: &mut [f32]) {
        for (&row, out) in x_rows.iter().zip(out) {
            // SAFETY: `self` exists only after `detect` saw every feature.
            *out = unsafe { int8_dot(weights, scales, x.row(row)) };
        }
    }

    fn float(&self, op: FloatOp<'_>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        fn with_avx512(op: FloatOp<'_>) {
            op.run();
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx512(op) }
    }
}

/// One nibble row with one activation row, a pair of groups (128 columns, 64 bytes) at a time: lanes 0–7
/// are the stripes of the even group, lanes 8–15 those of the odd one.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
fn int4_dot(weights: &[u8], scales: NibbleScales<'_>, x: QuantRow<'_>) -> f32 {
    let mut acc = _mm512_setzero_ps();
    let low_nibble = _mm512_set1_epi8(15);
    for (p, x_scales) in x.scales.chunks(2).enumerate() {
        let w = load(&padded::<u8, 64>(weights, p * GROUP));
        let even = load(chunk::<i8, 64>(x.split, p * 2 * GROUP));
        let odd = load(chunk::<i8, 64>(x.split, p * 2 * GROUP + GROUP));
        let sums = load(chunk::<i32, 16>(x.nibble_offsets, 16 * p));
        let sums = _mm512_dpbusd_epi32(sums, _mm512_and_si512(w, low_nibble), even);
        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(w), low_nibble);
        let sums = _mm512_dpbusd_epi32(sums, high, odd);
        let scale = match scales {
            NibbleScales::Row => halves(x_scales),
            NibbleScales::PerGroup(w) => {
                _mm512_mul_ps(halves(&w[2 * p..][..x_scales.len()]), halves(x_scales))
            }
            NibbleScales::PerStripe(w) => _mm512_mul_ps(load_ps(&padded(w, 16 * p)), halves(x_scales)),
        };
        // An absent odd group must not touch its accumulators.
        let lanes = if x_scales.len() == 2 { 0xffff } else { 0x00ff };
        acc = _mm512_mask3_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, acc, lanes);
    }
    tree(acc)
}

/// One int8 row with one activation row, one group of 64 columns at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
fn int8_dot(weights: &[i8], scales: Option<&[f32]>, x: QuantRow<'_>) -> f32 {
    let mut acc = _mm512_setzero_ps();
    let sign = _mm512_set1_epi8(i8::MIN);
    for (g, &x_scale) in x.scales.iter().enumerate() {
        // w + 128 as unsigned; the activations' offsets take the 128 out again.
        let w = _mm512_xor_si512(load(&padded::<i8, 64>(weights, g * GROUP)), sign);
        let q = load(&padded::<i8, 64>(x.values, g * GROUP));
        let offsets = load(chunk::<i32, 16>(x.byte_offsets, 16 * g));
        let sums = _mm512_dpbusd_epi32(offsets, w, q);
        let scale = _mm512_set1_ps(scales.map_or(x_scale, |w| w[g] * x_scale));
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, acc);
    }
    tree(acc)
}

/// The first value in lanes 0–7, the second (0 if absent) in lanes 8–15.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(pair: &[f32]) -> __m512 {
    let second = pair.get(1).copied().unwrap_or(0.0);
    _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(pair[0]), _mm512_set1_ps(second))
}

/// Loads 64 bytes.
#[target_feature(enable = "avx512f")]
#[inline]
fn load<T: bytemuck::Pod, const N: usize>(x: &[T; N]) -> __m512i {
    const { assert!(size_of::<[T; N]>() == 64) };
    // SAFETY: the array is 64 readable bytes of plain data; the load needs no alignment.
    unsafe { _mm512_loadu_si512(std::ptr::from_ref(x).cast()) }
}

/// Loads 16 floats.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_ps(x: &[f32; 16]) -> __m512 {
    // SAFETY: the array is 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

/// Adds the 16 lanes in the order of [`tree16`].
#[target_feature(enable = "avx512f")]
#[inline]
fn tree(acc: __m512) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: 16 writable floats; the store needs no alignment.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), acc) };
    tree16(&lanes)
}
