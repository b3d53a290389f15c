//! Rule N3: the one order in which floats are summed.
//!
//! Element `j` of a row belongs to stripe `j mod 16`. Every stripe accumulates its elements in
//! ascending order, starting from +0, by fused multiply-add; the 16
//! stripes are then added by [`tree16`]. A row whose length is no multiple of 16 behaves as if it
//! were padded with zeros.

/// Stripes of a float reduction.
pub(crate) const LANES: usize = 16;

/// The 16 accumulators of a reduction in the registers of one instruction set.
///
/// A value of the implementing type is the proof that the CPU has the instructions. Implementations are
/// explicit because the compiler does not reliably keep arrays of 16 in vector registers.
pub(crate) trait Stripes: Copy {
    /// The accumulators.
    type Acc: Copy;

    /// 16 times +0.
    fn zero(self) -> Self::Acc;

    /// `fma(a[i], b[i], acc[i])` for every stripe.
    #[inline(always)]
    fn fma(self, a: &[f32; LANES], b: &[f32; LANES], acc: Self::Acc) -> Self::Acc {
        self.mul_add(self.load(a), self.load(b), acc)
    }

    /// [`tree16`].
    fn tree(self, acc: Self::Acc) -> f32;

    /// Whether 16 accumulators and their operands fit in the registers (else 4 do).
    const WIDE: bool;

    /// 16 values.
    fn load(self, x: &[f32; LANES]) -> Self::Acc;

    /// 16 integers as floats.
    fn load_i8(self, x: &[i8; LANES]) -> Self::Acc;

    /// 16 nibbles minus 8 as floats, the low one of each byte before the high one.
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::Acc;

    /// 16 times `x`.
    fn splat(self, x: f32) -> Self::Acc;

    /// `a[i] · b[i]`, rounded.
    fn mul(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;

    /// `fma(a[i], b[i], acc[i])`.
    fn mul_add(self, a: Self::Acc, b: Self::Acc, acc: Self::Acc) -> Self::Acc;

    /// The 16 values.
    fn store(self, x: Self::Acc, out: &mut [f32; LANES]);

    /// [`tree16`] of four accumulators.
    fn tree4(self, acc: [Self::Acc; 4]) -> [f32; 4];
}

/// The definition of [`Stripes`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainStripes;

impl Stripes for PlainStripes {
    type Acc = [f32; LANES];

    #[inline(always)]
    fn zero(self) -> Self::Acc {
        [0.0; LANES]
    }

    #[inline(always)]
    fn tree(self, acc: Self::Acc) -> f32 {
        tree16(&acc)
    }

    const WIDE: bool = false;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::Acc {
        *x
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::Acc {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f32::from(x[i]);
        }
        out
    }

    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::Acc {
        let mut out = [0.0; LANES];
        for i in 0..LANES / 2 {
            out[2 * i] = f32::from((x[i] & 15) as i8 - 8);
            out[2 * i + 1] = f32::from((x[i] >> 4) as i8 - 8);
        }
        out
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Acc {
        [x; LANES]
    }

    #[inline(always)]
    fn mul(self, mut a: Self::Acc, b: Self::Acc) -> Self::Acc {
        for i in 0..LANES {
            a[i] *= b[i];
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Acc, b: Self::Acc, mut acc: Self::Acc) -> Self::Acc {
        for i in 0..LANES {
            acc[i] = a[i].mul_add(b[i], acc[i]);
        }
        acc
    }

    #[inline(always)]
    fn store(self, x: Self::Acc, out: &mut [f32; LANES]) {
        *out = x;
    }

    #[inline(always)]
    fn tree4(self, acc: [Self::Acc; 4]) -> [f32; 4] {
        [tree16(&acc[0]), tree16(&acc[1]), tree16(&acc[2]), tree16(&acc[3])]
    }
}

/// Adds 16 accumulators pairwise: `i` with `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
#[inline(always)]
pub(crate) fn tree16(acc: &[f32; LANES]) -> f32 {
    let mut a = *acc;
    for i in 0..8 {
        a[i] += a[i + 8];
    }
    for i in 0..4 {
        a[i] += a[i + 4];
    }
    (a[0] + a[2]) + (a[1] + a[3])
}

/// Up to 16 values, zero-padded.
#[inline(always)]
pub(crate) fn load_lanes(x: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..x.len()].copy_from_slice(x);
    lanes
}

/// Dot product of two rows of equal length.
#[inline(always)]
pub(crate) fn dot_body<S: Stripes>(stripes: S, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "a dot product takes rows of one length");
    let mut acc = stripes.zero();
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        acc = stripes.fma(a, b, acc);
    }
    if !a_tail.is_empty() {
        acc = stripes.fma(&load_lanes(a_tail), &load_lanes(b_tail), acc);
    }
    stripes.tree(acc)
}

/// Sum of a row: `fma(x, 1, acc)` is an addition.
#[inline(always)]
pub(super) fn sum_body<S: Stripes>(stripes: S, x: &[f32]) -> f32 {
    let mut acc = stripes.zero();
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        acc = stripes.fma(chunk, &[1.0; LANES], acc);
    }
    if !tail.is_empty() {
        acc = stripes.fma(&load_lanes(tail), &[1.0; LANES], acc);
    }
    stripes.tree(acc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_pairwise() {
        // 2²⁴ + 1 is not representable: the order of additions shows in the result.
        let mut acc = [0.0; 16];
        acc[0] = 16_777_216.0;
        acc[8] = 1.0; // lost: added to acc[0] first
        acc[4] = 1.0;
        acc[12] = 1.0; // kept: acc[4] + acc[12] = 2 joins later
        assert_eq!(tree16(&acc), 16_777_218.0);
    }

    #[test]
    fn dot_and_sum_stripe_by_sixteen() {
        let x: Vec<f32> = (0..131).map(|i| (i as f32).sin_like()).collect();
        let ones = vec![1.0; 131];
        let mut acc = [0.0f32; 16];
        for (j, &v) in x.iter().enumerate() {
            acc[j % 16] += v;
        }
        assert_eq!(sum_body(PlainStripes, &x).to_bits(), tree16(&acc).to_bits());
        assert_eq!(dot_body(PlainStripes, &x, &ones).to_bits(), tree16(&acc).to_bits());
        assert_eq!(dot_body(PlainStripes, &[], &[]), 0.0);
    }

    trait SinLike {
        fn sin_like(self) -> f32;
    }

    impl SinLike for f32 {
        /// Irregular values of mixed sign and size without libm.
        fn sin_like(self) -> f32 {
            let t = (self * 0.618_034).fract() - 0.5;
            t * t * t * 37.0 + t
        }
    }
}
