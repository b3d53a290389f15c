//! Rule N3: the one order in which floats are summed.
//!
//! Element `j` of a row belongs to stripe `j mod 16`. Every stripe accumulates its elements in
//! ascending order, starting from +0, by fused multiply-add (or addition for a plain sum); the 16
//! stripes are then added by [`tree16`]. A row whose length is no multiple of 16 behaves as if it
//! were padded with zeros.

/// Stripes of a float reduction.
pub(crate) const LANES: usize = 16;

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

/// `acc[i] = fma(a[i], b[i], acc[i])` for the 16 stripes.
#[inline(always)]
pub(crate) fn fma_lanes(a: &[f32; LANES], b: &[f32; LANES], acc: &mut [f32; LANES]) {
    for i in 0..LANES {
        acc[i] = a[i].mul_add(b[i], acc[i]);
    }
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
pub(crate) fn dot_body(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "a dot product takes rows of one length");
    let mut acc = [0.0; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        fma_lanes(a, b, &mut acc);
    }
    if !a_tail.is_empty() {
        fma_lanes(&load_lanes(a_tail), &load_lanes(b_tail), &mut acc);
    }
    tree16(&acc)
}

/// Sum of a row.
#[inline(always)]
pub(super) fn sum_body(x: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            acc[i] += chunk[i];
        }
    }
    for (acc, &v) in acc.iter_mut().zip(tail) {
        *acc += v;
    }
    tree16(&acc)
}

/// `y[i] = fma(a, x[i], y[i])`.
#[inline(always)]
pub(crate) fn axpy_body(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "axpy takes rows of one length");
    for (y, &x) in y.iter_mut().zip(x) {
        *y = a.mul_add(x, *y);
    }
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
        assert_eq!(sum_body(&x).to_bits(), tree16(&acc).to_bits());
        assert_eq!(dot_body(&x, &ones).to_bits(), tree16(&acc).to_bits());
        assert_eq!(dot_body(&[], &[]), 0.0);
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
