//! AVX2 kernels, and the portable ones compiled with FMA.

use std::arch::x86_64::*;

use super::engine::{Engine, Kernel};
use super::float::{FloatTask, Widen, float};
use super::integer::{IntTask, integer};
use super::ops::{FloatOp, Ops};
use crate::math::{LANES, PlainStripes, Stripes, tree16};

/// The portable kernels with hardware fused multiply-add; exists only where the CPU has it.
#[derive(Debug)]
struct PortableFma(());

/// AVX2 with FMA and conversions of halves; exists only where the CPU has all of them.
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
    let supported = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    supported.then_some(&OPS as &dyn Ops)
}

impl Ops for PortableFma {
    fn integer(&self, task: IntTask<'_, '_>) {
        #[target_feature(enable = "fma")]
        fn with_fma(task: IntTask<'_, '_>) {
            integer::<_, 1, 1>(PlainStripes, task);
        }
        // SAFETY: `self` exists only after `detect_fma` saw the feature.
        unsafe { with_fma(task) }
    }

    fn float_matrix(&self, task: FloatTask<'_, '_>) {
        #[target_feature(enable = "fma")]
        fn with_fma(task: FloatTask<'_, '_>) {
            float::<_, 1, 1, 1>(PlainStripes, task);
        }
        // SAFETY: `self` exists only after `detect_fma` saw the feature.
        unsafe { with_fma(task) }
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
    fn integer(&self, task: IntTask<'_, '_>) {
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(engine: Avx2, task: IntTask<'_, '_>) {
            integer::<_, 1, 4>(engine, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx2(*self, task) }
    }

    fn float_matrix(&self, task: FloatTask<'_, '_>) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with_avx2(stripes: Avx2, task: FloatTask<'_, '_>) {
            float::<_, 2, 2, 2>(stripes, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx2(*self, task) }
    }

    fn float(&self, op: FloatOp<'_>) {
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(op: FloatOp<'_>, stripes: Avx2) {
            op.run(stripes);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx2(op, *self) }
    }
}

impl Stripes for Avx2 {
    /// Stripes 0–7 and 8–15.
    type Acc = [__m256; 2];

    #[inline(always)]
    fn zero(self) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    fn tree(self, acc: Self::Acc) -> f32 {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { tree(acc) }
    }

    const WIDE: bool = false;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; both loads read 8 of 16 floats.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; the load reads 16 bytes.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            let widen = |x| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
            [widen(x), widen(_mm_srli_si128::<8>(x))]
        }
    }

    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw AVX2 and FMA; the load reads 8 bytes.
        unsafe {
            let x = _mm_loadl_epi64(x.as_ptr().cast());
            let nibbles = _mm_unpacklo_epi8(x, _mm_srli_epi16::<4>(x));
            let values = _mm_sub_epi8(_mm_and_si128(nibbles, _mm_set1_epi8(15)), _mm_set1_epi8(8));
            let widen = |x| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
            [widen(values), widen(_mm_srli_si128::<8>(values))]
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn mul(self, a: Self::Acc, b: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Acc, b: Self::Acc, acc: Self::Acc) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], acc[0]), _mm256_fmadd_ps(a[1], b[1], acc[1])] }
    }

    #[inline(always)]
    fn store(self, x: Self::Acc, out: &mut [f32; LANES]) {
        // SAFETY: `self` exists only after `detect` saw every feature; both stores write 8 of 16 floats.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
    }

    #[inline(always)]
    fn tree4(self, acc: [Self::Acc; 4]) -> [f32; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { tree4(acc) }
    }
}

impl Widen for Avx2 {
    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; both loads are within the 32 bytes.
        unsafe {
            let half = |i: usize| {
                let half = _mm_loadu_si128(bytes.as_ptr().cast::<__m128i>().add(i));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
            };
            [half(0), half(1)]
        }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; both loads are within the 32 bytes.
        unsafe {
            let half = |i: usize| _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast::<__m128i>().add(i)));
            [half(0), half(1)]
        }
    }

    #[inline(always)]
    fn e4m3(self, bytes: &[u8; 16]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; the load is the 16 bytes.
        unsafe {
            let halves = e4m3_halves(_mm_loadu_si128(bytes.as_ptr().cast()));
            let scale = _mm256_set1_ps(256.0);
            [
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), scale),
            ]
        }
    }
}

/// 16 e4m3 values as IEEE halves 256 times smaller: the same fields with another bias, subnormals included.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn e4m3_halves(bytes: __m128i) -> __m256i {
    let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(bytes));
    let all_ones = _mm256_set1_epi16(0x3f80);
    let magnitude = _mm256_and_si256(_mm256_srli_epi16::<1>(high), all_ones);
    let sign = _mm256_and_si256(high, _mm256_set1_epi16(i16::MIN));
    // All ones is NaN.
    let nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, all_ones), _mm256_set1_epi16(0x7e00));
    _mm256_or_si256(_mm256_or_si256(magnitude, sign), nan)
}

/// Vectors are pairs: the lanes of the first two groups of a quad, and those of the last two.
impl Engine for Avx2 {
    type Codes = [__m256i; 2];
    /// i16 of small codes, i32 of int8.
    type Sums = [__m256i; 2];

    #[inline(always)]
    fn apart<K: Kernel>(self, task: IntTask<'_, '_>) {
        #[target_feature(enable = "avx2,fma")]
        #[inline(never)]
        fn run<K: Kernel>(engine: Avx2, task: IntTask<'_, '_>) {
            K::run(engine, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { run::<K>(self, task) }
    }

    #[inline(always)]
    fn int4(self, bytes: &[u8; 128]) -> [[__m256i; 2]; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe {
            let low = |x| _mm256_and_si256(x, _mm256_set1_epi8(15));
            let high = |x| low(_mm256_srli_epi16::<4>(x));
            // The first and the last 16 bytes of the groups.
            let first = halves(load(bytes, 0), load(bytes, 1));
            let last = halves(load(bytes, 2), load(bytes, 3));
            [
                [low(first[0]), low(last[0])],
                [high(first[0]), high(last[0])],
                [low(first[1]), low(last[1])],
                [high(first[1]), high(last[1])],
            ]
        }
    }

    #[inline(always)]
    fn int8(self, bytes: &[u8; 256]) -> [[__m256i; 2]; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe {
            // Group g is vectors 2g (columns 0–31) and 2g + 1.
            let pair =
                |g: usize, half: usize| halves(load(bytes, 2 * g + half), load(bytes, 2 * g + 2 + half));
            let (a, b) = (pair(0, 0), pair(2, 0));
            let (c, d) = (pair(0, 1), pair(2, 1));
            [[a[0], b[0]], [a[1], b[1]], [c[0], d[0]], [c[1], d[1]]]
        }
    }

    #[inline(always)]
    fn int2(self, bytes: &[u8; 64]) -> [[__m256i; 2]; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { zip(bit_pairs(load(bytes, 0)), bit_pairs(load(bytes, 1))) }
    }

    #[inline(always)]
    fn int3(self, bytes: &[u8; 96]) -> [[__m256i; 2]; 4] {
        let (groups, _) = bytes.as_chunks::<24>();
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { zip(bit_triples(&groups[0], &groups[1]), bit_triples(&groups[2], &groups[3])) }
    }

    #[inline(always)]
    fn load_codes(self, codes: &[u8; 64]) -> [__m256i; 2] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [load(codes, 0), load(codes, 1)] }
    }

    #[inline(always)]
    fn store_codes(self, codes: [__m256i; 2], out: &mut [u8; 64]) {
        // SAFETY: `self` exists only after `detect` saw every feature; `out` is 64 writable bytes.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), codes[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), codes[1]);
        }
    }

    #[inline(always)]
    fn splat_code(self, code: u8) -> [__m256i; 2] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_set1_epi8(code as i8); 2] }
    }

    #[inline(always)]
    fn begin(self, _offsets: &[i32; LANES]) -> [__m256i; 2] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn add(self, bytes: bool, codes: [__m256i; 2], x: &[i8; 64], mut sums: [__m256i; 2]) -> [__m256i; 2] {
        for i in 0..2 {
            // SAFETY: `self` exists only after `detect` saw every feature.
            sums[i] = unsafe {
                let x = load(x, i);
                if bytes {
                    // |w| ≤ 128 as unsigned times ±x with |x| ≤ 127: a pair is at most 32512, no saturation.
                    let pairs =
                        _mm256_maddubs_epi16(_mm256_abs_epi8(codes[i]), _mm256_sign_epi8(x, codes[i]));
                    _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                } else {
                    // Four pairs of products are at most 4 · 2 · 15 · 127 in magnitude and fit an i16.
                    _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(codes[i], x))
                }
            };
        }
        sums
    }

    #[inline(always)]
    fn finish(self, bytes: bool, sums: [__m256i; 2], offsets: &[i32; LANES]) -> [__m256; 2] {
        let mut floats = self.zero();
        for i in 0..2 {
            // SAFETY: `self` exists only after `detect` saw every feature.
            floats[i] = unsafe {
                let values = if bytes {
                    sums[i]
                } else {
                    let stripes = _mm256_madd_epi16(sums[i], _mm256_set1_epi16(1));
                    _mm256_add_epi32(stripes, load(offsets, i))
                };
                _mm256_cvtepi32_ps(values)
            };
        }
        floats
    }

    #[inline(always)]
    fn spread(self, scales: [__m256; 2], k: usize) -> [__m256; 2] {
        let scales = scales[k / 2];
        let first = 4 * (k as i32 % 2);
        // SAFETY: `self` exists only after `detect` saw every feature.
        let pair = |a: i32| unsafe {
            let b = a + 1;
            _mm256_permutevar8x32_ps(scales, _mm256_setr_epi32(a, a, a, a, b, b, b, b))
        };
        [pair(first), pair(first + 2)]
    }
}

/// The first halves of two vectors, and the last.
#[target_feature(enable = "avx2")]
#[inline]
fn halves(a: __m256i, b: __m256i) -> [__m256i; 2] {
    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)]
}

/// Pairs of vectors of the same number.
#[inline(always)]
fn zip(a: [__m256i; 4], b: [__m256i; 4]) -> [[__m256i; 2]; 4] {
    [[a[0], b[0]], [a[1], b[1]], [a[2], b[2]], [a[3], b[3]]]
}

/// The four bit pairs of every byte.
#[target_feature(enable = "avx2")]
#[inline]
fn bit_pairs(x: __m256i) -> [__m256i; 4] {
    let low = |x| _mm256_and_si256(x, _mm256_set1_epi8(3));
    [low(x), low(_mm256_srli_epi16::<2>(x)), low(_mm256_srli_epi16::<4>(x)), low(_mm256_srli_epi16::<6>(x))]
}

/// Two groups of 16 bytes with the low bits of 3-bit values and 8 bytes with their high bits.
#[target_feature(enable = "avx2")]
#[inline]
fn bit_triples(a: &[u8; 24], b: &[u8; 24]) -> [__m256i; 4] {
    // SAFETY: 16 readable bytes from byte 0 and 8 from byte 16; the loads need no alignment.
    let low = |x: &[u8; 24]| unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
    // SAFETY: as above.
    let high = |x: &[u8; 24]| unsafe { _mm_loadl_epi64(x.as_ptr().add(16).cast()) };
    let [p, q, r, s] = bit_pairs(_mm256_set_m128i(low(b), low(a)));
    // Every byte of high bits twice, then the upper four bits of the second copy.
    let twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
    let highs = _mm256_shuffle_epi8(_mm256_set_m128i(high(b), high(a)), twice);
    let second = _mm256_set1_epi16(0xff00u16 as i16);
    let highs = _mm256_blendv_epi8(highs, _mm256_srli_epi16::<4>(highs), second);
    let four = |x| _mm256_and_si256(x, _mm256_set1_epi8(4));
    [
        _mm256_or_si256(p, four(_mm256_slli_epi16::<2>(highs))),
        _mm256_or_si256(q, four(_mm256_slli_epi16::<1>(highs))),
        _mm256_or_si256(r, four(highs)),
        _mm256_or_si256(s, four(_mm256_srli_epi16::<1>(highs))),
    ]
}

/// Loads bytes `32·i .. 32·i + 32`.
#[target_feature(enable = "avx2")]
#[inline]
fn load<T: bytemuck::Pod, const N: usize>(x: &[T; N], i: usize) -> __m256i {
    assert!(32 * (i + 1) <= size_of::<[T; N]>(), "a load stays inside its array");
    // SAFETY: 32 readable bytes of plain data, as just checked; the load needs no alignment.
    unsafe { _mm256_loadu_si256(std::ptr::from_ref(x).cast::<__m256i>().add(i)) }
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
