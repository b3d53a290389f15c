//! S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).

use std::collections::HashMap;

use super::super::super::ExpertId;
use super::super::super::store::EvictionPolicy;
use super::baselines::Queue;

/// Uses counted per expert.
const MOST_USES: u8 = 3;
/// A tenth of the room is the probation queue.
const SMALL_SHARE: usize = 10;

/// A small queue for newcomers, a main queue whose used experts go round again, a memory of what left
/// the small queue unused.
#[derive(Debug)]
pub struct S3Fifo {
    slots: usize,
    small: Queue,
    main: Queue,
    ghost: Queue,
    uses: HashMap<ExpertId, u8>,
}

impl S3Fifo {
    /// For a cache of this many experts.
    pub fn new(slots: usize) -> Self {
        let queue = Queue::default;
        Self { slots, small: queue(), main: queue(), ghost: queue(), uses: HashMap::new() }
    }

    fn uses(&self, id: ExpertId) -> u8 {
        self.uses.get(&id).copied().unwrap_or(0)
    }
}

impl EvictionPolicy for S3Fifo {
    fn inserted(&mut self, id: ExpertId) {
        if self.ghost.remove(id) {
            self.main.push(id);
        } else {
            self.small.push(id);
        }
        self.uses.insert(id, 0);
    }

    fn used(&mut self, id: ExpertId) {
        if let Some(uses) = self.uses.get_mut(&id) {
            *uses = (*uses + 1).min(MOST_USES);
        }
    }

    /// The hand passes over everything that stood before `id`.
    fn evicted(&mut self, id: ExpertId) {
        self.uses.remove(&id).unwrap_or(0);
        if self.small.contains(id) {
            while let Some(first) = self.small.first().filter(|&first| first != id && self.uses(first) > 1) {
                self.small.remove(first);
                self.main.push(first);
                self.uses.insert(first, 0);
            }
            self.small.remove(id);
            self.ghost.push(id);
            while self.ghost.len() > self.slots && self.ghost.pop().is_some() {}
        } else {
            while let Some(first) = self.main.first().filter(|&first| first != id && self.uses(first) > 0) {
                self.main.push(first);
                let uses = self.uses(first);
                self.uses.insert(first, uses.saturating_sub(1));
            }
            self.main.remove(id);
        }
    }

    fn candidates(&self) -> Box<dyn Iterator<Item = ExpertId> + '_> {
        let small = || self.small.iter().filter(|&id| self.uses(id) <= 1);
        let main =
            || (0..=MOST_USES).flat_map(move |n| self.main.iter().filter(move |&id| self.uses(id) == n));
        let promoted = || self.small.iter().filter(|&id| self.uses(id) > 1);
        if self.small.len() * SMALL_SHARE >= self.slots {
            Box::new(small().chain(main()).chain(promoted()))
        } else {
            Box::new(main().chain(small()).chain(promoted()))
        }
    }
}
