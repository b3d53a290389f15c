//! The arithmetic of one call: its experts, its rows, and the sums they are added to.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::super::{ExpertError, ExpertId, ExpertSource, ExpertSpec, ExpertWork};
use super::cache::Record;
use crate::ffn::{dense_ffn, expert_ffn};
use crate::fixed::FixedRows;
use crate::kernels::{Activations, Kernels};
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
    sums: SumPool,
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
            Cow::Owned(x.clone().quantized())
        } else {
            Cow::Borrowed(x)
        };
        let sums = SumPool::new(x.rows(), layout.hidden_size, profile.fraction_bits);
        Ok(Self { items, source, kernels, x, sums })
    }

    /// Computes the given items in parallel, small ones several to a task.
    pub(super) fn compute(&self, ready: &[(usize, Record)]) -> Result<(), ExpertError> {
        let few = ready.len() < rayon::current_num_threads();
        let run = |task: &[(usize, Record)]| {
            self.sums.with(|sums| {
                task.iter().try_for_each(|(item, record)| self.compute_one(*item, record, few, sums))
            })
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
        let target = (total / (2 * rayon::current_num_threads())).max(MIN_TASK_COST);
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

    /// Adds one expert's output to `sums`; on all threads when there are `few` experts, on this one
    /// otherwise. Every operator is row-independent (rule N6), so the bits are the same.
    fn compute_one(
        &self,
        item: usize,
        record: &Record,
        few: bool,
        sums: &mut FixedRows,
    ) -> Result<(), ExpertError> {
        let Item { id, spec, record_bytes, work } = &self.items[item];
        let ffn = record.get(..*record_bytes).and_then(|bytes| spec.view(bytes)).ok_or_else(|| {
            ExpertError::Damaged {
                id: *id,
                path: self.source.describe().into(),
                what: "the record does not fit its layout".into(),
            }
        })?;
        let added = match work.rows.as_slice() {
            [only] if few && self.x.rows() == 1 && *record_bytes >= MIN_SPREAD_BYTES => {
                let mut y = vec![0.0; self.x.cols()];
                dense_ffn(self.kernels, ffn, &self.x, &mut y)
                    .and_then(|()| Ok(sums.add_weighted(only.row as usize, only.gate, &y)?))
            }
            rows => expert_ffn(self.kernels, ffn, &self.x, rows, sums),
        };
        added.map_err(|source| ExpertError::Compute { id: *id, source })
    }

    /// The sums of everything computed, once.
    pub(super) fn sums(&self) -> FixedRows {
        self.sums.total()
    }
}

/// Partial sums, one array per task that runs at the same time, reused over the waves of a call.
struct SumPool {
    rows: usize,
    cols: usize,
    fraction_bits: u8,
    idle: Mutex<Vec<FixedRows>>,
}

impl SumPool {
    fn new(rows: usize, cols: usize, fraction_bits: u8) -> Self {
        Self { rows, cols, fraction_bits, idle: Mutex::default() }
    }

    fn with<R>(&self, f: impl FnOnce(&mut FixedRows) -> R) -> R {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut sums = idle.unwrap_or_else(|| FixedRows::zeroed(self.rows, self.cols, self.fraction_bits));
        let result = f(&mut sums);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(sums);
        result
    }

    fn total(&self) -> FixedRows {
        let parts = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        let mut parts = parts.into_iter();
        let mut total =
            parts.next().unwrap_or_else(|| FixedRows::zeroed(self.rows, self.cols, self.fraction_bits));
        parts.for_each(|part| total.merge(&part));
        total
    }
}
