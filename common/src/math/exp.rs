//! Exponentials, the logarithm, and the activation functions built on them.

/// Adding and subtracting this rounds an f32 of magnitude below 2²² to the nearest even integer.
const ROUND_F32: f32 = 12_582_912.0; // 1.5 · 2²³
/// As [`ROUND_F32`] for f64 values of magnitude below 2⁵¹.
pub(super) const ROUND_F64: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²

/// `exp(x)` in f32: at most 1 unit in the last place from the true value (tested bound).
///
/// `n = round(x · log2 e)`; `r = x − n · ln 2` by two fused steps (the first is exact); Taylor
/// polynomial of degree 7 in `r` (truncation below 6e-9); scaled by `2ⁿ` in two exact halves so that
/// subnormal results round once. Overflows to infinity, underflows to 0, NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = f32::from_bits(0x3f31_7218);
    const LN2_LO: f32 = f32::from_bits(0xb102_e308);
    // Beyond these the result is infinity or rounds to 0 anyway; comparisons keep NaN.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_F32);
    let n = shifted - ROUND_F32;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let mut p = 1.0 / 5040.0;
    p = r.mul_add(p, 1.0 / 720.0);
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    // Wrapping: for NaN the integer is meaningless, and p is NaN whatever it is multiplied by.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND_F32.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2ⁿ` for `n` in `-126..=127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `exp(x)` in f64, relative error below 1e-15 (tested bound); for the sampler and constants.
///
/// As [`exp`], with a Taylor polynomial of degree 13 and plain (unfused) operations.
pub fn exp_f64(x: f64) -> f64 {
    // The high part has 32 significant bits, so n · LN2_HI is exact.
    const LN2_HI: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LO: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    if x.is_nan() {
        return x;
    }
    let x = x.clamp(-746.0, 710.0);
    let n = (x * std::f64::consts::LOG2_E + ROUND_F64) - ROUND_F64;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.0;
    for k in (1..=13).rev() {
        p = 1.0 + r / f64::from(k) * p;
    }
    let n = n as i64;
    let power = |n: i64| f64::from_bits(((n + 1023) as u64) << 52);
    p * power(n >> 1) * power(n - (n >> 1))
}

/// Natural logarithm of a positive, finite, normal number, relative error below 1e-15.
pub(crate) fn ln_f64(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    // ln m = 2 artanh s = 2 (s + s³/3 + s⁵/5 + …), |s| ≤ 0.172
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for k in (0..14).rev() {
        series = series * square + 1.0 / f64::from(2 * k + 1);
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// In-place sigmoid of every element.
#[inline(always)]
pub(crate) fn sigmoid_body(x: &mut [f32]) {
    for v in x {
        *v = sigmoid(*v);
    }
}

/// `out = silu(gate) ⊙ up`.
#[inline(always)]
pub(crate) fn silu_mul_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "silu_mul takes slices of one length");
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu(gate) * up;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from the true value in units of the last place of the f32 result.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let step = f32::from_bits(nearest.abs().to_bits() + 1) - nearest.abs();
        (f64::from(got) - want).abs() / f64::from(step)
    }

    #[test]
    fn exp_is_within_one_ulp_of_the_true_value() {
        let mut worst = (0.0, 0.0);
        let steps = 400_000;
        for i in 0..=steps {
            let x = (-103.9 + 192.6 * f64::from(i) / f64::from(steps)) as f32;
            let e = ulps(exp(x), f64::from(x).exp());
            worst = if e > worst.0 { (e, x) } else { worst };
        }
        for i in 0..=200_000 {
            let x = (f64::from(i) * 1e-5 - 1.0) as f32;
            let e = ulps(exp(x), f64::from(x).exp());
            worst = if e > worst.0 { (e, x) } else { worst };
        }
        assert!(worst.0 < 1.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_is_right_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert_eq!(exp(f32::MAX), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-104.0), 0.0);
        assert_eq!(exp(-103.5), f32::from_bits(1));
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-f32::NAN).is_nan());
    }

    #[test]
    fn exp_f64_and_ln_f64_hold_their_bounds() {
        for i in 0..200_000 {
            let x = -700.0 + f64::from(i) * 0.007;
            let want = x.exp();
            assert!((exp_f64(x) - want).abs() <= 1e-15 * want, "exp({x})");
        }
        assert_eq!(exp_f64(0.0), 1.0);
        assert_eq!(exp_f64(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_f64(f64::INFINITY), f64::INFINITY);
        assert!(exp_f64(f64::NAN).is_nan());
        for x in [1e-300, 0.3, 0.9999, 1.0, 1.0001, std::f64::consts::SQRT_2, 2.0, 1e4, 8e6, 1e300] {
            let want = x.ln();
            assert!((ln_f64(x) - want).abs() <= 1e-15 * want.abs(), "ln({x})");
        }
    }

    #[test]
    fn sigmoid_and_silu_saturate() {
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(200.0), 1.0);
        assert_eq!(sigmoid(-200.0), 0.0);
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(200.0), 200.0);
        assert_eq!(silu(-200.0), 0.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }
}
