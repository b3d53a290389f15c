//! How soon a node would be done with some experts: what the choice among replicas goes by.

use std::time::{Duration, Instant};

use super::latency::Cost;
use super::placement::Rates;

/// Weight of the newest answer.
const NEWEST: f64 = 0.2;
/// Classes of rows per expert (powers of two).
const CLASSES: usize = 14;
/// Assumed of a node that has not answered yet: little, so that it is tried.
const FIRST_WIRE_S: f64 = 100e-6;
const FIRST_EXPERT_S: f64 = 50e-6;
/// A node that is not asked is forgiven half of its slowness in this time, so that it is tried again.
const FORGIVEN_S: f64 = 3.0;

/// What is expected of a node for one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    /// Seconds on the network, there and back.
    pub(super) wire_s: f64,
    /// Seconds per expert in memory.
    pub(super) warm_s: f64,
    /// Seconds per expert that has to be read first.
    pub(super) cold_s: f64,
}

impl Expected {
    /// Seconds for one expert.
    pub(super) fn seconds(&self, resident: bool) -> f64 {
        if resident { self.warm_s } else { self.cold_s }
    }
}

/// Learned from a node's answers.
#[derive(Debug, Default)]
pub(super) struct Pace {
    wire_s: Option<f64>,
    /// Computing one expert, by class.
    warm_s: [Option<f64>; CLASSES],
    /// Reading one.
    read_s: Option<f64>,
    newest: Option<Instant>,
}

fn class(cost: Cost) -> usize {
    ((cost.entries / cost.experts.max(1)).max(1).ilog2() as usize).min(CLASSES - 1)
}

fn learn(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |old| old + NEWEST * (value - old)));
}

impl Pace {
    /// An answer was `wire` on its way; the node waited `disk` for its disk, having to read `misses` experts,
    /// and computed for the time `compute`.
    pub(super) fn record(
        &mut self,
        cost: Cost,
        wire: Duration,
        disk: Duration,
        misses: u32,
        compute: Duration,
    ) {
        learn(&mut self.wire_s, wire.as_secs_f64());
        learn(&mut self.warm_s[class(cost)], compute.as_secs_f64() / cost.experts.max(1) as f64);
        if misses > 0 {
            learn(&mut self.read_s, disk.as_secs_f64() / f64::from(misses));
        }
        self.newest = Some(Instant::now());
    }

    /// What to expect of experts of `record_bytes` with `rows` rows each; `disk_bytes_per_s` is what the node
    /// measured, for as long as it has read nothing.
    pub(super) fn expected(
        &self,
        rows: usize,
        record_bytes: usize,
        disk_bytes_per_s: Option<f64>,
    ) -> Expected {
        let class = class(Cost { experts: 1, entries: rows, ..Cost::default() });
        let known = self.warm_s.iter().enumerate().filter_map(|(i, s)| Some((i.abs_diff(class), (*s)?)));
        let nearest = known.min_by_key(|(distance, _)| *distance).map(|(_, seconds)| seconds);
        let idle_s = self.newest.map_or(0.0, |at| at.elapsed().as_secs_f64());
        let forgiven = 0.5f64.powf(idle_s / FORGIVEN_S);
        let rate = disk_bytes_per_s.filter(|rate| *rate > 0.0).unwrap_or(Rates::ASSUMED.disk_bytes_per_s);
        let read_s = self.read_s.map_or(record_bytes as f64 / rate, |s| s * forgiven);
        let warm_s = nearest.map_or(FIRST_EXPERT_S, |s| s * forgiven);
        Expected {
            wire_s: self.wire_s.map_or(FIRST_WIRE_S, |s| s * forgiven),
            warm_s,
            cold_s: warm_s + read_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_follows_the_answers_of_its_class() {
        let mut pace = Pace::default();
        let first = pace.expected(1, 3_000_000, Some(1e9));
        assert_eq!((first.wire_s, first.warm_s), (FIRST_WIRE_S, FIRST_EXPERT_S));
        assert!((first.cold_s - first.warm_s - 3e-3).abs() < 1e-9, "as its disk was measured");
        let step = Cost { experts: 4, entries: 4, ..Cost::default() };
        let chunk = Cost { experts: 4, entries: 400, ..Cost::default() };
        let ms = Duration::from_millis;
        for _ in 0..50 {
            pace.record(step, ms(1), ms(10), 2, ms(4));
            pace.record(chunk, ms(1), ms(0), 0, ms(80));
        }
        let near = |a: f64, b: f64| (a - b).abs() < 0.05 * b;
        let expected = |rows| pace.expected(rows, 3_000_000, None);
        assert!(near(expected(1).warm_s, 1e-3) && near(expected(1).wire_s, 1e-3));
        assert!(near(expected(1).cold_s, 6e-3));
        assert!(near(expected(100).warm_s, 20e-3));
        assert!(near(expected(4000).warm_s, 20e-3), "the nearest class that is known");
    }
}
