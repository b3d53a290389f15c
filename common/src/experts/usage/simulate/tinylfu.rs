//! W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM
//! Transactions on Storage 2017), as in Caffeine, with exact counts in place of the sketch: experts are few.

use std::collections::HashMap;

use super::super::super::ExpertId;
use super::super::super::store::EvictionPolicy;
use super::baselines::Queue;

/// The window is a hundredth of the room.
const WINDOW_SHARE: usize = 100;
/// Counts are halved after so many accesses per slot.
const SAMPLE: u64 = 10;
const MOST_USES: u32 = 15;

/// A window of newcomers before a segmented LRU; what leaves the window stays only if it has been used more
/// often than the main part's victim.
#[derive(Debug)]
pub struct TinyLfu {
    slots: usize,
    window: Queue,
    probation: Queue,
    protected: Queue,
    uses: HashMap<ExpertId, u32>,
    seen: u64,
}

impl TinyLfu {
    /// For a cache of this many experts.
    pub fn new(slots: usize) -> Self {
        let queue = Queue::default;
        Self { slots, window: queue(), probation: queue(), protected: queue(), uses: HashMap::new(), seen: 0 }
    }

    fn uses(&self, id: ExpertId) -> u32 {
        self.uses.get(&id).copied().unwrap_or(0)
    }

    fn main(&self) -> impl Iterator<Item = ExpertId> + '_ {
        self.probation.iter().chain(self.protected.iter())
    }

    fn window_is_full(&self) -> bool {
        self.window.len() > (self.slots / WINDOW_SHARE).max(1)
    }
}

impl EvictionPolicy for TinyLfu {
    fn routed(&mut self, layer: u16, _rows: usize, uses: &[(u16, usize)]) {
        for &(index, _) in uses {
            let uses = self.uses.entry(ExpertId { layer, index }).or_default();
            *uses = (*uses + 1).min(MOST_USES);
            self.seen += 1;
        }
        if self.seen > SAMPLE * self.slots as u64 {
            self.seen /= 2;
            self.uses.values_mut().for_each(|uses| *uses /= 2);
        }
    }

    fn inserted(&mut self, id: ExpertId) {
        self.window.push(id);
        // While nothing has to leave, the window overflows into the main part.
        let filling = self.window.len() + self.probation.len() + self.protected.len() < self.slots;
        if filling
            && self.window_is_full()
            && let Some(first) = self.window.pop()
        {
            self.probation.push(first);
        }
    }

    fn used(&mut self, id: ExpertId) {
        if self.window.contains(id) {
            self.window.push(id);
        } else if self.probation.remove(id) || self.protected.contains(id) {
            self.protected.push(id);
            if self.protected.len() * 5 > self.slots * 4
                && let Some(first) = self.protected.pop()
            {
                self.probation.push(first);
            }
        }
    }

    fn evicted(&mut self, id: ExpertId) {
        if !self.window.remove(id) {
            let _ = self.probation.remove(id) || self.protected.remove(id);
            // The window's candidate took the victim's place.
            if self.window_is_full()
                && let Some(first) = self.window.pop()
            {
                self.probation.push(first);
            }
        }
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        if !self.window_is_full() {
            return Box::new(self.main().chain(self.window.iter()));
        }
        let newcomer_wins = match (self.window.first(), self.main().next()) {
            (Some(newcomer), Some(victim)) => self.uses(newcomer) > self.uses(victim),
            (_, victim) => victim.is_some(),
        };
        if newcomer_wins {
            Box::new(self.main().chain(self.window.iter()))
        } else {
            Box::new(self.window.iter().chain(self.main()))
        }
    }
}
