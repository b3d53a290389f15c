//! How soon a node would be done with some experts: what the choice among replicas goes by.

use std::time::{Duration, Instant};

use super::latency::Cost;

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
    /// Seconds per expert.
    pub(super) expert_s: f64,
}

/// Learned from a node's answers.
#[derive(Debug, Default)]
pub(super) struct Pace {
    wire_s: Option<f64>,
    expert_s: [Option<f64>; CLASSES],
    newest: Option<Instant>,
}

fn class(cost: Cost) -> usize {
    ((cost.entries / cost.experts.max(1)).max(1).ilog2() as usize).min(CLASSES - 1)
}

fn learn(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |old| old + NEWEST * (value - old)));
}

impl Pace {
    /// An answer was `wire` on its way, and the node spent `busy` on reading and computing.
    pub(super) fn record(&mut self, cost: Cost, wire: Duration, busy: Duration) {
        learn(&mut self.wire_s, wire.as_secs_f64());
        learn(&mut self.expert_s[class(cost)], busy.as_secs_f64() / cost.experts.max(1) as f64);
        self.newest = Some(Instant::now());
    }

    /// What to expect of experts with `rows` rows each.
    pub(super) fn expected(&self, rows: usize) -> Expected {
        let class = class(Cost { experts: 1, entries: rows, ..Cost::default() });
        let known = self.expert_s.iter().enumerate().filter_map(|(i, s)| Some((i.abs_diff(class), (*s)?)));
        let nearest = known.min_by_key(|(distance, _)| *distance).map(|(_, seconds)| seconds);
        let idle_s = self.newest.map_or(0.0, |at| at.elapsed().as_secs_f64());
        let forgiven = 0.5f64.powf(idle_s / FORGIVEN_S);
        Expected {
            wire_s: self.wire_s.map_or(FIRST_WIRE_S, |s| s * forgiven),
            expert_s: nearest.map_or(FIRST_EXPERT_S, |s| s * forgiven),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_follows_the_answers_of_its_class() {
        let mut pace = Pace::default();
        assert_eq!(pace.expected(1), Expected { wire_s: FIRST_WIRE_S, expert_s: FIRST_EXPERT_S });
        let step = Cost { experts: 4, entries: 4, ..Cost::default() };
        let chunk = Cost { experts: 4, entries: 400, ..Cost::default() };
        for _ in 0..50 {
            pace.record(step, Duration::from_millis(1), Duration::from_millis(4));
            pace.record(chunk, Duration::from_millis(1), Duration::from_millis(80));
        }
        let near = |a: f64, b: f64| (a - b).abs() < 0.05 * b;
        assert!(near(pace.expected(1).expert_s, 1e-3) && near(pace.expected(1).wire_s, 1e-3));
        assert!(near(pace.expected(100).expert_s, 20e-3));
        assert!(near(pace.expected(4000).expert_s, 20e-3), "the nearest class that is known");
    }
}
