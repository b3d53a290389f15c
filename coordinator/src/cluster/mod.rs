//! The cluster: certificates, joining, membership, dispatch with fall-back, shard distribution.
//!
//! Rooms: `state` (directory made by `cluster init`), `ca` (certificates), `token`, `service`
//! (the gRPC server nodes join at), `shards` (records on the same server), `hashes` (what records hash to), `membership`, `node`,
//! `placement`, `link` (one stream per node), `latency` (deadlines), `dispatch` (one layer over the cluster). [`ClusterExperts`] is the
//! seam's distributed implementation.
//!
//! Two threads with a single-threaded runtime each: `shimmer-wire` carries dispatches and nothing
//! else, `shimmer-control` serves joins, registrations and records. The engine thread meets them in
//! channels.

mod ca;
mod dispatch;
mod hashes;
mod latency;
mod link;
mod membership;
mod node;
mod placement;
mod service;
mod shards;
mod state;
mod token;

pub use state::{ClusterState, Member};

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{
    ExpertCompute, ExpertError, ExpertLayout, ExpertSource, LocalStore, Lookahead, RoutedBatch,
};
use shimmer_common::fixed::FixedRows;
use shimmer_common::profile::NumericProfile;
use shimmer_node::files::FileLock;
use shimmer_node::pace::Activity;
use shimmer_node::shards::RecordSender;
use shimmer_node::wire::Facts;

use dispatch::Dispatcher;
use hashes::HashTable;
use link::{LinkContext, run_links};
use membership::Membership;
use service::Control;

/// Why a cluster operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The state directory is missing, damaged or locked by another coordinator.
    #[error("cluster state {path}: {what}")]
    State {
        /// The directory or file.
        path: PathBuf,
        /// What is wrong and the remedy.
        what: String,
    },
    /// Another coordinator runs on the state directory.
    #[error("cluster state {path}: is in use by another running coordinator; stop it first")]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// A node cannot be reached or refused.
    #[error("{node}: {what}")]
    Node {
        /// The node as described, or its address.
        node: String,
        /// What is wrong and the remedy.
        what: String,
    },
    /// The control address cannot be bound.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// Address.
        addr: SocketAddr,
        /// Operating system error.
        source: std::io::Error,
    },
}

/// What a running cluster needs to know about the model.
pub struct ClusterModel {
    /// Identity of the model.
    pub fingerprint: Fingerprint,
    /// Numeric profile.
    pub profile: NumericProfile,
    /// Source the shards are served from (container or pack).
    pub source: Arc<dyn ExpertSource>,
    /// Local fallback and local share; `None` with `--experts cluster`.
    pub local: Option<Arc<LocalStore>>,
}

/// Options of a running cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterOptions {
    /// Where to listen for joins and fetches instead of the address in the state.
    pub listen: Option<SocketAddr>,
    /// Nodes to dial besides those that register (`--expert-nodes`).
    pub nodes: Vec<String>,
    /// Fixed dispatch deadline; `None` = derived from measured latency.
    pub deadline: Option<Duration>,
    /// Share of each layer's experts this machine computes itself while nodes work, 0.0 … 1.0.
    pub local_share: f64,
    /// Most bytes per second a node fetches records with; `None` = as fast as the link allows.
    pub sync_rate: Option<u64>,
}

/// Counters of one node.
#[derive(Clone, Debug, Default)]
pub struct NodeStatus {
    /// Stable id.
    pub id: String,
    /// Name given at join.
    pub name: String,
    /// Address dialled.
    pub addr: String,
    /// `joining`, `syncing`, `ready`, `suspect`, `lost`.
    pub state: String,
    /// Experts held.
    pub experts_held: usize,
    /// Experts computed for this coordinator.
    pub experts_served: u64,
    /// Dispatches answered late or not at all.
    pub failures: u64,
    /// Median round trip of recent dispatches in ms.
    pub latency_ms: f64,
}

/// The cluster implementation of the expert seam, with fall-back to replicas and the local store.
/// Dropping it closes every connection and frees the cluster directory.
pub struct ClusterExperts {
    dispatcher: Dispatcher,
    control_addr: SocketAddr,
    sender: RecordSender,
    threads: Vec<ServiceThread>,
    _lock: FileLock,
}

impl ClusterExperts {
    /// Starts the control server and the wire thread and dials the known nodes.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn start(
        state: ClusterState,
        model: ClusterModel,
        options: ClusterOptions,
    ) -> Result<Arc<Self>, ClusterError> {
        let lock = state.lock_coordinator()?;
        let credentials = state.credentials()?;
        let addr = options.listen.unwrap_or_else(|| state.listen());
        let listen_error = |source| ClusterError::Listen { addr, source };
        let listener = TcpListener::bind(addr).map_err(listen_error)?;
        listener.set_nonblocking(true).map_err(listen_error)?;
        let control_addr = listener.local_addr().map_err(listen_error)?;

        let layout = model.source.layout().clone();
        let facts = Facts {
            name: "the coordinator".to_owned(),
            fingerprint: Some(model.fingerprint),
            profile: Some(model.profile),
        };
        let (joined, new_nodes) = tokio::sync::mpsc::unbounded_channel();
        let membership = Arc::new(Membership::new(layout.clone(), joined));
        for member in state.members()?.iter().filter(|m| !m.revoked) {
            membership.get_or_add(&member.id, &member.name, &member.addresses);
        }
        let context = LinkContext {
            credentials: credentials.clone(),
            facts: facts.clone(),
            layout: layout.clone(),
            state: state.clone(),
        };
        let (context, weak) = (Arc::new(context), Arc::downgrade(&membership));
        let fixed = options.nodes.clone();
        let wire = ServiceThread::start(&state, "shimmer-wire", move |stop| {
            run_links(context, weak, new_nodes, fixed, stop)
        })?;
        let activity = Activity::new();
        let sender = RecordSender::new(activity.clone());
        let control = Control {
            state: state.clone(),
            facts,
            hashes: HashTable::open(state.dir(), model.fingerprint, model.source.clone()),
            source: model.source,
            membership: membership.clone(),
            sender: sender.clone(),
            sync_rate: options.sync_rate.unwrap_or(0),
        };
        let control = ServiceThread::start(&state, "shimmer-control", move |stop| async move {
            if let Err(why) = service::serve(control, credentials, listener, stop).await {
                tracing::error!(why, "the control server stopped; nodes cannot join or fetch");
            }
        })?;
        Ok(Arc::new(Self {
            dispatcher: Dispatcher {
                membership,
                layout,
                fraction_bits: model.profile.fraction_bits,
                local: model.local,
                local_share: options.local_share,
                fixed_deadline: options.deadline,
                activity,
                next_id: AtomicU64::new(1),
                by_share: AtomicU64::new(0),
                by_fallback: AtomicU64::new(0),
            },
            control_addr,
            sender,
            threads: vec![wire, control],
            _lock: lock,
        }))
    }

    /// The control server's bound address.
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// Blocks until at least `count` nodes are ready or the deadline passes.
    ///
    /// # Errors
    /// [`ClusterError::Node`] naming who is missing.
    pub fn wait_ready(&self, count: usize, timeout: Duration) -> Result<(), ClusterError> {
        let ready = |nodes: &[Arc<node::Node>]| nodes.iter().filter(|n| n.is_ready()).count();
        if self.dispatcher.membership.wait(Instant::now() + timeout, |nodes| ready(nodes) >= count) {
            return Ok(());
        }
        let nodes = self.dispatcher.membership.all();
        let missing: Vec<_> = nodes.iter().filter(|n| !n.is_ready()).map(|n| n.describe()).collect();
        let who =
            if missing.is_empty() { "nodes that have not joined yet".to_owned() } else { missing.join(", ") };
        Err(ClusterError::Node {
            node: who,
            what: format!(
                "only {} of {count} nodes are ready after {} s; start the missing nodes with `shimmer-node start --data DIR`",
                ready(&nodes),
                timeout.as_secs()
            ),
        })
    }

    /// Status of every known node.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        self.dispatcher.membership.all().iter().map(|node| node.status()).collect()
    }

    /// Bytes of records sent to nodes since the start.
    pub fn sent_bytes(&self) -> u64 {
        self.sender.sent_bytes()
    }

    /// Experts computed on this machine: by share and as fall-back.
    pub fn local_counts(&self) -> (u64, u64) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (read(&self.dispatcher.by_share), read(&self.dispatcher.by_fallback))
    }
}

impl ExpertCompute for ClusterExperts {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        self.dispatcher.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        &self.dispatcher.layout
    }

    fn prefetch(&self, ahead: &Lookahead) {
        self.dispatcher.prefetch(ahead);
    }

    fn wants_lookahead(&self) -> bool {
        self.dispatcher.local.as_ref().is_some_and(|local| local.wants_lookahead())
    }
}

impl Drop for ClusterExperts {
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(ServiceThread::stop);
    }
}

/// A thread with its own single-threaded runtime, stopped by dropping `stop`.
struct ServiceThread {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ServiceThread {
    fn start<F>(
        state: &ClusterState,
        name: &'static str,
        serve: impl FnOnce(tokio::sync::oneshot::Receiver<()>) -> F + Send + 'static,
    ) -> Result<Self, ClusterError>
    where
        F: Future<Output = ()>,
    {
        let failed = |e: std::io::Error| state.error("", format!("the thread {name} cannot be started: {e}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                runtime.block_on(serve(stopped));
                // Reads of a fetch under way are not waited for.
                runtime.shutdown_background();
            })
            .map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    fn stop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
