//! Late nodes: others are asked, the first complete answer counts, and no expert counts twice.

use std::sync::Arc;
use std::time::Duration;

use shimmer::cluster::{ClusterOptions, LocalShare};
use shimmer_common::experts::{ExpertCompute as _, ExpertError, ExpertTimes, RoutedBatch};

use crate::fake::{self, Act, Fake};
use crate::support::*;

/// Deadlines no test reaches by accident, and hedges soon.
fn patient() -> ClusterOptions {
    let (deadline, hedge) = (Some(Duration::from_secs(60)), Some(Duration::from_millis(30)));
    ClusterOptions { deadline, hedge, ..ClusterOptions::default() }
}

/// No hedges at all.
fn unhurried() -> ClusterOptions {
    ClusterOptions { hedge: patient().deadline, ..patient() }
}

fn start(local: bool, options: ClusterOptions) -> Cluster {
    Cluster::start(Setup { local, options, ..Setup::default() })
}

fn times(cluster: &Cluster) -> ExpertTimes {
    cluster.experts.times()
}

/// Work for one expert, which goes to the node the planner prefers.
fn single(expert: u16, seed: u64) -> RoutedBatch {
    let mut work = batch(LAYERS[0], 1, seed);
    work.work.truncate(1);
    work.work[0].expert = expert;
    work
}

fn prefer(cluster: &Cluster, name: &str) {
    let id: Arc<str> = cluster.status(name).id.into();
    cluster.experts.set_preferred(Arc::new(move |_| Some(id.clone())));
}

#[test]
fn a_replica_wins_and_the_late_answer_changes_nothing() {
    let cluster = start(false, patient());
    let late = Fake::start(&cluster, "late", |_| true, fake::after(1500));
    let replica = Fake::start(&cluster, "replica", |_| true, fake::prompt());
    prefer(&cluster, "late");
    cluster.check(&single(5, 1));
    let hedges = times(&cluster).hedges;
    assert_eq!((hedges.begun, hedges.won, hedges.lost), (1, 1, 0));
    assert_eq!((late.dispatches().len(), replica.dispatches().len()), (1, 1));
    wait_until("the late one is told", || late.cancelled() == [late.dispatches()[0].id]);
    // It is left alone while it owes an answer, which then changes nothing.
    cluster.check(&single(5, 2));
    assert_eq!(late.dispatches().len(), 1);
    for seed in 3..8 {
        cluster.check(&single(6, seed));
    }
    assert_eq!(cluster.status("late").failures, 0, "a hedge is no failure");
}

#[test]
fn this_machine_computes_what_replicas_do_not_cover() {
    let cluster = start(true, patient());
    let late = Fake::start(&cluster, "late", |_| true, fake::silent());
    let few = Fake::start(&cluster, "few", |id| id.index == 1, fake::prompt());
    prefer(&cluster, "late");
    let mut work = batch(LAYERS[1], 3, 3);
    work.work.truncate(2);
    (work.work[0].expert, work.work[1].expert) = (1, 2);
    cluster.check(&work);
    let asked = |fake: &Fake| fake.dispatches().iter().map(|d| d.experts.clone()).collect::<Vec<_>>();
    assert_eq!((asked(&late), asked(&few)), (vec![vec![1, 2]], vec![vec![1]]));
    assert_eq!(cluster.experts.local_counts(), (0, 1), "expert 2 here");
    let hedges = times(&cluster).hedges;
    assert_eq!((hedges.begun, hedges.won), (1, 1));
}

#[test]
fn what_nobody_else_has_is_waited_for() {
    let cluster = start(false, patient());
    let slow = Fake::start(&cluster, "slow", |_| true, fake::after(150));
    let other = Fake::start(&cluster, "other", |id| id.index != 15, fake::prompt());
    cluster.check(&single(15, 1));
    assert_eq!((slow.dispatches().len(), other.dispatches().len()), (1, 0));
    assert_eq!(times(&cluster).hedges.begun, 0);
    assert_eq!(cluster.status("slow").failures, 0, "late is no failure");
}

#[test]
fn a_hedge_that_loses_is_cancelled_and_thrown_away() {
    let cluster = start(false, patient());
    let first = Fake::start(&cluster, "first", |_| true, fake::after(150));
    let second = Fake::start(&cluster, "second", |_| true, fake::after(2000));
    prefer(&cluster, "first");
    cluster.check(&single(5, 4));
    let times = times(&cluster);
    assert_eq!((times.hedges.begun, times.hedges.won, times.hedges.lost), (1, 0, 1));
    assert_eq!((first.dispatches().len(), second.dispatches().len()), (1, 1));
    assert_eq!(times.nodes.values().map(|node| node.answers).sum::<u64>(), 1);
    wait_until("the loser is told", || second.cancelled() == [second.dispatches()[0].id]);
    // What was thrown away comes in during later layers, and still does not count.
    for seed in 0..5 {
        cluster.check(&batch(LAYERS[1], 2, seed));
    }
}

#[test]
fn answers_that_come_twice_or_belong_to_nothing_are_ignored() {
    let cluster = start(true, unhurried());
    let _odd = Fake::start(
        &cluster,
        "odd",
        |_| true,
        Box::new(|_| {
            // The rubbish comes when the answer has been taken.
            let (now, later) = (Duration::ZERO, Duration::from_millis(40));
            vec![(now, Act::Misnamed), (now, Act::Right), (now, Act::Right), (later, Act::Garbage)]
        }),
    );
    for seed in 0..20 {
        cluster.check(&batch(LAYERS[(seed % 2) as usize], 3, seed));
    }
    let status = cluster.status("odd");
    assert_eq!((status.state.as_str(), status.failures), ("ready", 0));
    assert_eq!(cluster.experts.local_counts().1, 0, "its answers counted");
}

#[test]
fn two_nodes_that_stand_still_at_once_cost_no_more_than_one() {
    for local in [true, false] {
        let deadline = Some(Duration::from_millis(400));
        let cluster = start(local, ClusterOptions { deadline, ..ClusterOptions::default() });
        let a = Fake::start(&cluster, "a", |id| id.index.is_multiple_of(2), fake::silent());
        let b = Fake::start(&cluster, "b", |id| id.index % 2 == 1, fake::silent());
        let _c = (!local).then(|| Fake::start(&cluster, "c", |_| true, fake::prompt()));
        cluster.check(&batch(LAYERS[0], 20, 1));
        for seed in 2..10 {
            cluster.check(&batch(LAYERS[1], 3, seed));
        }
        assert!(a.dispatches().len() <= 1 && b.dispatches().len() <= 1, "a node that owes gets no more");
        wait_until("both are suspect or were not asked", || {
            let stands =
                |name, fake: &Fake| fake.dispatches().is_empty() || cluster.status(name).state == "suspect";
            stands("a", &a) && stands("b", &b)
        });
    }
}

#[test]
fn one_that_answers_just_after_its_deadline_comes_back_each_time() {
    let (deadline, hedge) = (Some(Duration::from_millis(60)), Some(Duration::from_millis(60)));
    let cluster = start(true, ClusterOptions { deadline, hedge, ..ClusterOptions::default() });
    let tardy = Fake::start(&cluster, "tardy", |_| true, fake::after(70));
    for seed in 0..4 {
        cluster.check(&batch(LAYERS[0], 2, seed));
        wait_until("its answer came", || cluster.status("tardy").state == "ready");
    }
    assert_eq!(tardy.dispatches().len(), 4);
    assert_eq!(cluster.status("tardy").failures, 4);
}

#[test]
fn a_suspect_node_is_the_last_hope_where_nobody_else_has_an_expert() {
    let (deadline, hedge) = (Some(Duration::from_millis(50)), Some(Duration::from_millis(50)));
    let cluster = start(false, ClusterOptions { deadline, hedge, ..ClusterOptions::default() });
    let only = Fake::start(&cluster, "only", |_| true, fake::after(200));
    for seed in 0..3 {
        cluster.check(&batch(LAYERS[0], 2, seed));
    }
    assert_eq!(only.dispatches().len(), 3);
    only.act(Box::new(|_| vec![(Duration::ZERO, Act::Failure)]));
    let error = cluster.experts.compute(&batch(LAYERS[0], 2, 9), &mut || {}).unwrap_err();
    assert!(matches!(error, ExpertError::Unreachable(_)), "{error}");
}

#[test]
fn hedges_are_few_when_everything_is_slow() {
    let hedge = Some(Duration::from_millis(1));
    let cluster =
        start(true, ClusterOptions { deadline: Some(Duration::from_secs(60)), hedge, ..Default::default() });
    let _slow = Fake::start(&cluster, "slow", |_| true, fake::after(8));
    for seed in 0..120 {
        cluster.check(&batch(LAYERS[0], 1, seed));
        // It is asked again only when it owes nothing.
        let last = seed + 1;
        wait_until("it answered", || {
            let times = times(&cluster);
            let waiting = cluster.status("slow").state != "ready";
            !waiting && times.nodes.values().map(|n| n.dispatches).sum::<u64>() <= last
        });
    }
    let times = times(&cluster);
    assert!(times.hedges.begun <= 20, "{:?}", times.hedges);
}

/// SplitMix64 decides what every node does about every dispatch.
#[test]
fn whatever_nodes_do_every_call_ends_with_the_same_sums() {
    for seed in 0..6u64 {
        let (deadline, hedge) = (Some(Duration::from_millis(90)), Some(Duration::from_millis(20)));
        let options = ClusterOptions {
            deadline,
            hedge,
            local_share: LocalShare::Fixed(0.2),
            ..ClusterOptions::default()
        };
        let cluster = start(true, options);
        let holds: [fn(_) -> bool; 3] = [
            |id: shimmer_common::experts::ExpertId| !id.index.is_multiple_of(3),
            |id: shimmer_common::experts::ExpertId| id.index % 3 != 1,
            |id: shimmer_common::experts::ExpertId| id.index.is_multiple_of(2),
        ];
        let nodes: Vec<Fake> = holds
            .into_iter()
            .enumerate()
            .map(|(i, holds)| {
                let random = std::sync::Mutex::new(Random(seed * 1000 + i as u64));
                let script = move |_: &shimmer_proto::v1::Dispatch| {
                    let mut random = random.lock().unwrap();
                    let delay = Duration::from_millis([0, 0, 0, 5, 25, 60, 120][random.next() as usize % 7]);
                    match random.next() % 16 {
                        0 => Vec::new(),
                        1 => vec![(delay, Act::Failure)],
                        2 => vec![(delay, Act::Garbage)],
                        3 => vec![(delay, Act::Right), (delay, Act::Right)],
                        4 => vec![(delay, Act::Misnamed), (delay * 2, Act::Right)],
                        _ => vec![(delay, Act::Right)],
                    }
                };
                Fake::start(&cluster, &format!("n{i}"), holds, Box::new(script))
            })
            .collect();
        for step in 0..40 {
            let rows = [1, 1, 2, 30][(step % 4) as usize];
            cluster.check(&batch(LAYERS[(step % 2) as usize], rows, seed * 100 + step));
        }
        // One that is slow from the start may never be asked again.
        assert!(nodes.iter().filter(|node| !node.dispatches().is_empty()).count() >= 2);
        let times = times(&cluster);
        let tiers = times.tiers;
        let computed = tiers.node_memory + tiers.node_disk + tiers.local_memory + tiers.local_disk;
        let asked: u64 = (0..40)
            .map(|step| {
                let rows = [1, 1, 2, 30][(step % 4) as usize];
                batch(LAYERS[(step % 2) as usize], rows, seed * 100 + step).work.len() as u64
            })
            .sum();
        assert!(computed >= asked, "{computed} experts computed, {asked} asked for");
    }
}
