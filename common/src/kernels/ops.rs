//! What an instruction set has to implement: integer matrices, and the float operations of [`crate::math`].

use super::attention::AttentionOp;
use super::integer::IntTask;
use crate::math::{self, LANES, Stripes, dot_body, four_dots_body, load_lanes};
use crate::quant::decode::{Bf16, ChunkDecoder, F16, F32, Fp8, decode_chunks};

/// Kernels of one instruction set; every implementation gives the same bits as [`super::portable`].
pub(super) trait Ops: std::fmt::Debug + Sync {
    /// Multiplies an integer matrix.
    fn integer(&self, task: IntTask<'_, '_>);

    /// Runs a float operation.
    fn float(&self, op: FloatOp<'_>);
}

/// One row of a float matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum FloatRow<'a> {
    /// Little-endian f32.
    F32(&'a [u8]),
    /// IEEE half.
    F16(&'a [u8]),
    /// bfloat16.
    Bf16(&'a [u8]),
    /// e4m3fn bytes, and one scale per 128 columns.
    Fp8(&'a [u8], &'a [f32]),
}

/// A float operation. One enum, so that an instruction set needs one instance of [`FloatOp::run`].
#[derive(Debug)]
pub(super) enum FloatOp<'a> {
    /// `out[r]` = dot product of a weight row with row `x_rows[r]` of `x`, which is `[_, cols]`.
    Row {
        row: FloatRow<'a>,
        cols: usize,
        x: &'a [f32],
        x_rows: &'a [usize],
        scratch: &'a mut Vec<f32>,
        out: &'a mut [f32],
    },
    /// `out = a · b`.
    Dot { a: &'a [f32], b: &'a [f32], out: &'a mut f32 },
    /// `y = fma(a, x, y)`.
    Axpy { a: f32, x: &'a [f32], y: &'a mut [f32] },
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
    pub(super) fn run<S: Stripes>(self, s: S) {
        match self {
            FloatOp::Row { row, cols, x, x_rows, scratch, out } => match row {
                FloatRow::F32(bytes) => float_row(s, F32, bytes, cols, x, x_rows, scratch, out),
                FloatRow::F16(bytes) => float_row(s, F16, bytes, cols, x, x_rows, scratch, out),
                FloatRow::Bf16(bytes) => float_row(s, Bf16, bytes, cols, x, x_rows, scratch, out),
                FloatRow::Fp8(bytes, scales) => {
                    float_row(s, Fp8 { scales }, bytes, cols, x, x_rows, scratch, out)
                }
            },
            FloatOp::Dot { a, b, out } => *out = dot_body(s, a, b),
            FloatOp::Axpy { a, x, y } => math::axpy_body(a, x, y),
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

/// See [`FloatOp::Row`]. One activation row decodes on the fly; several share one decoded row.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the fields of FloatOp::Row, taken apart by format")]
fn float_row<S: Stripes, const BYTES: usize>(
    stripes: S,
    decoder: impl ChunkDecoder<BYTES>,
    bytes: &[u8],
    cols: usize,
    x: &[f32],
    x_rows: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let x_row = |row: usize| &x[row * cols..(row + 1) * cols];
    if let ([row], [out]) = (x_rows, &mut *out) {
        *out = decoded_dot(stripes, decoder, bytes, x_row(*row));
        return;
    }
    scratch.resize(cols, 0.0);
    decode_chunks(decoder, bytes, scratch);
    let (quads, rest) = x_rows.as_chunks::<4>();
    let (out_quads, out_rest) = out.as_chunks_mut::<4>();
    for (rows, out) in quads.iter().zip(out_quads) {
        let rows = [x_row(rows[0]), x_row(rows[1]), x_row(rows[2]), x_row(rows[3])];
        *out = four_dots_body(stripes, scratch, rows);
    }
    for (&row, out) in rest.iter().zip(out_rest) {
        *out = dot_body(stripes, scratch, x_row(row));
    }
}

/// Rule-N3 dot product of a stored row with an f32 row.
#[inline(always)]
fn decoded_dot<S: Stripes, const BYTES: usize>(
    stripes: S,
    decoder: impl ChunkDecoder<BYTES>,
    bytes: &[u8],
    x: &[f32],
) -> f32 {
    let mut acc = stripes.zero();
    let (chunks, tail) = bytes.as_chunks::<BYTES>();
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    for (i, (bytes, x)) in chunks.iter().zip(x_chunks).enumerate() {
        acc = stripes.fma(&decoder.decode(bytes, i), x, acc);
    }
    if !x_tail.is_empty() {
        let mut padded = [0; BYTES];
        padded[..tail.len()].copy_from_slice(tail);
        acc = stripes.fma(&decoder.decode(&padded, chunks.len()), &load_lanes(x_tail), acc);
    }
    stripes.tree(acc)
}
