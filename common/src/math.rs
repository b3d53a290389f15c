//! The model's elementary functions (rule N4), the same operations in scalar and SIMD code.

/// Root-mean-square norm of one row: `w ⊙ x / sqrt(mean(x²) + eps)`; `x`, `w`, `out` have equal length.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let _ = (x, w, eps, out);
    todo!()
}

/// Layer norm of one row with population variance.
pub fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    let _ = (x, w, b, eps, out);
    todo!()
}

/// `exp(x)` to within the documented bound; never the platform's libm.
pub fn exp(x: f32) -> f32 {
    let _ = x;
    todo!()
}

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + exp(-x))`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// In-place softmax of one row.
pub fn softmax(x: &mut [f32]) {
    let _ = x;
    todo!()
}

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
    /// Frequencies for `dim` (even) rotated elements and base `theta`.
    pub fn new(dim: usize, theta: f64) -> Self {
        let _ = (dim, theta);
        todo!()
    }

    /// Angles of position `p`: sin/cos of the f32 product `p · inv_freq`.
    pub fn angles(&self, position: usize) -> RopeAngles {
        let _ = position;
        todo!()
    }
}

impl RopeAngles {
    /// Rotates pairs `(2i, 2i+1)` in place (GLM: "interleaved"); `x.len() == 2 * cos.len()`.
    pub fn rotate_interleaved(&self, x: &mut [f32]) {
        let _ = x;
        todo!()
    }

    /// Rotates pairs `(i, i + dim/2)` in place (NeoX style, OLMoE).
    pub fn rotate_half(&self, x: &mut [f32]) {
        let _ = x;
        todo!()
    }
}

/// Indices of the `k` largest values, descending; equal values keep the lower index first (rule N7).
pub fn top_k(values: &[f32], k: usize) -> Vec<usize> {
    let _ = (values, k);
    todo!()
}

/// Index of the largest value, the lowest on a tie (rule N7). NaN never wins.
pub fn argmax(values: &[f32]) -> usize {
    let _ = values;
    todo!()
}
