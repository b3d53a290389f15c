//! Matrix kernels and the choice of instruction set at run time.
//!
//! The portable implementation is the definition; AVX2 and AVX-512 (VNNI) are bit-equal to it.
//!
//! # Striping of integer rows (rule N2)
//!
//! A row is cut into groups `g` of 64 columns; `xs[g]` is the activation scale of the group. A group has four
//! stripes of 16 columns: the weight in byte `k` of the group's stored bytes (64 for int8, 32 for int4, 16 for
//! int2 and for the plane of low bits of int3) belongs to stripe `s = ⌊k / 4⌋ mod 4`. So the columns of stripe
//! `s` within a group are
//!
//! * **int8**: `16q + 4s .. 16q + 4s + 4` for `q` in 0..4,
//! * **int4**: `8s .. 8s + 8` and `32 + 8s .. 32 + 8s + 8`,
//! * **int2, int3**: `16s .. 16s + 16`.
//!
//! Products of weights (−8..7 for int4, and so on) and activations are summed exactly in i32 within a stripe,
//! and every stripe sum joins one of 16 f32 accumulators (starting at +0, groups ascending) by one fused
//! multiply-add: `acc[4·(g mod 4) + s] = fma(sum, scale, acc[…])`. The accumulators are added pairwise: `i` with
//! `i + 8`, then `+ 4`, `+ 2`, `+ 1`. A row counts as padded to a multiple of 256 columns; absent columns and
//! the scales of absent groups are zero.
//!
//! Where a row has one scale, `scale` is `xs[g]` and the tree's result is multiplied by the row's scale; where
//! weights have a scale per group, `scale` is the f32 product `ws · xs[g]` and there is no last multiplication.
//! **int4 with groups that are no multiple of 64 columns** has stripes of 8 columns instead: of every four
//! groups first `8s .. 8s + 8` of each joins its accumulator, then `32 + 8s .. 32 + 8s + 8`, with the scale
//! `ws[(64g + first column) / group] · xs[g]`.
//!
//! Why this way: with 4 stripes, four groups fill a vector of 16 sums. Four dot-product instructions accumulate
//! into it before one conversion and one multiply-add, so that these are a fifth of the multiplier's work
//! instead of a half, and the 32-bit lanes need only whole 128-bit blocks to be moved.
//!
//! Float rows follow rule N3 (`math::reduce`); fp8 elements are multiplied by their block scale (one f32
//! rounding) before they enter the dot product.

mod activations;
mod arrange;
mod attention;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512;
mod code;
mod engine;
mod float;
mod integer;
mod matmul;
mod ops;
mod portable;
#[allow(unsafe_code)]
mod prefetch;
#[allow(unsafe_code)]
mod probe;
mod rows;
mod scales;
mod tile;

use std::str::FromStr;
use std::sync::OnceLock;

pub use activations::{Activations, GROUP, QuantRows};
pub use attention::{RowsMut, RowsRef, StoredRows};
pub(crate) use matmul::Threads;
use ops::{FloatOp, Ops};
pub use probe::{Macs, Probe};

use crate::math::Masses;
use crate::quant::MatrixRef;

/// Instruction sets with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, runs everywhere.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F/BW/VL/DQ/VNNI.
    Avx512,
}

impl Isa {
    /// Every instruction set with a kernel, slowest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The instruction sets this CPU supports, slowest first; never empty.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.ops().is_some()).collect()
    }

    /// The kernels, if this CPU supports them.
    fn ops(self) -> Option<&'static dyn Ops> {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Isa::Portable => Some(avx2::detect_fma().unwrap_or(&portable::Portable)),
            Isa::Avx2 => avx2::detect(),
            Isa::Avx512 => avx512::detect(),
        };
        #[cfg(not(target_arch = "x86_64"))]
        return match self {
            Isa::Portable => Some(&portable::Portable),
            Isa::Avx2 | Isa::Avx512 => None,
        };
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        let known = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
        known.ok_or_else(|| KernelError::Unknown { name: name.to_string() })
    }
}

/// Why kernels cannot be made or applied.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KernelError {
    /// `--isa` names something this CPU lacks.
    #[error("this CPU does not support {isa}; use --isa auto")]
    Unsupported {
        /// The refused instruction set.
        isa: Isa,
    },
    /// `--isa` names nothing we know.
    #[error("there is no instruction set \"{name}\"; use portable, avx2 or avx512")]
    Unknown {
        /// What was asked for.
        name: String,
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
    ops: &'static dyn Ops,
}

impl Kernels {
    /// The kernels of `isa`.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when the CPU lacks it.
    pub fn new(isa: Isa) -> Result<Self, KernelError> {
        let ops = isa.ops().ok_or(KernelError::Unsupported { isa })?;
        Ok(Self { isa, ops })
    }

    /// The fastest kernels this CPU supports.
    pub fn best() -> Self {
        static BEST: OnceLock<Kernels> = OnceLock::new();
        *BEST.get_or_init(|| {
            let best = Isa::ALL.into_iter().rev().find_map(|isa| Kernels::new(isa).ok());
            best.expect("the portable kernels run everywhere")
        })
    }

    /// The instruction set in use.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// `out[r, o] = Σ_i w[o, i] · x[r, i]`, `out` is `[x.rows, w.rows]`.
    /// Parallel over output rows on the current rayon pool when the work is worth it.
    ///
    /// An integer matrix quantises activations that lack the int8 form; call [`Activations::quantized`]
    /// first when several matrices take the same rows.
    ///
    /// # Errors
    /// [`KernelError::NeedsFloat`].
    ///
    /// # Panics
    /// When shapes do not fit.
    pub fn matmul(self, w: MatrixRef<'_>, x: &Activations, out: &mut [f32]) -> Result<(), KernelError> {
        let all: Vec<usize> = (0..x.rows()).collect();
        matmul::matmul(self.ops, w, x, &all, out, Threads::Pool)
    }

    /// As [`Kernels::matmul`] on the calling thread only, and only for the rows of `x` in `x_rows`
    /// (`out` is `[x_rows.len(), w.rows]`).
    ///
    /// # Errors
    /// [`KernelError::NeedsFloat`].
    ///
    /// # Panics
    /// When shapes do not fit or a row does not exist.
    pub fn matmul_rows(
        self,
        w: MatrixRef<'_>,
        x: &Activations,
        x_rows: &[usize],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.matmul_on(Threads::One, w, x, x_rows, out)
    }

    /// As [`Kernels::matmul_rows`] on the threads asked for.
    pub(crate) fn matmul_on(
        self,
        threads: Threads,
        w: MatrixRef<'_>,
        x: &Activations,
        x_rows: &[usize],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        matmul::matmul(self.ops, w, x, x_rows, out, threads)
    }

    /// `out[i] = silu(gate[i]) · up[i]`.
    ///
    /// # Panics
    /// When lengths differ (as all operations on slices below).
    pub fn silu_mul(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        self.ops.float(FloatOp::SiluMul { gate, up, out });
    }

    /// In-place sigmoid of every element, same bits as [`crate::math::sigmoid`].
    pub fn sigmoid(self, x: &mut [f32]) {
        self.ops.float(FloatOp::Sigmoid { x });
    }

    /// In-place softmax of one row, same bits as [`crate::math::softmax`].
    pub fn softmax(self, x: &mut [f32]) {
        self.ops.float(FloatOp::Softmax { x });
    }

    /// `x[i] = exp_f64((x[i] − largest) / temperature)`, same bits as [`crate::math::exp_f64`].
    pub fn sampling_weights(self, x: &mut [f64], largest: f64, temperature: f64) {
        self.ops.float(FloatOp::Weights { x, largest, temperature });
    }

    /// `out[i] = exp((x[i] − largest) · inverse_temperature)` in f32 with [`crate::math::exp`], and what lies
    /// below some of these weights.
    pub fn approximate_weights(
        self,
        x: &[f32],
        largest: f32,
        inverse_temperature: f32,
        out: &mut [f32],
    ) -> Masses {
        let mut masses = Masses::default();
        let op = FloatOp::ApproximateWeights { x, largest, inverse_temperature, out, masses: &mut masses };
        self.ops.float(op);
        masses
    }

    /// Root-mean-square norm of one row, same bits as [`crate::math::rms_norm`].
    pub fn rms_norm(self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        self.ops.float(FloatOp::RmsNorm { x, w, eps, out });
    }

    /// Layer norm of one row, same bits as [`crate::math::layer_norm`].
    pub fn layer_norm(self, x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
        self.ops.float(FloatOp::LayerNorm { x, w, b, eps, out });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert_eq!("sse9".parse::<Isa>(), Err(KernelError::Unknown { name: "sse9".into() }));
    }

    #[test]
    fn the_best_kernels_are_the_last_available() {
        assert_eq!(Isa::available()[0], Isa::Portable);
        assert_eq!(Isa::available().last(), Some(&Kernels::best().isa()));
        for isa in Isa::ALL {
            assert_eq!(Kernels::new(isa).is_ok(), Isa::available().contains(&isa));
        }
    }
}
