//! What one layer's call took, while it runs.

use std::time::{Duration, Instant};

use shimmer_common::experts::CallTally;
use shimmer_common::experts::times::{ExpertTimes, NodeTimes};
use shimmer_proto::v1;

use super::node::Node;

/// What the calling thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// Packing, sending, unpacking, adding.
    Handling,
    /// The caller's own work.
    Meanwhile,
    /// Experts.
    Local,
    /// Nothing.
    Waiting,
}

/// A round trip taken apart; the parts add up to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RoundTrip {
    total_s: f64,
    queue_s: f64,
    wire_s: f64,
    disk_s: f64,
    compute_s: f64,
}

impl RoundTrip {
    /// What the node says about its part is believed as far as it fits into the whole.
    pub(super) fn of(total: Duration, reply: &v1::Reply) -> Self {
        let total_s = total.as_secs_f64();
        let mut rest_s = total_s;
        let mut part = |us: u32| {
            let part_s = (f64::from(us) / 1e6).min(rest_s);
            rest_s -= part_s;
            part_s
        };
        let (queue_s, disk_s, compute_s) =
            (part(reply.queue_us), part(reply.disk_us), part(reply.compute_us));
        Self { total_s, queue_s, wire_s: rest_s, disk_s, compute_s }
    }
}

/// The times of one call. Every moment of it belongs to exactly one [`Doing`].
pub(super) struct CallTimes {
    since: Instant,
    layer: u16,
    pub(super) sums: ExpertTimes,
    /// The node waited for last.
    straggler: Option<String>,
}

impl CallTimes {
    pub(super) fn begin(layer: u16) -> Self {
        Self { since: Instant::now(), layer, sums: ExpertTimes::default(), straggler: None }
    }

    /// Says what the time since the last call of this was spent on.
    pub(super) fn was(&mut self, doing: Doing) -> Duration {
        let now = Instant::now();
        let spent = now.duration_since(self.since);
        self.since = now;
        match doing {
            Doing::Handling => self.sums.handling_s += spent.as_secs_f64(),
            Doing::Local => self.sums.local_s += spent.as_secs_f64(),
            Doing::Waiting => self.sums.wait_s += spent.as_secs_f64(),
            Doing::Meanwhile => {}
        }
        spent
    }

    fn node(&mut self, node: &Node) -> &mut NodeTimes {
        // Asked for with every message: only new keys cost a copy.
        if !self.sums.nodes.contains_key(&node.id) {
            let times = NodeTimes { name: node.name(), ..NodeTimes::default() };
            self.sums.nodes.insert(node.id.clone(), times);
        }
        self.sums.nodes.entry(node.id.clone()).or_default()
    }

    /// A dispatch went out.
    pub(super) fn sent(&mut self, node: &Node, bytes: usize, hinted: usize, is_hedge: bool) {
        self.sums.messages += 1;
        self.sums.bytes_out += bytes as u64;
        let times = self.node(node);
        times.dispatches += 1;
        times.hedges += u64::from(is_hedge);
        times.bytes_out += bytes as u64;
        times.hinted_experts += hinted as u64;
    }

    /// An answer came in, of use or not.
    pub(super) fn received(&mut self, node: &Node, bytes: usize) {
        self.sums.bytes_in += bytes as u64;
        self.node(node).bytes_in += bytes as u64;
    }

    /// An answer over `experts` experts is used.
    pub(super) fn used(&mut self, node: &Node, trip: RoundTrip, reply: &v1::Reply, experts: usize) {
        let misses = u64::from(reply.misses).min(experts as u64);
        let hits = experts as u64 - misses;
        self.sums.tiers.node_memory += hits;
        self.sums.tiers.node_disk += misses;
        let times = self.node(node);
        times.answers += 1;
        times.experts += experts as u64;
        times.hits += hits;
        times.misses += misses;
        times.read_bytes = times.read_bytes.saturating_add(reply.read_bytes);
        times.round_trip_s += trip.total_s;
        times.queue_s += trip.queue_s;
        times.wire_s += trip.wire_s;
        times.disk_s += trip.disk_s;
        times.compute_s += trip.compute_s;
        times.note_round_trip(trip.total_s);
    }

    /// A dispatch failed or missed its deadline.
    pub(super) fn failed(&mut self, node: &Node) {
        self.node(node).failures += 1;
    }

    /// `waited` ended with an answer of `node` that took `trip`.
    pub(super) fn waited_for(&mut self, node: &Node, waited: Duration, trip: RoundTrip) {
        let waited_s = waited.as_secs_f64();
        let share = if trip.total_s > 0.0 { waited_s / trip.total_s } else { 0.0 };
        self.sums.wait.queue_s += trip.queue_s * share;
        self.sums.wait.disk_s += trip.disk_s * share;
        self.sums.wait.compute_s += trip.compute_s * share;
        self.sums.wait.wire_s += waited_s - (trip.queue_s + trip.disk_s + trip.compute_s) * share;
        self.node(node).waited_s += waited_s;
        self.straggler = Some(node.id.clone());
    }

    /// `waited` ended without an answer of `node`.
    pub(super) fn waited_in_vain(&mut self, node: Option<&Node>, waited: Duration) {
        self.sums.wait.late_s += waited.as_secs_f64();
        if let Some(node) = node {
            self.node(node).waited_s += waited.as_secs_f64();
            self.straggler = Some(node.id.clone());
        }
    }

    /// Experts were computed here.
    pub(super) fn computed_here(&mut self, tally: &CallTally, by_share: usize, fallback: usize) {
        self.sums.tiers.local_memory += tally.hits as u64;
        self.sums.tiers.local_disk += tally.misses as u64;
        self.sums.local_disk_s += tally.disk_wait.as_secs_f64();
        self.sums.local_experts += by_share as u64;
        self.sums.fallback_experts += fallback as u64;
    }

    /// Ends the call.
    pub(super) fn end(mut self) -> ExpertTimes {
        self.was(Doing::Handling);
        let wait_s = self.sums.wait_s;
        if let Some(straggler) = self.straggler.as_deref()
            && let Some(node) = self.sums.nodes.get_mut(straggler)
        {
            node.straggled += 1;
        }
        let layer = self.sums.layers.entry(self.layer).or_default();
        layer.calls = 1;
        layer.wait_s = wait_s;
        layer.stragglers.extend(self.straggler.map(|node| (node, 1)));
        tracing::debug!(
            handling_us = micros(self.sums.handling_s),
            local_us = micros(self.sums.local_s),
            wait_us = micros(wait_s),
            messages = self.sums.messages,
            bytes_out = self.sums.bytes_out,
            bytes_in = self.sums.bytes_in,
            fallback = self.sums.fallback_experts,
            straggler = layer.stragglers.keys().next(),
            "experts computed"
        );
        self.sums
    }
}

fn micros(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_the_sum_of_its_parts_whatever_the_node_says() {
        let sum = |t: RoundTrip| t.queue_s + t.wire_s + t.disk_s + t.compute_s;
        let reply = v1::Reply { queue_us: 100, disk_us: 2000, compute_us: 300, ..v1::Reply::default() };
        let trip = RoundTrip::of(Duration::from_micros(3000), &reply);
        assert!((sum(trip) - 0.003).abs() < 1e-9 && (trip.wire_s - 0.000_6).abs() < 1e-9, "{trip:?}");
        let liar = v1::Reply { queue_us: u32::MAX, compute_us: u32::MAX, ..v1::Reply::default() };
        let trip = RoundTrip::of(Duration::from_micros(50), &liar);
        assert!((sum(trip) - 50e-6).abs() < 1e-12 && trip.queue_s == trip.total_s, "{trip:?}");
    }
}
