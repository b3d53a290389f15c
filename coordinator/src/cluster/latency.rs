//! How long to wait for a node: its measured round trips, and what its machine may need for cold records.
//!
//! Decode steps and prefill chunks differ by orders of magnitude, so dispatches are put into classes
//! by the power of two of their routed rows, and each class keeps its recent round trips.

use std::time::Duration;

use shimmer_proto::v1;

use super::ring::Ring;

/// Round trips remembered per class.
const KEPT: usize = 64;
const CLASSES: usize = 32;
/// Deadline before anything was measured, and the shortest afterwards.
const UNMEASURED: Duration = Duration::from_secs(2);
const SHORTEST: Duration = Duration::from_millis(250);
/// How far beyond its usual worst a dispatch may go.
const FACTOR: u32 = 8;
/// The same for the moment at which others are asked too.
const HEDGE_UNMEASURED: Duration = Duration::from_millis(150);
const HEDGE_SHORTEST: Duration = Duration::from_millis(25);
const HEDGE_FACTOR: u32 = 2;
/// Longest deadlines: of a step of a few rows, and of a prefill chunk.
const LONGEST_STEP: Duration = Duration::from_secs(5);
const LONGEST_CHUNK: Duration = Duration::from_secs(60);
/// Routed rows of a step at most.
const STEP_ENTRIES: usize = 64;
/// A slow disk and a slow core, for a machine that has not measured itself.
const SLOW_DISK_BYTES_PER_S: f64 = 250e6;
const SLOW_CORE_BYTES_PER_S: f64 = 5e9;

/// How much a dispatch asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cost {
    pub(super) experts: usize,
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

    fn longest(self) -> Duration {
        if self.entries <= STEP_ENTRIES { LONGEST_STEP } else { LONGEST_CHUNK }
    }
}

/// What a machine can do, as far as deadlines are concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Machine {
    disk_bytes_per_s: f64,
    disk_read_s: f64,
    core_bytes_per_s: f64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            disk_bytes_per_s: SLOW_DISK_BYTES_PER_S,
            disk_read_s: 0.0,
            core_bytes_per_s: SLOW_CORE_BYTES_PER_S,
        }
    }
}

impl Machine {
    /// What the machine says of itself, where it is believable.
    pub(super) fn measured(measurement: &v1::Measurement) -> Self {
        let default = Self::default();
        let rate = |value: f64, default: f64| if value.is_finite() && value >= 1e6 { value } else { default };
        let read_s = measurement.disk_read_us / 1e6;
        Self {
            disk_bytes_per_s: rate(measurement.disk_bytes_per_s, default.disk_bytes_per_s),
            disk_read_s: if read_s.is_finite() { read_s.clamp(0.0, 1.0) } else { 0.0 },
            core_bytes_per_s: rate(measurement.gemv_bytes_per_s, default.core_bytes_per_s),
        }
    }

    /// Time to read every record.
    fn cold(&self, cost: Cost) -> Duration {
        Duration::from_secs_f64(cost.record_bytes as f64 / self.disk_bytes_per_s + self.disk_read_s)
    }

    /// Time to compute every row on its own.
    fn compute(&self, cost: Cost) -> Duration {
        Duration::from_secs_f64(cost.touched_bytes as f64 / self.core_bytes_per_s)
    }
}

/// How long to wait for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    /// Before others are asked as well.
    pub(super) hedge: Duration,
    /// Before the node counts as failed.
    pub(super) deadline: Duration,
}

/// Recent round trips of one node.
#[derive(Debug, Default)]
pub(super) struct Latency {
    classes: [Ring<Duration, KEPT>; CLASSES],
    all: Ring<Duration, KEPT>,
}

impl Latency {
    pub(super) fn record(&mut self, cost: Cost, round_trip: Duration) {
        self.classes[cost.class()].push(round_trip);
        self.all.push(round_trip);
    }

    /// An answer came after the deadline of `wait`. It counts for a quarter of that, twice the usual worst,
    /// so that deadlines follow a node that became slow but not one that stood still for once.
    pub(super) fn record_missed(&mut self, cost: Cost, round_trip: Duration, wait: Duration) {
        self.record(cost, round_trip.min(wait / 4));
    }

    /// How long to wait for a dispatch of this cost; `reads` says whether the node has read from its disk
    /// lately. The deadline allows for cold records whatever was measured, and twice over.
    pub(super) fn patience(&self, cost: Cost, machine: &Machine, reads: bool) -> Patience {
        let usual = self.classes[cost.class()].percentile(95);
        let (cold, compute) = (machine.cold(cost), machine.compute(cost));
        let deadline = usual.map_or(UNMEASURED, |p95| (p95 * FACTOR).max(SHORTEST)) + (cold + compute) * 2;
        let hedge = match usual {
            None => HEDGE_UNMEASURED + cold + compute,
            Some(p95) => (p95 * HEDGE_FACTOR).max(HEDGE_SHORTEST) + if reads { cold } else { Duration::ZERO },
        };
        let deadline = deadline.min(cost.longest());
        Patience { hedge: hedge.min(deadline), deadline }
    }

    /// Median of the recent round trips.
    pub(super) fn median(&self) -> Option<Duration> {
        self.all.percentile(50)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Cost = Cost { experts: 4, entries: 4, record_bytes: 0, touched_bytes: 0 };

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn patience_follows_what_was_measured() {
        let (mut latency, machine) = (Latency::default(), Machine::default());
        let patience = |latency: &Latency, cost| latency.patience(cost, &machine, true);
        assert_eq!(patience(&latency, SMALL), Patience { hedge: HEDGE_UNMEASURED, deadline: UNMEASURED });
        (0..100).for_each(|_| latency.record(SMALL, Duration::from_micros(300)));
        assert_eq!(patience(&latency, SMALL), Patience { hedge: HEDGE_SHORTEST, deadline: SHORTEST });
        (0..KEPT).for_each(|_| latency.record(SMALL, millis(100)));
        assert_eq!(patience(&latency, SMALL), Patience { hedge: millis(200), deadline: millis(800) });
        assert_eq!(latency.median(), Some(millis(100)));
        let prefill = Cost { entries: 4096, ..SMALL };
        assert_eq!(patience(&latency, prefill).deadline, UNMEASURED, "another class");
    }

    #[test]
    fn cold_records_get_the_time_that_the_nodes_own_disk_needs() {
        let cost = Cost { experts: 8, entries: 8, record_bytes: 100_000_000, touched_bytes: 0 };
        let mut latency = Latency::default();
        (0..KEPT).for_each(|_| latency.record(cost, millis(10)));
        let fast = v1::Measurement { disk_bytes_per_s: 2e9, disk_read_us: 100.0, ..Default::default() };
        let fast = Machine::measured(&fast);
        assert_eq!(latency.patience(cost, &fast, true).hedge, Duration::from_micros(75_100));
        assert_eq!(latency.patience(cost, &fast, false).hedge, millis(25), "it reads nothing");
        assert_eq!(latency.patience(cost, &fast, false).deadline, Duration::from_micros(350_200));
        let unmeasured = latency.patience(cost, &Machine::default(), true);
        assert_eq!(unmeasured, Patience { hedge: millis(425), deadline: millis(1050) });
    }

    #[test]
    fn absurd_measurements_and_huge_work_end_in_sensible_deadlines() {
        let absurd = v1::Measurement {
            disk_bytes_per_s: f64::NAN,
            disk_read_us: f64::INFINITY,
            gemv_bytes_per_s: -1.0,
            ..Default::default()
        };
        assert_eq!(Machine::measured(&absurd), Machine::default());
        let huge = Cost { experts: 1, entries: 1, record_bytes: usize::MAX >> 20, touched_bytes: 0 };
        let step = Latency::default().patience(huge, &Machine::default(), true);
        assert_eq!(step, Patience { hedge: LONGEST_STEP, deadline: LONGEST_STEP });
    }

    #[test]
    fn one_that_stood_still_once_is_not_waited_for_longer_and_one_that_became_slow_is() {
        let mut latency = Latency::default();
        let deadline = |latency: &Latency| latency.patience(SMALL, &Machine::default(), false).deadline;
        (0..KEPT).for_each(|_| latency.record(SMALL, millis(40)));
        latency.record_missed(SMALL, Duration::from_secs(20), millis(320));
        assert_eq!(deadline(&latency), millis(320));
        (0..5).for_each(|_| latency.record_missed(SMALL, millis(700), millis(320)));
        assert_eq!(deadline(&latency), millis(640));
    }
}
