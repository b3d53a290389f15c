//! The slots: page-aligned buffers of one maximal record each, filled once and then shared.
//!
//! A slot is *free*, *loading* (owned by a reader thread) or *resident* (an `Arc` in the table).
//! Whoever computes holds a clone of that `Arc`: a slot is evictable exactly while the table's is
//! the only one, so nothing has to be unpinned by hand and a panicking caller leaks nothing.
//! One mutex guards the table; it is never held during a read or a computation.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::{ExpertError, ExpertId};
use super::policy::EvictionPolicy;
use crate::mem::AlignedBuf;

/// A filled slot; it cannot be evicted while a clone exists outside the table.
pub(super) type Record = Arc<AlignedBuf>;

/// What a call learns about an expert it waits for.
pub(super) struct Arrival {
    /// The caller's own number of the expert.
    pub item: usize,
    pub outcome: Outcome,
}

pub(super) enum Outcome {
    Ready(Record),
    Failed(ExpertError),
    /// The read was another call's and failed; that call has the error, this one should ask again.
    Retry,
}

struct Waiter {
    item: usize,
    arrivals: Sender<Arrival>,
}

enum State {
    Loading(Vec<Waiter>),
    Resident(Record),
}

struct Table {
    entries: HashMap<ExpertId, State>,
    free: Vec<AlignedBuf>,
    allocated: usize,
    policy: Box<dyn EvictionPolicy>,
}

pub(super) struct Cache {
    table: Mutex<Table>,
    slots: usize,
    slot_bytes: usize,
}

/// The answer to a request for several experts.
#[derive(Default)]
pub(super) struct Claims {
    /// Resident.
    pub hits: Vec<(usize, Record)>,
    /// Another call is reading them; they arrive on the channel.
    pub awaited: usize,
    /// To be read into these slots and handed to [`Cache::finish`].
    pub loads: Vec<(usize, AlignedBuf)>,
    /// No slot to be had now.
    pub refused: Vec<usize>,
}

impl Cache {
    pub(super) fn new(slots: usize, slot_bytes: usize, policy: Box<dyn EvictionPolicy>) -> Self {
        let table = Table { entries: HashMap::new(), free: Vec::new(), allocated: 0, policy };
        Self { table: Mutex::new(table), slots, slot_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up `wanted` (item number, expert). Hits are taken before any slot is given away, so
    /// that a miss never evicts an expert of the same request.
    pub(super) fn claim(&self, wanted: Vec<(usize, ExpertId)>, arrivals: &Sender<Arrival>) -> Claims {
        let mut claims = Claims::default();
        let mut table = self.lock();
        let mut misses = Vec::new();
        for (item, id) in wanted {
            match table.entries.get_mut(&id) {
                Some(State::Resident(record)) => {
                    claims.hits.push((item, Arc::clone(record)));
                    table.policy.used(id);
                }
                Some(State::Loading(waiters)) => {
                    waiters.push(Waiter { item, arrivals: arrivals.clone() });
                    claims.awaited += 1;
                }
                None => misses.push((item, id)),
            }
        }
        for (item, id) in misses {
            let waiter = Waiter { item, arrivals: arrivals.clone() };
            // The same expert may stand twice in one request.
            if let Some(State::Loading(waiters)) = table.entries.get_mut(&id) {
                waiters.push(waiter);
                claims.awaited += 1;
            } else if let Some(buf) = self.take_slot(&mut table) {
                table.entries.insert(id, State::Loading(vec![waiter]));
                claims.loads.push((item, buf));
            } else {
                claims.refused.push(item);
            }
        }
        claims
    }

    /// A free slot, else a new one within the budget, else the one the policy gives up first.
    fn take_slot(&self, table: &mut Table) -> Option<AlignedBuf> {
        if let Some(buf) = table.free.pop() {
            return Some(buf);
        }
        if table.allocated < self.slots
            && let Ok(buf) = AlignedBuf::zeroed(self.slot_bytes)
        {
            table.allocated += 1;
            return Some(buf);
        }
        let victim = table.policy.candidates().find(|id| {
            matches!(table.entries.get(id), Some(State::Resident(record)) if Arc::strong_count(record) == 1)
        })?;
        table.policy.evicted(victim);
        match table.entries.remove(&victim) {
            // Under the lock nobody can clone the table's only reference.
            Some(State::Resident(record)) => Arc::into_inner(record),
            _ => None,
        }
    }

    /// Takes a slot back from a reader: on success the expert becomes resident, on failure the slot
    /// is free again and the expert as unknown as before.
    pub(super) fn finish(&self, id: ExpertId, buf: AlignedBuf, read: Result<(), ExpertError>) {
        let mut table = self.lock();
        let Some(State::Loading(waiters)) = table.entries.remove(&id) else {
            table.free.push(buf);
            return;
        };
        let (record, mut error) = match read {
            Ok(()) => {
                let record = Arc::new(buf);
                table.entries.insert(id, State::Resident(Arc::clone(&record)));
                table.policy.inserted(id);
                (Some(record), None)
            }
            Err(error) => {
                table.free.push(buf);
                (None, Some(error))
            }
        };
        drop(table);
        for waiter in waiters {
            let outcome = match &record {
                Some(record) => Outcome::Ready(Arc::clone(record)),
                None => error.take().map_or(Outcome::Retry, Outcome::Failed),
            };
            // A call that failed meanwhile no longer listens; the record stays cached all the same.
            let _ = waiter.arrivals.send(Arrival { item: waiter.item, outcome });
        }
    }

    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        self.lock().allocated
    }
}
