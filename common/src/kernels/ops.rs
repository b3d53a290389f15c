//! What an instruction set has to implement: one weight row against activation rows, and the float
//! operations of [`crate::math`].

use super::QuantRows;
use crate::math::LANES;
use crate::quant::decode::{Bf16, ChunkDecoder, F16, F32, Fp8, decode_chunks};

/// Kernels of one instruction set; every implementation gives the same bits as [`super::portable`].
pub(super) trait Ops: std::fmt::Debug + Sync {
    /// `out[r]` = the unscaled dot product of a nibble row with activation row `x_rows[r]`.
    fn int4(
        &self,
        weights: &[u8],
        scales: NibbleScales<'_>,
        x: &QuantRows,
        x_rows: &[usize],
        out: &mut [f32],
    );

    /// `out[r]` = the unscaled dot product of an int8 row with activation row `x_rows[r]`; `scales`, if any,
    /// has one weight scale per group of 64 columns.
    fn int8(&self, weights: &[i8], scales: Option<&[f32]>, x: &QuantRows, x_rows: &[usize], out: &mut [f32]);

    /// Runs a float operation.
    fn float(&self, op: FloatOp<'_>);
}

/// Weight scales of one nibble row, expanded so that kernels need no division.
#[derive(Clone, Copy, Debug)]
pub(super) enum NibbleScales<'a> {
    /// One scale for the whole row, applied by the caller.
    Row,
    /// One per group of 64 columns: `[groups]`.
    PerGroup(&'a [f32]),
    /// One per stripe of 8 columns: `[groups · 8]`.
    PerStripe(&'a [f32]),
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
}

impl FloatOp<'_> {
    /// Runs the operation with the instructions enabled where this is inlined.
    #[inline(always)]
    pub(super) fn run(self) {
        use crate::math;
        match self {
            FloatOp::Row { row, cols, x, x_rows, scratch, out } => match row {
                FloatRow::F32(bytes) => float_row(F32, bytes, cols, x, x_rows, scratch, out),
                FloatRow::F16(bytes) => float_row(F16, bytes, cols, x, x_rows, scratch, out),
                FloatRow::Bf16(bytes) => float_row(Bf16, bytes, cols, x, x_rows, scratch, out),
                FloatRow::Fp8(bytes, scales) => {
                    float_row(Fp8 { scales }, bytes, cols, x, x_rows, scratch, out)
                }
            },
            FloatOp::Dot { a, b, out } => *out = math::dot_body(a, b),
            FloatOp::Axpy { a, x, y } => math::axpy_body(a, x, y),
            FloatOp::SiluMul { gate, up, out } => math::silu_mul_body(gate, up, out),
            FloatOp::Sigmoid { x } => math::sigmoid_body(x),
            FloatOp::Softmax { x } => math::softmax_body(x),
            FloatOp::RmsNorm { x, w, eps, out } => math::rms_norm_body(x, w, eps, out),
            FloatOp::LayerNorm { x, w, b, eps, out } => math::layer_norm_body(x, w, b, eps, out),
        }
    }
}

/// See [`FloatOp::Row`]. One activation row decodes on the fly; several share one decoded row.
#[inline(always)]
fn float_row<const BYTES: usize>(
    decoder: impl ChunkDecoder<BYTES>,
    bytes: &[u8],
    cols: usize,
    x: &[f32],
    x_rows: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    if let ([row], [out]) = (x_rows, &mut *out) {
        *out = decoded_dot(decoder, bytes, &x[row * cols..(row + 1) * cols]);
        return;
    }
    scratch.resize(cols, 0.0);
    decode_chunks(decoder, bytes, scratch);
    for (row, out) in x_rows.iter().zip(out) {
        *out = crate::math::dot_body(scratch, &x[row * cols..(row + 1) * cols]);
    }
}

/// Rule-N3 dot product of a stored row with an f32 row.
#[inline(always)]
fn decoded_dot<const BYTES: usize>(decoder: impl ChunkDecoder<BYTES>, bytes: &[u8], x: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (chunks, tail) = bytes.as_chunks::<BYTES>();
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    for (i, (bytes, x)) in chunks.iter().zip(x_chunks).enumerate() {
        crate::math::fma_lanes(&decoder.decode(bytes, i), x, &mut acc);
    }
    if !x_tail.is_empty() {
        let mut padded = [0; BYTES];
        padded[..tail.len()].copy_from_slice(tail);
        let w = decoder.decode(&padded, chunks.len());
        crate::math::fma_lanes(&w, &crate::math::load_lanes(x_tail), &mut acc);
    }
    crate::math::tree16(&acc)
}
