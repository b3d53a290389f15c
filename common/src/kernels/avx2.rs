//! AVX2 kernels, and the portable bodies compiled with FMA.

use std::arch::x86_64::*;

use super::activations::{GROUP, QuantRow, QuantRows};
use super::ops::{FloatOp, NibbleScales, Ops};
use super::portable::{chunk, int4_body, int8_body, padded};
use crate::math::{LANES, PlainStripes, Stripes, tree16};

/// The portable bodies with hardware fused multiply-add; exists only where the CPU has it.
#[derive(Debug)]
struct PortableFma(());

/// AVX2 with FMA; exists only where the CPU has both.
#[derive(Clone, Copy, Debug)]
struct Avx2(());

/// The portable kernels compiled with FMA, if the CPU has it.
pub(super) fn detect_fma() -> Option<&'static dyn Ops> {
    static OPS: PortableFma = PortableFma(());
    is_x86_feature_detected!("fma").then_some(&OPS as &dyn Ops)
}

/// The AVX2 kernels, if the CPU supports them.
pub(super) fn detect() -> Option<&'static dyn Ops> {
    static OPS: Avx2 = Avx2(());
    (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(&OPS as &dyn Ops)
}

impl Ops for PortableFma {
    fn int4(
        &self,
        weights: &[u8],
        scales: NibbleScales<'_>,
        x: &QuantRows,
        x_rows: &[usize],
        out: &mut [f32],
    ) {
        #[target_feature(enable = "fma")]
        fn with_fma(
            weights: &[u8],
            scales: NibbleScales<'_>,
            x: &QuantRows,
            x_rows: &[usize],
            out: &mut [f32],
        ) {
            int4_body(weights, scales, x, x_rows, out);
        }
        // SAFETY: `self` exists only after `detect_fma` saw the feature.
        unsafe { with_fma(weights, scales, x, x_rows, out) }
    }

    fn int8(&self, weights: &[i8], scales: Option<&[f32]>, x: &QuantRows, x_rows: &[usize], out: &mut [f32]) {
        #[target_feature(enable = "fma")]
        fn with_fma(
            weights: &[i8],
            scales: Option<&[f32]>,
            x: &QuantRows,
            x_rows: &[usize],
            out: &mut [f32],
        ) {
            int8_body(weights, scales, x, x_rows, out);
        }
        // SAFETY: `self` exists only after `detect_fma` saw the feature.
        unsafe { with_fma(weights, scales, x, x_rows, out) }
    }

    fn float(&self, op: FloatOp<'_>) {
        #[target_feature(enable = "fma")]
        fn with_fma(op: FloatOp<'_>) {
            op.run(PlainStripes);
        }
        // SAFETY: `self` exists only after `detect_fma` saw the feature.
        unsafe { with_fma(op) }
    }
}

impl Ops for Avx2 {
    fn int4(
        &self,
        weights: &[u8],
        scales: NibbleScales<'_>,
        x: &QuantRows,
        x_rows: &[usize],
        out: &mut [f32],
    ) {
        for (&row, out) in x_rows.iter().zip(out) {
            // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
            *out = unsafe { int4_dot(weights, scales, x.row(row)) };
        }
    }

    fn int8(&self, weights: &[i8], scales: Option<&[f32]>, x: &QuantRows, x_rows: &[usize], out: &mut [f32]) {
        for (&row, out) in x_rows.iter().zip(out) {
            // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
            *out = unsafe { int8_dot(weights, scales, x.row(row)) };
        }
    }

    fn float(&self, op: FloatOp<'_>) {
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(op: FloatOp<'_>, stripes: Avx2) {
            op.run(stripes);
        }
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { with_avx2(op, *self) }
    }
}

impl Stripes for Avx2 {
    /// Stripes 0–7 and 8–15.
    type Acc = [__m256; 2];

    #[inline(always)]
    fn zero(self) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    fn fma(self, a: &[f32; LANES], b: &[f32; LANES], acc: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA; every load reads 8 of 16 floats.
        unsafe {
            let half = |x: &[f32; LANES], i: usize| _mm256_loadu_ps(x.as_ptr().add(8 * i));
            [_mm256_fmadd_ps(half(a, 0), half(b, 0), acc[0]), _mm256_fmadd_ps(half(a, 1), half(b, 1), acc[1])]
        }
    }

    #[inline(always)]
    fn tree(self, acc: Self::Acc) -> f32 {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { tree(acc) }
    }

    const WIDE: bool = false;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA; both loads read 8 of 16 floats.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA; the load reads 16 bytes.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            let widen = |x| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
            [widen(x), widen(_mm_srli_si128::<8>(x))]
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn mul(self, a: Self::Acc, b: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Acc, b: Self::Acc, acc: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], acc[0]), _mm256_fmadd_ps(a[1], b[1], acc[1])] }
    }

    #[inline(always)]
    fn store(self, x: Self::Acc, out: &mut [f32; LANES]) {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA; both stores write 8 of 16 floats.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
    }

    #[inline(always)]
    fn tree4(self, acc: [Self::Acc; 4]) -> [f32; 4] {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA.
        unsafe { tree4(acc) }
    }
}

/// One nibble row with one activation row, one group of 64 columns (32 bytes) at a time.
#[target_feature(enable = "avx2,fma")]
fn int4_dot(weights: &[u8], scales: NibbleScales<'_>, x: QuantRow<'_>) -> f32 {
    let (groups, tail) = weights.as_chunks::<{ GROUP / 2 }>();
    let mut acc = [_mm256_setzero_ps(); 2];
    for (g, w) in groups.iter().enumerate() {
        acc[g % 2] = _mm256_fmadd_ps(int4_sums(w, g, x), stripe_scales(scales, g, x.scales[g]), acc[g % 2]);
    }
    if !tail.is_empty() {
        let g = groups.len();
        let scale = stripe_scales(scales, g, x.scales[g]);
        acc[g % 2] = _mm256_fmadd_ps(int4_sums(&padded(tail, 0), g, x), scale, acc[g % 2]);
    }
    tree(acc)
}

/// The exact stripe sums of group `g`.
#[target_feature(enable = "avx2")]
#[inline]
fn int4_sums(w: &[u8; GROUP / 2], g: usize, x: QuantRow<'_>) -> __m256 {
    let low_nibble = _mm256_set1_epi8(15);
    let w = load(w);
    let pair: &[i8; 2 * GROUP] = chunk(x.split, g / 2 * 2 * GROUP);
    let even = load(chunk::<i8, 32>(pair, g % 2 * GROUP / 2));
    let odd = load(chunk::<i8, 32>(pair, g % 2 * GROUP / 2 + GROUP));
    // Pairs of products are at most 2 · 15 · 127 in magnitude and two of them fit an i16.
    let low = _mm256_maddubs_epi16(_mm256_and_si256(w, low_nibble), even);
    let high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(w), low_nibble), odd);
    let stripes = _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
    _mm256_cvtepi32_ps(_mm256_add_epi32(stripes, load(chunk::<i32, 8>(x.nibble_offsets, 8 * g))))
}

/// The scales of the 8 stripes of group `g`.
#[target_feature(enable = "avx2")]
#[inline]
fn stripe_scales(scales: NibbleScales<'_>, g: usize, x_scale: f32) -> __m256 {
    match scales {
        NibbleScales::Row => _mm256_set1_ps(x_scale),
        NibbleScales::PerGroup(w) => _mm256_set1_ps(w[g] * x_scale),
        NibbleScales::PerStripe(w) => _mm256_mul_ps(load_ps(chunk(w, 8 * g)), _mm256_set1_ps(x_scale)),
    }
}

/// One int8 row with one activation row, one group of 64 columns at a time.
#[target_feature(enable = "avx2,fma")]
fn int8_dot(weights: &[i8], scales: Option<&[f32]>, x: QuantRow<'_>) -> f32 {
    let (groups, tail) = weights.as_chunks::<GROUP>();
    let (values, x_tail) = x.values.as_chunks::<GROUP>();
    let group_scale = |g: usize| scales.map_or(x.scales[g], |w| w[g] * x.scales[g]);
    let mut acc = [_mm256_setzero_ps(); 2];
    for (g, (w, q)) in groups.iter().zip(values).enumerate() {
        acc = int8_group(w, q, group_scale(g), acc);
    }
    if !tail.is_empty() {
        acc = int8_group(&padded(tail, 0), &padded(x_tail, 0), group_scale(groups.len()), acc);
    }
    tree(acc)
}

/// Adds one group to the accumulators.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn int8_group(w: &[i8; GROUP], q: &[i8; GROUP], scale: f32, acc: [__m256; 2]) -> [__m256; 2] {
    let mut acc = acc;
    for (half, acc) in acc.iter_mut().enumerate() {
        let w = load(chunk::<i8, 32>(w, 32 * half));
        let q = load(chunk::<i8, 32>(q, 32 * half));
        // |w| ≤ 128 as unsigned times ±q with |q| ≤ 127: a pair is at most 32512, no saturation.
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
        let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(scale), *acc);
    }
    acc
}

/// Loads 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn load<T: bytemuck::Pod, const N: usize>(x: &[T; N]) -> __m256i {
    const { assert!(size_of::<[T; N]>() == 32) };
    // SAFETY: the array is 32 readable bytes of plain data; the load needs no alignment.
    unsafe { _mm256_loadu_si256(std::ptr::from_ref(x).cast()) }
}

/// Loads 8 floats.
#[target_feature(enable = "avx2")]
#[inline]
fn load_ps(x: &[f32; 8]) -> __m256 {
    // SAFETY: the array is 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

/// Adds accumulators 0–7 and 8–15 in the order of [`tree16`].
#[target_feature(enable = "avx2")]
#[inline]
fn tree(acc: [__m256; 2]) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: both halves are 8 writable floats; the stores need no alignment.
    unsafe {
        _mm256_storeu_ps(lanes.as_mut_ptr(), acc[0]);
        _mm256_storeu_ps(lanes.as_mut_ptr().add(8), acc[1]);
    }
    tree16(&lanes)
}

/// [`tree`] of four accumulators, two in the halves of a register from the second step on.
#[target_feature(enable = "avx2")]
#[inline]
fn tree4(acc: [[__m256; 2]; 4]) -> [f32; 4] {
    let [a, b, c, d] = acc.map(|acc| _mm256_add_ps(acc[0], acc[1]));
    let quarters = |a, b| {
        let sums = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        let sums = _mm256_add_ps(sums, _mm256_permute_ps::<0b01_00_11_10>(sums));
        _mm256_add_ps(sums, _mm256_permute_ps::<0b10_11_00_01>(sums))
    };
    let mut lanes = [[0.0; 8]; 2];
    for (lanes, sums) in lanes.iter_mut().zip([quarters(a, b), quarters(c, d)]) {
        // SAFETY: 8 writable floats; the store needs no alignment.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sums) };
    }
    [lanes[0][0], lanes[0][4], lanes[1][0], lanes[1][4]]
}
