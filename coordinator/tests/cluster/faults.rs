//! Nodes that die, hang, come back, or never were.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use shimmer::cluster::ClusterOptions;
use shimmer_common::experts::{ExpertCompute as _, ExpertError};

use crate::support::*;

#[test]
fn a_node_that_dies_in_the_middle_of_a_dispatch_costs_nothing_but_time() {
    let cluster = Cluster::start(Setup::default());
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    stuck.store(true, Ordering::Relaxed);
    let node = cluster.node("mortal", source);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let computing = scope.spawn(|| cluster.check(&batch(LAYERS[0], 2, 1)));
        node.stop();
        computing.join().unwrap();
    });
    stuck.store(false, Ordering::Relaxed);
    assert!(cluster.experts.local_counts().1 > 0, "the local store took over");
    wait_until("the node is lost", || cluster.status("mortal").state == "lost");
}

#[test]
fn a_hanging_node_is_paid_for_once_and_comes_back() {
    let deadline = Duration::from_millis(300);
    // Nobody else is asked before.
    let (deadline, hedge) = (Some(deadline), Some(deadline));
    let options = ClusterOptions { deadline, hedge, ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let _node = cluster.node("frozen", source);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();

    stuck.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    cluster.check(&batch(LAYERS[0], 2, 1));
    assert!(begun.elapsed() >= deadline.unwrap(), "the node had its chance");
    assert_eq!(cluster.status("frozen").state, "suspect");
    let fallback = cluster.experts.local_counts().1;
    for seed in 2..10 {
        cluster.check(&batch(LAYERS[0], 2, seed));
    }
    assert_eq!(cluster.status("frozen").failures, 1, "a suspect node gets no work");
    assert!(cluster.experts.local_counts().1 > fallback);

    stuck.store(false, Ordering::Relaxed);
    wait_until("the late answer clears the node", || cluster.status("frozen").state == "ready");
    cluster.check(&batch(LAYERS[0], 2, 1));
    assert!(cluster.status("frozen").experts_served > 0);
}

#[test]
fn a_replica_answers_for_a_hanging_node() {
    let options = ClusterOptions { deadline: Some(Duration::from_millis(300)), ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { local: false, options, ..Setup::default() });
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let _first = cluster.node("first", source);
    let _second = cluster.node("second", Synthetic::new(|_| true));
    cluster.experts.wait_ready(2, PATIENCE).unwrap();
    stuck.store(true, Ordering::Relaxed);
    cluster.check(&batch(LAYERS[0], 20, 7));
    wait_until("the deadline passed", || cluster.status("first").state == "suspect");
    assert!(cluster.status("second").experts_served >= 16, "it computed every expert");
    stuck.store(false, Ordering::Relaxed);
}

#[test]
fn a_node_that_restarts_is_found_again() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let node = cluster.node("phoenix", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let (config, addr) = node.stop();
    wait_until("the node is lost", || cluster.status("phoenix").state == "lost");

    let work = batch(LAYERS[0], 1, 5);
    let mut meanwhile = 0;
    let error = cluster.experts.compute(&work, &mut || meanwhile += 1).unwrap_err();
    assert_eq!(meanwhile, 1);
    let ExpertError::Unreachable(sentence) = error else { panic!("{error}") };
    let expert = format!("layer {} expert {}", work.layer, work.work[0].expert);
    for part in [expert.as_str(), "node phoenix", "lost since", "start the node again"] {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }

    let _again = Node::start(config, addr);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    cluster.check(&work);
}

#[test]
fn what_a_node_turns_out_not_to_hold_is_computed_elsewhere() {
    // Says it holds everything, but cannot read odd experts.
    struct Liar(Synthetic);
    impl shimmer_common::experts::ExpertSource for Liar {
        fn layout(&self) -> &shimmer_common::experts::ExpertLayout {
            self.0.layout()
        }
        fn contains(&self, id: shimmer_common::experts::ExpertId) -> bool {
            id.index < 16
        }
        fn plan(
            &self,
            id: shimmer_common::experts::ExpertId,
        ) -> Result<Vec<shimmer_common::io::Segment>, ExpertError> {
            self.0.plan(id)
        }
        fn finish(
            &self,
            id: shimmer_common::experts::ExpertId,
            record: &mut [u8],
        ) -> Result<(), ExpertError> {
            self.0.finish(id, record)
        }
        fn describe(&self) -> String {
            "half a model".into()
        }
    }
    let cluster = Cluster::start(Setup::default());
    let mut config = cluster.join("liar");
    let source = std::sync::Arc::new(Liar(Synthetic::new(|id| id.index % 2 == 0)));
    config.records = shimmer_node::Records::Source { source, fingerprint: FINGERPRINT };
    let _node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    for seed in 0..40 {
        cluster.check(&batch(LAYERS[0], 2, seed));
    }
    let status = cluster.status("liar");
    assert!(status.failures > 0 && status.failures <= 8, "each odd expert fails once at most: {status:?}");
    assert!(status.experts_served > 0);
}
