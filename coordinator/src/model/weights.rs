//! Reading the dense part into memory, and the two shapes of it both families share.

use shimmer_common::container::{Container, ContainerError};
use shimmer_common::ffn::{FfnRef, dense_ffn};
use shimmer_common::kernels::{Activations, Kernels, RowsMut, RowsRef, StoredRows};
use shimmer_common::quant::Matrix;

use super::LoadProgress;
use super::rows::{Rows, for_each_chunk};

/// Loads tensors by name and reports progress.
pub(super) struct Loader<'a> {
    container: &'a Container,
    progress: LoadProgress<'a>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Loader<'a> {
    /// Loads from `container`, calling `progress` after every tensor.
    pub fn new(container: &'a Container, progress: LoadProgress<'a>) -> Self {
        Self { container, progress, done_bytes: 0, total_bytes: container.dense_bytes() }
    }

    /// Whether the model has matrix `name`.
    pub fn has(&self, name: &str) -> bool {
        self.container.matrix_spec(name).is_some()
    }

    /// Reads a matrix.
    pub fn matrix(&mut self, name: &str) -> Result<Matrix, ContainerError> {
        let matrix = self.container.load_matrix(name)?;
        self.advance(matrix.bytes());
        Ok(matrix)
    }

    /// Reads a norm's weights or a bias as f32.
    pub fn vector(&mut self, name: &str) -> Result<Vec<f32>, ContainerError> {
        let vector = self.container.load_vector(name)?;
        self.advance(vector.len() * 4);
        Ok(vector)
    }

    /// Reads `{prefix}.gate_proj`, `up_proj` and `down_proj`.
    pub fn ffn(&mut self, prefix: &str) -> Result<Ffn, ContainerError> {
        Ok(Ffn {
            gate: self.matrix(&format!("{prefix}.gate_proj.weight"))?,
            up: self.matrix(&format!("{prefix}.up_proj.weight"))?,
            down: self.matrix(&format!("{prefix}.down_proj.weight"))?,
        })
    }

    fn advance(&mut self, bytes: usize) {
        self.done_bytes = (self.done_bytes + bytes as u64).min(self.total_bytes);
        (self.progress)(self.done_bytes, self.total_bytes);
    }
}

/// A SwiGLU network held in memory: shared expert or dense MLP.
#[derive(Debug)]
pub(super) struct Ffn {
    /// `[inner, hidden]`.
    pub gate: Matrix,
    /// `[inner, hidden]`.
    pub up: Matrix,
    /// `[hidden, inner]`.
    pub down: Matrix,
}

impl Ffn {
    /// `ffn(x)`; `x` carries f32 rows, and int8 rows where gate or up take them.
    pub fn run(&self, kernels: Kernels, x: &Activations) -> Rows {
        let ffn = FfnRef { gate: self.gate.view(), up: self.up.view(), down: self.down.view() };
        let mut out = Rows::zeroed(x.rows(), self.down.rows);
        dense_ffn(kernels, ffn, x, &mut out.data).expect("activations made here carry the f32 form");
        out
    }
}

/// The embedding rows of `tokens`, which are below the vocabulary size.
pub(super) fn embed(table: &Matrix, tokens: &[u32]) -> Rows {
    let mut rows = Rows::zeroed(tokens.len(), table.cols);
    let (width, values) = (rows.width, rows.data.len());
    for_each_chunk(&mut rows.data, width, values, |r, row| table.view().decode_row(tokens[r] as usize, row));
    rows
}

/// A matrix whose rows are used one by one as floats, whatever its storage format.
#[derive(Debug)]
pub(super) enum FloatRows {
    /// Decoded once.
    Decoded(Rows),
    /// Decoded row by row when used.
    Stored(Matrix),
}

/// Up to this size the decoded form is kept: it spares small models the decoding, while the largest
/// (GLM-5.2: 59 MB for each of 79 layers) keep their RAM for experts.
const DECODED_BYTES_MAX: usize = 4 << 20;

/// Bytes of the decoded form of a matrix where that is the one kept.
pub fn decoded_bytes(rows: usize, cols: usize) -> Option<usize> {
    rows.checked_mul(cols)?.checked_mul(size_of::<f32>()).filter(|&bytes| bytes <= DECODED_BYTES_MAX)
}

impl FloatRows {
    /// Chooses the form by size; the values are the same.
    pub fn new(matrix: Matrix) -> Self {
        if decoded_bytes(matrix.rows, matrix.cols).is_none() {
            return Self::Stored(matrix);
        }
        let mut rows = Rows::zeroed(matrix.rows, matrix.cols);
        for r in 0..matrix.rows {
            matrix.view().decode_row(r, rows.row_mut(r));
        }
        Self::Decoded(rows)
    }

    /// `out[i] += Σ_j weights[i, j] · row[first + j]`, j ascending.
    pub fn accumulate(&self, kernels: Kernels, weights: RowsRef<'_>, first: usize, out: RowsMut<'_>) {
        let count = weights.width();
        match self {
            Self::Decoded(rows) => kernels.accumulate(weights, rows.part(first, count), out),
            Self::Stored(matrix) => {
                kernels.stored_accumulate(weights, StoredRows::new(matrix.view(), first, count), out);
            }
        }
    }

    /// `out[i, j] = row[first + j] · a[i]` for `count` rows.
    pub fn dots(&self, kernels: Kernels, a: RowsRef<'_>, first: usize, count: usize, out: RowsMut<'_>) {
        match self {
            Self::Decoded(rows) => kernels.dots(a, rows.part(first, count), 1.0, out),
            Self::Stored(matrix) => {
                kernels.stored_dots(a, StoredRows::new(matrix.view(), first, count), out);
            }
        }
    }
}
