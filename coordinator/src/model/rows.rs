//! f32 rows, and the choice between one thread and many.

use rayon::prelude::*;
use shimmer_common::kernels::{Activations, Kernels, RowsRef};
use shimmer_common::quant::Matrix;

/// f32 rows `[rows, width]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Values, row after row.
    pub data: Vec<f32>,
    /// Row length.
    pub width: usize,
}

impl Rows {
    /// `rows` rows of zeros.
    pub fn zeroed(rows: usize, width: usize) -> Self {
        Self { data: vec![0.0; rows * width], width }
    }

    /// No rows yet, of `width` values each.
    pub fn empty(width: usize) -> Self {
        Self { data: Vec::new(), width }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.width).unwrap_or(0)
    }

    /// One row.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.width..(i + 1) * self.width]
    }

    /// One row, to be changed.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.width..(i + 1) * self.width]
    }

    /// `count` rows from row `first` on, as the kernels take them.
    pub(super) fn part(&self, first: usize, count: usize) -> RowsRef<'_> {
        RowsRef::new(&self.data[first * self.width..], self.width, self.width, count)
    }

    /// Appends values of whole rows. Memory grows by an eighth rather than by doubling, so that a long
    /// context's cache stays near the size that was planned for it.
    pub(super) fn append(&mut self, values: &[f32]) {
        if self.data.capacity() - self.data.len() < values.len() {
            self.data.reserve_exact(values.len().max(self.data.len() / 8));
        }
        self.data.extend_from_slice(values);
    }

    /// Keeps the first `len` rows.
    pub fn truncate(&mut self, len: usize) {
        self.data.truncate(len * self.width);
    }

    /// Adds `other` of the same shape, element by element: the residual connection.
    pub(super) fn add(&mut self, other: &Rows) {
        debug_assert_eq!(self.data.len(), other.data.len());
        let add = |x: &mut [f32], y: &[f32]| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        if self.data.len() < PARALLEL_VALUES {
            add(&mut self.data, &other.data);
        } else {
            let parts = self.data.par_chunks_mut(VALUES_PER_TASK).zip(other.data.par_chunks(VALUES_PER_TASK));
            parts.for_each(|(x, y)| add(x, y));
        }
    }

    /// The root-mean-square norm of every row.
    pub(super) fn rms_norm(&self, kernels: Kernels, weight: &[f32], eps: f32) -> Rows {
        let mut out = Rows::zeroed(self.rows(), self.width);
        for_each_chunk(&mut out.data, self.width, self.data.len(), |r, row| {
            kernels.rms_norm(self.row(r), weight, eps, row);
        });
        out
    }
}

/// Rows as input of `matrices`: the int8 form is added when one of them takes it (rule N1).
pub(super) fn activations(x: Rows, matrices: &[&Matrix]) -> Activations {
    let quantize = matrices.iter().any(|m| m.format.is_integer());
    let x = Activations::from_f32(x.data, x.width);
    if quantize { x.quantized_on_pool() } else { x }
}

/// `x @ w` for every row; `x` must have been prepared for `w` by [`activations`].
pub(super) fn project(kernels: Kernels, w: &Matrix, x: &Activations) -> Rows {
    let mut out = Rows::zeroed(x.rows(), w.rows);
    kernels.matmul(w.view(), x, &mut out.data).expect("activations made here carry the f32 form");
    out
}

/// `n^-½`, rounded once to f32.
pub(super) fn inverse_sqrt(n: usize) -> f32 {
    (1.0 / (n as f64).sqrt()) as f32
}

/// Multiply-adds from which on waking other threads pays: at 10 per nanosecond and core this is some
/// 25 µs, a few times what a sleeping pool needs to wake up.
pub(super) const PARALLEL_WORK: usize = 1 << 18;

/// Values from which on an addition, a norm or a rotation is worth other threads, and what one task takes.
pub(super) const PARALLEL_VALUES: usize = 4 * VALUES_PER_TASK;
const VALUES_PER_TASK: usize = 1 << 15;

/// Calls `f(i, chunk)` for each chunk of `len` values, on the rayon pool when `work` multiply-adds are
/// worth it. Chunks are independent, so the choice never changes a bit.
pub(super) fn for_each_chunk<F>(data: &mut [f32], len: usize, work: usize, f: F)
where
    F: Fn(usize, &mut [f32]) + Sync,
{
    if len == 0 {
        return;
    }
    if work < PARALLEL_WORK || data.len() <= len {
        data.chunks_mut(len).enumerate().for_each(|(i, chunk)| f(i, chunk));
    } else {
        data.par_chunks_mut(len).enumerate().for_each(|(i, chunk)| f(i, chunk));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_see_their_index_on_one_thread_and_on_many() {
        for work in [0, usize::MAX] {
            let mut data = vec![0.0; 10];
            for_each_chunk(&mut data, 4, work, |i, chunk| chunk.fill(i as f32));
            assert_eq!(data, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
        }
    }

    #[test]
    fn rows_are_cut_and_appended() {
        let mut rows = Rows { data: (0..6).map(|i| i as f32).collect(), width: 2 };
        rows.truncate(2);
        assert_eq!((rows.rows(), rows.row(1)), (2, &[2.0, 3.0][..]));
        rows.append(&[8.0, 9.0]);
        assert_eq!((rows.rows(), rows.row(2)), (3, &[8.0, 9.0][..]));
        rows.truncate(2);
        assert_eq!((rows.rows(), rows.row(1)), (2, &[2.0, 3.0][..]));
        assert_eq!(Rows::empty(0).rows(), 0);
    }
}
