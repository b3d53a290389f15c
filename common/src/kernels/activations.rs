//! Activation rows in the forms the kernels take: f32 and int8 with one scale per 64 columns (rule N1).

use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::arrange::Arranged;
use super::code::Code;
use crate::quant::Format;

/// Columns per activation scale.
pub const GROUP: usize = 64;

/// int8 activation rows with one f32 scale per group of 64 columns.
///
/// Per group, with `m = max|x|`: `scale = m · (1/127)` (f32 product with the f32 constant 1/127) and
/// `q = clamp(round_half_even(x / scale), -127, 127)`; a group whose scale is 0 has `q = 0`. A group with
/// a NaN or infinity has scale NaN and `q = 0`, so that every product with it is NaN instead of plausible.
///
/// Beside the values in column order (the wire form) it keeps the orders in which the kernels take them, each
/// made when it is first wanted.
#[derive(Clone, Debug)]
pub struct QuantRows {
    rows: usize,
    cols: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    arranged: [OnceLock<Arranged>; Code::COUNT],
}

/// Equal shape, values and scales.
impl PartialEq for QuantRows {
    fn eq(&self, other: &Self) -> bool {
        (self.rows, self.cols) == (other.rows, other.cols)
            && self.values == other.values
            && self.scales == other.scales
    }
}

impl QuantRows {
    /// Quantises `[rows, cols]` f32 rows.
    ///
    /// # Panics
    /// When `x.len() != rows * cols`.
    pub fn quantize(x: &[f32], rows: usize, cols: usize) -> Self {
        let mut quant = Self::zeroed(x, rows, cols);
        let groups = cols.div_ceil(GROUP).max(1);
        let scales = quant.scales.chunks_exact_mut(groups);
        for ((x, q), scales) in
            x.chunks_exact(cols.max(1)).zip(quant.values.chunks_exact_mut(cols.max(1))).zip(scales)
        {
            quantize_row(x, q, scales);
        }
        quant
    }

    /// As [`QuantRows::quantize`], rows spread over the current rayon pool when there are many.
    fn quantize_on_pool(x: &[f32], rows: usize, cols: usize) -> Self {
        let mut quant = Self::zeroed(x, rows, cols);
        let groups = cols.div_ceil(GROUP).max(1);
        let values = quant.values.par_chunks_exact_mut(cols.max(1));
        let tasks =
            x.par_chunks_exact(cols.max(1)).zip(values).zip(quant.scales.par_chunks_exact_mut(groups));
        let rows_per_task = VALUES_PER_TASK.div_ceil(cols.max(1));
        tasks.with_min_len(rows_per_task).for_each(|((x, q), scales)| quantize_row(x, q, scales));
        quant
    }

    /// Rows for `x`, to be filled.
    fn zeroed(x: &[f32], rows: usize, cols: usize) -> Self {
        assert_eq!(x.len(), rows * cols, "activations are rows · cols values");
        Self::new(rows, cols, vec![0; x.len()], vec![0.0; rows * cols.div_ceil(GROUP)])
    }

    /// Rebuilds rows from the wire: `values` is `[rows, cols]`, `scales` is `[rows, ceil(cols/64)]`.
    /// `None` when a length does not fit, a value is -128, or a scale is not finite or negative.
    pub fn from_parts(rows: usize, cols: usize, values: Vec<i8>, scales: Vec<f32>) -> Option<Self> {
        let fits = rows.checked_mul(cols) == Some(values.len())
            && rows.checked_mul(cols.div_ceil(GROUP)) == Some(scales.len())
            && !values.contains(&i8::MIN)
            && scales.iter().all(|s| s.is_finite() && *s >= 0.0);
        fits.then(|| Self::new(rows, cols, values, scales))
    }

    fn new(rows: usize, cols: usize, values: Vec<i8>, scales: Vec<f32>) -> Self {
        Self { rows, cols, values, scales, arranged: Default::default() }
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

    /// Puts many rows into the order of `format` on the current rayon pool, once; without this the first thread
    /// that needs the order makes it while others wait. Does nothing for a float format.
    pub(crate) fn arrange_on_pool(&self, format: Format) {
        if !format.is_integer() || self.values.len() < 2 * VALUES_PER_TASK {
            return;
        }
        let code = Code::of(format);
        let cell = &self.arranged[code as usize];
        if cell.get().is_none() {
            // Not inside the cell: while the pool works, this thread may be given a task that waits for it.
            let _ = cell.set(Arranged::on_pool(code, self.rows, self.cols, &self.values, &self.scales));
        }
    }

    /// The rows in the order of weights of `code`.
    pub(super) fn arranged(&self, code: Code) -> &Arranged {
        self.arranged[code as usize]
            .get_or_init(|| Arranged::new(code, self.rows, self.cols, &self.values, &self.scales))
    }
}

/// Values worth a task of their own (some 30 µs).
const VALUES_PER_TASK: usize = 1 << 16;

/// Quantises one row.
fn quantize_row(x: &[f32], q: &mut [i8], scales: &mut [f32]) {
    for ((x, q), scale) in x.chunks(GROUP).zip(q.chunks_mut(GROUP)).zip(scales) {
        *scale = quantize_group(x, q);
    }
}

/// Quantises one group and returns its scale (see [`QuantRows`]).
fn quantize_group(x: &[f32], q: &mut [i8]) -> f32 {
    /// Adding and subtracting this rounds to the nearest even integer: 1.5 · 2²³.
    const ROUND: f32 = 12_582_912.0;
    // Magnitudes order like their bit patterns; infinity and NaN are the largest.
    let max_bits = x.iter().fold(0, |max, x| (x.to_bits() & 0x7fff_ffff).max(max));
    if max_bits >= f32::INFINITY.to_bits() {
        q.fill(0);
        return f32::NAN;
    }
    let scale = f32::from_bits(max_bits) * (1.0 / 127.0);
    if scale == 0.0 {
        q.fill(0);
        return 0.0;
    }
    for (q, &x) in q.iter_mut().zip(x) {
        // A subnormal scale has few bits: the quotient may be well beyond 127.
        let v = (x / scale).clamp(-127.0, 127.0);
        *q = (v + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8;
    }
    scale
}

/// Activation rows `[rows, cols]` in f32, int8, or both. Clones share the rows.
#[derive(Clone, Debug)]
pub struct Activations {
    rows: usize,
    cols: usize,
    floats: Option<Arc<Vec<f32>>>,
    quant: Option<Arc<QuantRows>>,
}

impl Activations {
    /// f32 rows; quantised on demand for integer matrices by [`Activations::quantized`].
    pub fn from_f32(x: Vec<f32>, cols: usize) -> Self {
        let rows = x.len().checked_div(cols).unwrap_or(0);
        Self { rows, cols, floats: Some(Arc::new(x)), quant: None }
    }

    /// int8 rows only (what a node receives).
    pub fn from_quant(q: QuantRows) -> Self {
        Self { rows: q.rows, cols: q.cols, floats: None, quant: Some(Arc::new(q)) }
    }

    /// Adds the int8 form if it is missing, so that several integer matrices share one quantisation.
    pub fn quantized(mut self) -> Self {
        if let (None, Some(x)) = (&self.quant, &self.floats) {
            self.quant = Some(Arc::new(QuantRows::quantize(x, self.rows, self.cols)));
        }
        self
    }

    /// The same rows with their int8 form only, made if it is missing.
    pub fn int8_only(&self) -> Self {
        Self { floats: None, ..self.clone().quantized_on_pool() }
    }

    /// The same rows without an int8 form.
    pub fn floats_only(&self) -> Self {
        Self { quant: None, ..self.clone() }
    }

    /// As [`Activations::quantized`], many rows spread over the current rayon pool. Not for callers that are one
    /// of many tasks themselves: their thread would take up another while it waits.
    pub fn quantized_on_pool(mut self) -> Self {
        if let (None, Some(x)) = (&self.quant, &self.floats) {
            self.quant = Some(Arc::new(QuantRows::quantize_on_pool(x, self.rows, self.cols)));
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
        self.floats.as_ref().map(|floats| floats.as_slice())
    }

    /// The int8 form, if present.
    pub fn quant(&self) -> Option<&QuantRows> {
        self.quant.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantisation_follows_the_definition() {
        let x: Vec<f32> = (0..131).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
        let q = QuantRows::quantize(&x, 1, 131);
        assert_eq!(q.scales().len(), 3);
        for (i, (&x, &v)) in x.iter().zip(q.values()).enumerate() {
            let group = &q.scales()[i / 64];
            assert_eq!(f32::from(v), (x / group).round_ties_even(), "column {i}");
        }
        let many: Vec<f32> = (0..3000 * 70).map(|i| (i % 1013) as f32 - 500.0).collect();
        let whole = Activations::from_f32(many.clone(), 70).quantized_on_pool();
        assert_eq!(whole.quant(), Some(&QuantRows::quantize(&many, 3000, 70)));
        let none = Activations::from_f32(Vec::new(), 0).quantized_on_pool();
        assert_eq!(none.quant(), Some(&QuantRows::quantize(&[], 0, 0)));
        let zero = QuantRows::quantize(&[0.0; 64], 1, 64);
        assert_eq!((zero.scales(), zero.values()), (&[0.0][..], &[0i8; 64][..]));
        // The largest magnitude becomes 127 unless the scale is subnormal.
        for max in [f32::MAX, 1.0, 1e-35] {
            let q = QuantRows::quantize(&[max, -max, 0.0], 1, 3);
            assert_eq!(q.values(), [127, -127, 0], "{max:e}");
        }
    }

    #[test]
    fn non_finite_groups_get_a_nan_scale() {
        let mut x = vec![1.0; 128];
        x[70] = f32::INFINITY;
        let q = QuantRows::quantize(&x, 1, 128);
        assert!(q.scales()[0].is_finite() && q.scales()[1].is_nan());
        assert!(q.values()[64..].iter().all(|&v| v == 0));
    }

    #[test]
    fn parts_round_trip_and_are_checked() {
        let x: Vec<f32> = (0..3 * 70).map(|i| (i as f32 - 100.0) * 0.1).collect();
        let q = QuantRows::quantize(&x, 3, 70);
        let (values, scales) = (q.values().to_vec(), q.scales().to_vec());
        let again = QuantRows::from_parts(3, 70, values.clone(), scales.clone()).unwrap();
        assert_eq!(again, q);

        assert!(QuantRows::from_parts(2, 70, values.clone(), scales.clone()).is_none());
        assert!(QuantRows::from_parts(usize::MAX, 70, values.clone(), scales.clone()).is_none());
        assert!(QuantRows::from_parts(3, 70, values.clone(), scales[1..].to_vec()).is_none());
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            let mut scales = scales.clone();
            scales[2] = bad;
            assert!(QuantRows::from_parts(3, 70, values.clone(), scales).is_none());
        }
        let mut values = values;
        values[5] = -128;
        assert!(QuantRows::from_parts(3, 70, values, scales).is_none());
        assert!(QuantRows::from_parts(0, 70, vec![], vec![]).is_some());
    }
}
