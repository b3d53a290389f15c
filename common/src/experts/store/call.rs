//! The course of one call: claim slots, queue reads, compute in order of arrival, in waves where
//! slots are short.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::super::{ExpertError, ExpertWork};
use super::cache::{Arrival, Outcome, Record, Wanted};
use super::job::{Item, Job};
use super::{Core, Why};
use crate::fixed::FixedRows;
use crate::kernels::Activations;

/// While slots are short, this many experts per thread are computed before slots are asked for again:
/// few, so that the disk goes on soon, and enough to keep all threads busy.
const WAVE_PER_THREAD: usize = 2;

/// Where the records of one call were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTally {
    /// Experts found in RAM, or already on their way.
    pub hits: usize,
    /// Experts read because this call asked for them.
    pub misses: usize,
    /// Bytes of those.
    pub read_bytes: usize,
    /// Time with nothing to compute before a record was read.
    pub disk_wait: Duration,
}

/// One layer's work in progress.
pub(super) struct Call<'a> {
    core: &'a Core,
    number: u64,
    job: Job<'a>,
    /// Items without a slot so far.
    pending: Vec<usize>,
    /// Items with a record, not yet computed, in order of arrival.
    ready: Vec<(usize, Record)>,
    /// Number of items whose record will arrive.
    awaited: usize,
    arrivals: Receiver<Arrival>,
    sender: Sender<Arrival>,
    tally: CallTally,
}

impl<'a> Call<'a> {
    /// Checks the work against the model and queues the first reads.
    pub(super) fn begin(
        core: &'a Core,
        layer: u16,
        x: &'a Activations,
        work: &'a [ExpertWork],
    ) -> Result<Self, ExpertError> {
        let job = Job::new(core.source.as_ref(), core.kernels, core.profile, layer, x, work)?;
        let uses: Vec<_> = work.iter().map(|work| (work.expert, work.rows.len())).collect();
        core.cache.routed(layer, x.rows(), &uses);
        let (sender, arrivals) = channel();
        let pending = (0..job.items.len()).collect();
        let experts: Vec<u16> = job.items.iter().map(|item| item.id.index).collect();
        let number = core.cache.begin(layer, &experts);
        let mut call = Self {
            core,
            number,
            job,
            pending,
            ready: Vec::new(),
            awaited: 0,
            arrivals,
            sender,
            tally: CallTally::default(),
        };
        call.request(Why::Demand);
        Ok(call)
    }

    /// Computes everything.
    pub(super) fn finish(mut self) -> Result<(FixedRows, CallTally), ExpertError> {
        loop {
            if !self.ready.is_empty() {
                self.compute()?;
                self.take_arrived()?;
            } else if self.awaited > 0 {
                self.receive()?;
            } else if !self.pending.is_empty() {
                self.core.cache.wait_for_room(self.number);
                self.request(Why::LastResort);
                continue;
            } else {
                break;
            }
            self.request(Why::Demand);
        }
        Ok((self.job.sums(), self.tally))
    }

    /// Computes what is ready, or a part of it while others wait for its slots.
    fn compute(&mut self) -> Result<(), ExpertError> {
        let count = if self.pending.is_empty() {
            self.ready.len()
        } else {
            self.ready.len().min(WAVE_PER_THREAD * rayon::current_num_threads())
        };
        let batch: Vec<_> = self.ready.drain(..count).collect();
        self.job.compute(&batch)?;
        self.core.counters.computed(batch.len());
        drop(batch);
        self.core.cache.released();
        Ok(())
    }

    /// Claims slots for as many pending items as possible and queues their reads.
    fn request(&mut self, why: Why) {
        if self.pending.is_empty() {
            return;
        }
        let wanted = |item: usize| {
            let Item { id, record_bytes, .. } = self.job.items[item];
            Wanted { item, id, record_bytes }
        };
        let wanted: Vec<_> = self.pending.drain(..).map(wanted).collect();
        let claims = self.core.cache.claim(self.number, why, &wanted, &self.sender);
        let (hits, misses) = (claims.hits.len() + claims.awaited, claims.loads.len());
        self.core.counters.claimed(hits, misses);
        self.tally.hits += hits;
        self.tally.misses += misses;
        self.tally.read_bytes += claims.loads.iter().map(|load| load.slot.len()).sum::<usize>();
        self.awaited += claims.awaited + claims.loads.len();
        self.ready.extend(claims.hits);
        self.pending.extend(claims.refused);
        for load in claims.loads {
            debug_assert_eq!(load.why, Why::Demand);
            self.core.submit(load);
        }
    }

    /// Waits for one record and takes whatever else has arrived by then.
    fn receive(&mut self) -> Result<(), ExpertError> {
        let begun = Instant::now();
        // The call keeps a sender of its own, so the channel cannot close while it waits.
        let first = self.arrivals.recv();
        let waited = begun.elapsed();
        self.core.counters.waited(waited);
        self.tally.disk_wait += waited;
        if let Ok(first) = first {
            self.take(first)?;
        }
        self.take_arrived()
    }

    fn take_arrived(&mut self) -> Result<(), ExpertError> {
        while let Ok(arrival) = self.arrivals.try_recv() {
            self.take(arrival)?;
        }
        Ok(())
    }

    fn take(&mut self, Arrival { item, outcome }: Arrival) -> Result<(), ExpertError> {
        self.awaited -= 1;
        match outcome {
            Outcome::Ready(record) => self.ready.push((item, record)),
            Outcome::Failed(error) => return Err(error),
            Outcome::Retry => self.pending.push(item),
        }
        Ok(())
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.ready.clear();
        self.core.call_ended(self.number);
    }
}
