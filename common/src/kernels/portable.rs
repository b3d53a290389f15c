//! The integer engine in plain Rust: the definition every other instruction set must match bit for bit.
//!
//! The kernels are inlined into functions compiled for several instruction sets (plain, and with FMA:
//! without that feature `mul_add` is a call into libm, exact but slow).

use super::engine::Engine;
use super::float::{FloatTask, float};
use super::integer::{IntTask, integer};
use super::ops::{FloatOp, Ops};
use crate::math::{LANES, PlainStripes};

/// Compiled for the baseline of the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

impl Ops for Portable {
    fn integer(&self, task: IntTask<'_, '_>) {
        integer::<_, 1, 1>(PlainStripes, task);
    }

    fn float_matrix(&self, task: FloatTask<'_, '_>) {
        float::<_, 1, 1, 1>(PlainStripes, task);
    }

    fn float(&self, op: FloatOp<'_>) {
        op.run(PlainStripes);
    }
}

impl Engine for PlainStripes {
    type Codes = [u8; 64];
    type Sums = [i32; LANES];

    #[inline(always)]
    fn int4(self, bytes: &[u8; 128]) -> [[u8; 64]; 4] {
        let mut codes = [[0; 64]; 4];
        for (i, bytes) in bytes.as_chunks::<16>().0.iter().enumerate() {
            let (group, half) = (i / 2, i % 2);
            for k in 0..16 {
                codes[2 * half][16 * group + k] = bytes[k] & 15;
                codes[2 * half + 1][16 * group + k] = bytes[k] >> 4;
            }
        }
        codes
    }

    #[inline(always)]
    fn int8(self, bytes: &[u8; 256]) -> [[u8; 64]; 4] {
        let mut codes = [[0; 64]; 4];
        for (i, bytes) in bytes.as_chunks::<16>().0.iter().enumerate() {
            codes[i % 4][i / 4 * 16..i / 4 * 16 + 16].copy_from_slice(bytes);
        }
        codes
    }

    #[inline(always)]
    fn int2(self, bytes: &[u8; 64]) -> [[u8; 64]; 4] {
        let mut codes = [[0; 64]; 4];
        for (v, codes) in codes.iter_mut().enumerate() {
            for k in 0..64 {
                codes[k] = bytes[k] >> (2 * v) & 3;
            }
        }
        codes
    }

    #[inline(always)]
    fn int3(self, bytes: &[u8; 96]) -> [[u8; 64]; 4] {
        let mut codes = [[0; 64]; 4];
        for (g, bytes) in bytes.as_chunks::<24>().0.iter().enumerate() {
            for (v, codes) in codes.iter_mut().enumerate() {
                for k in 0..16 {
                    let high = bytes[16 + k / 2] >> (4 * (k % 2) + v) & 1;
                    codes[16 * g + k] = (bytes[k] >> (2 * v) & 3) + 4 * high;
                }
            }
        }
        codes
    }

    #[inline(always)]
    fn load_codes(self, codes: &[u8; 64]) -> [u8; 64] {
        *codes
    }

    #[inline(always)]
    fn store_codes(self, codes: [u8; 64], out: &mut [u8; 64]) {
        *out = codes;
    }

    #[inline(always)]
    fn splat_code(self, code: u8) -> [u8; 64] {
        [code; 64]
    }

    #[inline(always)]
    fn begin(self, _offsets: &[i32; LANES]) -> [i32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn add(self, bytes: bool, codes: [u8; 64], x: &[i8; 64], mut sums: [i32; LANES]) -> [i32; LANES] {
        // A product is at most 128 · 127 and a pair of them 32512: both fit an i16.
        let mut products = [0i16; 64];
        for k in 0..64 {
            let code = if bytes { i16::from(codes[k] as i8) } else { i16::from(codes[k]) };
            products[k] = code.wrapping_mul(i16::from(x[k]));
        }
        for (sum, p) in sums.iter_mut().zip(products.as_chunks::<4>().0) {
            let pairs = (p[0].wrapping_add(p[1]), p[2].wrapping_add(p[3]));
            *sum = sum.wrapping_add(i32::from(pairs.0).wrapping_add(i32::from(pairs.1)));
        }
        sums
    }

    #[inline(always)]
    fn finish(self, bytes: bool, sums: [i32; LANES], offsets: &[i32; LANES]) -> [f32; LANES] {
        let mut floats = [0.0; LANES];
        for lane in 0..LANES {
            let offset = if bytes { 0 } else { offsets[lane] };
            floats[lane] = sums[lane].wrapping_add(offset) as f32;
        }
        floats
    }

    #[inline(always)]
    fn spread(self, scales: [f32; LANES], k: usize) -> [f32; LANES] {
        let mut spread = [0.0; LANES];
        for (lanes, scale) in spread.as_chunks_mut::<4>().0.iter_mut().zip(&scales[4 * k..]) {
            *lanes = [*scale; 4];
        }
        spread
    }
}
