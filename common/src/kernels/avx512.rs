//! AVX-512 kernels with VNNI dot-product instructions.

use std::arch::x86_64::*;

use super::activations::{GROUP, QuantRow, QuantRows};
use super::ops::{FloatOp, NibbleScales, Ops};
use super::portable::{chunk, padded};
use crate::math::{LANES, Stripes, tree16};

/// AVX-512 F, BW, VL, DQ and VNNI; exists only where the CPU has all of them.
#[derive(Clone, Copy, Debug)]
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
        fn with_avx512(op: FloatOp<'_>, stripes: Avx512) {
            op.run(stripes);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx512(op, *self) }
    }
}

impl Stripes for Avx512 {
    type Acc = __m512;

    #[inline(always)]
    fn zero(self) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn fma(self, a: &[f32; LANES], b: &[f32; LANES], acc: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_fmadd_ps(load_ps(a), load_ps(b), acc) }
    }

    #[inline(always)]
    fn tree(self, acc: Self::Acc) -> f32 {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { tree(acc) }
    }

    const WIDE: bool = true;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { load_ps(x) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; the load reads 16 bytes.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn mul(self, a: Self::Acc, b: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Acc, b: Self::Acc, acc: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_fmadd_ps(a, b, acc) }
    }

    #[inline(always)]
    fn store(self, x: Self::Acc, out: &mut [f32; LANES]) {
        // SAFETY: `self` exists only after `detect` saw every feature; the store writes 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn tree4(self, acc: [Self::Acc; 4]) -> [f32; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { tree4(acc) }
    }
}

/// One nibble row with one activation row, a pair of groups (128 columns, 64 bytes) at a time: lanes 0–7
/// are the stripes of the even group, lanes 8–15 those of the odd one.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
fn int4_dot(weights: &[u8], scales: NibbleScales<'_>, x: QuantRow<'_>) -> f32 {
    let (pairs, tail) = weights.as_chunks::<64>();
    let (split, _) = x.split.as_chunks::<128>();
    let (offsets, _) = x.nibble_offsets.as_chunks::<16>();
    let (x_scales, last_scale) = x.scales.as_chunks::<2>();
    let mut acc = _mm512_setzero_ps();
    for (p, (((w, split), offsets), &x_scales)) in
        pairs.iter().zip(split).zip(offsets).zip(x_scales).enumerate()
    {
        let scale = pair_scales(scales, p, x_scales);
        acc = _mm512_fmadd_ps(int4_sums(w, split, offsets), scale, acc);
    }
    if 2 * pairs.len() < x.scales.len() {
        let p = pairs.len();
        let sums = int4_sums(&padded(tail, 0), &split[p], &offsets[p]);
        // An absent odd group must not touch its accumulators.
        let (x_scales, lanes) = match *last_scale {
            [even] => ([even, 0.0], 0x00ff),
            _ => (x_scales[p], 0xffff),
        };
        acc = _mm512_mask3_fmadd_ps(sums, pair_scales(scales, p, x_scales), acc, lanes);
    }
    tree(acc)
}

/// The exact stripe sums of a pair of groups.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn int4_sums(w: &[u8; 64], split: &[i8; 128], offsets: &[i32; 16]) -> __m512 {
    let low_nibble = _mm512_set1_epi8(15);
    let w = load(w);
    let low = _mm512_and_si512(w, low_nibble);
    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(w), low_nibble);
    let sums = _mm512_dpbusd_epi32(load(offsets), low, load(chunk::<i8, 64>(split, 0)));
    _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(sums, high, load(chunk::<i8, 64>(split, 64))))
}

/// The scales of pair `p` of groups, per lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn pair_scales(scales: NibbleScales<'_>, p: usize, x_scales: [f32; 2]) -> __m512 {
    match scales {
        NibbleScales::Row => halves(x_scales),
        NibbleScales::PerGroup(w) => {
            let odd = w.get(2 * p + 1).copied().unwrap_or(0.0);
            halves([w[2 * p] * x_scales[0], odd * x_scales[1]])
        }
        NibbleScales::PerStripe(w) => _mm512_mul_ps(load_ps(&padded(w, 16 * p)), halves(x_scales)),
    }
}

/// One int8 row with one activation row, one group of 64 columns at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
fn int8_dot(weights: &[i8], scales: Option<&[f32]>, x: QuantRow<'_>) -> f32 {
    let (groups, tail) = weights.as_chunks::<GROUP>();
    let (values, x_tail) = x.values.as_chunks::<GROUP>();
    let (offsets, _) = x.byte_offsets.as_chunks::<16>();
    let group_scale = |g: usize| scales.map_or(x.scales[g], |w| w[g] * x.scales[g]);
    let mut acc = _mm512_setzero_ps();
    for (g, ((w, q), offsets)) in groups.iter().zip(values).zip(offsets).enumerate() {
        acc = _mm512_fmadd_ps(int8_sums(w, q, offsets), _mm512_set1_ps(group_scale(g)), acc);
    }
    if !tail.is_empty() {
        let g = groups.len();
        let sums = int8_sums(&padded(tail, 0), &padded(x_tail, 0), &offsets[g]);
        acc = _mm512_fmadd_ps(sums, _mm512_set1_ps(group_scale(g)), acc);
    }
    tree(acc)
}

/// The exact stripe sums of a group.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn int8_sums(w: &[i8; GROUP], q: &[i8; GROUP], offsets: &[i32; 16]) -> __m512 {
    // w + 128 as unsigned; the activations' offsets take the 128 out again.
    let w = _mm512_xor_si512(load(w), _mm512_set1_epi8(i8::MIN));
    _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(load(offsets), w, load(q)))
}

/// The first value in lanes 0–7, the second in lanes 8–15.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(pair: [f32; 2]) -> __m512 {
    _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(pair[0]), _mm512_set1_ps(pair[1]))
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

/// [`tree`] of four accumulators, one in each quarter of a register from the second step on.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn tree4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
    /// The lower quarters (0, 1) or the upper ones (2, 3) of two registers.
    const LOWER: i32 = 0b01_00_01_00;
    const UPPER: i32 = 0b11_10_11_10;
    /// The even or the odd quarters of two registers.
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    let halves =
        |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<LOWER>(a, b), _mm512_shuffle_f32x4::<UPPER>(a, b));
    let (ab, cd) = (halves(a, b), halves(c, d));
    let sums = _mm512_add_ps(_mm512_shuffle_f32x4::<EVEN>(ab, cd), _mm512_shuffle_f32x4::<ODD>(ab, cd));
    let sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b01_00_11_10>(sums));
    let sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b10_11_00_01>(sums));
    let first_of_each = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    let mut out = [0.0; 4];
    let quarter = _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_each, sums));
    // SAFETY: 4 writable floats; the store needs no alignment.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), quarter) };
    out
}
