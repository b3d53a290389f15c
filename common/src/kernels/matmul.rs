//! Matrix times activation rows: formats, scratch space, and the split over threads.
//!
//! Work is cut over weight rows only (rule N6): every weight row meets all activation rows before the
//! next is touched, and a row's result depends on nothing else.

use std::ops::Range;

use rayon::prelude::*;

use super::KernelError;
use super::activations::{Activations, QuantRows};
use super::arrange::Arranged;
use super::code::Code;
use super::float::FloatTask;
use super::integer::IntTask;
use super::ops::Ops;
use crate::quant::MatrixRef;

/// Multiply-adds below which a task is not worth its dispatch (about 10 µs on one core).
const TASK_MACS: usize = 1 << 17;

/// Tasks per thread when there is work enough, so that a late thread does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// Activation rows in the form the matrix takes.
#[derive(Clone, Copy)]
enum Input<'a> {
    Quant(&'a Arranged),
    Float(&'a [f32]),
}

/// Whether to spread weight rows over the current rayon pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
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
        if threads == Threads::Pool {
            quant.arrange_on_pool(w.format);
        }
        run(ops, w, Input::Quant(quant.arranged(Code::of(w.format))), x_rows, out, threads);
    } else {
        let (quant, x_rows) = quantize_rows(x, x_rows);
        run(ops, w, Input::Quant(quant.arranged(Code::of(w.format))), &x_rows, out, threads);
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

/// Cuts the weight rows into tasks. `out` is `[x_rows.len(), w.rows]`; a task owns some columns of it.
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
    let pool = if threads == Threads::Pool { rayon::current_num_threads() } else { 1 };
    let worthwhile = TASK_MACS.div_ceil((w.cols * n).max(1));
    let rows_per_task =
        if pool == 1 { w.rows } else { worthwhile.max(w.rows.div_ceil(pool * TASKS_PER_THREAD)) };
    let mut tasks: Vec<(Range<usize>, Vec<&mut [f32]>)> = (0..w.rows)
        .step_by(rows_per_task)
        .map(|first| (first..w.rows.min(first + rows_per_task), Vec::with_capacity(n)))
        .collect();
    for out in out.chunks_exact_mut(w.rows) {
        for ((_, outs), out) in tasks.iter_mut().zip(out.chunks_mut(rows_per_task)) {
            outs.push(out);
        }
    }
    let compute = |(rows, outs): &mut (Range<usize>, Vec<&mut [f32]>)| {
        compute(ops, w, rows.clone(), x, x_rows, outs);
    };
    match tasks.as_mut_slice() {
        [only] => compute(only),
        tasks => tasks.par_iter_mut().for_each(compute),
    }
}

/// The weight rows `rows` on this thread; `outs` has `rows.len()` results per activation row.
fn compute(
    ops: &dyn Ops,
    w: MatrixRef<'_>,
    rows: Range<usize>,
    x: Input<'_>,
    x_rows: &[usize],
    outs: &mut [&mut [f32]],
) {
    match x {
        Input::Quant(x) => ops.integer(IntTask { w, rows, x, x_rows, outs }),
        Input::Float(x) => ops.float_matrix(FloatTask { w, rows, x, x_rows, outs }),
    }
}
