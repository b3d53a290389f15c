//! Rotary position embedding: frequencies, angles, rotations.

use super::exp::{ROUND_F64, exp_f64, ln_f64};

/// The cosine and sine of the rotary angles of one position.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    /// `cos(p · θ^(-2i/dim))` for `i` in `0..dim/2`.
    pub cos: Vec<f32>,
    /// The sines, aligned with `cos`.
    pub sin: Vec<f32>,
}

/// Rotary frequencies of one model: `θ^(-2i/dim)` in f32.
#[derive(Clone, Debug)]
pub struct Rope {
    /// `dim / 2` inverse frequencies.
    pub inv_freq: Vec<f32>,
}

impl Rope {
    /// Frequencies for `dim` (even) rotated elements and base `theta` (positive).
    ///
    /// As the reference does it: the exponent `2i/dim`, the power `θ^(2i/dim)` and its reciprocal
    /// are each rounded to f32.
    pub fn new(dim: usize, theta: f64) -> Self {
        let ln_theta = ln_f64(theta);
        let inv_freq = (0..dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / dim as f32;
                1.0 / exp_f64(f64::from(exponent) * ln_theta) as f32
            })
            .collect();
        Self { inv_freq }
    }

    /// Angles of position `p`: sin/cos of the f32 product `p · inv_freq`.
    pub fn angles(&self, position: usize) -> RopeAngles {
        let (sin, cos) = self.inv_freq.iter().map(|&f| sin_cos(position as f32 * f)).unzip();
        RopeAngles { cos, sin }
    }
}

impl RopeAngles {
    /// Rotates pairs `(2i, 2i+1)` in place (GLM: "interleaved"); `x.len() == 2 * cos.len()`.
    ///
    /// # Panics
    /// When the length differs.
    pub fn rotate_interleaved(&self, x: &mut [f32]) {
        assert_eq!(x.len(), 2 * self.cos.len(), "a row to rotate has two elements per angle");
        for ((pair, &cos), &sin) in x.chunks_exact_mut(2).zip(&self.cos).zip(&self.sin) {
            (pair[0], pair[1]) = rotate(pair[0], pair[1], cos, sin);
        }
    }

    /// Rotates pairs `(i, i + dim/2)` in place (NeoX style, OLMoE).
    ///
    /// # Panics
    /// When `x.len() != 2 * cos.len()`.
    pub fn rotate_half(&self, x: &mut [f32]) {
        assert_eq!(x.len(), 2 * self.cos.len(), "a row to rotate has two elements per angle");
        let (first, second) = x.split_at_mut(self.cos.len());
        for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(&self.cos).zip(&self.sin) {
            (*a, *b) = rotate(*a, *b, cos, sin);
        }
    }
}

/// `(a cos − b sin, b cos + a sin)`, each product and sum rounded on its own.
#[inline(always)]
fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a * cos - b * sin, b * cos + a * sin)
}

/// Sine and cosine of a finite f32 of magnitude up to 2²⁴, to f32 accuracy (tested bound 1 ulp).
///
/// `n = round(x · 2/π)`; `r = x − n · π/2` in f64 with π/2 in three parts, of which the first two
/// have 28 bits so that their products with `n` are exact; Taylor polynomials on `|r| ≤ π/4`.
fn sin_cos(x: f32) -> (f32, f32) {
    const HALF_PI: [f64; 3] = [
        f64::from_bits(0x3ff9_21fb_5400_0000),
        f64::from_bits(0x3e11_0b46_1000_0000),
        f64::from_bits(0x3c5a_6263_3145_c06e),
    ];
    let x = f64::from(x);
    let n = (x * std::f64::consts::FRAC_2_PI + ROUND_F64) - ROUND_F64;
    let r = ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2];
    let square = r * r;
    // 1 − r²/(2·3) (1 − r²/(4·5) (…)) and 1 − r²/(1·2) (1 − r²/(3·4) (…))
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..=9).rev() {
        let k = f64::from(2 * k);
        sin = 1.0 - square / (k * (k + 1.0)) * sin;
        cos = 1.0 - square / ((k - 1.0) * k) * cos;
    }
    sin *= r;
    let (sin, cos) = (sin as f32, cos as f32);
    match (n as i64) & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sin_cos_is_accurate_up_to_large_angles() {
        let mut x = 1e-6f32;
        while x < 1.6e7 {
            for x in [x, -x] {
                let (sin, cos) = sin_cos(x);
                let (want_sin, want_cos) = f64::from(x).sin_cos();
                for (got, want) in [(sin, want_sin), (cos, want_cos)] {
                    let bound = 1.2e-7 * want.abs() + 1e-14;
                    assert!((f64::from(got) - want).abs() <= bound, "at {x}: {got} against {want}");
                }
            }
            x = x * 1.0001 + 1e-7;
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    #[test]
    fn frequencies_follow_the_formula() {
        for (dim, theta) in [(64, 8e6), (16, 1e4), (128, 1e6)] {
            let rope = Rope::new(dim, theta);
            assert_eq!(rope.inv_freq.len(), dim / 2);
            assert_eq!(rope.inv_freq[0], 1.0);
            for (i, &f) in rope.inv_freq.iter().enumerate() {
                let want = 1.0 / theta.powf((2 * i) as f64 / dim as f64);
                assert!((f64::from(f) - want).abs() < 2e-7 * want);
            }
        }
    }

    #[test]
    fn both_rotations_turn_pairs_by_the_angle() {
        let rope = Rope::new(8, 1e4);
        let angles = rope.angles(3);
        assert_eq!(rope.angles(0).cos, [1.0; 4]);
        let mut interleaved: Vec<f32> = (1..=8).map(|i| i as f32).collect();
        angles.rotate_interleaved(&mut interleaved);
        // The same pairs in half-split order.
        let mut half = vec![1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 6.0, 8.0];
        angles.rotate_half(&mut half);
        for i in 0..4 {
            assert_eq!(interleaved[2 * i], half[i]);
            assert_eq!(interleaved[2 * i + 1], half[i + 4]);
            let (a, b) = (f64::from(2 * i as u32 + 1), f64::from(2 * i as u32 + 2));
            let angle = 3.0 * f64::from(rope.inv_freq[i]);
            assert!((f64::from(half[i]) - (a * angle.cos() - b * angle.sin())).abs() < 1e-5);
            assert!((f64::from(half[i + 4]) - (b * angle.cos() + a * angle.sin())).abs() < 1e-5);
        }
    }
}
