//! Hints ride on dispatches to the nodes they concern.

use shimmer::cluster::ClusterOptions;
use shimmer_common::experts::{ExpertCompute as _, Lookahead};
use shimmer_proto::v1;

use crate::fake::{self, Fake};
use crate::support::*;

fn guess(cluster: &Cluster, layer: u16, experts: &[u16]) {
    cluster.experts.prefetch(&Lookahead { layer, experts: experts.to_vec() });
}

/// A node that says it reads everything from its disk.
fn disk_bound(cluster: &Cluster, name: &str, holds: fn(shimmer_common::experts::ExpertId) -> bool) -> Fake {
    let node = Fake::start(cluster, name, holds, fake::prompt());
    node.claim(v1::Reply { misses: 1, disk_us: 5, ..v1::Reply::default() });
    node
}

#[test]
fn hints_go_to_the_nodes_that_would_compute_and_are_counted() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let even = disk_bound(&cluster, "even", |id| id.index.is_multiple_of(2));
    let odd = disk_bound(&cluster, "odd", |id| id.index % 2 == 1);
    assert_eq!(cluster.experts.lookahead().depth, 0, "nothing is known to be read");
    cluster.check(&batch(LAYERS[0], 8, 1));
    let ahead = cluster.experts.lookahead();
    assert!(ahead.depth > 0 && ahead.before_sending, "{ahead:?}");
    guess(&cluster, LAYERS[1], &[7, 2, 4, 5]);
    cluster.check(&batch(LAYERS[0], 8, 2));
    let hints = |node: &Fake| node.dispatches().last().unwrap().hints.clone();
    let hint = |experts: &[u32]| vec![v1::Hint { layer: LAYERS[1].into(), experts: experts.to_vec() }];
    assert_eq!((hints(&even), hints(&odd)), (hint(&[2, 4]), hint(&[7, 5])));
    let hinted: u64 = cluster.experts.times().nodes.values().map(|n| n.hinted_experts).sum();
    assert_eq!(hinted, 4);
    // Told once; and a layer that has begun is not hinted at.
    guess(&cluster, LAYERS[1], &[1, 6]);
    cluster.check(&batch(LAYERS[1], 8, 3));
    assert!(hints(&even).is_empty() && hints(&odd).is_empty());
}

#[test]
fn nodes_that_read_nothing_get_no_hints() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let node = Fake::start(&cluster, "resident", |_| true, fake::prompt());
    cluster.check(&batch(LAYERS[0], 8, 1));
    guess(&cluster, LAYERS[1], &[7, 2]);
    cluster.check(&batch(LAYERS[0], 8, 2));
    assert!(node.dispatches().iter().all(|d| d.hints.is_empty()));
    assert_eq!(cluster.experts.lookahead().depth, 0);
}

#[test]
fn a_real_node_reads_what_it_was_told() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let mut config = cluster.join("small");
    // Room for a quarter of the experts: everything else is read again and again.
    config.settings.ram_bytes = Some(8 * layout().max_record_bytes() as u64);
    let source = std::sync::Arc::new(Synthetic::new(|_| true));
    config.records = shimmer_node::Records::Source { source, fingerprint: FINGERPRINT };
    let _node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    for step in 0..40u64 {
        let next = batch(LAYERS[1], 1, step);
        guess(&cluster, LAYERS[1], &next.work.iter().map(|w| w.expert).collect::<Vec<_>>());
        cluster.check(&batch(LAYERS[0], 1, step + 100));
        cluster.check(&next);
    }
    let times = cluster.experts.times();
    let node = times.nodes.values().next().unwrap();
    assert!(node.misses > 0 && node.read_bytes > 0 && node.hinted_experts > 0, "{node:?}");
    assert_eq!(node.hits + node.misses, node.experts);
}

#[test]
fn messages_are_as_many_as_nodes_touched() {
    let options = ClusterOptions { hedge: Some(PATIENCE), deadline: Some(PATIENCE), ..Default::default() };
    let cluster = Cluster::start(Setup { local: false, options, ..Setup::default() });
    let nodes = [
        disk_bound(&cluster, "even", |id| id.index.is_multiple_of(2)),
        disk_bound(&cluster, "odd", |id| id.index % 2 == 1),
    ];
    let calls = 30;
    for seed in 0..calls {
        guess(&cluster, LAYERS[1], &[1, 2, 3, 4]);
        cluster.check(&batch(LAYERS[(seed % 2) as usize], 1, seed));
    }
    let times = cluster.experts.times();
    let got: u64 = nodes.iter().map(|node| node.dispatches().len() as u64).sum();
    assert_eq!(times.messages, got);
    assert!(times.messages <= calls * nodes.len() as u64, "{} messages", times.messages);
}
