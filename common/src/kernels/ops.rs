//! What an instruction set has to implement: integer matrices, float matrices, and the float operations of
//! [`crate::math`].

use super::attention::AttentionOp;
use super::float::{FloatTask, Widen};
use super::integer::IntTask;
use crate::math;

/// Kernels of one instruction set; every implementation gives the same bits as [`super::portable`].
pub(super) trait Ops: std::fmt::Debug + Sync {
    /// Multiplies an integer matrix.
    fn integer(&self, task: IntTask<'_, '_>);

    /// Multiplies a float matrix.
    fn float_matrix(&self, task: FloatTask<'_, '_>);

    /// Runs a float operation.
    fn float(&self, op: FloatOp<'_>);
}

/// A float operation. One enum, so that an instruction set needs one instance of [`FloatOp::run`].
#[derive(Debug)]
pub(super) enum FloatOp<'a> {
    /// `out = silu(gate) ⊙ up`.
    SiluMul { gate: &'a [f32], up: &'a [f32], out: &'a mut [f32] },
    /// In-place sigmoid.
    Sigmoid { x: &'a mut [f32] },
    /// In-place softmax.
    Softmax { x: &'a mut [f32] },
    /// Root-mean-square norm.
    RmsNorm { x: &'a [f32], w: &'a [f32], eps: f32, out: &'a mut [f32] },
    /// Layer norm.
    LayerNorm { x: &'a [f32], w: &'a [f32], b: &'a [f32], eps: f32, out: &'a mut [f32] },
    /// Sampling weights.
    Weights { x: &'a mut [f64], largest: f64, temperature: f64 },
    /// Sampling weights in f32, and their masses.
    ApproximateWeights {
        x: &'a [f32],
        largest: f32,
        inverse_temperature: f32,
        out: &'a mut [f32],
        masses: &'a mut math::Masses,
    },
    /// Many rows against many rows.
    Attention(AttentionOp<'a>),
}

impl FloatOp<'_> {
    /// Runs the operation with the instructions enabled where this is inlined.
    #[inline(always)]
    pub(super) fn run<S: Widen>(self, s: S) {
        match self {
            FloatOp::SiluMul { gate, up, out } => math::silu_mul_body(gate, up, out),
            FloatOp::Sigmoid { x } => math::sigmoid_body(x),
            FloatOp::Softmax { x } => math::softmax_body(s, x),
            FloatOp::RmsNorm { x, w, eps, out } => math::rms_norm_body(s, x, w, eps, out),
            FloatOp::LayerNorm { x, w, b, eps, out } => math::layer_norm_body(s, x, w, b, eps, out),
            FloatOp::Weights { x, largest, temperature } => math::weights_body(x, largest, temperature),
            FloatOp::ApproximateWeights { x, largest, inverse_temperature, out, masses } => {
                *masses = math::approximate_weights_body(x, largest, inverse_temperature, out);
            }
            FloatOp::Attention(op) => op.run(s),
        }
    }
}
