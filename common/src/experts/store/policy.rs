//! Which cached expert gives way when a slot is needed.

use std::collections::{BTreeSet, HashMap};

use super::super::ExpertId;

/// Ranks cached experts for eviction. Implementations see every insertion, use and removal; they
/// never own memory, so a policy can be replayed on a recorded trace without a disk.
pub trait EvictionPolicy: Send {
    /// `id` became resident.
    fn inserted(&mut self, id: ExpertId);

    /// `id` was used while resident.
    fn used(&mut self, id: ExpertId);

    /// `id` left the cache.
    fn evicted(&mut self, id: ExpertId);

    /// Resident experts, the first to give way first. The store takes the first one that is not
    /// being computed right now.
    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_>;
}

/// Least frequently used with dynamic ageing: an expert's rank is the cache's age plus its uses
/// since it became resident; the age is the rank of the last expert evicted. Equal ranks give way
/// in least-recently-used order.
///
/// Plain LRU finds nothing in a cache smaller than one token's experts, because every layer comes
/// round in the same order; counting uses keeps the hot experts, ageing lets yesterday's go.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u16) -> ExpertId {
        ExpertId { layer: 0, index }
    }

    fn order(policy: &AgedFrequency) -> Vec<u16> {
        policy.candidates().map(|id| id.index).collect()
    }

    #[test]
    fn rare_then_old_gives_way_first() {
        let mut policy = AgedFrequency::default();
        for i in 0..3 {
            policy.inserted(id(i));
        }
        assert_eq!(order(&policy), [0, 1, 2]);
        policy.used(id(0));
        assert_eq!(order(&policy), [1, 2, 0]);
    }

    #[test]
    fn ageing_lets_a_newcomer_pass_a_formerly_hot_expert() {
        let mut policy = AgedFrequency::default();
        policy.inserted(id(0));
        policy.used(id(0));
        policy.used(id(0));
        // Rank 3; each round of insert and evict raises the age by one.
        for _ in 0..3 {
            policy.inserted(id(1));
            policy.evicted(id(1));
        }
        policy.inserted(id(2));
        assert_eq!(order(&policy), [0, 2]);
    }
}
