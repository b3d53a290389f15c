//! One expert's SwiGLU feed-forward network: `down(silu(gate(x)) ⊙ up(x))`.

use crate::fixed::FixedRows;
use crate::kernels::{Activations, Kernels};
use crate::quant::MatrixRef;

/// The three matrices of one SwiGLU FFN; gate and up are `[inner, hidden]`, down is `[hidden, inner]`.
#[derive(Clone, Copy, Debug)]
pub struct FfnRef<'a> {
    /// Gate projection.
    pub gate: MatrixRef<'a>,
    /// Up projection.
    pub up: MatrixRef<'a>,
    /// Down projection.
    pub down: MatrixRef<'a>,
}

/// One routed row of an expert: the row of the batch and its gate weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutedRow {
    /// Row of the batch.
    pub row: u32,
    /// Router weight of this expert for the row.
    pub gate: f32,
}

/// Why an FFN could not be computed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FfnError {
    /// See [`crate::kernels::KernelError`].
    #[error(transparent)]
    Kernel(#[from] crate::kernels::KernelError),
    /// See [`crate::fixed::FixedError`].
    #[error(transparent)]
    Fixed(#[from] crate::fixed::FixedError),
}

/// Adds `gate_r · ffn(x_r)` in fixed point to `sums` for every routed row, on the calling thread.
///
/// # Errors
/// [`FfnError`].
pub fn expert_ffn(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    routed: &[RoutedRow],
    sums: &mut FixedRows,
) -> Result<(), FfnError> {
    let _ = (kernels, ffn, x, routed, sums);
    todo!()
}

/// `out = ffn(x)` for all rows, parallel on the current rayon pool (shared expert, dense MLP).
///
/// # Errors
/// [`FfnError`].
pub fn dense_ffn(
    kernels: Kernels,
    ffn: FfnRef<'_>,
    x: &Activations,
    out: &mut [f32],
) -> Result<(), FfnError> {
    let _ = (kernels, ffn, x, out);
    todo!()
}
