//! Sampling weights `exp((logit − largest) / temperature)` of a whole vocabulary.

use super::exp::{ROUND_F64, exp};
use super::reduce::LANES;

/// `x[i] = exp_f64((x[i] − largest) / temperature)`, the bits of [`super::exp_f64`].
///
/// Divisions by the small integers of the series are a product with the rounded reciprocal and one correction.
/// The remainder is exact, and the quotient of a 53-bit number and an integer up to 13 keeps a distance from
/// every rounding boundary that the correction's error cannot bridge, so the result is the rounded quotient.
/// (Where a remainder underflows, the quotient is far below the last place of the 1 it is added to.)
#[inline(always)]
pub(crate) fn weights_body(x: &mut [f64], largest: f64, temperature: f64) {
    for x in x {
        *x = exp_by_reciprocals((*x - largest) / temperature);
    }
}

/// [`super::exp_f64`] without divisions and conversions, so that it vectorises.
#[inline(always)]
fn exp_by_reciprocals(x: f64) -> f64 {
    const LN2_HI: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LO: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    let x = x.clamp(-746.0, 710.0);
    let shifted = x * std::f64::consts::LOG2_E + ROUND_F64;
    let n = shifted - ROUND_F64;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.0;
    let mut k = 13.0;
    for _ in 0..13 {
        let reciprocal = 1.0 / k;
        let q = r * reciprocal;
        let q = q.mul_add(-k, r).mul_add(reciprocal, q);
        p = 1.0 + q * p;
        k -= 1.0;
    }
    let n = shifted.to_bits().wrapping_sub(ROUND_F64.to_bits());
    // n lies in -1077..=1025: halved downwards without a signed shift, which few instruction sets have.
    let half = (n.wrapping_add(2048) >> 1).wrapping_sub(1024);
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2ⁿ` for a small signed `n`.
#[inline(always)]
fn power_of_two(n: u64) -> f64 {
    f64::from_bits(n.wrapping_add(1023) << 52)
}

/// Steps of [`Masses`].
pub const MASS_STEPS: usize = 4;

/// What lies below some weights, approximately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Masses {
    /// Sum of the weights below `2^(-5 (i + 1))`.
    pub below: [f64; MASS_STEPS],
    /// Sum of all.
    pub total: f64,
    /// Number of weights not below `2^(-5 (i + 1))`.
    pub count: [usize; MASS_STEPS],
}

impl Masses {
    /// `2^(-5 (step + 1))`.
    pub const fn threshold(step: usize) -> f32 {
        1.0 / (1_u64 << (5 * (step + 1))) as f32
    }

    /// Adds those of another part of the vocabulary.
    pub fn add(&mut self, other: &Self) {
        self.total += other.total;
        for i in 0..MASS_STEPS {
            self.below[i] += other.below[i];
            self.count[i] += other.count[i];
        }
    }
}

/// Weights summed in f32 before they join an f64: 64 per lane, an error of at most 64 roundings.
const SUMMED_IN_F32: usize = 64 * LANES;

/// `out[i] = exp((x[i] − largest) · inverse_temperature)` in f32, and the masses of `out`.
#[inline(always)]
pub(crate) fn approximate_weights_body(
    x: &[f32],
    largest: f32,
    inverse_temperature: f32,
    out: &mut [f32],
) -> Masses {
    assert_eq!(x.len(), out.len(), "a weight per logit");
    let mut masses = Masses::default();
    for (x, out) in x.chunks(SUMMED_IN_F32).zip(out.chunks_mut(SUMMED_IN_F32)) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = exp((x - largest) * inverse_temperature);
        }
        let (chunks, tail) = out.as_chunks::<LANES>();
        masses.total += sum_below(chunks, tail, f32::INFINITY).0;
        for step in 0..MASS_STEPS {
            let (sum, count) = sum_below(chunks, tail, Masses::threshold(step));
            masses.below[step] += sum;
            masses.count[step] += out.len() - count;
        }
    }
    masses
}

/// Sum and number of the values below `threshold`, of at most 64 chunks and a tail.
#[inline(always)]
fn sum_below(chunks: &[[f32; LANES]], tail: &[f32], threshold: f32) -> (f64, usize) {
    let mut sums = [0.0; LANES];
    let mut counts = [0.0; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            let below = chunk[i] < threshold;
            sums[i] += if below { chunk[i] } else { 0.0 };
            counts[i] += if below { 1.0 } else { 0.0 };
        }
    }
    let (mut sum, mut count) = (0.0, 0);
    for i in 0..LANES {
        sum += f64::from(sums[i]);
        count += counts[i] as usize;
    }
    for &value in tail {
        if value < threshold {
            sum += f64::from(value);
            count += 1;
        }
    }
    (sum, count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Isa, Kernels};
    use crate::math::exp_f64;

    #[test]
    fn the_fast_exponential_has_the_bits_of_the_plain_one() {
        let mut xs: Vec<f64> = (0..300_000).map(|i| -760.0 + f64::from(i) * 0.0051).collect();
        xs.extend((0..300_000).map(|i| -f64::from(i) * 0.000_317_9));
        xs.extend([0.0, -0.0, 1e-310, -1e-310, 5e-324, -1e-20, f64::INFINITY, f64::NEG_INFINITY, -1e300]);
        for isa in Isa::available() {
            let mut weights = xs.clone();
            Kernels::new(isa).unwrap().sampling_weights(&mut weights, 0.0, 1.0);
            for (x, w) in xs.iter().zip(weights) {
                assert_eq!(w.to_bits(), exp_f64(*x).to_bits(), "{isa}: exp({x})");
            }
        }
    }

    #[test]
    fn scaled_logits_are_divided_like_the_plain_ones() {
        let logits: Vec<f64> =
            (0..5000).map(|i| f64::from((i * 7919 % 20_011) as f32 / 700.3 - 14.0)).collect();
        for temperature in [1.0, 0.7, 1e-3, 1e300] {
            let mut weights = logits.clone();
            Kernels::best().sampling_weights(&mut weights, 15.0, temperature);
            for (x, w) in logits.iter().zip(weights) {
                assert_eq!(w.to_bits(), exp_f64((x - 15.0) / temperature).to_bits());
            }
        }
    }

    #[test]
    fn approximate_weights_and_masses_are_close() {
        let logits: Vec<f32> = (0..5003).map(|i| (i * 7919 % 20_011) as f32 / 700.3 - 24.0).collect();
        let mut out = vec![0.0; logits.len()];
        let masses = Kernels::best().approximate_weights(&logits, 5.0, 1.25, &mut out);
        let exact: Vec<f64> = logits.iter().map(|&x| exp_f64((f64::from(x) - 5.0) * 1.25)).collect();
        for (a, e) in out.iter().zip(&exact) {
            assert!((f64::from(*a) - e).abs() <= 2e-5 * e + 1e-37);
        }
        assert!((masses.total - exact.iter().sum::<f64>()).abs() < 3e-5 * masses.total);
        for step in 0..MASS_STEPS {
            let threshold = Masses::threshold(step);
            assert_eq!(masses.count[step], out.iter().filter(|&&w| w >= threshold).count());
            let below: f64 = out.iter().filter(|&&w| w < threshold).map(|&w| f64::from(w)).sum();
            assert!((masses.below[step] - below).abs() <= 1e-5 * below + 1e-30);
        }
    }
}
