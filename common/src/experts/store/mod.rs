//! The local expert store: a RAM budget of cached slots over an [`ExpertSource`].
//!
//! A call asks the cache for its experts, queues every miss at once, runs the caller's
//! `meanwhile` while the disk works, computes what is resident and then goes on in order of arrival.
//! Experts that found no slot wait for the next wave, when this call's own slots are free again.
//! Sums are integers (rule N5), so neither order, budget nor the number of threads changes a bit.
//!
//! *Budget.* At most `ram_bytes` of slots are ever allocated. When every slot is held by other calls
//! a call that holds none reads into one buffer of its own for as long as it runs: several calls
//! never wait for each other's slots, hence cannot deadlock. Each thread that computes also holds one
//! `[rows, hidden_size]` array of sums for the length of the call.

mod cache;
mod call;
mod job;
mod policy;
mod readers;
mod stats;

pub use policy::{AgedFrequency, EvictionPolicy};
pub use stats::StoreStats;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::cache::Cache;
use self::call::Call;
use self::readers::Readers;
use self::stats::Counters;
use super::{ExpertCompute, ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertWork, RoutedBatch};
use crate::fixed::FixedRows;
use crate::kernels::{Activations, Kernels};
use crate::mem::AlignedBuf;
use crate::profile::NumericProfile;

/// How a store is set up.
pub struct StoreOptions {
    /// Most bytes of records kept in RAM.
    pub ram_bytes: usize,
    /// Who gives way when a slot is needed.
    pub policy: Box<dyn EvictionPolicy>,
}

impl StoreOptions {
    /// The default policy within `ram_bytes`.
    pub fn new(ram_bytes: usize) -> Self {
        Self { ram_bytes, policy: Box::new(AgedFrequency::default()) }
    }
}

/// Computes experts from a container or pack on this machine.
pub struct LocalStore {
    source: Arc<dyn ExpertSource>,
    kernels: Kernels,
    profile: NumericProfile,
    cache: Arc<Cache>,
    counters: Arc<Counters>,
    readers: Readers,
}

impl LocalStore {
    /// Opens a store that keeps at most `ram_bytes` of records resident.
    ///
    /// # Errors
    /// [`ExpertError::Budget`] when the largest record of the model does not fit.
    pub fn new(
        source: Arc<dyn ExpertSource>,
        kernels: Kernels,
        profile: NumericProfile,
        ram_bytes: usize,
    ) -> Result<Self, ExpertError> {
        Self::open(source, kernels, profile, StoreOptions::new(ram_bytes))
    }

    /// As [`LocalStore::new`] with everything that can be chosen.
    ///
    /// # Errors
    /// As [`LocalStore::new`].
    pub fn open(
        source: Arc<dyn ExpertSource>,
        kernels: Kernels,
        profile: NumericProfile,
        options: StoreOptions,
    ) -> Result<Self, ExpertError> {
        let StoreOptions { ram_bytes, policy } = options;
        let needed_bytes = source.layout().max_record_bytes();
        if ram_bytes < needed_bytes || needed_bytes == 0 {
            return Err(ExpertError::Budget { budget_bytes: ram_bytes, needed_bytes });
        }
        Ok(Self {
            source,
            kernels,
            profile,
            cache: Arc::new(Cache::new(ram_bytes, policy)),
            counters: Arc::default(),
            readers: Readers::start(),
        })
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        let (pinned, pinned_bytes, evictions) = self.cache.counts();
        StoreStats { pinned, pinned_bytes, evictions, ..self.counters.read() }
    }

    /// Makes `pins` the experts that are never evicted; those pinned before and not now become ordinary.
    /// Experts the model lacks are ignored.
    pub fn set_pins(&self, pins: &[ExpertId]) {
        self.cache.set_pins(pins.iter().filter(|id| self.source.contains(**id)).copied());
    }

    /// The source read from.
    pub fn source(&self) -> &Arc<dyn ExpertSource> {
        &self.source
    }

    /// Computes `work` of `layer` on the rows of `x` and returns `[x.rows, hidden_size]` sums: what
    /// [`ExpertCompute::compute`] does, without a `meanwhile`.
    ///
    /// # Errors
    /// [`ExpertError`] names the expert.
    pub fn compute_work(
        &self,
        layer: u16,
        x: &Activations,
        work: &[ExpertWork],
    ) -> Result<FixedRows, ExpertError> {
        Call::begin(self, layer, x, work)?.finish()
    }

    fn count_hits(&self, hits: usize) {
        self.counters.hits.fetch_add(hits as u64, Ordering::Relaxed);
    }

    fn count_computed(&self, experts: usize) {
        self.counters.computed.fetch_add(experts as u64, Ordering::Relaxed);
    }

    /// Queues the read of `id` into `buf`; whoever waits for it hears from the cache.
    fn load(&self, id: ExpertId, record_bytes: usize, mut buf: AlignedBuf) {
        let (source, cache, counters) =
            (Arc::clone(&self.source), Arc::clone(&self.cache), Arc::clone(&self.counters));
        self.readers.submit(Box::new(move || {
            let read = read_record(source.as_ref(), &counters, id, record_bytes, &mut buf);
            cache.finish(id, buf, read);
        }));
    }
}

impl ExpertCompute for LocalStore {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        let call = Call::begin(self, batch.layer, &batch.x, &batch.work);
        meanwhile();
        call?.finish()
    }

    fn layout(&self) -> &ExpertLayout {
        self.source.layout()
    }
}

/// Reads one record; a panic of the source is an error like any other, or a waiter would never wake.
fn read_record(
    source: &dyn ExpertSource,
    counters: &Counters,
    id: ExpertId,
    record_bytes: usize,
    buf: &mut AlignedBuf,
) -> Result<(), ExpertError> {
    let failed = |what: &str| ExpertError::Read {
        id,
        path: source.describe().into(),
        source: std::io::Error::other(what.to_owned()),
    };
    let record = buf.get_mut(..record_bytes).ok_or_else(|| failed("the record is larger than its slot"))?;
    std::panic::catch_unwind(AssertUnwindSafe(|| source.read(id, record)))
        .unwrap_or_else(|_| Err(failed("the reader panicked")))?;
    counters.misses.fetch_add(1, Ordering::Relaxed);
    counters.bytes_read.fetch_add(record_bytes as u64, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests;
