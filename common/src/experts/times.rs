//! Where the time of routed experts goes, and who computes them from what.
//!
//! Everything is a count or a sum of seconds since the process began; what one answer took is the
//! difference of two moments ([`ExpertTimes::since`]). The thread that calls [`super::ExpertCompute::compute`]
//! either handles messages, computes experts or waits: these three add up to the calls' duration without
//! the callers' own work.

use std::collections::BTreeMap;

use serde::Serialize;

/// Upper bounds of the round trip histogram's buckets in seconds; one more bucket has none.
pub const ROUND_TRIP_BOUNDS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 4.096];

/// Experts computed, by where their records were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tiers {
    /// In a node's memory.
    pub node_memory: u64,
    /// On a node's disk.
    pub node_disk: u64,
    /// In this machine's memory.
    pub local_memory: u64,
    /// On this machine's disk.
    pub local_disk: u64,
}

/// Seconds of waiting for nodes, by what the answer waited for was doing meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct WaitCauses {
    /// Other dispatches were in its way.
    pub queue_s: f64,
    /// It was on the network, or the node was not running.
    pub wire_s: f64,
    /// Records were being read.
    pub disk_s: f64,
    /// The node computed.
    pub compute_s: f64,
    /// No answer came before the work was given to somebody else.
    pub late_s: f64,
}

/// Work given to a second machine while the first might still answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HedgeCounts {
    /// Begun.
    pub begun: u64,
    /// Complete before the first answer.
    pub won: u64,
    /// The first answer came after all.
    pub lost: u64,
    /// Not begun although an answer was late, because too many had been.
    pub withheld: u64,
}

/// One node's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeTimes {
    /// Name for people.
    pub name: String,
    /// Messages with work sent to it.
    pub dispatches: u64,
    /// Of these, second attempts of work that another node was late with.
    pub hedges: u64,
    /// Answers that were used.
    pub answers: u64,
    /// Dispatches that failed or missed their deadline.
    pub failures: u64,
    /// Experts in used answers.
    pub experts: u64,
    /// Of these, found in its memory.
    pub hits: u64,
    /// Of these, read from its disk.
    pub misses: u64,
    /// Bytes read for them.
    pub read_bytes: u64,
    /// Bytes sent to and received from it.
    pub bytes_out: u64,
    /// See `bytes_out`.
    pub bytes_in: u64,
    /// Experts named in hints.
    pub hinted_experts: u64,
    /// Sum of the round trips of used answers; the four parts below add up to it.
    pub round_trip_s: f64,
    /// Waiting behind other dispatches.
    pub queue_s: f64,
    /// Under way: the round trip without what the node took.
    pub wire_s: f64,
    /// With nothing to compute before a record was read.
    pub disk_s: f64,
    /// Computing.
    pub compute_s: f64,
    /// Calls that waited for this node last.
    pub straggled: u64,
    /// Seconds during which it was the one waited for.
    pub waited_s: f64,
    /// Round trips by [`ROUND_TRIP_BOUNDS`].
    #[serde(skip)]
    pub round_trips: [u64; ROUND_TRIP_BOUNDS.len() + 1],
}

/// One layer's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerTimes {
    /// Calls.
    pub calls: u64,
    /// Seconds waited for nodes.
    pub wait_s: f64,
    /// Calls by the node (its id) they waited for last.
    pub stragglers: BTreeMap<String, u64>,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ExpertTimes {
    /// Seconds with nothing to do but wait for nodes.
    pub wait_s: f64,
    /// Seconds of computing experts here, reading them included.
    pub local_s: f64,
    /// Of these, seconds with nothing to compute before a record was read.
    pub local_disk_s: f64,
    /// Seconds of packing, sending, unpacking and adding up.
    pub handling_s: f64,
    /// What `wait_s` was spent on.
    pub wait: WaitCauses,
    /// Experts computed here by plan.
    pub local_experts: u64,
    /// Experts computed here because no node did in time.
    pub fallback_experts: u64,
    /// Experts computed, by tier.
    pub tiers: Tiers,
    /// Second attempts.
    pub hedges: HedgeCounts,
    /// Dispatches sent.
    pub messages: u64,
    /// Bytes of dispatches.
    pub bytes_out: u64,
    /// Bytes of answers.
    pub bytes_in: u64,
    /// By node id.
    pub nodes: BTreeMap<String, NodeTimes>,
    /// By checkpoint layer index.
    pub layers: BTreeMap<u16, LayerTimes>,
}

impl ExpertTimes {
    /// Seconds spent in [`super::ExpertCompute::compute`], the callers' own work not counted.
    pub fn seconds(&self) -> f64 {
        self.wait_s + self.local_s + self.handling_s
    }

    /// What happened since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut rest = self.clone();
        rest.combine(earlier, &Combine { seconds: |a, b| a - b, count: u64::saturating_sub });
        rest.nodes.retain(|_, node| node.dispatches > 0 || node.answers > 0 || node.failures > 0);
        rest.layers.retain(|_, layer| layer.calls > 0);
        rest
    }

    /// Adds what happened in `more`.
    pub fn add(&mut self, more: &Self) {
        self.combine(more, &Combine { seconds: |a, b| a + b, count: u64::saturating_add });
    }

    fn combine(&mut self, other: &Self, with: &Combine) {
        let Self { wait, tiers, hedges, nodes, layers, .. } = other;
        with.seconds([
            (&mut self.wait_s, other.wait_s),
            (&mut self.local_s, other.local_s),
            (&mut self.local_disk_s, other.local_disk_s),
            (&mut self.handling_s, other.handling_s),
            (&mut self.wait.queue_s, wait.queue_s),
            (&mut self.wait.wire_s, wait.wire_s),
            (&mut self.wait.disk_s, wait.disk_s),
            (&mut self.wait.compute_s, wait.compute_s),
            (&mut self.wait.late_s, wait.late_s),
        ]);
        with.counts([
            (&mut self.local_experts, other.local_experts),
            (&mut self.fallback_experts, other.fallback_experts),
            (&mut self.tiers.node_memory, tiers.node_memory),
            (&mut self.tiers.node_disk, tiers.node_disk),
            (&mut self.tiers.local_memory, tiers.local_memory),
            (&mut self.tiers.local_disk, tiers.local_disk),
            (&mut self.hedges.begun, hedges.begun),
            (&mut self.hedges.won, hedges.won),
            (&mut self.hedges.lost, hedges.lost),
            (&mut self.hedges.withheld, hedges.withheld),
            (&mut self.messages, other.messages),
            (&mut self.bytes_out, other.bytes_out),
            (&mut self.bytes_in, other.bytes_in),
        ]);
        for (id, node) in nodes {
            self.nodes.entry(id.clone()).or_default().combine(node, with);
        }
        for (&layer, times) in layers {
            self.layers.entry(layer).or_default().combine(times, with);
        }
    }
}

impl NodeTimes {
    fn combine(&mut self, other: &Self, with: &Combine) {
        self.name.clone_from(&other.name);
        with.counts([
            (&mut self.dispatches, other.dispatches),
            (&mut self.hedges, other.hedges),
            (&mut self.answers, other.answers),
            (&mut self.failures, other.failures),
            (&mut self.experts, other.experts),
            (&mut self.hits, other.hits),
            (&mut self.misses, other.misses),
            (&mut self.read_bytes, other.read_bytes),
            (&mut self.bytes_out, other.bytes_out),
            (&mut self.bytes_in, other.bytes_in),
            (&mut self.hinted_experts, other.hinted_experts),
            (&mut self.straggled, other.straggled),
        ]);
        with.seconds([
            (&mut self.round_trip_s, other.round_trip_s),
            (&mut self.queue_s, other.queue_s),
            (&mut self.wire_s, other.wire_s),
            (&mut self.disk_s, other.disk_s),
            (&mut self.compute_s, other.compute_s),
            (&mut self.waited_s, other.waited_s),
        ]);
        for (mine, theirs) in self.round_trips.iter_mut().zip(other.round_trips) {
            *mine = (with.count)(*mine, theirs);
        }
    }

    /// Counts a round trip in the histogram.
    pub fn note_round_trip(&mut self, seconds: f64) {
        let bucket = ROUND_TRIP_BOUNDS.iter().take_while(|bound| seconds > **bound).count();
        if let Some(count) = self.round_trips.get_mut(bucket) {
            *count += 1;
        }
    }
}

impl LayerTimes {
    fn combine(&mut self, other: &Self, with: &Combine) {
        with.counts([(&mut self.calls, other.calls)]);
        with.seconds([(&mut self.wait_s, other.wait_s)]);
        for (node, &calls) in &other.stragglers {
            let mine = self.stragglers.entry(node.clone()).or_default();
            *mine = (with.count)(*mine, calls);
        }
        self.stragglers.retain(|_, calls| *calls > 0);
    }
}

/// Addition, or subtraction of an earlier moment.
struct Combine {
    seconds: fn(f64, f64) -> f64,
    count: fn(u64, u64) -> u64,
}

impl Combine {
    fn seconds<const N: usize>(&self, pairs: [(&mut f64, f64); N]) {
        // A difference of sums may fall short of zero by a rounding.
        pairs.into_iter().for_each(|(mine, theirs)| *mine = (self.seconds)(*mine, theirs).max(0.0));
    }

    fn counts<const N: usize>(&self, pairs: [(&mut u64, u64); N]) {
        pairs.into_iter().for_each(|(mine, theirs)| *mine = (self.count)(*mine, theirs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(scale: u64) -> ExpertTimes {
        let mut node = NodeTimes { name: "attic".into(), dispatches: 3 * scale, ..NodeTimes::default() };
        node.round_trip_s = 0.25 * scale as f64;
        (0..scale).for_each(|_| node.note_round_trip(0.003));
        let mut times = ExpertTimes {
            wait_s: 0.5 * scale as f64,
            local_s: 0.125 * scale as f64,
            handling_s: 0.25 * scale as f64,
            messages: 7 * scale,
            ..ExpertTimes::default()
        };
        times.nodes.insert("a1".into(), node);
        let stragglers = BTreeMap::from([("a1".to_owned(), scale)]);
        times.layers.insert(4, LayerTimes { calls: scale, wait_s: 0.5 * scale as f64, stragglers });
        times
    }

    #[test]
    fn what_was_added_can_be_taken_away_again() {
        let mut sum = times(2);
        sum.add(&times(3));
        assert_eq!(sum, times(5));
        assert_eq!(sum.since(&times(2)), times(3));
        assert_eq!(sum.seconds(), 5.0 * 0.875);
    }

    #[test]
    fn nodes_and_layers_without_work_are_left_out_of_a_difference() {
        let none = times(4).since(&times(4));
        assert!(none.nodes.is_empty() && none.layers.is_empty());
        assert_eq!(none, ExpertTimes::default());
    }

    #[test]
    fn round_trips_go_into_the_first_bucket_that_holds_them() {
        let mut node = NodeTimes::default();
        [0.000_1, 0.000_25, 0.003, 99.0].into_iter().for_each(|s| node.note_round_trip(s));
        assert_eq!((node.round_trips[0], node.round_trips[4], node.round_trips[14]), (2, 1, 1));
    }
}
