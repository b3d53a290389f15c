//! The slots: page-aligned buffers of one record each, filled once and then shared.
//!
//! Slots have the size of their record, because an int8 MTP expert is nearly twice an int4 one and
//! would make every slot that large. A slot is reused for records of the same size and given back to
//! the system when another size needs the room.
//!
//! A slot is *free*, *loading* (owned by a reader thread) or *resident* (an `Arc` in the table).
//! Whoever computes holds a clone of that `Arc`: a slot is evictable exactly while the table's is
//! the only one, so nothing has to be unpinned by hand and a panicking caller leaks nothing.
//! One mutex guards the table; it is never held during a read or a computation.

use std::collections::{BTreeMap, HashMap, HashSet};
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
    /// By size.
    free: BTreeMap<usize, Vec<AlignedBuf>>,
    /// Of all slots: free, loading and resident.
    allocated_bytes: usize,
    policy: Box<dyn EvictionPolicy>,
    /// Never evicted.
    pins: HashSet<ExpertId>,
    evictions: u64,
}

impl Table {
    fn release(&mut self, buf: AlignedBuf) {
        self.free.entry(buf.len()).or_default().push(buf);
    }

    fn take_free(&mut self, bytes: usize) -> Option<AlignedBuf> {
        let same_size = self.free.get_mut(&bytes)?;
        let buf = same_size.pop();
        if same_size.is_empty() {
            self.free.remove(&bytes);
        }
        buf
    }
}

pub(super) struct Cache {
    table: Mutex<Table>,
    budget_bytes: usize,
}

/// An expert asked for.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// The caller's own number of it.
    pub item: usize,
    pub id: ExpertId,
    pub record_bytes: usize,
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
    pub(super) fn new(budget_bytes: usize, policy: Box<dyn EvictionPolicy>) -> Self {
        let table = Table {
            entries: HashMap::new(),
            free: BTreeMap::new(),
            allocated_bytes: 0,
            policy,
            pins: HashSet::new(),
            evictions: 0,
        };
        Self { table: Mutex::new(table), budget_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up the experts `wanted`. Hits are taken before any slot is given away, so
    /// that a miss never evicts an expert of the same request.
    pub(super) fn claim(&self, wanted: &[Wanted], arrivals: &Sender<Arrival>) -> Claims {
        let mut claims = Claims::default();
        let mut table = self.lock();
        let mut misses = Vec::new();
        for &one in wanted {
            let Wanted { item, id, .. } = one;
            match table.entries.get_mut(&id) {
                Some(State::Resident(record)) => {
                    claims.hits.push((item, Arc::clone(record)));
                    table.policy.used(id);
                }
                Some(State::Loading(waiters)) => {
                    waiters.push(Waiter { item, arrivals: arrivals.clone() });
                    claims.awaited += 1;
                }
                None => misses.push(one),
            }
        }
        for Wanted { item, id, record_bytes } in misses {
            let waiter = Waiter { item, arrivals: arrivals.clone() };
            // The same expert may stand twice in one request.
            if let Some(State::Loading(waiters)) = table.entries.get_mut(&id) {
                waiters.push(waiter);
                claims.awaited += 1;
            } else if let Some(buf) = self.take_slot(&mut table, record_bytes) {
                table.entries.insert(id, State::Loading(vec![waiter]));
                claims.loads.push((item, buf));
            } else {
                claims.refused.push(item);
            }
        }
        claims
    }

    /// A free slot of this size, else a new one within the budget, for which free slots of other sizes
    /// and then the experts that the policy gives up first make room. `None` when all that is left is
    /// being read or computed.
    fn take_slot(&self, table: &mut Table, bytes: usize) -> Option<AlignedBuf> {
        loop {
            if let Some(buf) = table.take_free(bytes) {
                return Some(buf);
            }
            if table.allocated_bytes.saturating_add(bytes) <= self.budget_bytes
                && let Ok(buf) = AlignedBuf::zeroed(bytes)
            {
                table.allocated_bytes += bytes;
                return Some(buf);
            }
            if let Some(&other) = table.free.keys().next() {
                drop(table.take_free(other));
                table.allocated_bytes -= other;
            } else {
                let buf = Self::evict(table)?;
                table.release(buf);
            }
        }
    }

    /// Takes the first expert that nobody computes out of the cache.
    fn evict(table: &mut Table) -> Option<AlignedBuf> {
        let victim = table.policy.candidates().find(|id| {
            !table.pins.contains(id)
                && matches!(table.entries.get(id), Some(State::Resident(record)) if Arc::strong_count(record) == 1)
        })?;
        table.policy.evicted(victim);
        table.evictions += 1;
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
            table.release(buf);
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
                table.release(buf);
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

    /// Replaces the experts that are never evicted.
    pub(super) fn set_pins(&self, pins: impl Iterator<Item = ExpertId>) {
        self.lock().pins = pins.collect();
    }

    /// Pinned experts, bytes of those that are resident, experts evicted so far.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let table = self.lock();
        let resident = |id| match table.entries.get(id) {
            Some(State::Resident(record)) => record.len() as u64,
            _ => 0,
        };
        (table.pins.len() as u64, table.pins.iter().map(resident).sum(), table.evictions)
    }

    #[cfg(test)]
    pub(super) fn allocated_bytes(&self) -> usize {
        self.lock().allocated_bytes
    }
}
