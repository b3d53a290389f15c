//! Where the time went: the parts add up, and everything is counted once.

use std::time::{Duration, Instant};

use shimmer::cluster::{ClusterOptions, LocalShare};
use shimmer_common::experts::ExpertCompute as _;
use shimmer_proto::v1;

use crate::fake::{self, Fake};
use crate::support::*;

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6 + 1e-6 * b.abs()
}

#[test]
fn the_parts_add_up_to_what_was_measured_outside() {
    // Nothing is computed twice.
    let (deadline, hedge) = (Some(PATIENCE), Some(PATIENCE));
    let local_share = LocalShare::Fixed(0.3);
    let options = ClusterOptions { local_share, deadline, hedge, ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let slow = Fake::start(&cluster, "slow", |id| id.index % 2 == 0, fake::after(10));
    let _fast = Fake::start(&cluster, "fast", |id| id.index % 2 == 1, fake::prompt());
    slow.claim(v1::Reply { queue_us: 100, disk_us: 7000, compute_us: 500, misses: 1, ..Default::default() });
    let (mut own, mut outside, mut experts) = (Duration::ZERO, Duration::ZERO, 0);
    let calls = 25;
    for seed in 0..calls {
        let work = batch(LAYERS[(seed % 2) as usize], 2, seed);
        experts += work.work.len() as u64;
        let begun = Instant::now();
        let mut meanwhile = || {
            let begun = Instant::now();
            std::thread::sleep(Duration::from_millis(2));
            own += begun.elapsed();
        };
        cluster.experts.compute(&work, &mut meanwhile).unwrap();
        outside += begun.elapsed();
    }
    let times = cluster.experts.times();
    let inside = times.seconds();
    let outside = (outside - own).as_secs_f64();
    assert!(inside <= outside, "{inside} of {outside}");
    // Only the test's own clock and what lies between the two is missing.
    assert!(inside >= 0.5 * outside, "{inside} of {outside}");
    let wait = times.wait;
    assert!(near(wait.queue_s + wait.wire_s + wait.disk_s + wait.compute_s + wait.late_s, times.wait_s));
    assert!(wait.disk_s > wait.queue_s && wait.disk_s > 0.0, "{wait:?}");
    let waited: f64 = times.nodes.values().map(|n| n.waited_s).sum();
    assert!(near(waited, times.wait_s), "{waited} of {}", times.wait_s);
    for node in times.nodes.values() {
        assert!(near(node.queue_s + node.wire_s + node.disk_s + node.compute_s, node.round_trip_s));
        assert_eq!(node.round_trips.iter().sum::<u64>(), node.answers);
    }
    let tiers = times.tiers;
    let counted = tiers.node_memory + tiers.node_disk + tiers.local_memory + tiers.local_disk;
    assert_eq!(counted, experts, "{tiers:?}");
    assert_eq!(times.local_experts + times.fallback_experts, tiers.local_memory + tiers.local_disk);
    assert_eq!(times.layers.values().map(|l| l.calls).sum::<u64>(), calls);
    let slow = times.nodes.values().find(|n| n.name == "slow").unwrap();
    let fast = times.nodes.values().find(|n| n.name == "fast").unwrap();
    assert!(slow.straggled > fast.straggled, "{} and {}", slow.straggled, fast.straggled);
    assert!(times.bytes_out > 0 && times.bytes_in > 0);
    assert_eq!(times.bytes_in, times.nodes.values().map(|n| n.bytes_in).sum::<u64>());
}

#[test]
fn one_machine_counts_its_own_time() {
    let cluster = Cluster::start(Setup::default());
    for seed in 0..5 {
        cluster.check(&batch(LAYERS[0], 2, seed));
    }
    let times = cluster.experts.times();
    assert!(times.local_s > 0.0 && times.wait_s == 0.0, "{times:?}");
    assert!(times.local_disk_s <= times.local_s);
    assert_eq!(times.messages, 0);
    let alone = store(std::sync::Arc::new(Synthetic::new(|_| true)));
    let work = batch(LAYERS[0], 2, 1);
    alone.compute(&work, &mut || std::thread::sleep(Duration::from_millis(20))).unwrap();
    let times = alone.times();
    assert!(times.local_s > 0.0 && times.seconds() < 0.02 + times.local_s);
    assert_eq!(times.tiers.local_memory + times.tiers.local_disk, work.work.len() as u64);
}

#[test]
fn a_node_reports_what_it_read_and_what_it_had() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let _node = cluster.node("whole", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let work = batch(LAYERS[0], 1, 1);
    cluster.check(&work);
    cluster.check(&work);
    let times = cluster.experts.times();
    let node = times.nodes.values().next().unwrap();
    let experts = work.work.len() as u64;
    assert_eq!((node.misses, node.hits), (experts, experts), "read once, then in memory");
    let bytes: usize = work.work.iter().map(|_| layout().specs[0].record_bytes()).sum();
    assert_eq!(node.read_bytes, bytes as u64);
    assert_eq!((times.tiers.node_disk, times.tiers.node_memory), (experts, experts));
}
