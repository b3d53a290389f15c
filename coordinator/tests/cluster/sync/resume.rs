//! Nodes that are killed while they fetch: they go on with the next byte, and no record is ever wrong.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{
    LARGE_EXPERTS, Large, LargeCluster, bytes_on_disk, coordinator, partials, report, start_again,
    wait_synced,
};
use crate::support::*;

/// Slow enough that a record of 1.5 MB takes most of a second.
const SLOW: u64 = 2_000_000;

/// Runs a node until part of a record has arrived, and stops it there.
fn stop_within_a_record(cluster: &LargeCluster) -> (shimmer_node::NodeConfig, std::net::SocketAddr) {
    let node = Node::start(cluster.join(&cluster.root.path().join("node")), "127.0.0.1:0".parse().unwrap());
    wait_until("part of a record is here", || {
        partials(&node.config).first().is_some_and(|(_, bytes)| (1..600_000).contains(bytes))
    });
    let stopped = node.stop();
    assert_eq!(partials(&stopped.0).len(), 1);
    stopped
}

#[test]
fn a_stopped_node_goes_on_within_the_record() {
    let cluster = LargeCluster::start(Some(SLOW));
    let (config, addr) = stop_within_a_record(&cluster);
    let here = bytes_on_disk(&config);
    let sent = cluster.experts.sent_bytes();
    assert!(here > 0 && here < cluster.source.bytes());
    let node = start_again(config, addr);
    let now = wait_synced(&node.config, LARGE_EXPERTS as u32);
    assert_eq!(now.received_bytes, cluster.source.bytes() - here, "what was here is not asked for again");
    // A few parts were on their way to the node that stopped.
    let sent = cluster.experts.sent_bytes() - sent;
    assert!((now.received_bytes..now.received_bytes + (1 << 20)).contains(&sent), "{sent} bytes were sent");
    assert_eq!((now.problem.as_str(), now.eta_s), ("", 0.0));
    cluster.check_shard(&node.config);
}

#[test]
fn a_damaged_beginning_is_fetched_again() {
    let cluster = LargeCluster::start(Some(SLOW));
    let (config, addr) = stop_within_a_record(&cluster);
    let here = bytes_on_disk(&config);
    let (path, bytes) = partials(&config).remove(0);
    let mut content = std::fs::read(&path).unwrap();
    content[bytes as usize / 2] ^= 1;
    std::fs::write(&path, content).unwrap();
    let node = start_again(config, addr);
    let now = wait_synced(&node.config, LARGE_EXPERTS as u32);
    assert_eq!(now.received_bytes, cluster.source.bytes() - here + record_bytes());
    cluster.check_shard(&node.config);
}

fn record_bytes() -> u64 {
    Large::new().bytes() / LARGE_EXPERTS as u64
}

#[test]
fn a_complete_beginning_becomes_a_record_without_being_asked_for() {
    let cluster = LargeCluster::start(Some(SLOW));
    let (config, addr) = stop_within_a_record(&cluster);
    let (path, _) = partials(&config).remove(0);
    let name = path.file_name().unwrap().to_str().unwrap();
    let (id, _) = shimmer_common::experts::pack::parse_partial_name(name).unwrap();
    std::fs::write(&path, cluster.source.record(id)).unwrap();
    let here = bytes_on_disk(&config);
    let node = start_again(config, addr);
    let now = wait_synced(&node.config, LARGE_EXPERTS as u32);
    assert_eq!(now.received_bytes, cluster.source.bytes() - here);
    cluster.check_shard(&node.config);
}

#[test]
fn progress_is_told_while_records_arrive() {
    let cluster = LargeCluster::start(Some(SLOW));
    let node = Node::start(cluster.join(&cluster.root.path().join("node")), "127.0.0.1:0".parse().unwrap());
    let mut seen = Vec::new();
    wait_until("everything is here", || {
        seen.extend(report(&node.config).filter(|now| seen.last() != Some(now)));
        seen.last().is_some_and(|now| now.held_records == LARGE_EXPERTS as u32)
    });
    let within = seen.iter().find(|now| now.bytes_per_s > 0.0 && !now.sources.is_empty() && now.eta_s > 0.0);
    let within = within.expect("a rate, a source and an end while it fetches");
    assert_eq!(within.sources, ["the coordinator"]);
    assert!(within.bytes_per_s < 3.0 * SLOW as f64, "the limit holds: {within:?}");
    assert_eq!(within.wanted_bytes, cluster.source.bytes());
}

/// A node in a process of its own.
struct Process(Child);

impl Process {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shimmer"));
        command.args(["node"]).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nodes_and_coordinators_killed_at_random_leave_no_wrong_record() {
    let rounds: u64 =
        std::env::var("SHIMMER_TEST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(6);
    let cluster = LargeCluster::start(Some(SLOW));
    let config = cluster.join(&cluster.root.path().join("node"));
    let data = config.data_dir.to_str().unwrap().to_owned();
    let LargeCluster { root, state, experts, source } = cluster;
    let mut experts = Some(experts);
    let mut random = Random(u64::from(std::process::id()));
    let (mut transferred, mut here) = (0, 0);
    for round in 0..rounds {
        let mut node = Process::start(&["start", "--data", &data]);
        std::thread::sleep(Duration::from_millis(random.next() % 700));
        if round % 3 == 2 {
            transferred += experts.take().map_or(0, |experts| experts.sent_bytes());
        }
        node.kill();
        if experts.is_none() {
            experts = Some(coordinator(&state, source.clone(), Some(SLOW)));
        }
        if config.data_dir.join("shard/manifest.json").exists() {
            let now = bytes_on_disk(&config);
            assert!(now >= here, "{here} bytes were here, {now} are");
            here = now;
        }
    }
    let experts = experts.unwrap();
    let sent = experts.sent_bytes();
    let _ = std::fs::remove_file(config.data_dir.join("progress.json"));
    let _node = Process::start(&["start", "--data", &data]);
    let now = wait_synced(&config, LARGE_EXPERTS as u32);
    assert_eq!(now.received_bytes, source.bytes() - here, "what was here is not asked for again");
    eprintln!("{rounds} kills, {} bytes sent for {}", transferred + experts.sent_bytes(), source.bytes());
    assert!(experts.sent_bytes() >= sent + now.received_bytes);
    LargeCluster { root, state, experts, source }.check_shard(&config);
}
