//! One coordinator per node, one process per identity; and how fast everybody finds each other.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use shimmer::cluster::ClusterState;
use shimmer_node::{NodeConfig, NodeError, Records};

use crate::support::*;

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn serving_everything(mut config: NodeConfig) -> NodeConfig {
    config.records = Records::Source { source: Arc::new(Synthetic::new(|_| true)), fingerprint: FINGERPRINT };
    config
}

#[test]
fn a_second_coordinator_with_a_copied_directory_waits_for_the_first() {
    let first = Cluster::start(Setup::default());
    let _node = first.node("kitchen", Synthetic::new(|_| true));
    first.experts.wait_ready(1, PATIENCE).unwrap();
    let copy = first.root.path().join("copy");
    copy_files(first.state.dir(), &copy);
    let state = ClusterState::open(&copy).unwrap();
    let second = start_coordinator(&state, Setup::default());
    let status = |experts: &shimmer::cluster::ClusterExperts| experts.nodes().remove(0);
    wait_until("the second is refused", || status(&second).why.contains("another coordinator"));
    assert_ne!(status(&second).state, "ready");
    first.check(&batch(LAYERS[0], 2, 1));
    assert_eq!(first.status("kitchen").state, "ready");

    let begun = Instant::now();
    let (_root, _) = first.stop();
    second.wait_ready(1, PATIENCE).unwrap();
    println!("taken over {} ms after the first coordinator ended", begun.elapsed().as_millis());
    drop(second);
}

#[test]
fn a_copied_node_is_refused_and_the_original_goes_on() {
    let cluster = Cluster::start(Setup::default());
    let original = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    wait_until("the first pulse", || cluster.status("kitchen").pulse_age_ms.is_some());
    let copy = cluster.root.path().join("copy");
    copy_files(&original.config.data_dir, &copy);
    let twin = serving_everything(NodeConfig::load(&copy).unwrap());
    let error = Node::start(twin, "127.0.0.1:0".parse().unwrap()).end().unwrap_err();
    assert!(matches!(error, NodeError::Twin(_)), "{error}");
    let sentence = error.to_string();
    assert!(sentence.contains("copied --data directory") && sentence.contains("join it again"), "{sentence}");
    cluster.check(&batch(LAYERS[0], 2, 1));
    assert_eq!(cluster.status("kitchen").state, "ready");
    assert!(cluster.status("kitchen").experts_served > 0);
}

#[test]
fn a_node_with_a_new_address_is_found_there() {
    let cluster = Cluster::start(Setup::default());
    let node = cluster.node("laptop", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let (config, old) = node.stop();
    wait_until("the node is lost", || cluster.status("laptop").state == "lost");
    let node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    assert_ne!(node.addr, old);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    assert_eq!(cluster.status("laptop").addr, node.addr.to_string());
    cluster.check(&batch(LAYERS[0], 2, 1));
}

#[test]
fn joining_and_restarting_are_quick() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let begun = Instant::now();
    // Empty: it fetches every record.
    let node = Node::start(cluster.join("empty"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    cluster.check(&batch(LAYERS[0], 2, 1));
    println!("join to first remote expert served, empty node: {} ms", begun.elapsed().as_millis());
    let others: Vec<_> = ["b", "c"].map(|name| cluster.node(name, Synthetic::new(|_| true))).into();
    cluster.experts.wait_ready(3, PATIENCE).unwrap();

    let (_root, state) = cluster.stop();
    let begun = Instant::now();
    let experts = start_coordinator(&state, Setup { local: false, ..Setup::default() });
    experts.wait_ready(3, PATIENCE).unwrap();
    println!("coordinator restart to all of 3 nodes ready: {} ms", begun.elapsed().as_millis());
    assert!(begun.elapsed() < PATIENCE);
    drop((experts, node, others));
}
