//! Faults of a real LAN in the middle of an answer: the answer stays the same, bit for bit, and the node
//! is used again afterwards.
//!
//! `SHIMMER_FAULT_REPEATS=20` strikes that often with every fault, the nodes in turn;
//! `SHIMMER_FAULT_FULL=1` makes faults last 20 s instead of 5 and every one strike in every set-up. The
//! moment is random and printed; `SHIMMER_FAULT_SEED` repeats a run.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use shimmer_tests::http::{self, Answer};
use shimmer_tests::lan::cluster::{LanCluster, Setup, demo_model};
use shimmer_tests::process::{Program, wait_for};
use shimmer_tests::random::Random;

/// With these seeds the answer goes on for longer than asked.
const SEEDS: [u64; 8] = [0, 4, 6, 10, 11, 14, 22, 23];
const PROMPT: &str = "There was once a king who had three sons; the eldest went out into the wide world \
    to seek his fortune, and when he had gone a little way he met an old woman.";
const TOKENS: usize = 500;

/// The longest pause a stream may have while a node fails. The bar is a deadline plus the local
/// computation; this only tells a pause from a hang.
const HANG: Duration = Duration::from_secs(10);

/// A node's disk: room for all records and what a node leaves free.
const DISK_BYTES: u64 = 128 << 20;

/// A node is back when its share is at least this part of what it was.
const BACK: f64 = 0.7;

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// One lab at a time: two cores are shared by everything in it.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What this machine alone answers, by seed.
fn undisturbed(seed: u64) -> (String, u64) {
    static ANSWERS: OnceLock<HashMap<u64, (String, u64)>> = OnceLock::new();
    let all = ANSWERS.get_or_init(|| {
        let mut command = program().command(["serve", "--experts", "local", "--usage", "off", "--no-think"]);
        command.args(["--port", "0", "--json"]).arg("--model").arg(demo_model());
        let server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut server = server.expect("the program starts");
        let mut line = String::new();
        let stdout = server.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("its address");
        let line: Value = serde_json::from_str(&line).expect("JSON");
        let address = line["address"].as_str().expect("an address").to_owned();
        let ask = |&seed: &u64| {
            let stream = TcpStream::connect(&address).map_err(|e| e.to_string())?;
            http::ask(stream, PROMPT, seed, TOKENS, |_| {})
        };
        let answers: Vec<_> = SEEDS.iter().map(ask).collect();
        let _ = server.kill();
        let _ = server.wait();
        let checked = |(seed, answer): (&u64, Result<Answer, String>)| {
            let answer = answer.expect("an answer");
            assert_eq!((answer.tokens, answer.finish.as_str()), (TOKENS as u64, "length"));
            (*seed, (answer.text, answer.tokens))
        };
        SEEDS.iter().zip(answers).map(checked).collect()
    });
    all[&seed].clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Killed,
    Stopped,
    Cut,
    HalfLost,
    DiskErrors,
    DiskFull,
}

const ALL: [Fault; 5] = [Fault::Killed, Fault::Stopped, Fault::Cut, Fault::HalfLost, Fault::DiskFull];

impl Fault {
    /// What has to be so before the answer begins.
    fn prepare(self, cluster: &LanCluster, node: usize) {
        if self != Fault::DiskFull {
            return;
        }
        // It comes back with nothing and fetches over a slow cable.
        cluster.kill(node);
        std::fs::remove_dir_all(cluster.data(node).join("shard")).expect("the shard is removed");
        // All records are 100 Mbit: 6 s at 16 Mbit/s, and a share on its part of that as long.
        let mbit = 16.0 / cluster.nodes().count() as f64;
        cluster.host(node).set_rate(mbit).expect("a slow cable");
        cluster.start(node);
        wait_for("the sync to begin", || cluster.line(node).filter(|line| line.state == "syncing"));
    }

    fn strike(self, cluster: &LanCluster, node: usize) {
        let host = cluster.host(node);
        match self {
            Fault::Killed => cluster.kill(node),
            Fault::Stopped => host.signal(Signal::STOP),
            Fault::Cut => host.cut().expect("cut"),
            Fault::HalfLost => host.set_loss(500_000).expect("loss"),
            Fault::DiskErrors => cluster.disk(node).fail(true).expect("a failing disk"),
            Fault::DiskFull => cluster.disk(node).fill().expect("a full disk"),
        }
    }

    fn lift(self, cluster: &LanCluster, node: usize) {
        let host = cluster.host(node);
        match self {
            Fault::Killed => cluster.start(node),
            Fault::Stopped => host.signal(Signal::CONT),
            Fault::Cut => host.plug().expect("plugged"),
            Fault::HalfLost => host.set_loss(0).expect("no loss"),
            Fault::DiskErrors => cluster.disk(node).fail(false).expect("a good disk"),
            Fault::DiskFull => {
                cluster.disk(node).free().expect("room");
                host.set_rate(1000.0).expect("a fast cable");
            }
        }
        // A supervisor would start a node again that its disk has ended.
        if !cluster.runs(node) {
            println!("  node{node} had ended: {}", cluster.log_tail(node, 1));
            cluster.start(node);
        }
    }

    /// Whether the coordinator must show the node as anything but ready while the fault lasts.
    fn is_seen(self) -> bool {
        matches!(self, Fault::Killed | Fault::Stopped | Fault::Cut | Fault::DiskFull)
    }
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// With this piece of the answer.
    Piece(usize),
    /// With the first piece this long after the question.
    After(Duration),
}

/// Strikes while an answer streams, lifts the fault `lasts` later, and returns the answer and how the
/// node looked just before.
fn strike_during_answer(
    cluster: &LanCluster,
    fault: Fault,
    node: usize,
    seed: u64,
    moment: Moment,
    lasts: Duration,
) -> (Result<Answer, String>, String) {
    std::thread::scope(|scope| {
        let (struck, waiting) = mpsc::channel::<Instant>();
        let lifter = scope.spawn(move || {
            let Ok(since) = waiting.recv() else { panic!("the answer ended before the fault") };
            std::thread::sleep(lasts.saturating_sub(since.elapsed()));
            let state = cluster.line(node).map_or_else(|| "unknown".to_owned(), |line| line.state);
            fault.lift(cluster, node);
            state
        });
        let (begun, mut struck) = (Instant::now(), Some(struck));
        let answer = cluster.ask(PROMPT, seed, TOKENS, |piece| {
            let due = match moment {
                Moment::Piece(at) => piece >= at,
                Moment::After(time) => begun.elapsed() >= time,
            };
            if let Some(struck) = struck.take_if(|_| due) {
                fault.strike(cluster, node);
                let _ = struck.send(Instant::now());
            }
        });
        drop(struck);
        (answer, lifter.join().expect("the fault was lifted"))
    })
}

/// The part of an answer's remote experts that each node computes. Parts, because the number depends on
/// how many drafts are tried.
fn shares(cluster: &LanCluster) -> Vec<f64> {
    let counts = || cluster.nodes().map(|node| cluster.line(node).map_or(0, |line| line.experts));
    let before: Vec<u64> = counts().collect();
    cluster.ask(PROMPT, SEEDS[0], 100, |_| {}).expect("an answer");
    let new: Vec<u64> = counts().zip(before).map(|(after, before)| after - before).collect();
    let all = new.iter().sum::<u64>().max(1);
    new.into_iter().map(|new| new as f64 / all as f64).collect()
}

/// What must hold after a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// The answer is the same.
    SameTokens,
    /// And the node computes as much as before.
    UsedAgain,
}

/// Strikes with each of `faults`, the nodes in turn.
fn faults(nodes: usize, faults: &[Fault], after: After) {
    let _alone = alone();
    let setup = Setup { disk_bytes: Some(DISK_BYTES), ..Setup::demo(nodes) };
    let Some(cluster) = LanCluster::ready_or_skip(&program(), setup) else { return };
    let repeats = number("SHIMMER_FAULT_REPEATS", 1) as usize;
    let mut random = Random::announced();

    let (text, _) = undisturbed(SEEDS[0]);
    let mut pieces = 0;
    let calm = cluster.ask(PROMPT, SEEDS[0], TOKENS, |_| pieces += 1).expect("an answer");
    assert_eq!(calm.text, text, "other tokens with {nodes} nodes and no fault");
    println!("{nodes} nodes, undisturbed: {:.2?}, longest pause {:.2?}", calm.elapsed, calm.longest_pause);
    let shares = shares(&cluster);
    // The planner may give a node of so small a model nothing; a fault of it must change nothing either.
    assert!(shares.iter().any(|&share| share > 0.0), "no node does anything: {shares:?}");
    println!("shares of the nodes: {shares:.2?}");

    for (turn, &fault) in faults.iter().enumerate() {
        for repeat in 0..repeats {
            let node = (turn + repeat) % nodes + 1;
            let seed = SEEDS[random.below(SEEDS.len())];
            let moment = match fault {
                // While the sync is still under way, which takes 6 s.
                Fault::DiskFull => Moment::After(Duration::from_millis(random.below(2000) as u64)),
                // While the rest of the answer is long enough to feel it.
                _ => Moment::Piece(random.below(pieces / 2) + pieces / 20),
            };
            let what = format!("{fault:?}, node{node} of {nodes}, {moment:?}, seed {seed}");
            strike(&cluster, fault, node, seed, moment, &what);
            if after == After::UsedAgain {
                cluster.wait_ready(nodes);
                // Who computes what of so small a model is decided by chance: judged in the long form only.
                if thorough() {
                    used_again(&cluster, node, &shares, &what);
                }
            }
        }
    }
}

fn strike(cluster: &LanCluster, fault: Fault, node: usize, seed: u64, moment: Moment, what: &str) {
    let lasts = Duration::from_secs(if number("SHIMMER_FAULT_FULL", 0) > 0 { 20 } else { 5 });
    fault.prepare(cluster, node);
    let (answer, state) = strike_during_answer(cluster, fault, node, seed, moment, lasts);
    let answer = answer.unwrap_or_else(|error| panic!("{what}: no answer: {error}"));
    let (text, tokens) = undisturbed(seed);
    assert_eq!(answer.text, text, "{what}: other tokens");
    assert_eq!(answer.tokens, tokens, "{what}");
    assert!(answer.longest_pause < HANG, "{what}: paused for {:?}", answer.longest_pause);
    assert!(!fault.is_seen() || state != "ready", "{what}: the coordinator still shows it as ready");
    if fault == Fault::DiskErrors && !cluster.log_tail(node, 1000).contains("os error 5") {
        // `the_failing_disk_fails` shows that they would.
        println!("{what}: it had everything in memory, no read failed");
    }
    println!("{what}: {state}; longest pause {:.2?} of {:.2?}", answer.longest_pause, answer.elapsed);
}

fn used_again(cluster: &LanCluster, node: usize, calm: &[f64], what: &str) {
    let lifted = Instant::now();
    cluster.wait_ready(calm.len());
    let wanted = calm[node - 1] * BACK;
    wait_for(&format!("node{node} to compute {wanted:.2} of the experts again ({what})"), || {
        (shares(cluster)[node - 1] >= wanted).then_some(())
    });
    println!("{what}: used as before after {:.2?}", lifted.elapsed());
}

#[test]
fn every_fault_with_two_nodes() {
    faults(2, &ALL, After::UsedAgain);
}

#[test]
fn faults_with_three_nodes() {
    faults(3, if thorough() { &ALL } else { &[Fault::Stopped, Fault::Cut] }, After::UsedAgain);
}

#[test]
fn faults_with_five_nodes() {
    faults(5, if thorough() { &ALL } else { &[Fault::HalfLost, Fault::Killed] }, After::UsedAgain);
}

#[test]
fn disk_errors_change_no_token() {
    let nodes: &[usize] = if thorough() { &[2, 3, 5] } else { &[3] };
    nodes.iter().for_each(|&nodes| faults(nodes, &[Fault::DiskErrors], After::SameTokens));
}

#[test]
fn a_disk_that_had_errors_is_used_again() {
    let nodes: &[usize] = if thorough() { &[2, 3, 5] } else { &[2] };
    nodes.iter().for_each(|&nodes| faults(nodes, &[Fault::DiskErrors], After::UsedAgain));
}

/// Whether more than the short form was asked for.
fn thorough() -> bool {
    number("SHIMMER_FAULT_REPEATS", 1) > 1 || number("SHIMMER_FAULT_FULL", 0) > 0
}

/// A fault that hits nobody tells nothing: reads must really fail while the disk does.
#[test]
fn the_failing_disk_fails() {
    let _alone = alone();
    let setup = Setup { disk_bytes: Some(DISK_BYTES), ..Setup::demo(1) };
    let Some(cluster) = LanCluster::ready_or_skip(&program(), setup) else { return };
    let entries = std::fs::read_dir(cluster.data(1).join("shard")).expect("a shard");
    let files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    cluster.disk(1).fail(true).expect("a failing disk");
    let readable = |path: &std::path::PathBuf| {
        let mut read = Command::new("dd");
        read.args(["of=/dev/null", "bs=4096", "iflag=direct"]).arg(format!("if={}", path.display()));
        read.output().expect("dd starts").status.success()
    };
    assert!(!files.iter().all(readable), "every file of the shard can still be read");
    cluster.disk(1).fail(false).expect("a good disk");
}
