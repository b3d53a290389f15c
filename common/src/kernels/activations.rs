//! Activation rows in the forms the kernels take: f32 and int8 with one scale per 64 columns (rule N1).

/// Columns per activation scale.
pub const GROUP: usize = 64;

/// int8 activation rows: `scale = max|x| / 127` per group of 64 columns, round to nearest even.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantRows {
    rows: usize,
    cols: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
}

impl QuantRows {
    /// Quantises `[rows, cols]` f32 rows.
    pub fn quantize(x: &[f32], rows: usize, cols: usize) -> Self {
        let _ = (x, rows, cols);
        todo!()
    }

    /// Rebuilds rows from the wire: `values` is `[rows, cols]`, `scales` is `[rows, ceil(cols/64)]`.
    /// `None` when a length does not fit, a value is -128, or a scale is not finite or negative.
    pub fn from_parts(rows: usize, cols: usize, values: Vec<i8>, scales: Vec<f32>) -> Option<Self> {
        let _ = (rows, cols, values, scales);
        todo!()
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// int8 values `[rows, cols]` in column order.
    pub fn values(&self) -> &[i8] {
        &self.values
    }

    /// Scales `[rows, ceil(cols/64)]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// Activation rows `[rows, cols]` in f32, int8, or both.
#[derive(Clone, Debug)]
pub struct Activations {
    rows: usize,
    cols: usize,
    floats: Option<Vec<f32>>,
    quant: Option<QuantRows>,
}

impl Activations {
    /// f32 rows; quantised on demand for integer matrices by [`Activations::quantized`].
    pub fn from_f32(x: Vec<f32>, cols: usize) -> Self {
        let rows = if cols == 0 { 0 } else { x.len() / cols };
        Self { rows, cols, floats: Some(x), quant: None }
    }

    /// int8 rows only (what a node receives).
    pub fn from_quant(q: QuantRows) -> Self {
        Self { rows: q.rows, cols: q.cols, floats: None, quant: Some(q) }
    }

    /// Adds the int8 form if it is missing, so that several integer matrices share one quantisation.
    pub fn quantized(mut self) -> Self {
        if let (None, Some(x)) = (&self.quant, &self.floats) {
            self.quant = Some(QuantRows::quantize(x, self.rows, self.cols));
        }
        self
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The f32 form, if present.
    pub fn floats(&self) -> Option<&[f32]> {
        self.floats.as_deref()
    }

    /// The int8 form, if present.
    pub fn quant(&self) -> Option<&QuantRows> {
        self.quant.as_ref()
    }
}
