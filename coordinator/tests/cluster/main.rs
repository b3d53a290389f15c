//! The cluster as a whole, in one process with real TLS on loopback.
#![allow(clippy::unwrap_used, reason = "helpers of a test fail the test")]

mod admission;
mod discovery;
mod fake;
mod faults;
mod hedging;
mod hints;
mod leases;
mod liveness;
mod peers;
mod shards;
mod support;
mod sync;
mod times;

use std::sync::atomic::Ordering;
use std::time::Duration;

use shimmer::cluster::{ClusterOptions, LocalShare};
use support::*;

/// Every layer with few and many rows.
fn check_all(cluster: &Cluster) {
    for layer in LAYERS {
        for rows in [1, 3, 40] {
            cluster.check(&batch(layer, rows, rows as u64));
        }
    }
}

#[test]
fn one_node_returns_the_bits_of_the_local_store() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let _node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    check_all(&cluster);
    let status = cluster.status("kitchen");
    assert!(status.experts_served > 0 && status.failures == 0, "{status:?}");
    assert_eq!(cluster.experts.local_counts(), (0, 0));
}

#[test]
fn parts_add_up_and_replicas_share_the_work() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let nodes = [
        cluster.node("first", Synthetic::new(|id| id.index % 3 == 0)),
        cluster.node("second", Synthetic::new(|id| id.index % 3 == 1)),
        cluster.node("all", Synthetic::new(|_| true)),
    ];
    cluster.experts.wait_ready(nodes.len(), PATIENCE).unwrap();
    check_all(&cluster);
    for name in ["first", "second", "all"] {
        assert!(cluster.status(name).experts_served > 0, "{name} was idle");
    }
}

#[test]
fn the_coordinator_takes_its_share_and_what_nobody_holds() {
    let options = ClusterOptions { local_share: LocalShare::Fixed(0.5), ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let _node = cluster.node("small", Synthetic::new(|id| id.layer == LAYERS[0]));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    check_all(&cluster);
    let (by_share, by_fallback) = cluster.experts.local_counts();
    assert!(by_share > 0 && by_fallback > 0, "{by_share} by share, {by_fallback} as fall-back");
    assert!(cluster.status("small").experts_served > 0);
}

#[test]
fn without_any_node_the_local_store_computes() {
    let cluster = Cluster::start(Setup::default());
    check_all(&cluster);
    let missing = cluster.experts.wait_ready(1, Duration::from_millis(1)).unwrap_err();
    assert!(missing.to_string().contains("have not joined yet"), "{missing}");
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let mut nodes = Vec::new();
    for (i, isa) in ["portable", "avx2", "avx512"].into_iter().enumerate() {
        let mut config = cluster.join(isa);
        config.settings.isa = Some(isa.to_owned());
        if config.settings.kernels().is_err() {
            continue; // this CPU lacks it
        }
        let holds: fn(_) -> bool = match i {
            0 => |id: shimmer_common::experts::ExpertId| id.index.is_multiple_of(3),
            1 => |id: shimmer_common::experts::ExpertId| id.index % 3 == 1,
            _ => |_| true,
        };
        config.records = shimmer_node::Records::Source {
            source: std::sync::Arc::new(Synthetic::new(holds)),
            fingerprint: FINGERPRINT,
        };
        nodes.push(Node::start(config, "127.0.0.1:0".parse().unwrap()));
    }
    let everything = cluster.node("rest", Synthetic::new(|_| true));
    cluster.experts.wait_ready(nodes.len() + 1, PATIENCE).unwrap();
    check_all(&cluster);
    drop(everything);
}

#[test]
fn nodes_outlive_the_coordinator() {
    let mut cluster = Cluster::start(Setup::default());
    let node = cluster.node("patient", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let Cluster { root, state, experts } = cluster;
    drop(experts);
    let experts = start_coordinator(&state, Setup::default());
    cluster = Cluster { root, state, experts };
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    check_all(&cluster);
    assert!(cluster.status("patient").experts_served > 0);
    drop(node);
}

#[test]
fn a_listed_address_is_enough_to_find_a_node() {
    let mut cluster = Cluster::start(Setup::default());
    let mut config = cluster.join("behind-nat");
    config.settings.advertise = vec!["127.0.0.1:1".to_owned()];
    config.records = shimmer_node::Records::Source {
        source: std::sync::Arc::new(Synthetic::new(|_| true)),
        fingerprint: FINGERPRINT,
    };
    let node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    let Cluster { root, state, experts } = cluster;
    wait_until("the node registers", || experts.nodes().iter().any(|n| n.addr == "127.0.0.1:1"));
    drop(experts);
    let options = ClusterOptions { nodes: vec![node.addr.to_string()], ..ClusterOptions::default() };
    // The node asks at the old port only once it has a model; it has, so it can be dialled.
    let experts = start_coordinator(&state, Setup { options, ..Setup::default() });
    cluster = Cluster { root, state, experts };
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    check_all(&cluster);
    assert_eq!(cluster.status("behind-nat").addr, node.addr.to_string());
}

#[test]
fn measured_latency_is_reported() {
    let cluster = Cluster::start(Setup::default());
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let _node = cluster.node("timed", source);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    assert!(!stuck.load(Ordering::Relaxed));
    let begun = std::time::Instant::now();
    let rounds = 200;
    for seed in 0..rounds {
        cluster.check(&batch(LAYERS[0], 1, seed));
    }
    let status = cluster.status("timed");
    assert!(status.latency_ms > 0.0 && status.latency_ms < 1000.0, "{status:?}");
    eprintln!(
        "{:.3} ms per checked dispatch, median round trip {:.3} ms",
        begun.elapsed().as_secs_f64() * 1e3 / rounds as f64,
        status.latency_ms
    );
}
