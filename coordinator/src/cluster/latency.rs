//! Measured round trips of a node and the deadlines derived from them.
//!
//! Decode steps and prefill chunks differ by orders of magnitude, so dispatches are put into classes
//! by the power of two of their routed rows, and each class keeps its recent round trips.

use std::time::Duration;

/// Round trips remembered per class.
const KEPT: usize = 64;
const CLASSES: usize = 32;
/// Deadline before anything was measured, and the shortest afterwards.
const UNMEASURED: Duration = Duration::from_secs(2);
const SHORTEST: Duration = Duration::from_millis(250);
/// How far beyond its usual worst a dispatch may go.
const FACTOR: u32 = 8;
/// A slow disk and a slow core: any expert may have to be read, whatever was measured before.
const SLOW_DISK_BYTES_PER_S: f64 = 250e6;
const SLOW_CORE_BYTES_PER_S: f64 = 5e9;

/// How much a dispatch asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    /// Routed rows over all experts.
    pub(super) entries: usize,
    /// Bytes of the experts' records.
    pub(super) record_bytes: usize,
    /// Bytes of the records, each counted once per routed row.
    pub(super) touched_bytes: usize,
}

impl Cost {
    fn class(self) -> usize {
        (self.entries.max(1).ilog2() as usize).min(CLASSES - 1)
    }

    /// Time a cold and slow machine may need, beyond what was measured.
    fn allowance(self) -> Duration {
        let seconds = self.record_bytes as f64 / SLOW_DISK_BYTES_PER_S
            + self.touched_bytes as f64 / SLOW_CORE_BYTES_PER_S;
        Duration::from_secs_f64(seconds)
    }
}

/// Recent round trips of one node.
#[derive(Debug, Default)]
pub(super) struct Latency {
    classes: [Ring; CLASSES],
    all: Ring,
}

impl Latency {
    pub(super) fn record(&mut self, cost: Cost, round_trip: Duration) {
        self.classes[cost.class()].push(round_trip);
        self.all.push(round_trip);
    }

    /// How long to wait for a dispatch of this cost.
    pub(super) fn deadline(&self, cost: Cost) -> Duration {
        let usual = self.classes[cost.class()].percentile(95);
        usual.map_or(UNMEASURED, |p95| (p95 * FACTOR).max(SHORTEST)) + cost.allowance()
    }

    /// Median of the recent round trips.
    pub(super) fn median(&self) -> Option<Duration> {
        self.all.percentile(50)
    }
}

#[derive(Debug, Default)]
struct Ring {
    values: Vec<Duration>,
    next: usize,
}

impl Ring {
    fn push(&mut self, value: Duration) {
        if self.values.len() < KEPT {
            self.values.push(value);
        } else if let Some(slot) = self.values.get_mut(self.next) {
            *slot = value;
        }
        self.next = (self.next + 1) % KEPT;
    }

    fn percentile(&self, percent: usize) -> Option<Duration> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable();
        sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Cost = Cost { entries: 4, record_bytes: 0, touched_bytes: 0 };

    #[test]
    fn deadlines_follow_what_was_measured() {
        let mut latency = Latency::default();
        assert_eq!(latency.deadline(SMALL), UNMEASURED);
        (0..100).for_each(|_| latency.record(SMALL, Duration::from_micros(300)));
        assert_eq!(latency.deadline(SMALL), SHORTEST);
        (0..KEPT).for_each(|_| latency.record(SMALL, Duration::from_millis(100)));
        assert_eq!(latency.deadline(SMALL), Duration::from_millis(800));
        assert_eq!(latency.median(), Some(Duration::from_millis(100)));
        let prefill = Cost { entries: 4096, ..SMALL };
        assert_eq!(latency.deadline(prefill), UNMEASURED, "another class");
    }

    #[test]
    fn big_cold_experts_get_more_time() {
        let cost = Cost { entries: 4, record_bytes: 500_000_000, touched_bytes: 500_000_000 };
        assert_eq!(Latency::default().deadline(cost), Duration::from_millis(4100));
    }
}
