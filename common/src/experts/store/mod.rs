//! The local expert store: a RAM budget of cached records over an [`ExpertSource`].
//!
//! A call asks the cache for its experts, queues every miss at once, runs the caller's
//! `meanwhile` while the disk works, computes what is resident and then goes on in order of arrival.
//! Experts that found no slot wait for the next wave, when this call's own slots are free again.
//! Sums are integers (rule N5), so neither order, budget nor the number of threads changes a bit.
//!
//! | file | idea |
//! |---|---|
//! | `call` | the course of one call |
//! | `job` | its arithmetic |
//! | `cache` | what is in RAM, what is coming, who gives way |
//! | `room` | where in the arena the next record goes |
//! | `policy` | whose record is worth least |
//! | `guesses` | what became of guesses, and whether the next is worth a read |
//! | `keeper` | the thread that brings pinned experts into RAM |
//! | `check` | reading everything once |
//! | `watch` | less RAM when the system runs short of it |
//! | `loader` | reading and checking in the background |
//!
//! *Budget.* All records lie in one arena of at most `ram_bytes`; nothing is ever read anywhere else. A
//! call that finds no room computes what it holds, lets go of it and asks again; a call that holds nothing
//! waits its turn, while those that hold something never wait for more: calls cannot deadlock. A call
//! also holds one `[rows, hidden_size]` array of sums, whatever the number of threads.

mod cache;
mod call;
mod check;
mod guesses;
mod job;
mod keeper;
mod loader;
mod policy;
mod room;
mod stats;
mod watch;

pub use call::CallTally;
pub use policy::{EvictionPolicy, LearnedFrequency, SharedUsage};
pub use stats::StoreStats;
pub use watch::MemoryWatch;

use std::sync::Arc;
use std::time::Instant;

use self::cache::{Cache, Load, Why};
use self::call::Call;
use self::keeper::{Keeper, Signal};
use self::loader::Loader;
use self::stats::Counters;
use super::times::Tiers;
use super::{
    Ahead, ExpertCompute, ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertTimes, ExpertWork,
    Lookahead, RoutedBatch,
};
use crate::fixed::FixedRows;
use crate::io::{Class, IoOptions};
use crate::kernels::{Activations, Kernels};
use crate::mem::Arena;
use crate::profile::NumericProfile;

/// Of a store that cannot hold everything, this part at most is pinned: calls need room to work in.
const PINNED_PART: (usize, usize) = (7, 8);

/// How a store is set up.
pub struct StoreOptions {
    /// Most bytes of records kept in RAM.
    pub ram_bytes: usize,
    /// Who gives way when a slot is needed.
    pub policy: Box<dyn EvictionPolicy>,
    /// How disks are read.
    pub io: IoOptions,
}

impl StoreOptions {
    /// The default policy within `ram_bytes`.
    pub fn new(ram_bytes: usize) -> Self {
        Self { ram_bytes, policy: Box::new(LearnedFrequency::default()), io: IoOptions::default() }
    }
}

/// What calls and the keeper share.
struct Core {
    source: Arc<dyn ExpertSource>,
    kernels: Kernels,
    profile: NumericProfile,
    cache: Arc<Cache>,
    counters: Arc<Counters>,
    signal: Arc<Signal>,
    loader: Loader,
    /// Experts of the model, and the bytes of all their records.
    experts: usize,
    all_bytes: usize,
}

/// Computes experts from a container or pack on this machine.
pub struct LocalStore {
    core: Arc<Core>,
    _keeper: Keeper,
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
        let StoreOptions { ram_bytes, policy, io } = options;
        let layout = source.layout();
        let needed_bytes = layout.max_record_bytes();
        let budget_error = ExpertError::Budget { budget_bytes: ram_bytes, needed_bytes };
        if ram_bytes < needed_bytes || needed_bytes == 0 {
            return Err(budget_error);
        }
        let sizes = || layout.ids().filter_map(|id| layout.record_bytes(id));
        let (experts, all_bytes) = (sizes().count(), sizes().fold(0, usize::saturating_add));
        // Of address space more than everything would be idle; of RAM nothing is taken yet.
        let arena = Arena::new(ram_bytes.min(all_bytes)).map_err(|_| budget_error)?;
        let signal = Arc::new(Signal::default());
        let core = Arc::new(Core {
            loader: Loader::start(Arc::clone(&source), io),
            source,
            kernels,
            profile,
            cache: Arc::new(Cache::new(arena, policy)),
            counters: Arc::default(),
            signal: Arc::clone(&signal),
            experts,
            all_bytes,
        });
        let keeper = Keeper::start(&core, signal);
        Ok(Self { core, _keeper: keeper })
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        let mut stats = self.core.counters.read();
        stats.disk_busy_us = u64::try_from(self.core.loader.busy().as_micros()).unwrap_or(u64::MAX);
        self.core.cache.count(&mut stats);
        stats
    }

    /// Makes `pins` the experts that are given up last, and brings them into RAM in the background, the
    /// first ones first; those pinned before and not now become ordinary. Experts this machine does not
    /// hold are ignored, as is what goes beyond seven eighths of the RAM when not everything fits.
    pub fn set_pins(&self, pins: &[ExpertId]) {
        let core = &self.core;
        let limit = core.cache.capacity();
        let mut left = if limit >= core.all_bytes { limit } else { limit / PINNED_PART.1 * PINNED_PART.0 };
        let mut fits = |id: &ExpertId| {
            let bytes = core.source.layout().record_bytes(*id).unwrap_or(usize::MAX);
            let fits = core.source.contains(*id) && bytes <= left;
            left -= if fits { bytes } else { 0 };
            fits
        };
        core.cache.set_pins(pins.iter().copied().filter(|id| fits(id)).collect());
        core.signal.wake();
    }

    /// Changes the RAM budget while running, up to what the store was opened with and down to one record.
    /// Memory beyond it goes back to the system at once, or as soon as its records are computed.
    pub fn set_ram_limit(&self, bytes: usize) {
        self.core.cache.set_limit(bytes.max(self.core.source.layout().max_record_bytes()));
        self.core.signal.wake();
    }

    /// The RAM budget now, in bytes.
    pub fn ram_limit(&self) -> usize {
        self.core.cache.limit()
    }

    /// The RAM budget the store was opened with, in bytes (at most what all records need).
    pub fn ram_capacity(&self) -> usize {
        self.core.cache.capacity()
    }

    /// The experts whose records are in RAM now.
    pub fn resident_ids(&self) -> Vec<ExpertId> {
        self.core.cache.resident_ids()
    }

    /// Which experts of a layer are in RAM now.
    pub fn are_resident(&self, layer: u16, experts: &[u16]) -> Vec<bool> {
        self.core.cache.are_resident(experts.iter().map(|&index| ExpertId { layer, index }))
    }

    /// Whether there is RAM for every expert of the model.
    pub fn has_room_for_all(&self) -> bool {
        self.core.cache.limit() >= self.core.all_bytes
    }

    /// The kernels it computes with.
    pub fn kernels(&self) -> Kernels {
        self.core.kernels
    }

    /// Bytes of records in RAM or on their way.
    pub fn ram_taken(&self) -> usize {
        self.core.cache.allocated_bytes()
    }

    /// Reads every expert once, which checks them all; what fits stays in RAM.
    ///
    /// # Errors
    /// Of an expert that cannot be read.
    pub fn read_all(&self) -> Result<(), ExpertError> {
        check::read_all(&self.core)
    }

    /// The source read from.
    pub fn source(&self) -> &Arc<dyn ExpertSource> {
        &self.core.source
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
        Ok(self.compute_tallied(layer, x, work, &mut || {})?.0)
    }

    /// As [`ExpertCompute::compute`], and says where the records were.
    ///
    /// # Errors
    /// [`ExpertError`] names the expert.
    pub fn compute_tallied(
        &self,
        layer: u16,
        x: &Activations,
        work: &[ExpertWork],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(FixedRows, CallTally), ExpertError> {
        let begun = Instant::now();
        let call = Call::begin(&self.core, layer, x, work);
        let asked = begun.elapsed();
        meanwhile();
        let begun = Instant::now();
        let result = call.and_then(Call::finish);
        self.core.counters.called(asked + begun.elapsed());
        result
    }

    /// Ends the guesses for all layers for which `is_over` holds, as wrong ones.
    pub fn end_guesses(&self, is_over: impl Fn(u16) -> bool) {
        self.core.cache.end_guesses(is_over);
    }

    /// Whether the most probable expert of a guess would be read now.
    pub fn guesses_pay(&self) -> bool {
        self.core.cache.guesses_pay()
    }
}

impl Core {
    /// Says that a call has ended, and has pinned experts brought back that gave way to it.
    fn call_ended(&self, call: u64) {
        if self.cache.ended(call) {
            self.signal.wake();
        }
    }

    /// Queues a read; whoever waits for it hears from the cache.
    fn submit(&self, load: Load) {
        let Load { id, slot, why } = load;
        let (cache, counters) = (Arc::clone(&self.cache), Arc::clone(&self.counters));
        let signal = (why == Why::Pin).then(|| Arc::clone(&self.signal));
        let done: loader::Done = Box::new(move |slot, read| {
            if let Some(Ok(())) = read {
                counters.was_read(slot.len());
            }
            cache.finish(id, slot, read);
            if let Some(signal) = signal {
                signal.wake();
            }
        });
        let class = if why == Why::Demand { Class::Demand } else { Class::Prefetch };
        if let Some(ticket) = self.loader.submit(id, slot, class, done) {
            self.cache.submitted(id, ticket);
        }
    }
}

impl ExpertCompute for LocalStore {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        Ok(self.compute_tallied(batch.layer, &batch.x, &batch.work, meanwhile)?.0)
    }

    fn layout(&self) -> &ExpertLayout {
        self.core.source.layout()
    }

    fn prefetch(&self, ahead: &Lookahead) {
        let source = &self.core.source;
        let held = ahead.ids().filter(|id| source.contains(*id));
        let experts: Vec<_> = held.filter_map(|id| Some((id, source.layout().record_bytes(id)?))).collect();
        for load in self.core.cache.guess(ahead.layer, &experts) {
            self.core.submit(load);
        }
    }

    fn lookahead(&self) -> Ahead {
        let all_resident = self.core.cache.capacity() >= self.core.all_bytes
            && self.core.cache.resident() >= self.core.experts;
        if all_resident { Ahead::NONE } else { Ahead::MEANWHILE }
    }

    fn times(&self) -> ExpertTimes {
        let stats = self.core.counters.read();
        let seconds = |us: u64| us as f64 / 1e6;
        ExpertTimes {
            local_s: seconds(stats.call_us),
            local_disk_s: seconds(stats.wait_us),
            local_experts: stats.computed,
            tiers: Tiers { local_memory: stats.hits, local_disk: stats.misses, ..Tiers::default() },
            ..ExpertTimes::default()
        }
    }
}

#[cfg(test)]
mod tests;
