//! AVX-512 kernels with VNNI dot-product instructions.

use std::arch::x86_64::*;

use super::avx2::e4m3_halves;
use super::engine::{Engine, Kernel};
use super::float::{FloatTask, Widen, float};
use super::integer::{IntTask, integer};
use super::ops::{FloatOp, Ops};
use crate::math::{LANES, Stripes, tree16};

/// AVX-512 F, BW, VL, DQ and VNNI; exists only where the CPU has all of them.
#[derive(Clone, Copy, Debug)]
struct Avx512(());

/// A cache line.
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "only its alignment matters")] [u8; 64]);

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
    fn integer(&self, task: IntTask<'_, '_>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
        fn with_avx512(engine: Avx512, task: IntTask<'_, '_>) {
            integer::<_, 4, 4>(engine, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx512(*self, task) }
    }

    fn float_matrix(&self, task: FloatTask<'_, '_>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
        fn with_avx512(stripes: Avx512, task: FloatTask<'_, '_>) {
            float::<_, 4, 4, 2>(stripes, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { with_avx512(*self, task) }
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
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::Acc {
        // SAFETY: `self` exists only after `detect` saw every feature; the load reads 8 bytes.
        unsafe {
            let x = _mm_loadl_epi64(x.as_ptr().cast());
            let nibbles = _mm_unpacklo_epi8(x, _mm_srli_epi16::<4>(x));
            let values = _mm_sub_epi8(_mm_and_si128(nibbles, _mm_set1_epi8(15)), _mm_set1_epi8(8));
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values))
        }
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

impl Widen for Avx512 {
    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> __m512 {
        // SAFETY: `self` exists only after `detect` saw every feature; the load is the 32 bytes.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> __m512 {
        // SAFETY: `self` exists only after `detect` saw every feature; the load is the 32 bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn e4m3(self, bytes: &[u8; 16]) -> __m512 {
        // SAFETY: `self` exists only after `detect` saw every feature; the load is the 16 bytes.
        unsafe {
            let halves = e4m3_halves(_mm_loadu_si128(bytes.as_ptr().cast()));
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
        }
    }
}

impl Engine for Avx512 {
    type Codes = __m512i;
    type Sums = __m512i;

    #[inline(always)]
    fn apart<K: Kernel>(self, task: IntTask<'_, '_>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
        #[inline(never)]
        fn run<K: Kernel>(engine: Avx512, task: IntTask<'_, '_>) {
            // With something of that alignment on it the stack holds vectors that find no register at addresses
            // they can be loaded from in one piece.
            std::hint::black_box(&mut Line([0; 64]));
            K::run(engine, task);
        }
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { run::<K>(self, task) }
    }

    #[inline(always)]
    fn int4(self, bytes: &[u8; 128]) -> [__m512i; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe {
            let (a, b) = (load(part(bytes, 0)), load(part(bytes, 1)));
            // The first and the last 16 bytes of every group.
            let (first, last) = (_mm512_shuffle_i64x2::<0x88>(a, b), _mm512_shuffle_i64x2::<0xdd>(a, b));
            let low = |x| _mm512_and_si512(x, _mm512_set1_epi8(15));
            let high = |x| low(_mm512_srli_epi16::<4>(x));
            [low(first), high(first), low(last), high(last)]
        }
    }

    #[inline(always)]
    fn int8(self, bytes: &[u8; 256]) -> [__m512i; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe {
            // Plus 128 as unsigned; then the groups' 4 × 16 bytes are transposed.
            let group = |g| _mm512_xor_si512(load(part(bytes, g)), _mm512_set1_epi8(i8::MIN));
            let (a, b, c, d) = (group(0), group(1), group(2), group(3));
            let (ab_first, ab_last) =
                (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xee>(a, b));
            let (cd_first, cd_last) =
                (_mm512_shuffle_i64x2::<0x44>(c, d), _mm512_shuffle_i64x2::<0xee>(c, d));
            [
                _mm512_shuffle_i64x2::<0x88>(ab_first, cd_first),
                _mm512_shuffle_i64x2::<0xdd>(ab_first, cd_first),
                _mm512_shuffle_i64x2::<0x88>(ab_last, cd_last),
                _mm512_shuffle_i64x2::<0xdd>(ab_last, cd_last),
            ]
        }
    }

    #[inline(always)]
    fn int2(self, bytes: &[u8; 64]) -> [__m512i; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { bit_pairs(load(bytes)) }
    }

    #[inline(always)]
    fn int3(self, bytes: &[u8; 96]) -> [__m512i; 4] {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { bit_triples(bytes) }
    }

    #[inline(always)]
    fn load_codes(self, codes: &[u8; 64]) -> __m512i {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { load(codes) }
    }

    #[inline(always)]
    fn store_codes(self, codes: __m512i, out: &mut [u8; 64]) {
        // SAFETY: `self` exists only after `detect` saw every feature; `out` is 64 writable bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), codes) }
    }

    #[inline(always)]
    fn splat_code(self, code: u8) -> __m512i {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_set1_epi8(code as i8) }
    }

    #[inline(always)]
    fn begin(self, offsets: &[i32; LANES]) -> __m512i {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { load(offsets) }
    }

    #[inline(always)]
    fn add(self, _bytes: bool, codes: __m512i, x: &[i8; 64], sums: __m512i) -> __m512i {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_dpbusd_epi32(sums, codes, load(x)) }
    }

    /// In two chains, since a sum waits longer for its instruction than instructions for each other.
    #[inline(always)]
    fn add_quad(
        self,
        bytes: bool,
        codes: &[__m512i; 4],
        x: &[[i8; 64]; 4],
        offsets: &[i32; LANES],
    ) -> __m512i {
        let first = self.add(bytes, codes[1], &x[1], self.add(bytes, codes[0], &x[0], self.begin(offsets)));
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe {
            let none = _mm512_setzero_si512();
            let second = self.add(bytes, codes[3], &x[3], self.add(bytes, codes[2], &x[2], none));
            _mm512_add_epi32(first, second)
        }
    }

    #[inline(always)]
    fn finish(self, _bytes: bool, sums: __m512i, _offsets: &[i32; LANES]) -> __m512 {
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn load_part(self, x: &[f32]) -> __m512 {
        let lanes = u16::MAX.checked_shr((LANES - x.len().min(LANES)) as u32).unwrap_or(0);
        // SAFETY: `self` exists only after `detect` saw every feature; the load reads only lanes `x` has.
        unsafe { _mm512_maskz_loadu_ps(lanes, x.as_ptr()) }
    }

    #[inline(always)]
    fn spread(self, scales: __m512, k: usize) -> __m512 {
        /// Lane numbers by quad of a block.
        static LANE_OF: [[i32; LANES]; 4] = {
            let mut lanes = [[0; LANES]; 4];
            let mut i = 0;
            while i < 4 * LANES {
                lanes[i / LANES][i % LANES] = (i / 4) as i32;
                i += 1;
            }
            lanes
        };
        // SAFETY: `self` exists only after `detect` saw every feature.
        unsafe { _mm512_permutexvar_ps(load(&LANE_OF[k]), scales) }
    }
}

/// The four bit pairs of every byte.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn bit_pairs(x: __m512i) -> [__m512i; 4] {
    let low = |x| _mm512_and_si512(x, _mm512_set1_epi8(3));
    [low(x), low(_mm512_srli_epi16::<2>(x)), low(_mm512_srli_epi16::<4>(x)), low(_mm512_srli_epi16::<6>(x))]
}

/// Four groups of 16 bytes with the low bits of 3-bit values and 8 bytes with their high bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn bit_triples(bytes: &[u8; 96]) -> [__m512i; 4] {
    let (head, tail) = bytes.split_first_chunk::<64>().expect("96 bytes are more than 64");
    let tail: &[u8; 32] = tail.first_chunk().expect("96 bytes are 64 and 32");
    // SAFETY: 32 readable bytes; the load needs no alignment.
    let tail = unsafe { _mm512_castsi256_si512(_mm256_loadu_si256(tail.as_ptr().cast())) };
    let head = load(head);
    // 32-bit words: a group has four of low bits and two of high bits.
    let word = |i| _mm512_permutex2var_epi32(head, i, tail);
    let lows = word(_mm512_setr_epi32(0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21));
    let highs = word(_mm512_setr_epi32(4, 5, 4, 5, 10, 11, 10, 11, 16, 17, 16, 17, 22, 23, 22, 23));
    // Every byte of high bits twice, then the upper four bits of the second copy.
    let twice = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
    let highs = _mm512_shuffle_epi8(highs, twice);
    let highs = _mm512_mask_blend_epi8(0xaaaa_aaaa_aaaa_aaaa, highs, _mm512_srli_epi16::<4>(highs));
    let [a, b, c, d] = bit_pairs(lows);
    let four = |x| _mm512_and_si512(x, _mm512_set1_epi8(4));
    [
        _mm512_or_si512(a, four(_mm512_slli_epi16::<2>(highs))),
        _mm512_or_si512(b, four(_mm512_slli_epi16::<1>(highs))),
        _mm512_or_si512(c, four(highs)),
        _mm512_or_si512(d, four(_mm512_srli_epi16::<1>(highs))),
    ]
}

/// Bytes `64·i .. 64·i + 64`.
#[inline(always)]
fn part(bytes: &[u8], i: usize) -> &[u8; 64] {
    bytes[64 * i..].first_chunk().expect("a quad is whole vectors")
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
