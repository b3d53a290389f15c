//! The one place that turns flags into a running engine.
//!
//! container → memory plan → expert store → cluster (optional) → dense part → text → engine thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shimmer_common::container::Container;
use shimmer_common::experts::pack::Pack;
use shimmer_common::experts::{
    ExpertCompute, ExpertId, ExpertSource, LocalStore, MemoryWatch, StoreOptions, StoreStats,
};
use shimmer_common::machine;
use shimmer_common::profile::NumericProfile;

use super::error::CliError;
use super::memory::{self, MemoryPlan, Needs};
use super::model_args::{ExpertsChoice, LimitArgs, ModelArgs};
use super::output;
use super::usage::Learning;
use crate::cluster::{
    ClusterExperts, ClusterModel, ClusterOptions, ClusterState, ExpertDemand, NodeStatus, Settle,
};
use crate::decode::{Engine, EngineHandle};
use crate::gateway::{ExpertMetrics, NodeState};
use crate::model::{self, LanguageModel};
use crate::text::TextModel;
use shimmer_common::size::Size;

/// Nodes that come this close together are planned for together.
const SETTLE: Settle = Settle { pause: Duration::from_millis(1500), nodes: None };

/// How long nodes that were asked for by name may take to get ready.
const LISTED_WAIT: Duration = Duration::from_secs(60);

/// How long the other members may take: enough for every node that runs, short for those that are off.
const MEMBER_WAIT: Duration = Duration::from_secs(4);

/// Requests that may wait beside the running one.
pub const QUEUE_LIMIT: usize = 16;

/// A loaded model and what stands behind it; `T` is `()` where no text is read or written.
pub struct Loaded<T = Arc<TextModel>> {
    /// The opened container.
    pub container: Container,
    /// The model.
    pub model: Arc<dyn LanguageModel>,
    /// Its text side.
    pub text: T,
    /// Computes; every parallel step runs inside.
    pub pool: Arc<rayon::ThreadPool>,
    /// This machine's experts, if it holds any.
    pub local: Option<Arc<LocalStore>>,
    /// Makes them give memory back when it gets short.
    pub _watch: Option<MemoryWatch>,
    /// The cluster, if there is one.
    pub cluster: Option<Arc<ClusterExperts>>,
    /// What is learned of the experts' usage; saved when dropped.
    _learning: Learning,
    /// Where the RAM goes.
    pub memory: MemoryPlan,
    /// Seconds from the first header to the last weight.
    pub load_s: f64,
    /// Instruction set in use.
    pub isa: shimmer_common::kernels::Isa,
}

impl Loaded {
    /// Starts the engine thread over this model.
    ///
    /// # Errors
    /// [`CliError::Failed`] when no thread can be started.
    pub fn engine(&self) -> Result<EngineHandle, CliError> {
        let engine = Engine { model: self.model.clone(), text: self.text.clone() };
        EngineHandle::start(engine, self.pool.clone(), QUEUE_LIMIT)
            .map_err(|e| CliError::Failed(format!("cannot start the engine thread: {e}")))
    }
}

impl<T> Loaded<T> {
    /// Where the time of routed experts went so far, and the state of the nodes.
    pub fn metrics(&self) -> ExpertMetrics {
        let nodes = self.cluster.as_ref().map(|c| c.nodes()).unwrap_or_default();
        let state = |n: NodeStatus| NodeState {
            id: n.id,
            name: n.name,
            state: n.state,
            disk_is_sick: n.disk == "sick",
            read_failures: n.read_failures,
        };
        ExpertMetrics { nodes: nodes.into_iter().map(state).collect(), times: self.model.expert_times() }
    }

    /// Experts computed so far, per place.
    pub fn served(&self) -> Served {
        let nodes = self.cluster.as_ref().map(|c| c.nodes()).unwrap_or_default();
        let (local, fallback) = match (&self.cluster, &self.local) {
            (Some(cluster), _) => cluster.local_counts(),
            (None, Some(store)) => (store.stats().computed, 0),
            (None, None) => (0, 0),
        };
        Served {
            nodes: nodes
                .into_iter()
                .map(|n| NodeServed {
                    name: n.name,
                    addr: n.addr,
                    state: n.state,
                    experts: n.experts_served,
                    failures: n.failures,
                })
                .collect(),
            local,
            fallback,
            store: self.local.as_ref().map(|store| store.stats()),
        }
    }
}

/// Experts computed per place.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Served {
    /// By node.
    pub nodes: Vec<NodeServed>,
    /// On this machine by plan.
    pub local: u64,
    /// On this machine because a node was late or lost.
    pub fallback: u64,
    /// Counters of this machine's store since the start; `hits / (hits + misses)` is its hit rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreStats>,
}

/// One node's share.
#[derive(Clone, Debug, serde::Serialize)]
pub struct NodeServed {
    /// Name given at join.
    pub name: String,
    /// Address dialled.
    pub addr: String,
    /// Membership state.
    pub state: String,
    /// Experts computed.
    pub experts: u64,
    /// Dispatches answered late or not at all.
    pub failures: u64,
}

impl Served {
    /// The counts since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |name: &str| {
            let node = earlier.nodes.iter().find(|n| n.name == name);
            node.map_or((0, 0), |n| (n.experts, n.failures))
        };
        Self {
            nodes: self
                .nodes
                .iter()
                .map(|n| {
                    let (experts, failures) = before(&n.name);
                    NodeServed {
                        experts: n.experts.saturating_sub(experts),
                        failures: n.failures.saturating_sub(failures),
                        ..n.clone()
                    }
                })
                .collect(),
            local: self.local.saturating_sub(earlier.local),
            fallback: self.fallback.saturating_sub(earlier.fallback),
            store: self.store,
        }
    }
}

/// Opens the container and says on stderr what was found.
///
/// # Errors
/// [`CliError::Data`] with the list of every problem.
pub fn container(dirs: &[PathBuf]) -> Result<Container, CliError> {
    let container = Container::open(dirs)?;
    let summary = container.summary();
    output::note(&format!("model: {}", summary.line));
    for warning in &summary.warnings {
        output::note(&format!("warning: {warning}"));
    }
    Ok(container)
}

/// The place expert records are read from: the pack if one is given, else the container.
///
/// # Errors
/// [`CliError::Data`] when the pack is damaged or belongs to another model.
pub fn expert_source(
    container: &Container,
    pack: Option<&PathBuf>,
) -> Result<Arc<dyn ExpertSource>, CliError> {
    let Some(dir) = pack else { return Ok(container.experts()) };
    let pack = Pack::open(dir)?;
    let fingerprint = container.fingerprint()?;
    if pack.fingerprint() != fingerprint {
        return Err(CliError::Data(format!(
            "the pack {} was made from model {} but the container is model {fingerprint}; make it again with `shimmer pack`",
            dir.display(),
            pack.fingerprint(),
        )));
    }
    Ok(Arc::new(pack))
}

/// Experts of models up to this size are read whole before the first answer, into the store where there is
/// one: a fraction of a second.
const CHECKED_AT_OPENING_BYTES: u64 = 256 << 20;

/// Reads every expert of a small model once, which checks hashes, scales and weights, so that damage is
/// found before the first answer and not in the answer that happens to need the expert. Experts of larger
/// models are checked when they are read, all of them by `doctor --deep`.
fn check_small(source: &dyn ExpertSource) -> Result<(), CliError> {
    let layout = source.layout();
    let held = |id: &ExpertId| source.contains(*id);
    let records: Vec<_> =
        layout.ids().filter(held).filter_map(|id| Some((id, layout.record_bytes(id)?))).collect();
    if records.iter().map(|&(_, bytes)| bytes as u64).sum::<u64>() > CHECKED_AT_OPENING_BYTES {
        return Ok(());
    }
    let mut record = Vec::new();
    for (id, bytes) in records {
        record.resize(bytes, 0);
        source.read(id, &mut record)?;
    }
    Ok(())
}

/// A pool of compute threads.
///
/// # Errors
/// [`CliError::Failed`] when threads cannot be started.
pub fn compute_pool(threads: Option<usize>) -> Result<Arc<rayon::ThreadPool>, CliError> {
    let threads = threads.unwrap_or_else(machine::physical_cores);
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("compute-{i}"));
    builder
        .build()
        .map(Arc::new)
        .map_err(|e| CliError::Failed(format!("cannot start {threads} compute threads: {e}")))
}

/// Opens and loads everything `args` asks for.
///
/// # Errors
/// [`CliError`] with the documented exit codes.
pub fn load(args: &ModelArgs) -> Result<Loaded, CliError> {
    load_with(args, |container| {
        Ok(Arc::new(TextModel::open(container.dir(), container.config().vocab_size())?))
    })
}

/// As [`load`]; `text` gets the opened headers and makes the text side, or refuses the model, before
/// anything big is read.
///
/// # Errors
/// As [`load`], and those of `text`.
pub fn load_with<T>(
    args: &ModelArgs,
    text: impl FnOnce(&Container) -> Result<T, CliError>,
) -> Result<Loaded<T>, CliError> {
    let container = container(&args.model)?;
    let text = text(&container)?;
    let source = expert_source(&container, args.pack.as_ref())?;
    let cluster = open_cluster(&args.limits)?;
    load_parts(container, text, source, &args.limits, cluster, |_| Ok(()))
}

/// The cluster state the flags name; `None` with local experts.
fn open_cluster(limits: &LimitArgs) -> Result<Option<ClusterState>, CliError> {
    let state = match (&limits.cluster, limits.experts) {
        (_, ExpertsChoice::Local) => None,
        (Some(dir), _) => Some(ClusterState::open(dir)?),
        (None, ExpertsChoice::Cluster) => {
            return Err(CliError::Usage(
                "--experts cluster needs --cluster DIR; make one with `shimmer cluster init`".into(),
            ));
        }
        (None, ExpertsChoice::Auto) => None,
    };
    if state.is_none() && !limits.expert_nodes.is_empty() {
        return Err(CliError::Usage(
            "--expert-nodes needs --cluster DIR, whose certificates the nodes trust".into(),
        ));
    }
    Ok(state)
}

/// Loads a model from its opened parts. `joined` runs once the cluster listens, before listed nodes are
/// waited for (the demo starts its nodes there).
///
/// # Errors
/// [`CliError`].
pub fn load_parts<T>(
    container: Container,
    text: T,
    source: Arc<dyn ExpertSource>,
    limits: &LimitArgs,
    cluster: Option<ClusterState>,
    joined: impl FnOnce(&Arc<ClusterExperts>) -> Result<(), CliError>,
) -> Result<Loaded<T>, CliError> {
    let started = Instant::now();
    let kernels = limits.isa.kernels()?;
    let profile = NumericProfile::default();
    let pool = compute_pool(limits.threads)?;
    let needs = Needs::of(&container, source.layout(), limits).with_program_now();
    let memory = memory::divide(limits, &needs)?;
    let learning = Learning::open(&container, source.layout(), limits)?;
    let local = match limits.experts {
        ExpertsChoice::Cluster => {
            check_small(&*source)?;
            None
        }
        _ => {
            let options = StoreOptions {
                policy: learning.policy(source.layout(), memory.expert_bytes)?,
                io: limits.io_options(),
                ..StoreOptions::new(usize::try_from(memory.expert_bytes).unwrap_or(usize::MAX))
            };
            let store = Arc::new(LocalStore::open(source.clone(), kernels, profile, options)?);
            if memory.all_experts_bytes <= CHECKED_AT_OPENING_BYTES {
                store.read_all()?;
            }
            learning.pin(&store, memory.expert_bytes);
            Some(store)
        }
    };
    let cluster = match cluster {
        None => None,
        Some(state) => {
            let demand =
                ExpertDemand { per_token: container.config().experts_per_token(), heat: learning.heat() };
            let model = ClusterModel {
                fingerprint: container.fingerprint()?,
                profile,
                source,
                local: local.clone(),
                demand,
            };
            let options = ClusterOptions {
                nodes: limits.expert_nodes.clone(),
                local_share: limits.local_share.0,
                discovery: !limits.no_discovery,
                interface: limits.interface.clone(),
                sync_rate: limits.sync_rate.map(|rate| rate.0),
                settle: limits.settle.unwrap_or(Settle { nodes: limits.awaited_nodes, ..SETTLE }),
                ..ClusterOptions::default()
            };
            let experts = ClusterExperts::start(state, model, options)?;
            joined(&experts)?;
            wait_for_nodes(&experts, limits)?;
            Some(experts)
        }
    };
    let experts: Arc<dyn ExpertCompute> = match (&cluster, &local) {
        (Some(cluster), _) => cluster.clone(),
        (None, Some(local)) => local.clone(),
        (None, None) => return Err(CliError::Usage("--experts cluster needs --cluster DIR".into())),
    };
    let experts = learning.observe(experts);
    let bar = output::bytes_bar("loading", container.dense_bytes());
    let model =
        pool.install(|| model::load(&container, kernels, experts, &mut |done, _| bar.set_position(done)))?;
    bar.finish_and_clear();
    container.finish_loading();
    let load_s = started.elapsed().as_secs_f64();
    output::note(&format!(
        "loaded in {load_s:.1} s: dense part {}, experts in RAM {} of {}, {} threads, {}",
        Size(memory.dense_bytes),
        Size(memory.expert_bytes),
        Size(memory.all_experts_bytes),
        pool.current_num_threads(),
        super::isa_name(kernels.isa()),
    ));
    let _watch = local
        .as_ref()
        .map(|store| MemoryWatch::start(store, memory.budget_bytes.saturating_sub(memory.expert_bytes)));
    Ok(Loaded {
        container,
        model,
        text,
        pool,
        local,
        _watch,
        cluster,
        _learning: learning,
        memory,
        load_s,
        isa: kernels.isa(),
    })
}

/// Waits for listed nodes, then briefly for the other members, and says which nodes compute.
fn wait_for_nodes(experts: &ClusterExperts, limits: &LimitArgs) -> Result<(), CliError> {
    let cluster_only = limits.experts == ExpertsChoice::Cluster;
    let required = limits.expert_nodes.len().max(usize::from(cluster_only));
    let members = experts.nodes().len();
    let others = if members > required { members } else { 0 };
    for (count, wait) in [(required, LISTED_WAIT), (others, MEMBER_WAIT)] {
        match experts.wait_ready(count, wait) {
            Ok(()) => {}
            Err(error) if cluster_only && count == required => return Err(error.into()),
            Err(error) => output::note(&format!("warning: {error}; other machines compute what they would")),
        }
    }
    let nodes = experts.nodes();
    if nodes.is_empty() {
        output::note(&format!(
            "cluster: no node has joined {} yet; this machine computes",
            experts.control_addr()
        ));
    }
    for node in nodes {
        output::note(&format!(
            "cluster: {} at {} is {} with {} experts",
            node.name, node.addr, node.state, node.experts_held
        ));
    }
    Ok(())
}
