//! The arithmetic of one call: its experts, its rows, and the sums they are added to.

use std::borrow::Cow;

use rayon::prelude::*;

use super::super::{ExpertError, ExpertId, ExpertSource, ExpertSpec, ExpertWork};
use super::cache::Record;
use crate::ffn::weighted_rows;
use crate::fixed::{FixedRows, SharedRows};
use crate::kernels::{Activations, Kernels, Threads};
use crate::profile::NumericProfile;

/// Record bytes times rows below which an expert is not worth a task of its own (some 20 µs of work,
/// a few times what waking a thread costs).
const MIN_TASK_COST: usize = 256 << 10;

/// Records at least this large are worth all threads together where there are fewer experts than
/// threads: a node that owns two of a token's experts would otherwise use two cores.
const MIN_SPREAD_BYTES: usize = 1 << 20;

/// One expert of a call.
pub(super) struct Item<'a> {
    pub id: ExpertId,
    pub record_bytes: usize,
    spec: &'a ExpertSpec,
    work: &'a ExpertWork,
}

impl Item<'_> {
    /// Rough cost: bytes streamed once per row.
    fn cost(&self) -> usize {
        self.record_bytes.saturating_mul(self.work.rows.len())
    }
}

/// One layer's routed work, checked against the model.
pub(super) struct Job<'a> {
    pub items: Vec<Item<'a>>,
    source: &'a dyn ExpertSource,
    kernels: Kernels,
    x: Cow<'a, Activations>,
    sums: SharedRows,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        source: &'a dyn ExpertSource,
        kernels: Kernels,
        profile: NumericProfile,
        layer: u16,
        x: &'a Activations,
        work: &'a [ExpertWork],
    ) -> Result<Self, ExpertError> {
        let layout = source.layout();
        let unfit = |what: String| ExpertError::Unfit { layer, what };
        if x.cols() != layout.hidden_size {
            let (cols, hidden_size) = (x.cols(), layout.hidden_size);
            return Err(unfit(format!(
                "its rows have {cols} columns, the model's hidden_size is {hidden_size}"
            )));
        }
        let mut items = Vec::with_capacity(work.len());
        for one in work {
            let id = ExpertId { layer, index: one.expert };
            let spec = layout.spec(id).ok_or_else(|| ExpertError::Missing {
                id,
                holder: source.describe(),
                remedy: "the model has no such expert, so check that both sides use the same model".into(),
            })?;
            if let Some(routed) = one.rows.iter().find(|routed| routed.row as usize >= x.rows()) {
                return Err(unfit(format!("{id} is asked for row {} of {}", routed.row, x.rows())));
            }
            if !one.rows.is_empty() {
                items.push(Item { id, record_bytes: spec.record_bytes(), spec, work: one });
            }
        }
        // Once for all experts, where the caller did not do it.
        let takes_int8 =
            |item: &Item<'_>| item.spec.gate.format.is_integer() || item.spec.up.format.is_integer();
        let x = if x.quant().is_none() && items.iter().any(takes_int8) {
            Cow::Owned(x.clone().quantized_on_pool())
        } else {
            Cow::Borrowed(x)
        };
        if let Some(quant) = x.quant() {
            let specs = items.iter().flat_map(|item| [item.spec.gate, item.spec.up]);
            specs.for_each(|spec| quant.arrange_on_pool(spec.format));
        }
        let sums = SharedRows::zeroed(x.rows(), layout.hidden_size, profile.fraction_bits);
        Ok(Self { items, source, kernels, x, sums })
    }

    /// Computes the given items in parallel, small ones several to a task.
    pub(super) fn compute(&self, ready: &[(usize, Record)]) -> Result<(), ExpertError> {
        let threads = rayon::current_num_threads();
        // So few that some threads would have nothing to do towards the end.
        let few =
            ready.len() < threads || (ready.len() < 4 * threads && !ready.len().is_multiple_of(threads));
        let run = |task: &[(usize, Record)]| {
            task.iter().try_for_each(|(item, record)| self.compute_one(*item, record, few))
        };
        match self.tasks(ready).as_slice() {
            [only] => run(only),
            tasks => tasks.par_iter().try_for_each(|task| run(task)),
        }
    }

    /// Cuts `ready` into runs of about equal cost.
    fn tasks<'r>(&self, ready: &'r [(usize, Record)]) -> Vec<&'r [(usize, Record)]> {
        let cost = |(item, _): &(usize, Record)| self.items[*item].cost();
        let total = ready.iter().map(cost).fold(0, usize::saturating_add);
        let target = (total / (4 * rayon::current_num_threads())).max(MIN_TASK_COST);
        let mut tasks = Vec::new();
        let (mut start, mut sum) = (0, 0usize);
        for (i, one) in ready.iter().enumerate() {
            sum = sum.saturating_add(cost(one));
            if sum >= target {
                tasks.push(&ready[start..=i]);
                (start, sum) = (i + 1, 0);
            }
        }
        if start < ready.len() {
            tasks.push(&ready[start..]);
        }
        tasks
    }

    /// Adds one expert's output to the sums; on all threads when there are `few` experts, on this one
    /// otherwise. Every operator is row-independent (rule N6), so the bits are the same.
    fn compute_one(&self, item: usize, record: &Record, few: bool) -> Result<(), ExpertError> {
        let Item { id, spec, record_bytes, work } = &self.items[item];
        let ffn = record.get(..*record_bytes).and_then(|bytes| spec.view(bytes)).ok_or_else(|| {
            ExpertError::Damaged {
                id: *id,
                path: self.source.describe().into(),
                what: "the record does not fit its layout".into(),
            }
        })?;
        let threads = if few && *record_bytes >= MIN_SPREAD_BYTES { Threads::Pool } else { Threads::One };
        let added = weighted_rows(self.kernels, ffn, &self.x, &work.rows, threads, &mut |row, gate, y| {
            self.sums.add_weighted(row, gate, y)
        });
        added.map_err(|source| ExpertError::Compute { id: *id, source })
    }

    /// The sums of everything computed, once.
    pub(super) fn sums(&self) -> FixedRows {
        self.sums.take()
    }
}
