//! What a running coordinator says of its nodes, as a table.

use shimmer_common::size::Size;

use crate::cluster::{ClusterReport, NodeStatus, WorkerReport};

/// The table of `shimmer cluster status`.
pub(super) fn table(report: &ClusterReport) -> String {
    let mut text = String::new();
    if report.nodes.is_empty() {
        text += "no node has joined yet; shimmer cluster invite makes a token\n";
        return text;
    }
    text +=
        "node             state     experts   share  in memory  hits      disk read   ping ms  failures\n";
    for node in &report.nodes {
        text += &line(node, worker(report, node));
        text += &notes(node);
    }
    if let Some(plan) = &report.plan {
        text += &format!(
            "planned: {:.2} ms of experts per layer and token; `shimmer plan --cluster DIR --model DIR` shows why\n",
            plan.ms_per_layer
        );
    }
    text
}

fn worker<'a>(report: &'a ClusterReport, node: &NodeStatus) -> Option<&'a WorkerReport> {
    report.plan.as_ref()?.workers.iter().find(|worker| worker.worker.id == node.id)
}

fn line(node: &NodeStatus, worker: Option<&WorkerReport>) -> String {
    let load = node.load.as_ref();
    let share = worker.map_or("-".to_owned(), |w| format!("{:.0} %", w.share * 100.0));
    let memory = load.map_or("-".to_owned(), |l| format!("{}/{}", l.pinned + l.cached, l.slots));
    let hits = load
        .filter(|l| l.hits + l.misses > 0)
        .map_or("-".to_owned(), |l| format!("{:.0} %", l.hits as f64 / (l.hits + l.misses) as f64 * 100.0));
    let read = load.map_or("-".to_owned(), |l| Size(l.read_bytes).to_string());
    format!(
        "{:<16} {:<9} {:>7} {:>7} {:>10} {:>5} {:>14} {:>9.2} {:>9}\n",
        node.name,
        node.state,
        node.experts_held,
        share,
        memory,
        hits,
        read,
        f64::from(node.ping_p50_us) / 1e3,
        node.failures,
    )
}

/// What else there is to know of a node: why it is not well, how far its records are.
fn notes(node: &NodeStatus) -> String {
    let mut text = String::new();
    for why in [&node.why, &node.unreachable].into_iter().filter(|why| !why.is_empty()) {
        text += &format!("                 {why}\n");
    }
    let sync = node.load.as_ref().and_then(|load| load.sync.as_ref());
    if let Some(sync) = sync.filter(|sync| sync.held_records < sync.wanted_records) {
        text += &format!(
            "                 fetched {} of {} ({} of {} records) at {}/s from {}, {:.0} s to go\n",
            Size(sync.held_bytes),
            Size(sync.wanted_bytes),
            sync.held_records,
            sync.wanted_records,
            Size(sync.bytes_per_s as u64),
            if sync.sources.is_empty() { "nobody".to_owned() } else { sync.sources.join(", ") },
            sync.eta_s,
        );
        if !sync.problem.is_empty() {
            text += &format!("                 {}\n", sync.problem);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_proto::v1;

    #[test]
    fn the_table_tells_of_states_progress_and_trouble() {
        let sync = v1::SyncProgress {
            wanted_records: 10,
            held_records: 4,
            wanted_bytes: 10 << 20,
            held_bytes: 4 << 20,
            bytes_per_s: 1e6,
            eta_s: 6.0,
            sources: vec!["the coordinator".into()],
            ..v1::SyncProgress::default()
        };
        let load = v1::Load { sync: Some(sync), hits: 3, misses: 1, slots: 9, ..v1::Load::default() };
        let node = NodeStatus {
            name: "attic".into(),
            state: "suspect".into(),
            why: "no answer within 900 ms".into(),
            load: Some(load),
            ..NodeStatus::default()
        };
        let text = table(&ClusterReport { nodes: vec![node], plan: None });
        for part in [
            "attic",
            "suspect",
            "75 %",
            "no answer within",
            "4 of 10 records",
            "the coordinator",
            "6 s to go",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
}
