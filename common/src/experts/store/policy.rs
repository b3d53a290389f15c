//! Which cached expert gives way when a slot is needed.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::ExpertId;
use super::super::usage::Usage;

/// Ranks cached experts for eviction. Implementations see every use, insertion and removal; they
/// never own memory, so a policy can be replayed on a recorded trace without a disk.
///
/// Nobody asks whether an expert deserves a slot: what has to be computed has to be in memory. A policy
/// that thinks little of a newcomer ranks it first among the candidates, and the next miss takes its slot.
pub trait EvictionPolicy: Send {
    /// A step begins: `rows` rows of `layer` were routed, `uses` are the experts with the number of rows
    /// that chose them. Comes before `used` and `inserted` of these experts.
    fn routed(&mut self, _layer: u16, _rows: usize, _uses: &[(u16, usize)]) {}

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

/// Usage counts that several parts of the program record and read.
pub type SharedUsage = Arc<Mutex<Usage>>;

/// The coolest expert gives way first, where heat is the decayed usage of *all* experts, resident or not
/// ([`Usage`]).
///
/// Every layer comes round once per token in the same order, so recency says nothing and a cache smaller
/// than one token's experts finds nothing by it. Counting the absent experts too is what admits them: a
/// newcomer that is cooler than everything resident is the first to go again and costs one slot for one
/// step, never the place of a better one.
#[derive(Debug)]
pub struct LearnedFrequency {
    usage: SharedUsage,
    /// Whether this policy counts; otherwise somebody who sees all routes does.
    counts: bool,
    /// Resident experts by heat; the bits of floats that are not negative sort as the floats do.
    ranked: BTreeSet<(u64, ExpertId)>,
    heats: HashMap<ExpertId, u64>,
    epoch: u64,
}

impl LearnedFrequency {
    /// Ranks by `usage`; `counts` says whether this policy records the steps it sees there, or
    /// somebody else does before the store is called.
    pub fn over(usage: SharedUsage, counts: bool) -> Self {
        Self { usage, counts, ranked: BTreeSet::new(), heats: HashMap::new(), epoch: 0 }
    }

    /// Enters `id` with its present heat.
    fn rank(&mut self, id: ExpertId) {
        let usage = Arc::clone(&self.usage);
        let usage = usage.lock().unwrap_or_else(PoisonError::into_inner);
        if usage.epoch() != self.epoch {
            self.epoch = usage.epoch();
            for (&id, heat) in &mut self.heats {
                *heat = usage.heat(id).to_bits();
            }
            self.ranked = self.heats.iter().map(|(&id, &heat)| (heat, id)).collect();
        }
        let heat = usage.heat(id).to_bits();
        if let Some(old) = self.heats.insert(id, heat) {
            self.ranked.remove(&(old, id));
        }
        self.ranked.insert((heat, id));
    }
}

impl Default for LearnedFrequency {
    /// Counts by itself, from nothing.
    fn default() -> Self {
        Self::over(SharedUsage::default(), true)
    }
}

impl EvictionPolicy for LearnedFrequency {
    fn routed(&mut self, layer: u16, rows: usize, uses: &[(u16, usize)]) {
        if self.counts {
            let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
            usage.record(layer, rows, uses.iter().copied());
        }
    }

    fn inserted(&mut self, id: ExpertId) {
        self.rank(id);
    }

    fn used(&mut self, id: ExpertId) {
        if self.heats.contains_key(&id) {
            self.rank(id);
        }
    }

    fn evicted(&mut self, id: ExpertId) {
        if let Some(heat) = self.heats.remove(&id) {
            self.ranked.remove(&(heat, id));
        }
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        Box::new(self.ranked.iter().map(|&(_, id)| id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u16) -> ExpertId {
        ExpertId { layer: 0, index }
    }

    fn order(policy: &LearnedFrequency) -> Vec<u16> {
        policy.candidates().map(|id| id.index).collect()
    }

    #[test]
    fn the_coolest_gives_way_first() {
        let mut policy = LearnedFrequency::default();
        for i in 0..3 {
            policy.routed(0, 1, &[(i, 1)]);
            policy.inserted(id(i));
        }
        policy.routed(0, 1, &[(0, 1)]);
        policy.used(id(0));
        assert_eq!(order(&policy), [1, 2, 0]);
        policy.evicted(id(1));
        assert_eq!(order(&policy), [2, 0]);
    }

    #[test]
    fn absent_experts_are_counted_too_and_return_to_their_rank() {
        let mut policy = LearnedFrequency::default();
        for _ in 0..5 {
            policy.routed(0, 1, &[(3, 1)]);
        }
        policy.routed(0, 2, &[(0, 2), (1, 1)]);
        policy.inserted(id(0));
        policy.inserted(id(1));
        policy.inserted(id(3));
        assert_eq!(order(&policy), [1, 0, 3]);
    }

    #[test]
    fn what_was_hot_cools_down() {
        let mut policy = LearnedFrequency::default();
        for (expert, times) in [(0, 3000), (1, 2500)] {
            for _ in 0..times {
                policy.routed(0, 1, &[(expert, 1)]);
                policy.used(id(expert));
            }
            policy.inserted(id(expert));
        }
        assert_eq!(order(&policy), [0, 1]);
    }
}
