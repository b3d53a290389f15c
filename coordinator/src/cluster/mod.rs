//! The cluster: certificates, joining, membership, dispatch with fall-back, shard distribution.
//!
//! Rooms: `state` (directory made by `cluster init`), `ca` (certificates), `token`, `service`
//! (the gRPC server nodes join and fetch from), `membership`, `placement`, `link` (one stream per
//! node), `dispatch` ([`ClusterExperts`], the seam's distributed implementation).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{
    ExpertCompute, ExpertError, ExpertLayout, ExpertSource, LocalStore, RoutedBatch,
};
use shimmer_common::fixed::FixedRows;
use shimmer_common::profile::NumericProfile;

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
    /// A node cannot be reached or refused.
    #[error("node {node}: {what}")]
    Node {
        /// Name or address.
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

/// The cluster directory (`--cluster DIR`): CA, coordinator identity, tokens, known nodes.
pub struct ClusterState {
    _dir: PathBuf,
}

impl ClusterState {
    /// Makes a private CA and a coordinator certificate in `dir`; refuses to overwrite.
    /// `listen` is where nodes will join and fetch.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn init(dir: &Path, listen: SocketAddr) -> Result<Self, ClusterError> {
        let _ = (dir, listen);
        todo!()
    }

    /// Opens an existing directory.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn open(dir: &Path) -> Result<Self, ClusterError> {
        let _ = dir;
        todo!()
    }

    /// Makes a join token: CA fingerprint, expiring secret, addresses. `advertise` lists the
    /// addresses a node should try.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn invite(
        &self,
        advertise: &[SocketAddr],
        valid_for: Duration,
        uses: u32,
    ) -> Result<String, ClusterError> {
        let _ = (advertise, valid_for, uses);
        todo!()
    }
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
pub struct ClusterExperts {
    _layout: ExpertLayout,
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
        let _ = (state, model, options);
        todo!()
    }

    /// The control server's bound address.
    pub fn control_addr(&self) -> SocketAddr {
        todo!()
    }

    /// Blocks until at least `count` nodes are ready or the deadline passes.
    ///
    /// # Errors
    /// [`ClusterError::Node`] naming who is missing.
    pub fn wait_ready(&self, count: usize, timeout: Duration) -> Result<(), ClusterError> {
        let _ = (count, timeout);
        todo!()
    }

    /// Status of every known node.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        todo!()
    }

    /// Experts computed on this machine: by share and as fall-back.
    pub fn local_counts(&self) -> (u64, u64) {
        todo!()
    }
}

impl ExpertCompute for ClusterExperts {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        let _ = (batch, meanwhile);
        todo!()
    }

    fn layout(&self) -> &ExpertLayout {
        &self._layout
    }
}
