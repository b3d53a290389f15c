//! How long joining and restarting take on a LAN, demo model, printed.

use std::time::{Duration, Instant};

use shimmer_tests::lan::cluster::{LanCluster, Setup};
use shimmer_tests::process::{Program, wait_for};

/// For debug builds on a busy machine.
const SLOW: u32 = 3;

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

#[test]
fn an_empty_node_serves_experts_soon_after_join() {
    let Some(cluster) = LanCluster::up_or_skip(&program(), Setup::demo(1)) else { return };
    let started = Instant::now();
    cluster.join(1);
    wait_for("the first remote expert", || {
        cluster.ask("Hello", 1, 4, |_| {}).expect("this machine has the model");
        cluster.line(1).filter(|line| line.experts > 0)
    });
    let took = started.elapsed();
    println!("from join to the first remote expert: {:.2} s", took.as_secs_f64());
    assert!(took < Duration::from_secs(10) * SLOW, "{took:?}");
}

#[test]
fn a_coordinator_that_restarts_soon_has_all_nodes_again() {
    let Some(cluster) = LanCluster::ready_or_skip(&program(), Setup::demo(3)) else { return };
    cluster.kill(0);
    let started = Instant::now();
    cluster.launch_coordinator();
    wait_for("an answer with all nodes", || {
        cluster.ask("Hello", 1, 16, |_| {}).ok()?;
        let lines = cluster.lines();
        let working = lines.iter().filter(|line| line.state == "ready" && line.experts > 0);
        (working.count() == 3).then_some(())
    });
    let took = started.elapsed();
    println!("from the coordinator's start to serving with all nodes: {:.2} s", took.as_secs_f64());
    assert!(took < Duration::from_secs(5) * SLOW, "{took:?}");
}
