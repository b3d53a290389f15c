//! A weight matrix in memory: owned ([`Matrix`]) or borrowed from a slot or file ([`MatrixRef`]).

use super::Format;
use crate::mem::AlignedBuf;

/// A borrowed `[rows, cols]` matrix. Lengths were checked where it was made.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    /// Storage format.
    pub format: Format,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// `format.weight_bytes(rows, cols)` bytes.
    pub weights: &'a [u8],
    /// `format.scale_count(rows, cols)` scales.
    pub scales: &'a [f32],
}

impl<'a> MatrixRef<'a> {
    /// Builds a view; `None` when a length does not fit the format and shape, or a group size is not a
    /// positive multiple of 8.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        weights: &'a [u8],
        scales: &'a [f32],
    ) -> Option<Self> {
        if matches!(format, Format::Int4Grouped { group } if group == 0 || !group.is_multiple_of(8)) {
            return None;
        }
        let fits = weights.len() == format.weight_bytes(rows, cols)
            && scales.len() == format.scale_count(rows, cols);
        fits.then_some(Self { format, rows, cols, weights, scales })
    }
}

/// An owned matrix of the dense part.
#[derive(Debug)]
pub struct Matrix {
    /// Storage format.
    pub format: Format,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// Weight payload.
    pub weights: AlignedBuf,
    /// Scales in the format's order.
    pub scales: Vec<f32>,
}

impl Matrix {
    /// Borrows the matrix.
    pub fn view(&self) -> MatrixRef<'_> {
        MatrixRef {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            weights: &self.weights,
            scales: &self.scales,
        }
    }

    /// Bytes of memory held by weights and scales.
    pub fn bytes(&self) -> usize {
        self.weights.len() + self.scales.len() * 4
    }
}
