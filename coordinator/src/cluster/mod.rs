//! The cluster: certificates, joining, membership, dispatch with fall-back, shard distribution.
//!
//! Rooms: `state` (directory made by `cluster init`), `ca` (certificates), `token`, `service`
//! (the gRPC server nodes join at), `shards` (records on the same server), `hashes` (what
//! records hash to), `membership`, `node`,
//! `placement` and `planner` (who owns what), `link` (one stream per node), `pulse` (liveness), `discovery`
//! (mDNS), `admin` and `client` (the command line's questions and orders). [`ClusterExperts`] is the seam's
//! distributed implementation: `dispatch` (what all layers share), `call` and `gather` (one layer), `group`
//! (work on its way, twice if it is late), `choose` (who computes what), `owed`, `latency` and `pace` (what a
//! node owes and how fast it is), `hedging` (how often work is given out twice), `hints`, `times`, `routes`.
//!
//! Three threads with a single-threaded runtime each: `shimmer-wire` carries dispatches and nothing
//! else, `shimmer-pulse` asks nodes for signs of life, `shimmer-control` serves joins, registrations and
//! records. The engine thread meets them in
//! channels.

mod admin;
mod ca;
mod call;
mod choose;
mod client;
mod discovery;
mod dispatch;
mod gather;
mod group;
mod hashes;
mod hedging;
mod here;
mod hints;
mod latency;
mod link;
mod membership;
mod node;
mod owed;
mod pace;
mod placement;
mod planner;
mod pulse;
mod ring;
mod routes;
mod service;
mod shards;
mod state;
mod times;
mod token;

pub use admin::ClusterReport;
pub use choose::Preferred;
pub use client::Coordinator;
pub use node::StateChange;
pub use placement::{Advice, LOCAL, PlanReport, Rates, Upgrade, Worker, WorkerReport};
pub use planner::{Settle, plan_offline};
pub use state::{ClusterState, Measured, Member};

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{
    Ahead, ExpertCompute, ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertTimes, LocalStore,
    Lookahead, RoutedBatch,
};
use shimmer_common::fixed::FixedRows;
use shimmer_common::profile::NumericProfile;
use shimmer_node::files::FileLock;
use shimmer_node::pace::Activity;
use shimmer_node::shards::RecordSender;
use shimmer_node::wire::Facts;

use admin::AdminService;
use discovery::Announcement;
use dispatch::Dispatcher;
use hashes::HashTable;
use here::Here;
use link::{LinkContext, run_links};
use membership::Membership;
use planner::Planner;
use pulse::run_pulses;
use routes::RouteLog;
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
    /// What tokens ask for.
    pub demand: ExpertDemand,
}

/// What tokens ask for, for the planner.
#[derive(Clone)]
pub struct ExpertDemand {
    /// Experts a token uses in a layer.
    pub per_token: usize,
    /// Learned usage of an expert, in any unit; 0 everywhere before anything was learned.
    pub heat: Arc<dyn Fn(ExpertId) -> f64 + Send + Sync>,
}

impl ExpertDemand {
    /// Nothing was learned yet.
    pub fn unknown(per_token: usize) -> Self {
        Self { per_token, heat: Arc::new(|_| 0.0) }
    }
}

/// Which experts this machine computes itself while nodes work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LocalShare {
    /// What the planner gives it, as one machine among others.
    Planned,
    /// This part of each layer, 0.0 … 1.0.
    Fixed(f64),
}

impl Default for LocalShare {
    fn default() -> Self {
        Self::Fixed(0.0)
    }
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
    /// Fixed time after which others are asked for late work too; `None` = derived from measured latency.
    pub hedge: Option<Duration>,
    /// Which experts this machine computes itself while nodes work.
    pub local_share: LocalShare,
    /// When to plan for nodes that come.
    pub settle: Settle,
    /// Whether to announce the control port by multicast DNS.
    pub discovery: bool,
    /// Network interface to announce; absent means those that lead to other machines.
    pub interface: Option<String>,
    /// Most bytes per second a node fetches records with; `None` = as fast as the link allows.
    pub sync_rate: Option<u64>,
}

/// Counters of one node.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
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
    /// Why it is suspect or lost, or was not reached; may be empty.
    pub why: String,
    /// Why no address of it answers, with the remedy; empty when one does.
    pub unreachable: String,
    /// Round trip of pings in microseconds, median and 95th percentile.
    pub ping_p50_us: u32,
    /// See `ping_p50_us`.
    pub ping_p95_us: u32,
    /// What it last said it is doing.
    pub load: Option<shimmer_proto::v1::Load>,
    /// Milliseconds since its latest sign of life; `None` before the first.
    pub pulse_age_ms: Option<u64>,
    /// Its latest changes of state, oldest first.
    pub changes: Vec<StateChange>,
    /// `ok`, or `sick` while reads fail: only what is in its memory is asked of it.
    pub disk: String,
    /// Experts it could not read when asked for them.
    pub read_failures: u64,
}

/// The cluster implementation of the expert seam, with fall-back to replicas and the local store.
/// Dropping it closes every connection and frees the cluster directory.
pub struct ClusterExperts {
    dispatcher: Dispatcher,
    reporter: AdminService,
    control_addr: SocketAddr,
    sender: RecordSender,
    threads: Vec<ServiceThread>,
    _announcement: Option<Announcement>,
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
        state.note_running_at(control_addr)?;

        let layout = model.source.layout().clone();
        let facts = Facts {
            name: "the coordinator".to_owned(),
            fingerprint: Some(model.fingerprint),
            profile: Some(model.profile),
        };
        let mut instance = [0; 16];
        getrandom::fill(&mut instance)
            .map_err(|e| state.error("", format!("the system gives no random numbers: {e}")))?;
        let (joined, new_nodes) = tokio::sync::mpsc::unbounded_channel();
        let (seen, to_watch) = tokio::sync::mpsc::unbounded_channel();
        let membership = Arc::new(Membership::new(layout.clone(), vec![joined, seen]));
        for member in state.members()?.iter().filter(|m| !m.revoked) {
            membership.get_or_add(&member.id, &member.name, &member.addresses);
        }
        let context = LinkContext {
            credentials: credentials.clone(),
            facts: facts.clone(),
            layout: layout.clone(),
            state: state.clone(),
            instance,
        };
        let (context, weak) = (Arc::new(context), Arc::downgrade(&membership));
        let fixed = options.nodes.clone();
        let (watcher, watched) = (context.clone(), weak.clone());
        let pulse = ServiceThread::start(&state, "shimmer-pulse", move |stop| {
            run_pulses(watcher, watched, to_watch, stop)
        })?;
        let wire = ServiceThread::start(&state, "shimmer-wire", move |stop| {
            run_links(context, weak, new_nodes, fixed, stop)
        })?;
        let routes = Arc::new(RouteLog::default());
        let here = model.local.clone().filter(|_| options.local_share == LocalShare::Planned).map(Here::new);
        let planner = Planner::new(
            state.clone(),
            model.fingerprint,
            layout.clone(),
            model.demand,
            routes,
            here,
            options.settle,
        )?;
        let planner = Arc::new(planner);
        let activity = Activity::new();
        let sender = RecordSender::new(activity.clone());
        let control = Control {
            state: state.clone(),
            credentials,
            facts,
            hashes: HashTable::open(state.dir(), model.fingerprint, model.source.clone()),
            source: model.source,
            membership: membership.clone(),
            planner: planner.clone(),
            sender: sender.clone(),
            sync_rate: options.sync_rate.unwrap_or(0),
        };
        let admin = AdminService {
            state: state.clone(),
            membership: membership.clone(),
            planner: planner.clone(),
            local: model.local.as_ref().map(|store| store.source().clone()),
        };
        let reporter = admin.clone();
        let control = ServiceThread::start(&state, "shimmer-control", move |stop| async move {
            if let Err(why) = service::serve(control, admin, listener, stop).await {
                tracing::error!(why, "the control server stopped; nodes cannot join or fetch");
            }
        })?;
        let announcement = match options.discovery {
            true => {
                let ca = state.ca_fingerprint()?;
                Announcement::start(&ca, control_addr, options.interface.as_deref())
            }
            false => None,
        };
        Ok(Arc::new(Self {
            dispatcher: Dispatcher::new(
                membership,
                planner,
                layout,
                model.profile.fraction_bits,
                model.local,
                activity,
                &options,
            ),
            reporter,
            control_addr,
            sender,
            threads: vec![wire, pulse, control],
            _announcement: announcement,
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

    /// Everything there is to show.
    pub fn report(&self) -> ClusterReport {
        self.reporter.report()
    }

    /// Status of every known node.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        self.dispatcher.membership.statuses()
    }

    /// Bytes of records sent to nodes since the start.
    pub fn sent_bytes(&self) -> u64 {
        self.sender.sent_bytes()
    }

    /// Experts computed on this machine: by share and as fall-back.
    pub fn local_counts(&self) -> (u64, u64) {
        self.dispatcher.local_counts()
    }

    /// Says which node is to compute an expert where several can equally well, in place of the planner.
    pub fn set_preferred(&self, preferred: Preferred) {
        self.dispatcher.set_preferred(preferred);
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

    fn lookahead(&self) -> Ahead {
        self.dispatcher.lookahead()
    }

    fn times(&self) -> ExpertTimes {
        self.dispatcher.times()
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
