//! A cluster in the lab: the coordinator on host 0, node i on host i, real programs, joined by token.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::disk::Disk;
use super::{Host, HostOptions, Lan, LanOptions};
use crate::http::{self, Answer};
use crate::process::{Program, wait_for};

const CONTROL_PORT: u16 = 7420;
const HTTP_PORT: u16 = 8000;

/// What the cluster is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Expert nodes.
    pub nodes: usize,
    /// Every host and its cable.
    pub host: HostOptions,
    /// RAM for experts of a node, as the command line takes it.
    pub node_ram: String,
    /// Size of each node's own disk in bytes; `None` = a plain directory.
    pub disk_bytes: Option<u64>,
    /// Model directory.
    pub model: PathBuf,
}

impl Setup {
    /// The demo model on gigabit Ethernet. No node can keep all its experts in RAM.
    pub fn demo(nodes: usize) -> Self {
        Self {
            nodes,
            host: HostOptions::default(),
            node_ram: "1MiB".to_owned(),
            disk_bytes: None,
            model: demo_model(),
        }
    }
}

/// Directory of the demo model.
pub fn demo_model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../coordinator/assets/demo-model"))
}

/// A node as the coordinator's `/status` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLine {
    /// Name: `node1`, `node2`, …
    pub name: String,
    /// Membership state.
    pub state: String,
    /// Experts it computed since the coordinator started.
    pub experts: u64,
}

/// A cluster in the lab. Node numbers are host numbers and begin at 1.
pub struct LanCluster {
    /// The hosts.
    pub lan: Lan,
    program: Program,
    setup: Setup,
    token: String,
    /// Programs by host.
    running: Vec<Mutex<Option<Child>>>,
    disks: Vec<Disk>,
    dir: tempfile::TempDir,
}

impl LanCluster {
    /// Makes hosts and cluster state and starts the coordinator; no node has joined yet. `None`, with a
    /// line that says why, where there is no lab.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn up_or_skip(program: &Program, setup: Setup) -> Option<Self> {
        let lan = Lan::up_or_skip(&LanOptions::uniform(setup.nodes + 1, &setup.host))?;
        let dir = super::switch::compile_dir().expect("a temporary directory");
        let state = dir.path().join("cluster");
        let control = lan.host(0).at(CONTROL_PORT).to_string();
        let mut init = program.command(["cluster", "init", "--listen", &control, "--cluster"]);
        assert!(init.arg(&state).output().expect("the program starts").status.success());
        let mut invite = program.command(["cluster", "invite", "--advertise", &control, "--uses", "64"]);
        let out = invite.arg("--cluster").arg(&state).output().expect("the program starts");
        let token = String::from_utf8(out.stdout).expect("UTF-8").trim().to_owned();
        assert!(!token.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
        let disk = |(i, bytes): (usize, u64)| {
            Disk::make(&dir.path().join(format!("node{i}")), bytes).expect("a disk")
        };
        let disks = setup.disk_bytes.into_iter().flat_map(|b| (1..=setup.nodes).map(move |i| (i, b)));
        let disks = disks.map(disk).collect();
        let running = (0..=setup.nodes).map(|_| Mutex::default()).collect();
        let cluster = Self { lan, program: program.clone(), setup, token, running, disks, dir };
        cluster.start_coordinator();
        Some(cluster)
    }

    /// As [`Self::up_or_skip`]; all nodes have joined, own experts and have fetched them.
    ///
    /// # Panics
    /// When they do not in time.
    pub fn ready_or_skip(program: &Program, setup: Setup) -> Option<Self> {
        let cluster = Self::up_or_skip(program, setup)?;
        let nodes = cluster.setup.nodes;
        (1..=nodes).for_each(|node| cluster.enrol(node));
        (1..=nodes).for_each(|node| cluster.start(node));
        cluster.wait_ready(nodes);
        cluster.wait_spread();
        Some(cluster)
    }

    /// Waits until every node has a part.
    fn wait_spread(&self) {
        wait_for("experts on every node", || {
            let status = self.status().ok()?;
            let nodes = status["experts"]["cluster"]["nodes"].as_array()?;
            let has_part = |node: &&Value| {
                node["state"] == "ready" && node["experts_held"].as_u64().is_some_and(|n| n > 0)
            };
            (nodes.iter().filter(has_part).count() >= self.setup.nodes).then_some(())
        });
    }

    /// Numbers of all nodes.
    pub fn nodes(&self) -> std::ops::RangeInclusive<usize> {
        1..=self.setup.nodes
    }

    /// Data directory of a node.
    pub fn data(&self, node: usize) -> PathBuf {
        self.dir.path().join(format!("node{node}"))
    }

    /// The disk of a node that has one of its own.
    ///
    /// # Panics
    /// When it has none.
    pub fn disk(&self, node: usize) -> &Disk {
        &self.disks[node - 1]
    }

    /// Starts the coordinator and waits until it answers HTTP.
    ///
    /// # Panics
    /// When it does not.
    pub fn start_coordinator(&self) {
        self.launch_coordinator();
        wait_for("the coordinator's HTTP port", || self.status().ok());
    }

    /// Starts the coordinator without waiting for anything.
    pub fn launch_coordinator(&self) {
        let port = HTTP_PORT.to_string();
        let mut command = self.program.command(["serve", "--usage", "off", "--no-think", "--port", &port]);
        command.arg("--model").arg(&self.setup.model).arg("--cluster").arg(self.dir.path().join("cluster"));
        // The demo model is so small that a planner gives the machine with the shortest round trip all of it:
        // equal parts come of planning before anything has been measured.
        command.args(["--local-share", "0", "--awaited-nodes", &self.setup.nodes.to_string()]);
        self.launch(0, &command);
    }

    /// Starts a node's first run: `join`.
    pub fn join(&self, node: usize) {
        let mut command = self.program.command(["node", "join", &self.token, "--threads", "1"]);
        command.args(["--listen", "0.0.0.0:7421", "--ram", &self.setup.node_ram]);
        command.arg("--name").arg(format!("node{node}")).arg("--data").arg(self.data(node));
        self.launch(node, &command);
    }

    /// Joins without serving: certificates and settings only.
    ///
    /// # Panics
    /// When the coordinator does not let it in.
    pub fn enrol(&self, node: usize) {
        let mut command = self.program.command(["node", "join", &self.token, "--threads", "1", "--no-start"]);
        command.args(["--listen", "0.0.0.0:7421", "--ram", &self.setup.node_ram]);
        command.arg("--name").arg(format!("node{node}")).arg("--data").arg(self.data(node));
        let out = self.lan.host(node).command(&command).output().expect("the node starts");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    /// Starts a node again from its data directory.
    pub fn start(&self, node: usize) {
        let mut command = self.program.command(["node", "start", "--data"]);
        command.arg(self.data(node));
        self.launch(node, &command);
    }

    fn launch(&self, host: usize, command: &Command) {
        let mut slot = self.slot(host);
        reap(&mut slot);
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log(host));
        let mut command = self.lan.host(host).command(command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log file"));
        *slot = Some(command.spawn().expect("a program starts"));
    }

    fn slot(&self, host: usize) -> MutexGuard<'_, Option<Child>> {
        self.running[host].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("host{host}.log"))
    }

    /// SIGKILL for the program of a host; 0 is the coordinator.
    pub fn kill(&self, host: usize) {
        reap(&mut self.slot(host));
    }

    /// Whether the program of a host runs.
    pub fn runs(&self, host: usize) -> bool {
        self.slot(host).as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// The coordinator's `/status`.
    ///
    /// # Errors
    /// What went wrong, for people.
    pub fn status(&self) -> Result<Value, String> {
        http::get_json(self.connect()?, "/status")
    }

    /// The nodes as the coordinator sees them; none while it does not answer.
    pub fn lines(&self) -> Vec<NodeLine> {
        let status = self.status().unwrap_or_default();
        let line = |node: &Value| {
            Some(NodeLine {
                name: node["name"].as_str()?.to_owned(),
                state: node["state"].as_str()?.to_owned(),
                experts: node["experts"].as_u64()?,
            })
        };
        status["experts"]["nodes"].as_array().into_iter().flatten().filter_map(line).collect()
    }

    /// One node as the coordinator sees it.
    pub fn line(&self, node: usize) -> Option<NodeLine> {
        self.lines().into_iter().find(|line| line.name == format!("node{node}"))
    }

    /// Waits until so many nodes are ready.
    ///
    /// # Panics
    /// When they are not in time.
    pub fn wait_ready(&self, count: usize) {
        wait_for("ready nodes", || {
            let ready = self.lines().iter().filter(|line| line.state == "ready").count();
            (ready >= count).then_some(())
        });
    }

    /// Waits until a node has computed something it had not before, asking for short answers meanwhile.
    ///
    /// # Panics
    /// When it is not used in time.
    pub fn wait_used(&self, node: usize) {
        let before = self.line(node).map_or(0, |line| line.experts);
        wait_for(&format!("node{node} to be used"), || {
            self.ask("Hello", 1, 8, |_| {}).ok()?;
            self.line(node).filter(|line| line.experts > before)
        });
    }

    /// Asks the coordinator; see [`http::ask`].
    ///
    /// # Errors
    /// What went wrong, for people.
    pub fn ask(
        &self,
        prompt: &str,
        seed: u64,
        max_tokens: usize,
        piece: impl FnMut(usize),
    ) -> Result<Answer, String> {
        http::ask(self.connect()?, prompt, seed, max_tokens, piece)
    }

    fn connect(&self) -> Result<TcpStream, String> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, HTTP_PORT));
        let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(5));
        self.lan.host(0).inside(connect).map_err(|e| e.to_string())
    }

    /// One host.
    pub fn host(&self, index: usize) -> &Host {
        self.lan.host(index)
    }

    /// The coordinator's address for nodes.
    pub fn control(&self) -> SocketAddr {
        self.lan.host(0).at(CONTROL_PORT)
    }

    /// The last lines a host's programs wrote.
    pub fn log_tail(&self, host: usize, lines: usize) -> String {
        tail(&self.log(host), lines)
    }
}

fn reap(slot: &mut Option<Child>) {
    if let Some(mut child) = slot.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

impl Drop for LanCluster {
    fn drop(&mut self) {
        for host in 0..self.running.len() {
            // A stopped or frozen program ends by SIGKILL, too, but only after it was thawed.
            let _ = self.lan.host(host).thaw();
            self.kill(host);
            if std::thread::panicking() {
                eprintln!("--- log of host {host}\n{}", self.log_tail(host, 40));
            }
        }
    }
}
