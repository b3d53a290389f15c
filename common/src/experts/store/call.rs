//! The course of one call: claim slots, queue reads, compute in order of arrival, in waves where
//! slots are short.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use super::super::{ExpertError, ExpertWork};
use super::cache::{Arrival, Outcome, Record, Wanted};
use super::job::{Item, Job};
use super::{LocalStore, read_record};
use crate::fixed::FixedRows;
use crate::kernels::Activations;
use crate::mem::AlignedBuf;

/// One layer's work in progress.
pub(super) struct Call<'a> {
    store: &'a LocalStore,
    job: Job<'a>,
    /// Items without a slot so far.
    pending: Vec<usize>,
    /// Items with a record, not yet computed.
    ready: Vec<(usize, Record)>,
    /// Number of items whose record will arrive.
    awaited: usize,
    arrivals: Receiver<Arrival>,
    sender: Sender<Arrival>,
}

impl<'a> Call<'a> {
    /// Checks the work against the model and queues the first reads.
    pub(super) fn begin(
        store: &'a LocalStore,
        layer: u16,
        x: &'a Activations,
        work: &'a [ExpertWork],
    ) -> Result<Self, ExpertError> {
        let job = Job::new(store.source.as_ref(), store.kernels, store.profile, layer, x, work)?;
        let (sender, arrivals) = channel();
        let pending = (0..job.items.len()).collect();
        let mut call = Self { store, job, pending, ready: Vec::new(), awaited: 0, arrivals, sender };
        call.request();
        Ok(call)
    }

    /// Computes everything.
    pub(super) fn finish(mut self) -> Result<FixedRows, ExpertError> {
        loop {
            if !self.ready.is_empty() {
                let ready = std::mem::take(&mut self.ready);
                self.job.compute(&ready)?;
                self.store.count_computed(ready.len());
            } else if self.awaited > 0 {
                self.receive()?;
            } else if let Some(item) = self.pending.pop() {
                // Every slot is held by other calls, and this one holds none: waiting for theirs
                // could go on for ever.
                let record = self.read_privately(item)?;
                self.ready.push((item, record));
                continue;
            } else {
                return Ok(self.job.into_sums());
            }
            self.request();
        }
    }

    /// Claims slots for as many pending items as possible and queues their reads.
    fn request(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let wanted = |item: usize| {
            let Item { id, record_bytes, .. } = self.job.items[item];
            Wanted { item, id, record_bytes }
        };
        let wanted: Vec<_> = self.pending.drain(..).map(wanted).collect();
        let claims = self.store.cache.claim(&wanted, &self.sender);
        self.store.count_hits(claims.hits.len() + claims.awaited);
        self.awaited += claims.awaited + claims.loads.len();
        self.ready.extend(claims.hits);
        self.pending.extend(claims.refused);
        for (item, buf) in claims.loads {
            let Item { id, record_bytes, .. } = self.job.items[item];
            self.store.load(id, record_bytes, buf);
        }
    }

    /// Waits for one record and takes whatever else has arrived by then.
    fn receive(&mut self) -> Result<(), ExpertError> {
        // The call keeps a sender of its own, so the channel cannot close while it waits.
        let begun = Instant::now();
        let mut next = self.arrivals.recv().ok();
        self.store.counters.waited(begun.elapsed());
        while let Some(Arrival { item, outcome }) = next {
            self.awaited -= 1;
            match outcome {
                Outcome::Ready(record) => self.ready.push((item, record)),
                Outcome::Failed(error) => return Err(error),
                Outcome::Retry => self.pending.push(item),
            }
            next = self.arrivals.try_recv().ok();
        }
        Ok(())
    }

    fn read_privately(&self, item: usize) -> Result<Record, ExpertError> {
        let Item { id, record_bytes, .. } = self.job.items[item];
        let source = self.store.source.as_ref();
        let mut buf = AlignedBuf::zeroed(record_bytes).map_err(|error| ExpertError::Read {
            id,
            path: source.describe().into(),
            source: error,
        })?;
        read_record(source, &self.store.counters, id, record_bytes, &mut buf)?;
        Ok(Arc::new(buf))
    }
}
