//! A cluster of real node processes on loopback: joined by token, synced, ready for `--cluster`.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use shimmer::cluster::{ClusterExperts, ClusterModel, ClusterOptions, ClusterState, ExpertDemand};
use shimmer_common::container::Container;
use shimmer_common::profile::NumericProfile;

use crate::process::{PATIENCE, Program};

/// How a node runs.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Instruction set (`auto`, `portable`, `avx2`, `avx512`).
    pub isa: String,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self { isa: "auto".to_owned() }
    }
}

/// One node process and where it lives.
#[derive(Debug)]
pub struct NodeProcess {
    child: Child,
    data: PathBuf,
    /// Where it serves.
    pub address: SocketAddr,
}

impl NodeProcess {
    /// SIGKILL: the power cut.
    pub fn kill(&mut self) {
        self.child.kill().expect("the node can be killed");
        self.child.wait().expect("the node ends");
    }

    /// SIGSTOP: the swap storm, the suspended laptop.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a signal");
    }
}

/// A cluster state directory and its running nodes, which outlive coordinators.
#[derive(Debug)]
pub struct Lab {
    program: Program,
    dir: tempfile::TempDir,
    state: String,
    nodes: Vec<NodeProcess>,
}

impl Lab {
    /// Starts nodes that own the experts of `model` among them and waits until all are ready.
    ///
    /// # Panics
    /// When anything does not come up in time.
    pub fn start(program: &Program, model: &Path, options: &[NodeOptions]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let control = free_address();
        let state_dir = dir.path().join("cluster");
        let state = ClusterState::init(&state_dir, control).expect("a new cluster");
        let uses = options.len() as u32;
        let token = state.invite(&[control], Duration::from_secs(3600), uses).expect("a token");
        let container = Container::open(&[model.to_owned()]).expect("a valid model");
        let cluster_model = ClusterModel {
            fingerprint: container.fingerprint().expect("a fingerprint"),
            profile: NumericProfile::default(),
            source: container.experts(),
            local: None,
            demand: ExpertDemand::unknown(container.config().experts_per_token()),
        };
        let coordinator = ClusterExperts::start(state, cluster_model, ClusterOptions::default());
        let coordinator = coordinator.expect("a coordinator");
        let state = state_dir.to_str().expect("UTF-8").to_owned();
        let mut lab = Self { program: program.clone(), dir, state, nodes: Vec::new() };
        for (i, options) in options.iter().enumerate() {
            let node = lab.join(i, &token, options);
            lab.nodes.push(node);
        }
        coordinator.wait_ready(lab.nodes.len(), PATIENCE).expect("all nodes get ready");
        lab
    }

    fn join(&self, index: usize, token: &str, options: &NodeOptions) -> NodeProcess {
        let data = self.dir.path().join(format!("node{index}"));
        let address = free_address();
        let mut command = self.program.command(["node", "join", token, "--isa", &options.isa]);
        command.arg("--data").arg(&data).arg("--name").arg(format!("node{index}"));
        command.arg("--listen").arg(address.to_string()).stdout(Stdio::null()).stderr(Stdio::null());
        NodeProcess { child: command.spawn().expect("a node starts"), data, address }
    }

    /// The flags that make a command use this cluster.
    pub fn flags(&self) -> Vec<&str> {
        // These models fit into any machine: as planned, nobody would need the nodes.
        vec!["--cluster", &self.state, "--local-share", "0"]
    }

    /// One node.
    pub fn node(&mut self, index: usize) -> &mut NodeProcess {
        &mut self.nodes[index]
    }

    /// Starts a killed node again from its data directory.
    pub fn restart(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let mut command = self.program.command(["node", "start", "--data"]);
        command.arg(&node.data).stdout(Stdio::null()).stderr(Stdio::null());
        node.child = command.spawn().expect("the node starts");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.child.kill();
            let _ = node.child.wait();
        }
    }
}

/// A loopback address nobody listens on now.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address")
}
