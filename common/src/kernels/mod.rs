//! Matrix kernels and the choice of instruction set at run time.
//!
//! The portable implementation is the definition; AVX2 and AVX-512 (VNNI) are bit-equal to it.
//! Striping (rule N2) is documented here by the kernel's owner.

mod activations;

pub use activations::{Activations, GROUP, QuantRows};

use crate::quant::MatrixRef;

/// Instruction sets with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, runs everywhere.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F/BW/VL/VNNI.
    Avx512,
}

/// Why kernels cannot be made or applied.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KernelError {
    /// `--isa` names something this CPU lacks.
    #[error("this CPU does not support {isa:?}; use --isa auto")]
    Unsupported {
        /// The refused instruction set.
        isa: Isa,
    },
    /// A float matrix was given int8 activations only.
    #[error("a {format} matrix needs f32 activations")]
    NeedsFloat {
        /// The matrix format.
        format: crate::quant::Format,
    },
}

/// The kernels of one instruction set. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    isa: Isa,
}

impl Kernels {
    /// The kernels of `isa`.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when the CPU lacks it.
    pub fn new(isa: Isa) -> Result<Self, KernelError> {
        Ok(Self { isa })
    }

    /// The fastest kernels this CPU supports.
    pub fn best() -> Self {
        todo!()
    }

    /// The instruction set in use.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// `out[r, o] = Σ_i w[o, i] · x[r, i]`, `out` is `[x.rows, w.rows]`.
    /// Parallel over output rows on the current rayon pool.
    ///
    /// # Errors
    /// [`KernelError::NeedsFloat`].
    ///
    /// # Panics
    /// When shapes do not fit.
    pub fn matmul(self, w: MatrixRef<'_>, x: &Activations, out: &mut [f32]) -> Result<(), KernelError> {
        let _ = (w, x, out);
        todo!()
    }

    /// As [`Kernels::matmul`] on the calling thread only, and only for the rows of `x` in `x_rows`
    /// (`out` is `[x_rows.len(), w.rows]`).
    ///
    /// # Errors
    /// [`KernelError::NeedsFloat`].
    pub fn matmul_rows(
        self,
        w: MatrixRef<'_>,
        x: &Activations,
        x_rows: &[usize],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let _ = (w, x, x_rows, out);
        todo!()
    }

    /// Dot product under rule N3 (16 stripes, pairwise tree).
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        let _ = (a, b);
        todo!()
    }

    /// `y[i] = fma(a, x[i], y[i])`.
    pub fn axpy(self, a: f32, x: &[f32], y: &mut [f32]) {
        let _ = (a, x, y);
        todo!()
    }

    /// `out[i] = silu(gate[i]) · up[i]`.
    pub fn silu_mul(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        let _ = (gate, up, out);
        todo!()
    }

    /// In-place softmax of one row, same bits as [`crate::math::softmax`].
    pub fn softmax(self, x: &mut [f32]) {
        let _ = x;
        todo!()
    }
}
