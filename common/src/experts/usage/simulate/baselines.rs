//! Policies of the literature that need no file of their own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::super::ExpertId;
use super::super::super::store::EvictionPolicy;

/// Experts in the order in which they were put in.
#[derive(Debug, Default)]
pub(super) struct Queue {
    order: BTreeMap<u64, ExpertId>,
    places: HashMap<ExpertId, u64>,
    clock: u64,
}

impl Queue {
    /// Puts `id` at the end, from wherever it is.
    pub(super) fn push(&mut self, id: ExpertId) {
        self.clock += 1;
        if let Some(old) = self.places.insert(id, self.clock) {
            self.order.remove(&old);
        }
        self.order.insert(self.clock, id);
    }

    pub(super) fn remove(&mut self, id: ExpertId) -> bool {
        let place = self.places.remove(&id);
        place.is_some_and(|place| self.order.remove(&place).is_some())
    }

    pub(super) fn pop(&mut self) -> Option<ExpertId> {
        let (_, id) = self.order.pop_first()?;
        self.places.remove(&id);
        Some(id)
    }

    pub(super) fn first(&self) -> Option<ExpertId> {
        self.iter().next()
    }

    pub(super) fn contains(&self, id: ExpertId) -> bool {
        self.places.contains_key(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = ExpertId> + '_ {
        self.order.values().copied()
    }
}

/// Least recently used.
#[derive(Debug, Default)]
pub struct Lru(Queue);

impl EvictionPolicy for Lru {
    fn inserted(&mut self, id: ExpertId) {
        self.0.push(id);
    }

    fn used(&mut self, id: ExpertId) {
        self.0.push(id);
    }

    fn evicted(&mut self, id: ExpertId) {
        self.0.remove(id);
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        Box::new(self.0.iter())
    }
}

/// First in, first out.
#[derive(Debug, Default)]
pub struct Fifo(Queue);

impl EvictionPolicy for Fifo {
    fn inserted(&mut self, id: ExpertId) {
        self.0.push(id);
    }

    fn used(&mut self, _id: ExpertId) {}

    fn evicted(&mut self, id: ExpertId) {
        self.0.remove(id);
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        Box::new(self.0.iter())
    }
}

/// Least frequently used with dynamic ageing: an expert's rank is the cache's age plus its uses
/// since it became resident; the age is the rank of the last expert evicted. Equal ranks give way
/// in least-recently-used order.
#[derive(Debug, Default)]
pub struct AgedFrequency {
    ranked: BTreeSet<(u64, u64, ExpertId)>,
    ranks: HashMap<ExpertId, (u64, u64)>,
    age: u64,
    clock: u64,
}

impl AgedFrequency {
    fn put(&mut self, id: ExpertId, rank: u64) {
        self.clock += 1;
        if let Some((rank, stamp)) = self.ranks.insert(id, (rank, self.clock)) {
            self.ranked.remove(&(rank, stamp, id));
        }
        self.ranked.insert((rank, self.clock, id));
    }
}

impl EvictionPolicy for AgedFrequency {
    fn inserted(&mut self, id: ExpertId) {
        self.put(id, self.age + 1);
    }

    fn used(&mut self, id: ExpertId) {
        if let Some(&(rank, _)) = self.ranks.get(&id) {
            self.put(id, rank + 1);
        }
    }

    fn evicted(&mut self, id: ExpertId) {
        if let Some((rank, stamp)) = self.ranks.remove(&id) {
            self.ranked.remove(&(rank, stamp, id));
            self.age = self.age.max(rank);
        }
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        Box::new(self.ranked.iter().map(|&(_, _, id)| id))
    }
}

/// Adaptive replacement cache: `t1` holds what was used once, `t2` what was used again, `b1` and `b2`
/// remember what left them; hits in the memories shift the target size of `t1`.
#[derive(Debug)]
pub struct Arc {
    slots: usize,
    target: usize,
    t1: Queue,
    t2: Queue,
    b1: Queue,
    b2: Queue,
}

impl Arc {
    /// For a cache of this many experts.
    pub fn new(slots: usize) -> Self {
        let queue = Queue::default;
        Self { slots: slots.max(1), target: 0, t1: queue(), t2: queue(), b1: queue(), b2: queue() }
    }
}

impl EvictionPolicy for Arc {
    fn routed(&mut self, layer: u16, _rows: usize, uses: &[(u16, usize)]) {
        // The target moves before the victim of this miss is chosen.
        for &(index, _) in uses {
            let id = ExpertId { layer, index };
            if self.b1.contains(id) {
                let step = (self.b2.len() / self.b1.len().max(1)).max(1);
                self.target = (self.target + step).min(self.slots);
            } else if self.b2.contains(id) {
                let step = (self.b1.len() / self.b2.len().max(1)).max(1);
                self.target = self.target.saturating_sub(step);
            }
        }
    }

    fn inserted(&mut self, id: ExpertId) {
        // Both memories are asked: an expert is in one at most.
        if self.b1.remove(id) | self.b2.remove(id) {
            self.t2.push(id);
        } else {
            self.t1.push(id);
        }
    }

    fn used(&mut self, id: ExpertId) {
        if self.t1.remove(id) || self.t2.contains(id) {
            self.t2.push(id);
        }
    }

    fn evicted(&mut self, id: ExpertId) {
        if self.t1.remove(id) {
            self.b1.push(id);
        } else if self.t2.remove(id) {
            self.b2.push(id);
        }
        while self.t1.len() + self.b1.len() > self.slots && self.b1.pop().is_some() {}
        let all = |arc: &Self| arc.t1.len() + arc.t2.len() + arc.b1.len() + arc.b2.len();
        while all(self) > 2 * self.slots && self.b2.pop().is_some() {}
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        if self.t1.len() > self.target.max(1) || self.t2.len() == 0 {
            Box::new(self.t1.iter().chain(self.t2.iter()))
        } else {
            Box::new(self.t2.iter().chain(self.t1.iter()))
        }
    }
}
