//! From router choices to the routed experts' sum: the model's side of the expert seam.

use shimmer_common::experts::{ExpertCompute, ExpertError, RoutedBatch};
use shimmer_common::kernels::Activations;

use super::rows::{Rows, for_each_chunk};
use super::trace::Recorder;

/// Router choices of several rows: `ids` (ascending within a row) and `gates` are `[rows, k]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Routes {
    /// Chosen experts.
    pub ids: Vec<u16>,
    /// Their final weights.
    pub gates: Vec<f32>,
}

impl Routes {
    /// `rows` rows of `k` choices, to be filled.
    pub fn zeroed(rows: usize, k: usize) -> Self {
        Self { ids: vec![0; rows * k], gates: vec![0.0; rows * k] }
    }

    /// Appends one row: experts in ascending order with aligned weights.
    pub fn push(&mut self, ids: &[usize], gates: &[f32]) {
        self.ids.extend(ids.iter().map(|&id| id as u16));
        self.gates.extend_from_slice(gates);
    }

    /// The chosen experts of all rows, ascending, each once.
    pub fn experts(&self) -> Vec<u16> {
        let mut experts = self.ids.clone();
        experts.sort_unstable();
        experts.dedup();
        experts
    }

    /// Records `router_ids` and `router_weights`.
    pub fn record(&self, k: usize, recorder: &mut Recorder<'_>) {
        for ids in self.ids.chunks(k) {
            recorder.i32_row("router_ids", ids.iter().map(|&id| i32::from(id)));
        }
        recorder.f32("router_weights", k, &self.gates);
    }
}

/// `Σ gate · expert(x)` for every row of `x`, which must carry f32 rows. `meanwhile` runs on this
/// thread while other machines compute.
///
/// # Errors
/// [`ExpertError`] of an expert nobody could compute.
pub(super) fn routed_sum(
    experts: &dyn ExpertCompute,
    layer: u16,
    x: &Activations,
    routes: &Routes,
    k: usize,
    meanwhile: &mut dyn FnMut(),
) -> Result<Rows, ExpertError> {
    let sent = if experts.layout().int8_activations(layer) { x.int8_only() } else { x.floats_only() };
    let batch = RoutedBatch::from_routes(layer, sent, &routes.ids, &routes.gates, k);
    let sums = experts.compute(&batch, meanwhile)?;
    let mut out = Rows::zeroed(x.rows(), x.cols());
    let (width, values) = (out.width, out.data.len());
    for_each_chunk(&mut out.data, width, values, |r, out| sums.row_to_f32(r, out));
    Ok(out)
}
