//! Fixed-point sums of expert outputs (rule N5) and their lossless wire form.

/// `[rows, cols]` partial sums, each an i64 with `fraction_bits` fractional bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedRows {
    rows: usize,
    cols: usize,
    fraction_bits: u8,
    values: Vec<i64>,
}

/// What is wrong with fixed-point data.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FixedError {
    /// An expert produced NaN or infinity.
    #[error("the expert output is not finite at column {col}")]
    NotFinite {
        /// Column of the first bad value.
        col: usize,
    },
    /// Packed bytes do not decode to the promised shape.
    #[error("packed fixed-point block {block} is malformed")]
    Malformed {
        /// Index of the bad block of 64 values.
        block: usize,
    },
}

impl FixedRows {
    /// All-zero sums.
    pub fn zeroed(rows: usize, cols: usize, fraction_bits: u8) -> Self {
        Self { rows, cols, fraction_bits, values: vec![0; rows * cols] }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The raw sums of one row.
    pub fn row(&self, row: usize) -> &[i64] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// Adds `gate · y` to `row`: f32 product, then one rounding (nearest even) to fixed point.
    ///
    /// # Errors
    /// [`FixedError::NotFinite`].
    pub fn add_weighted(&mut self, row: usize, gate: f32, y: &[f32]) -> Result<(), FixedError> {
        let _ = (row, gate, y);
        todo!()
    }

    /// Adds another partial sum of the same shape.
    ///
    /// # Panics
    /// When shapes or fraction bits differ.
    pub fn merge(&mut self, other: &FixedRows) {
        let _ = other;
        todo!()
    }

    /// Writes row `row` as f32 into `out`.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        let _ = (row, out);
        todo!()
    }

    /// Packs every block of 64 values to the narrowest of 2, 3, 4, 5 or 8 bytes per value.
    pub fn pack(&self) -> Vec<u8> {
        todo!()
    }

    /// Reverses [`FixedRows::pack`].
    ///
    /// # Errors
    /// [`FixedError::Malformed`] on any length or width that does not fit; never panics.
    pub fn unpack(rows: usize, cols: usize, fraction_bits: u8, bytes: &[u8]) -> Result<Self, FixedError> {
        let _ = (rows, cols, fraction_bits, bytes);
        todo!()
    }
}
