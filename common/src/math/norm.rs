//! Norms and softmax of one row.

use super::exp::exp;
use super::reduce::{LANES, Stripes, dot_body, sum_body};
use crate::kernels::Kernels;

/// Root-mean-square norm of one row: `w ⊙ (x · (1 / sqrt(mean(x²) + eps)))`; `x`, `w`, `out` have
/// equal length. The mean of squares is a rule-N3 dot product divided by the length.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    Kernels::best().rms_norm(x, w, eps, out);
}

/// Layer norm of one row with population variance: `fma((x − mean) · (1 / sqrt(var + eps)), w, b)`;
/// all slices have equal length.
pub fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    Kernels::best().layer_norm(x, w, b, eps, out);
}

/// In-place softmax of one row: subtract the maximum, [`exp`], divide each by the rule-N3 sum.
///
/// A NaN anywhere, +infinity, or a row of −infinity only gives NaN; other −infinities give 0.
pub fn softmax(x: &mut [f32]) {
    Kernels::best().softmax(x);
}

/// See [`rms_norm`].
#[inline(always)]
pub(crate) fn rms_norm_body<S: Stripes>(stripes: S, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len(), "rms_norm takes rows of one length");
    let mean_square = dot_body(stripes, x, x) / x.len() as f32;
    let inverse = 1.0 / (mean_square + eps).sqrt();
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
        *out = w * (x * inverse);
    }
}

/// See [`layer_norm`].
#[inline(always)]
pub(crate) fn layer_norm_body<S: Stripes>(
    stripes: S,
    x: &[f32],
    w: &[f32],
    b: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    assert!(
        x.len() == w.len() && x.len() == b.len() && x.len() == out.len(),
        "layer_norm takes rows of one length"
    );
    let mean = sum_body(stripes, x) / x.len() as f32;
    for (out, &x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let variance = dot_body(stripes, out, out) / x.len() as f32;
    let inverse = 1.0 / (variance + eps).sqrt();
    for ((out, &w), &b) in out.iter_mut().zip(w).zip(b) {
        *out = (*out * inverse).mul_add(w, b);
    }
}

/// See [`softmax`].
#[inline(always)]
pub(crate) fn softmax_body<S: Stripes>(stripes: S, x: &mut [f32]) {
    let max = max_body(x);
    for v in x.iter_mut() {
        *v = exp(*v - max);
    }
    let sum = sum_body(stripes, x);
    for v in x.iter_mut() {
        *v /= sum;
    }
}

/// Largest value, ignoring NaN; −infinity for an empty row. Order does not matter.
#[inline(always)]
fn max_body(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    let mut max = f32::NEG_INFINITY;
    for &v in lanes.iter().chain(tail) {
        max = if v > max { v } else { max };
    }
    max
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rms_norm_matches_the_formula() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 * 0.3 - 4.0).collect();
        let w: Vec<f32> = (0..37).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mut out = vec![0.0; 37];
        rms_norm(&x, &w, 1e-5, &mut out);
        let mean: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / 37.0;
        for i in 0..37 {
            let want = f64::from(w[i]) * f64::from(x[i]) / (mean + 1e-5).sqrt();
            assert!((f64::from(out[i]) - want).abs() < 1e-6, "element {i}");
        }
    }

    #[test]
    fn layer_norm_matches_the_formula() {
        let x: Vec<f32> = (0..50).map(|i| (i * i % 17) as f32 - 3.0).collect();
        let w = vec![0.5; 50];
        let b = vec![0.25; 50];
        let mut out = vec![0.0; 50];
        layer_norm(&x, &w, &b, 1e-6, &mut out);
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / 50.0;
        let var = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / 50.0;
        for i in 0..50 {
            let want = 0.5 * (f64::from(x[i]) - mean) / (var + 1e-6).sqrt() + 0.25;
            assert!((f64::from(out[i]) - want).abs() < 1e-6, "element {i}");
        }
    }

    #[test]
    fn softmax_sums_to_one_and_handles_infinities() {
        let mut x: Vec<f32> = (0..100).map(|i| (i % 13) as f32 * 3.0 - 500.0).collect();
        softmax(&mut x);
        assert!((x.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        assert!(x[12] > x[11] && x[11] > x[10]);

        let mut masked = [1.0, f32::NEG_INFINITY, 1.0];
        softmax(&mut masked);
        assert_eq!(masked, [0.5, 0.0, 0.5]);

        let mut poisoned = [0.0, f32::NAN, 1.0];
        softmax(&mut poisoned);
        assert!(poisoned.iter().all(|v| v.is_nan()));
        softmax(&mut []);
    }
}
