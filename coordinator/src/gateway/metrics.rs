//! `GET /metrics`: counters in the Prometheus text format 0.0.4.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use shimmer_common::experts::ExpertTimes;
use shimmer_common::experts::times::{NodeTimes, ROUND_TRIP_BOUNDS};

use super::Gateway;

/// A member of the cluster, as far as metrics go.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    /// Stable id.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// `joining`, `syncing`, `ready`, `suspect` or `lost`.
    pub state: String,
    /// Whether its disk fails and is left alone.
    pub disk_is_sick: bool,
    /// Reads that failed.
    pub read_failures: u64,
}

/// What metrics are made of besides the gateway's own counters.
#[derive(Clone, Debug, Default)]
pub struct ExpertMetrics {
    /// The members of the cluster.
    pub nodes: Vec<NodeState>,
    /// Times and counts of routed experts.
    pub times: ExpertTimes,
}

const STATES: [&str; 5] = ["joining", "syncing", "ready", "suspect", "lost"];

/// Text under construction.
#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if i == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    /// A counter with one label.
    fn split<const N: usize>(&mut self, name: &str, help: &str, label: &str, parts: [(&str, f64); N]) {
        self.family(name, "counter", help);
        for (part, value) in parts {
            self.sample(name, &[(label, part)], value);
        }
    }
}

/// The endpoint.
pub async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let counts = {
        let gateway = gateway.clone();
        // Node counters sit behind the cluster's locks.
        tokio::task::spawn_blocking(move || (gateway.config.metrics)()).await.unwrap_or_default()
    };
    let mut page = Page::default();
    requests(&mut page, &gateway);
    experts(&mut page, &counts.times);
    nodes(&mut page, &counts);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page.0).into_response()
}

fn requests(page: &mut Page, gateway: &Gateway) {
    let counts = gateway.totals.counts();
    page.one(
        "gw_prompt_tokens_total",
        "counter",
        "Prompt tokens of answered requests.",
        counts.prompt_tokens,
    );
    page.one(
        "gw_cached_prompt_tokens_total",
        "counter",
        "Of these, tokens that were in the session's caches.",
        counts.cached_tokens,
    );
    page.one("gw_generation_tokens_total", "counter", "Generated tokens.", counts.generated_tokens);
    page.one("gw_spec_draft_tokens_total", "counter", "Drafted tokens.", counts.drafted);
    page.one("gw_spec_accepted_tokens_total", "counter", "Drafted tokens that were right.", counts.accepted);
    page.one("gw_requests_running", "gauge", "Requests at work.", u8::from(gateway.engine.is_running()));
    page.one("gw_requests_waiting", "gauge", "Requests in the queue.", gateway.engine.waiting());
}

fn experts(page: &mut Page, times: &ExpertTimes) {
    page.split(
        "shimmer_expert_seconds_total",
        "Seconds of the engine thread spent on routed experts.",
        "doing",
        [("waiting", times.wait_s), ("computing", times.local_s), ("messages", times.handling_s)],
    );
    let wait = &times.wait;
    page.split(
        "shimmer_node_wait_seconds_total",
        "Seconds waited for nodes, by what the answer waited for was doing.",
        "cause",
        [
            ("queue", wait.queue_s),
            ("wire", wait.wire_s),
            ("disk", wait.disk_s),
            ("compute", wait.compute_s),
            ("late", wait.late_s),
        ],
    );
    let tiers = &times.tiers;
    page.split(
        "shimmer_experts_total",
        "Experts computed, by where their records were.",
        "tier",
        [
            ("node_memory", tiers.node_memory as f64),
            ("node_disk", tiers.node_disk as f64),
            ("local_memory", tiers.local_memory as f64),
            ("local_disk", tiers.local_disk as f64),
        ],
    );
    page.one(
        "shimmer_fallback_experts_total",
        "counter",
        "Experts computed here because no node did in time.",
        times.fallback_experts,
    );
    let hedges = &times.hedges;
    page.split(
        "shimmer_hedges_total",
        "Late work given to a second machine, by outcome.",
        "outcome",
        [("won", hedges.won as f64), ("lost", hedges.lost as f64), ("withheld", hedges.withheld as f64)],
    );
}

/// A counter per node.
type NodeCounter = (&'static str, &'static str, fn(&NodeTimes) -> f64);

const NODE_COUNTERS: [NodeCounter; 10] = [
    ("shimmer_node_dispatches_total", "Dispatches sent.", |n| n.dispatches as f64),
    ("shimmer_node_hedges_total", "Of these, second attempts of others' late work.", |n| n.hedges as f64),
    ("shimmer_node_failures_total", "Dispatches that failed or missed a deadline.", |n| n.failures as f64),
    ("shimmer_node_experts_total", "Experts in used answers.", |n| n.experts as f64),
    ("shimmer_node_misses_total", "Of these, experts read from the node's disk.", |n| n.misses as f64),
    ("shimmer_node_read_bytes_total", "Bytes the node read for them.", |n| n.read_bytes as f64),
    ("shimmer_node_sent_bytes_total", "Bytes sent to the node.", |n| n.bytes_out as f64),
    ("shimmer_node_received_bytes_total", "Bytes received from the node.", |n| n.bytes_in as f64),
    ("shimmer_node_hinted_experts_total", "Experts named in hints.", |n| n.hinted_experts as f64),
    ("shimmer_node_waited_seconds_total", "Seconds it was the one waited for.", |n| n.waited_s),
];

fn nodes(page: &mut Page, counts: &ExpertMetrics) {
    page.family("shimmer_node_state", "gauge", "1 for the state a node is in.");
    for node in &counts.nodes {
        for state in STATES {
            let value = u8::from(node.state == state);
            page.sample(
                "shimmer_node_state",
                &[("node", &node.name), ("id", &node.id), ("state", state)],
                value,
            );
        }
    }
    let reads = "shimmer_node_read_failures_total";
    page.family(reads, "counter", "Experts the node could not read when asked for them.");
    for node in &counts.nodes {
        page.sample(reads, &[("node", &node.name), ("id", &node.id)], node.read_failures);
    }
    let sick = "shimmer_node_disk_sick";
    page.family(sick, "gauge", "1 while reads fail and only what is in the node's memory is asked of it.");
    for node in &counts.nodes {
        page.sample(sick, &[("node", &node.name), ("id", &node.id)], u8::from(node.disk_is_sick));
    }
    for (name, help, value) in NODE_COUNTERS {
        page.family(name, "counter", help);
        for (id, node) in &counts.times.nodes {
            page.sample(name, &[("node", &node.name), ("id", id)], value(node));
        }
    }
    let name = "shimmer_node_round_trip_seconds";
    page.family(name, "histogram", "Round trips of used answers.");
    for (id, node) in &counts.times.nodes {
        let labels = [("node", node.name.as_str()), ("id", id)];
        let mut below = 0;
        for (bound, count) in ROUND_TRIP_BOUNDS.iter().zip(node.round_trips) {
            below += count;
            let bound = bound.to_string();
            page.sample(&format!("{name}_bucket"), &[labels[0], labels[1], ("le", &bound)], below);
        }
        let all = node.round_trips.iter().sum::<u64>();
        page.sample(&format!("{name}_bucket"), &[labels[0], labels[1], ("le", "+Inf")], all);
        page.sample(&format!("{name}_sum"), &labels, node.round_trip_s);
        page.sample(&format!("{name}_count"), &labels, all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> ExpertMetrics {
        let mut node =
            NodeTimes { name: "\"attic\"\n".into(), dispatches: 7, answers: 2, ..NodeTimes::default() };
        [0.001, 99.0].into_iter().for_each(|s| node.note_round_trip(s));
        let mut times = ExpertTimes { wait_s: 1.5, ..ExpertTimes::default() };
        times.wait.disk_s = 1.5;
        times.nodes.insert("a1".into(), node);
        let state = NodeState {
            id: "a1".into(),
            name: "\"attic\"\n".into(),
            state: "suspect".into(),
            disk_is_sick: true,
            read_failures: 3,
        };
        ExpertMetrics { nodes: vec![state], times }
    }

    #[test]
    fn every_sample_belongs_to_a_family_and_labels_are_escaped() {
        let mut page = Page::default();
        let counts = counts();
        experts(&mut page, &counts.times);
        nodes(&mut page, &counts);
        let mut family = String::new();
        for line in page.0.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap().to_owned();
            } else if !line.starts_with('#') {
                assert!(line.starts_with(&family), "{line} is not of {family}");
                assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
            }
        }
        for line in [
            "shimmer_node_state{node=\"\\\"attic\\\"\\n\",id=\"a1\",state=\"suspect\"} 1",
            "shimmer_node_state{node=\"\\\"attic\\\"\\n\",id=\"a1\",state=\"ready\"} 0",
            "shimmer_node_read_failures_total{node=\"\\\"attic\\\"\\n\",id=\"a1\"} 3",
            "shimmer_node_disk_sick{node=\"\\\"attic\\\"\\n\",id=\"a1\"} 1",
            "shimmer_node_wait_seconds_total{cause=\"disk\"} 1.5",
            "shimmer_node_dispatches_total{node=\"\\\"attic\\\"\\n\",id=\"a1\"} 7",
            "shimmer_node_round_trip_seconds_bucket{node=\"\\\"attic\\\"\\n\",id=\"a1\",le=\"4.096\"} 1",
            "shimmer_node_round_trip_seconds_bucket{node=\"\\\"attic\\\"\\n\",id=\"a1\",le=\"+Inf\"} 2",
        ] {
            assert!(page.0.lines().any(|l| l == line), "{line} is not in\n{}", page.0);
        }
    }
}
