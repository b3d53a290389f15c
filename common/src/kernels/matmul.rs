//! Matrix times activation rows: formats, scratch space, and the split over threads.
//!
//! Work is cut over weight rows only (rule N6): every weight row meets all activation rows before the
//! next is touched, and a row's result depends on nothing else.

use std::ops::Range;

use rayon::prelude::*;

use super::KernelError;
use super::activations::{Activations, GROUP, QuantRows};
use super::ops::{FloatOp, FloatRow, NibbleScales, Ops};
use crate::quant::decode::{unpack_int2, unpack_int3};
use crate::quant::{Format, MatrixRef};

/// Multiply-adds below which a task is not worth its dispatch (about 10 µs on one core).
const TASK_MACS: usize = 1 << 17;

/// Tasks per thread when there is work enough, so that a late thread does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// Activation rows in the form the matrix takes.
#[derive(Clone, Copy)]
enum Input<'a> {
    Quant(&'a QuantRows),
    Float(&'a [f32]),
}

/// Whether to spread weight rows over the current rayon pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Threads {
    /// The calling thread only.
    One,
    /// The pool, if the work is big enough.
    Pool,
}

/// `out[r, o] = Σ_i w[o, i] · x[x_rows[r], i]`; `out` is `[x_rows.len(), w.rows]`.
pub(super) fn matmul(
    ops: &'static dyn Ops,
    w: MatrixRef<'_>,
    x: &Activations,
    x_rows: &[usize],
    out: &mut [f32],
    threads: Threads,
) -> Result<(), KernelError> {
    assert_eq!(w.cols, x.cols(), "activations must be as wide as the matrix");
    assert_eq!(out.len(), x_rows.len() * w.rows, "the output is [activation rows, weight rows]");
    if !w.format.is_integer() {
        let floats = x.floats().ok_or(KernelError::NeedsFloat { format: w.format })?;
        run(ops, w, Input::Float(floats), x_rows, out, threads);
    } else if let Some(quant) = x.quant() {
        run(ops, w, Input::Quant(quant), x_rows, out, threads);
    } else {
        let (quant, x_rows) = quantize_rows(x, x_rows);
        run(ops, w, Input::Quant(&quant), &x_rows, out, threads);
    }
    Ok(())
}

/// Quantises only the wanted rows of activations that have no int8 form; returns them and their indices.
fn quantize_rows(x: &Activations, x_rows: &[usize]) -> (QuantRows, Vec<usize>) {
    let cols = x.cols();
    let floats = x.floats().expect("activations without an int8 form have floats");
    let gathered: Vec<f32> =
        x_rows.iter().flat_map(|row| &floats[row * cols..(row + 1) * cols]).copied().collect();
    (QuantRows::quantize(&gathered, x_rows.len(), cols), (0..x_rows.len()).collect())
}

/// Computes in `[weight row, activation row]` order and transposes when there is more than one row.
fn run(
    ops: &'static dyn Ops,
    w: MatrixRef<'_>,
    x: Input<'_>,
    x_rows: &[usize],
    out: &mut [f32],
    threads: Threads,
) {
    let n = x_rows.len();
    if n == 0 || w.rows == 0 {
        return;
    }
    if n == 1 {
        run_by_weight_row(ops, w, x, x_rows, out, threads);
        return;
    }
    let mut by_weight_row = vec![0.0; out.len()];
    run_by_weight_row(ops, w, x, x_rows, &mut by_weight_row, threads);
    for (r, out) in out.chunks_exact_mut(w.rows).enumerate() {
        for (out, computed) in out.iter_mut().zip(by_weight_row.chunks_exact(n)) {
            *out = computed[r];
        }
    }
}

/// `out` is `[w.rows, x_rows.len()]`.
fn run_by_weight_row(
    ops: &'static dyn Ops,
    w: MatrixRef<'_>,
    x: Input<'_>,
    x_rows: &[usize],
    out: &mut [f32],
    threads: Threads,
) {
    let n = x_rows.len();
    let pool = if threads == Threads::Pool { rayon::current_num_threads() } else { 1 };
    let worthwhile = TASK_MACS.div_ceil((w.cols * n).max(1));
    let rows_per_task = worthwhile.max(w.rows.div_ceil(pool * TASKS_PER_THREAD));
    if pool == 1 || rows_per_task >= w.rows {
        compute(ops, w, 0..w.rows, x, x_rows, out);
        return;
    }
    out.par_chunks_mut(rows_per_task * n).enumerate().for_each(|(task, out)| {
        let first = task * rows_per_task;
        compute(ops, w, first..first + out.len() / n, x, x_rows, out);
    });
}

/// The weight rows `rows` on this thread; `out` is `[rows.len(), x_rows.len()]`.
fn compute(
    ops: &dyn Ops,
    w: MatrixRef<'_>,
    rows: Range<usize>,
    x: Input<'_>,
    x_rows: &[usize],
    out: &mut [f32],
) {
    let out_rows = rows.zip(out.chunks_exact_mut(x_rows.len()));
    match x {
        Input::Quant(x) => {
            let mut scratch = IntScratch::new(w);
            for (row, out) in out_rows {
                integer_row(ops, w, row, x, x_rows, &mut scratch, out);
            }
        }
        Input::Float(x) => {
            let mut scratch = Vec::new();
            for (row, out) in out_rows {
                let row = float_row(w, row);
                let scratch = &mut scratch;
                ops.float(FloatOp::Row { row, cols: w.cols, x, x_rows, scratch, out });
            }
        }
    }
}

/// Row `row` of a float matrix.
fn float_row(w: MatrixRef<'_>, row: usize) -> FloatRow<'_> {
    let bytes = w.row_weights(row);
    match w.format {
        Format::F32 => FloatRow::F32(bytes),
        Format::F16 => FloatRow::F16(bytes),
        Format::Bf16 => FloatRow::Bf16(bytes),
        Format::Fp8Block => FloatRow::Fp8(bytes, w.row_scales(row)),
        _ => unreachable!("integer formats take int8 activations"),
    }
}

/// Buffers for what a weight row must be expanded to.
struct IntScratch {
    /// An int2 or int3 row as int8.
    values: Vec<i8>,
    /// Nibble scales per group or per stripe.
    scales: Vec<f32>,
}

impl IntScratch {
    fn new(w: MatrixRef<'_>) -> Self {
        let unpacked = if matches!(w.format, Format::Int2Row | Format::Int3G64) { w.cols } else { 0 };
        Self { values: vec![0; unpacked], scales: Vec::new() }
    }

    /// Expands the scales of a nibble row to groups of 64 columns, or to stripes of 8.
    fn expand<'a>(&'a mut self, scales: &'a [f32], group: usize, cols: usize) -> NibbleScales<'a> {
        if group == GROUP {
            return NibbleScales::PerGroup(scales);
        }
        let step = if group.is_multiple_of(GROUP) { GROUP } else { 8 };
        self.scales.clear();
        for &scale in scales {
            self.scales.extend(std::iter::repeat_n(scale, group / step));
        }
        // Padding stripes beyond the last group have zero sums; any finite scale will do.
        let last = scales.last().copied().unwrap_or(0.0);
        self.scales.resize(cols.div_ceil(GROUP) * (GROUP / step), last);
        if step == GROUP {
            NibbleScales::PerGroup(&self.scales)
        } else {
            NibbleScales::PerStripe(&self.scales)
        }
    }
}

/// One weight row of an integer matrix; `out` has one value per activation row.
fn integer_row(
    ops: &dyn Ops,
    w: MatrixRef<'_>,
    row: usize,
    x: &QuantRows,
    x_rows: &[usize],
    scratch: &mut IntScratch,
    out: &mut [f32],
) {
    let (bytes, scales) = (w.row_weights(row), w.row_scales(row));
    match w.format {
        Format::Int4Row => ops.int4(bytes, NibbleScales::Row, x, x_rows, out),
        Format::Int4Grouped { group } => {
            let scales = scratch.expand(scales, group as usize, w.cols);
            ops.int4(bytes, scales, x, x_rows, out);
        }
        Format::Int8Row => ops.int8(bytemuck::cast_slice(bytes), None, x, x_rows, out),
        Format::Int2Row => {
            unpack_int2(bytes, &mut scratch.values);
            ops.int8(&scratch.values, None, x, x_rows, out);
        }
        Format::Int3G64 => {
            unpack_int3(bytes, &mut scratch.values);
            ops.int8(&scratch.values, Some(scales), x, x_rows, out);
        }
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block => {
            unreachable!("float formats take f32 activations")
        }
    }
    if matches!(w.format, Format::Int4Row | Format::Int8Row | Format::Int2Row) {
        for out in out {
            *out *= scales[0];
        }
    }
}
