//! What policies are measured against: choices made with knowledge of the trace.

use std::collections::{BTreeMap, BTreeSet};

use super::super::super::ExpertId;
use super::super::super::store::EvictionPolicy;
use super::{Phase, Replay};

/// Which experts to hold through a whole phase for most hits in decode steps (in all steps where there are
/// none): those with most uses per byte. `per_layer` gives every layer an equal part of the room.
pub fn fixed_choice(replay: &Replay, phase: &Phase, room: u64, per_layer: bool) -> Vec<bool> {
    let mut uses = vec![0u64; replay.experts()];
    let has_decode = replay.steps(phase).any(|step| replay.is_decode(&step));
    for step in replay.steps(phase).filter(|step| replay.is_decode(step) || !has_decode) {
        for &expert in step.experts {
            if let Some(uses) = uses.get_mut(expert as usize) {
                *uses += 1;
            }
        }
    }
    let mut ranking: Vec<u32> = (0..replay.experts() as u32).collect();
    let worth = |e: u32| uses.get(e as usize).map_or(0.0, |&uses| uses as f64 / replay.bytes(e) as f64);
    ranking.sort_by(|&a, &b| worth(b).total_cmp(&worth(a)));
    let mut chosen = vec![false; replay.experts()];
    let layer_room = if per_layer { room / replay.shape.layers.len().max(1) as u64 } else { room };
    let mut used = BTreeMap::<u16, u64>::new();
    for expert in ranking {
        let used = used.entry(if per_layer { replay.id(expert).layer } else { 0 }).or_default();
        if *used + replay.bytes(expert) <= layer_room {
            *used += replay.bytes(expert);
            super::mark(&mut chosen, expert, true);
        }
    }
    chosen
}

/// Evicts what is needed again farthest in the future.
pub struct Belady {
    /// For every access from the beginning on, the access after it of the same expert.
    next: Vec<usize>,
    /// Number of accesses seen.
    now: usize,
    ranked: BTreeSet<(std::cmp::Reverse<usize>, ExpertId)>,
    resident: BTreeMap<ExpertId, usize>,
    /// Next use of the experts of the present step.
    step: BTreeMap<ExpertId, usize>,
}

impl Belady {
    /// For a replay that begins at `step`.
    pub fn new(replay: &Replay, step: usize) -> Self {
        let accesses = replay.accesses_from(step);
        let mut next = vec![usize::MAX; accesses.len()];
        let mut later = vec![usize::MAX; replay.experts()];
        for (at, &expert) in accesses.iter().enumerate().rev() {
            if let (Some(next), Some(later)) = (next.get_mut(at), later.get_mut(expert as usize)) {
                *next = std::mem::replace(later, at);
            }
        }
        Self { next, now: 0, ranked: BTreeSet::new(), resident: BTreeMap::new(), step: BTreeMap::new() }
    }
}

impl EvictionPolicy for Belady {
    fn routed(&mut self, layer: u16, _rows: usize, uses: &[(u16, usize)]) {
        self.step.clear();
        for &(index, _) in uses {
            let next = self.next.get(self.now).copied().unwrap_or(usize::MAX);
            self.step.insert(ExpertId { layer, index }, next);
            self.now += 1;
        }
    }

    fn inserted(&mut self, id: ExpertId) {
        let next = self.step.get(&id).copied().unwrap_or(usize::MAX);
        if let Some(old) = self.resident.insert(id, next) {
            self.ranked.remove(&(std::cmp::Reverse(old), id));
        }
        self.ranked.insert((std::cmp::Reverse(next), id));
    }

    fn used(&mut self, id: ExpertId) {
        self.inserted(id);
    }

    fn evicted(&mut self, id: ExpertId) {
        if let Some(old) = self.resident.remove(&id) {
            self.ranked.remove(&(std::cmp::Reverse(old), id));
        }
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        Box::new(self.ranked.iter().map(|&(_, id)| id))
    }
}
