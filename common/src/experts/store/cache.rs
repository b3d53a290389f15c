//! Which records are in RAM, which are coming, and who gives way.
//!
//! An expert is *unknown*, *loading* (its slot is owned by a read) or *resident* (an `Arc` in the table).
//! Whoever computes holds a clone of that `Arc`: a slot can be given up exactly while the table's is the
//! only one, so nothing has to be released by hand and a panicking caller leaks nothing.
//!
//! Three kinds of reads want slots. *Demands* of calls take any slot nobody computes, those of guessed
//! experts last, and those of pinned ones only for a call that holds nothing and found no other. *Guesses*
//! and *pins* never take a pinned or guessed one, and a demand that finds no room calls them off. A demand
//! for an expert that is being read as a guess makes the read a demand.
//! Which slot goes first is the policy's order ([`EvictionPolicy`]), where it lies is `room`'s.
//!
//! One mutex guards the table; it is never held during a read or a computation. Locks are taken in the
//! order table, arena or reading queue.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::{ExpertError, ExpertId};
use super::guesses::Guesses;
use super::loader::Ticket;
use super::policy::EvictionPolicy;
use super::room::{self, Segment};
use super::stats::StoreStats;
use crate::mem::{Arena, ArenaBuf};

/// A filled slot; it cannot be given up while a clone exists outside the table.
pub(super) type Record = Arc<ArenaBuf>;

/// A call waits at most this long before it asks for room again.
const ROOM_POLL: Duration = Duration::from_millis(50);

/// An exact fit this many places behind the first candidate is still taken rather than a run of others.
const EXACT_FIT_SLACK: usize = 16;

/// What a call learns about an expert it waits for.
pub(super) struct Arrival {
    /// The caller's own number of the expert.
    pub item: usize,
    pub outcome: Outcome,
}

pub(super) enum Outcome {
    Ready(Record),
    Failed(ExpertError),
    /// The read was another call's and failed, or was called off; this one should ask again.
    Retry,
}

struct Waiter {
    item: usize,
    arrivals: Sender<Arrival>,
}

/// Why a record is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// A call waits.
    Demand,
    /// A call waits that holds nothing and found no room.
    LastResort,
    /// A coming layer may want it.
    Guess,
    /// It is pinned.
    Pin,
}

impl Why {
    fn is_demand(self) -> bool {
        matches!(self, Self::Demand | Self::LastResort)
    }
}

struct Loading {
    why: Why,
    waiters: Vec<Waiter>,
    /// Known a moment after the read was submitted.
    ticket: Option<Ticket>,
    bytes: usize,
    cancelled: bool,
}

enum State {
    Loading(Loading),
    Resident(Record),
}

struct Table {
    entries: HashMap<ExpertId, State>,
    /// Resident experts by offset in the arena.
    places: BTreeMap<usize, ExpertId>,
    policy: Box<dyn EvictionPolicy>,
    /// Given up last.
    pins: HashSet<ExpertId>,
    /// As given.
    pin_order: Vec<ExpertId>,
    /// A pinned expert was given up since the keeper was last woken.
    pin_lost: bool,
    guesses: Guesses,
    /// Calls that wait for room, first come first served.
    queue: VecDeque<u64>,
    calls: u64,
    evictions: u64,
    stopped: bool,
}

pub(super) struct Cache {
    arena: Arena,
    table: Mutex<Table>,
    /// Slots came back.
    room: Condvar,
}

/// An expert asked for.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// The caller's own number of it.
    pub item: usize,
    pub id: ExpertId,
    pub record_bytes: usize,
}

/// A read to be submitted: into this slot, then [`Cache::submitted`], then [`Cache::finish`].
pub(super) struct Load {
    pub id: ExpertId,
    pub slot: ArenaBuf,
    pub why: Why,
}

/// The answer to a request for several experts.
#[derive(Default)]
pub(super) struct Claims {
    /// Resident.
    pub hits: Vec<(usize, Record)>,
    /// Being read for others; they arrive on the channel.
    pub awaited: usize,
    /// To be read.
    pub loads: Vec<Load>,
    /// No slot to be had now.
    pub refused: Vec<usize>,
}

impl Cache {
    pub(super) fn new(arena: Arena, policy: Box<dyn EvictionPolicy>) -> Self {
        let table = Table {
            entries: HashMap::new(),
            places: BTreeMap::new(),
            policy,
            pins: HashSet::new(),
            pin_order: Vec::new(),
            pin_lost: false,
            guesses: Guesses::default(),
            queue: VecDeque::new(),
            calls: 0,
            evictions: 0,
            stopped: false,
        };
        Self { arena, table: Mutex::new(table), room: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the policy what a step of `rows` rows of `layer` needs, and by how many rows.
    pub(super) fn routed(&self, layer: u16, rows: usize, uses: &[(u16, usize)]) {
        self.lock().policy.routed(layer, rows, uses);
    }

    /// A number for a new call. `experts` of `layer` are what it will ask for: guesses for the layer end.
    pub(super) fn begin(&self, layer: u16, experts: &[u16]) -> u64 {
        let mut table = self.lock();
        table.calls += 1;
        let number = table.calls;
        for wrong in table.guesses.layer_begins(layer, experts) {
            table.call_off(wrong);
        }
        number
    }

    /// Ends the guesses for the layers that are over, as if nothing of them had been asked for.
    pub(super) fn end_guesses(&self, is_over: impl Fn(u16) -> bool) {
        let mut table = self.lock();
        for layer in table.guesses.layers().into_iter().filter(|&layer| is_over(layer)) {
            for wrong in table.guesses.layer_begins(layer, &[]) {
                table.call_off(wrong);
            }
        }
    }

    /// Whether the first of a list of guesses would be worth a read.
    pub(super) fn guesses_pay(&self) -> bool {
        self.lock().guesses.pays(0)
    }

    /// Looks up the experts `wanted` by a call. Hits are taken before any slot is given away, so that a
    /// miss never evicts an expert of the same request.
    pub(super) fn claim(&self, call: u64, why: Why, wanted: &[Wanted], arrivals: &Sender<Arrival>) -> Claims {
        let mut claims = Claims::default();
        let mut table = self.lock();
        table.leave_beyond(&self.arena);
        let mut misses = Vec::new();
        for &one in wanted {
            if !table.join(one, arrivals, &mut claims) {
                misses.push(one);
            }
        }
        let first_in_queue = table.queue.front().is_none_or(|&first| first == call);
        for one in misses {
            // The same expert may stand twice in one request.
            if table.join(one, arrivals, &mut claims) {
                continue;
            }
            let Wanted { item, id, record_bytes } = one;
            let slot = if first_in_queue { table.slot(&self.arena, record_bytes, why) } else { None };
            match slot {
                None => claims.refused.push(item),
                Some(slot) => {
                    table.guesses.missed(id);
                    let waiters = vec![Waiter { item, arrivals: arrivals.clone() }];
                    claims.loads.push(table.begin_load(id, slot, Why::Demand, waiters));
                }
            }
        }
        if claims.refused.len() < wanted.len() {
            table.queue.retain(|&waiting| waiting != call);
        }
        claims
    }

    /// Waits until slots may have come back. For calls that hold none and expect none: those that do
    /// hold slots finish without needing more, so that one is free some time.
    pub(super) fn wait_for_room(&self, call: u64) {
        let mut table = self.lock();
        if !table.queue.contains(&call) {
            table.queue.push_back(call);
        }
        drop(self.room.wait_timeout(table, ROOM_POLL).unwrap_or_else(PoisonError::into_inner));
    }

    /// Says that a call let go of records.
    pub(super) fn released(&self) {
        self.room.notify_all();
    }

    /// Says that a call has ended; true when a pinned expert had to give way and should come back.
    pub(super) fn ended(&self, call: u64) -> bool {
        let mut table = self.lock();
        table.queue.retain(|&waiting| waiting != call);
        let pin_lost = std::mem::take(&mut table.pin_lost);
        drop(table);
        self.room.notify_all();
        pin_lost
    }

    /// The reads worth making for a guess; it replaces the one before for its layer.
    pub(super) fn guess(&self, layer: u16, experts: &[(ExpertId, usize)]) -> Vec<Load> {
        let mut table = self.lock();
        if table.stopped {
            return Vec::new();
        }
        let ids: Vec<ExpertId> = experts.iter().map(|&(id, _)| id).collect();
        let Table { entries, guesses, .. } = &mut *table;
        let is_resident = |id: &ExpertId| matches!(entries.get(id), Some(State::Resident(_)));
        for old in guesses.replace(layer, &ids, is_resident) {
            table.call_off(old);
        }
        let room = self.arena.limit() / 4;
        let mut loads = Vec::new();
        for (rank, &(id, bytes)) in experts.iter().enumerate() {
            let known = table.entries.contains_key(&id);
            if known || !table.guesses.pays(rank) || table.guesses.outstanding_bytes() + bytes > room {
                continue;
            }
            let Some(slot) = table.slot(&self.arena, bytes, Why::Guess) else { break };
            table.guesses.issued(id, bytes);
            loads.push(table.begin_load(id, slot, Why::Guess, Vec::new()));
        }
        loads
    }

    /// The next read that brings a pinned expert into RAM, unless `in_flight` of them are under way.
    pub(super) fn next_pin(
        &self,
        in_flight: usize,
        bytes: impl Fn(ExpertId) -> Option<usize>,
    ) -> Option<Load> {
        let mut table = self.lock();
        let pins_loading =
            table.entries.values().filter(|s| matches!(s, State::Loading(l) if l.why == Why::Pin)).count();
        if pins_loading >= in_flight || table.stopped {
            return None;
        }
        let id = *table.pin_order.iter().find(|id| !table.entries.contains_key(id))?;
        let slot = table.slot(&self.arena, bytes(id)?, Why::Pin)?;
        Some(table.begin_load(id, slot, Why::Pin, Vec::new()))
    }

    /// Notes the ticket of a read, unless the read is over already.
    pub(super) fn submitted(&self, id: ExpertId, ticket: Ticket) {
        let mut table = self.lock();
        if let Some(State::Loading(loading)) = table.entries.get_mut(&id)
            && loading.ticket.is_none()
        {
            if loading.why == Why::Demand || !loading.waiters.is_empty() {
                ticket.promote();
            }
            let call_off = loading.cancelled && loading.waiters.is_empty();
            loading.ticket = Some(ticket);
            if call_off {
                table.call_off(id);
            }
        }
    }

    /// Takes a slot back from a read (`None`: it was called off): on success the expert becomes resident,
    /// else the slot is free again and the expert as unknown as before.
    pub(super) fn finish(&self, id: ExpertId, slot: ArenaBuf, read: Option<Result<(), ExpertError>>) {
        let mut table = self.lock();
        let waiters = match table.entries.remove(&id) {
            Some(State::Loading(loading)) => {
                if matches!(read, Some(Err(_))) && loading.why == Why::Pin {
                    // Whoever asks for it hears why it cannot be read; trying again would never end.
                    table.pin_order.retain(|&pin| pin != id);
                }
                loading.waiters
            }
            // Reads end once, so that nobody else can have put anything else there.
            Some(other @ State::Resident(_)) => {
                table.entries.insert(id, other);
                return;
            }
            None => Vec::new(),
        };
        let (record, mut error) = match read {
            // What lies beyond a limit lowered meanwhile must go.
            Some(Ok(())) if slot.offset() + slot.extent() <= self.arena.limit() || !waiters.is_empty() => {
                let record = Arc::new(slot);
                table.places.insert(record.offset(), id);
                table.entries.insert(id, State::Resident(Arc::clone(&record)));
                table.policy.inserted(id);
                table.guesses.arrived(id);
                (Some(record), None)
            }
            Some(failed) => {
                drop(slot);
                table.guesses.lost(id, false);
                (None, failed.err())
            }
            None => {
                table.guesses.called_off(id, slot.len());
                drop(slot);
                (None, None)
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
        drop(record);
        self.room.notify_all();
    }

    /// Replaces the experts that are given up last.
    pub(super) fn set_pins(&self, pins: Vec<ExpertId>) {
        let mut table = self.lock();
        table.pins = pins.iter().copied().collect();
        table.pin_order = pins;
    }

    /// Whether pinned experts are still to be read.
    pub(super) fn misses_pins(&self) -> bool {
        let table = self.lock();
        table.pin_order.iter().any(|id| !table.entries.contains_key(id))
    }

    /// Experts in RAM.
    pub(super) fn resident(&self) -> usize {
        self.lock().places.len()
    }

    /// The experts that can be computed without a read.
    pub(super) fn resident_ids(&self) -> Vec<ExpertId> {
        self.lock().places.values().copied().collect()
    }

    /// Which of these can be computed without a read.
    pub(super) fn are_resident(&self, ids: impl Iterator<Item = ExpertId>) -> Vec<bool> {
        let table = self.lock();
        ids.map(|id| matches!(table.entries.get(&id), Some(State::Resident(_)))).collect()
    }

    /// Lowers or raises the bytes in use, within what the arena has. What lies beyond a lowered limit is
    /// given up where nobody uses it, else as soon as it comes back.
    pub(super) fn set_limit(&self, bytes: usize) {
        let mut table = self.lock();
        self.arena.set_limit(bytes);
        table.leave_beyond(&self.arena);
        drop(table);
        self.room.notify_all();
    }

    /// Bytes in use at most.
    pub(super) fn limit(&self) -> usize {
        self.arena.limit()
    }

    /// Bytes the arena was made for.
    pub(super) fn capacity(&self) -> usize {
        self.arena.capacity()
    }

    /// No read is begun any more but for calls.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
    }

    /// What the table counts.
    pub(super) fn count(&self, stats: &mut StoreStats) {
        let table = self.lock();
        let resident = |id| match table.entries.get(id) {
            Some(State::Resident(record)) => record.len() as u64,
            _ => 0,
        };
        stats.pinned = table.pins.len() as u64;
        stats.pinned_bytes = table.pins.iter().map(resident).sum();
        stats.evictions = table.evictions;
        table.guesses.count(stats);
    }

    /// Bytes of slots that are in use.
    pub(super) fn allocated_bytes(&self) -> usize {
        self.arena.taken()
    }

    #[cfg(test)]
    pub(super) fn is_resident(&self, id: ExpertId) -> bool {
        matches!(self.lock().entries.get(&id), Some(State::Resident(_)))
    }
}

impl Table {
    /// Serves one expert from RAM or from a read under way; false when it has to be read.
    fn join(&mut self, wanted: Wanted, arrivals: &Sender<Arrival>, claims: &mut Claims) -> bool {
        let Wanted { item, id, .. } = wanted;
        match self.entries.get_mut(&id) {
            Some(State::Resident(record)) => {
                claims.hits.push((item, Arc::clone(record)));
                self.policy.used(id);
            }
            Some(State::Loading(loading)) => {
                loading.waiters.push(Waiter { item, arrivals: arrivals.clone() });
                loading.why = Why::Demand;
                if let Some(ticket) = &loading.ticket {
                    ticket.promote();
                }
                claims.awaited += 1;
            }
            None => return false,
        }
        self.guesses.used(id);
        true
    }

    fn begin_load(&mut self, id: ExpertId, slot: ArenaBuf, why: Why, waiters: Vec<Waiter>) -> Load {
        let loading = Loading { why, waiters, ticket: None, bytes: slot.len(), cancelled: false };
        self.entries.insert(id, State::Loading(loading));
        Load { id, slot, why }
    }

    /// A slot of `bytes`: free room, else room that others give up.
    fn slot(&mut self, arena: &Arena, bytes: usize, why: Why) -> Option<ArenaBuf> {
        loop {
            if let Some(slot) = arena.take(bytes) {
                return Some(slot);
            }
            if let Some(slot) = self.replace(arena, bytes, why) {
                return Some(slot);
            }
            if !why.is_demand() || !self.call_off_any() {
                return None;
            }
        }
    }

    /// A slot that others give up.
    fn replace(&mut self, arena: &Arena, bytes: usize, why: Why) -> Option<ArenaBuf> {
        let exact = {
            let ordinary = self.policy.candidates().filter(|id| self.is_ordinary(id));
            let mut extents = ordinary.filter_map(|id| Some((id, self.unused(&id)?.1)));
            let need = Arena::extent_of(bytes)?;
            extents.by_ref().take(EXACT_FIT_SLACK).find(|&(_, extent)| extent == need)
        };
        if let Some((victim, _)) = exact {
            let offset = self.evict(victim)?;
            return arena.take_at(offset, bytes).or_else(|| arena.take(bytes));
        }
        let run = room::cheapest_run(&self.segments(arena, why), bytes)?;
        for victim in run.victims {
            self.evict(victim);
        }
        arena.take_at(run.offset, bytes)
    }

    fn is_ordinary(&self, id: &ExpertId) -> bool {
        !self.pins.contains(id) && !self.guesses.is_live(id)
    }

    /// Offset and extent of a record that nobody computes.
    fn unused(&self, id: &ExpertId) -> Option<(usize, usize)> {
        match self.entries.get(id) {
            Some(State::Resident(record)) if Arc::strong_count(record) == 1 => {
                Some((record.offset(), record.extent()))
            }
            _ => None,
        }
    }

    /// All that is free or could be given up, with its cost: the place in the policy's order, for a demand
    /// also guessed and pinned experts behind all others.
    fn segments(&self, arena: &Arena, why: Why) -> Vec<Segment<ExpertId>> {
        let free = arena.free().into_iter().map(|(offset, len)| Segment { offset, len, slot: None });
        let mut segments: Vec<_> = free.collect();
        let all = self.entries.len() as u64 + 1;
        for (place, id) in self.policy.candidates().enumerate() {
            let Some((offset, len)) = self.unused(&id) else { continue };
            let cost = match (self.pins.contains(&id), self.guesses.is_live(&id)) {
                (false, false) => 0,
                (false, true) if why.is_demand() => all * all,
                (true, _) if why == Why::LastResort => all * all * all,
                _ => continue,
            };
            segments.push(Segment { offset, len, slot: Some((id, cost + place as u64 + 1)) });
        }
        segments.sort_unstable_by_key(|segment| segment.offset);
        segments
    }

    /// Gives up a record nobody computes; its offset is free then.
    fn evict(&mut self, id: ExpertId) -> Option<usize> {
        let record = self.give_up_unused(id)?;
        self.gone(id);
        Some(record.offset())
    }

    /// Takes a record nobody computes out of the table.
    fn give_up_unused(&mut self, id: ExpertId) -> Option<ArenaBuf> {
        self.unused(&id)?;
        match self.entries.remove(&id) {
            // Under the lock nobody can clone the table's only reference.
            Some(State::Resident(record)) => {
                self.places.remove(&record.offset());
                Arc::into_inner(record)
            }
            _ => None,
        }
    }

    fn gone(&mut self, id: ExpertId) {
        self.policy.evicted(id);
        self.guesses.lost(id, true);
        self.pin_lost |= self.pins.contains(&id);
        self.evictions += 1;
    }

    /// Moves or gives up records beyond the limit that nobody computes.
    fn leave_beyond(&mut self, arena: &Arena) {
        let limit = arena.limit();
        let beyond = self.places.range(limit..).map(|(_, &id)| id);
        let across = self.places.range(..limit).next_back().map(|(_, &id)| id).filter(
            |id| matches!(self.entries.get(id), Some(State::Resident(r)) if r.offset() + r.extent() > limit),
        );
        for id in beyond.chain(across).collect::<Vec<_>>() {
            if let Some(record) = self.give_up_unused(id) {
                self.move_down(arena, id, record);
            }
        }
    }

    /// Finds a record another place below the limit, if one is free or held by somebody less useful.
    fn move_down(&mut self, arena: &Arena, id: ExpertId, record: ArenaBuf) {
        let why = if self.pins.contains(&id) { Why::Demand } else { Why::Guess };
        let worse = self.policy.candidates().position(|other| other == id).is_some_and(|place| place > 0);
        let slot = arena.take(record.len());
        let slot = if slot.is_none() && worse { self.replace(arena, record.len(), why) } else { slot };
        match slot {
            Some(mut slot) => {
                slot.copy_from_slice(&record);
                self.places.insert(slot.offset(), id);
                self.entries.insert(id, State::Resident(Arc::new(slot)));
            }
            None => self.gone(id),
        }
    }

    /// Calls a guess or pin off that nobody waits for.
    fn call_off(&mut self, id: ExpertId) {
        let Some(State::Loading(loading)) = self.entries.get_mut(&id) else { return };
        if !loading.waiters.is_empty() || loading.why == Why::Demand {
            return;
        }
        loading.cancelled = true;
        let bytes = loading.bytes;
        if let Some(slot) = loading.ticket.as_ref().and_then(Ticket::cancel) {
            drop(slot);
            self.entries.remove(&id);
            self.guesses.called_off(id, bytes);
        }
    }

    /// Calls off some guess or pin that nobody waits for; false when none can be taken back at once.
    fn call_off_any(&mut self) -> bool {
        let open = |(&id, state): (&ExpertId, &State)| match state {
            State::Loading(l) if l.why != Why::Demand && l.waiters.is_empty() && !l.cancelled => Some(id),
            _ => None,
        };
        let Some(id) = self.entries.iter().filter_map(open).max() else { return false };
        self.call_off(id);
        !self.entries.contains_key(&id) || self.call_off_any()
    }
}
