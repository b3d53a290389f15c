//! A cluster in one process: a synthetic model, a coordinator and nodes on loopback with real TLS.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shimmer::cluster::{ClusterExperts, ClusterModel, ClusterOptions, ClusterState, ExpertDemand};
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{
    ExpertCompute, ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertSpec, LocalStore, MatrixSpec,
    RoutedBatch,
};
use shimmer_common::fixed::FixedRows;
use shimmer_common::io::{Segment, SharedFile};
use shimmer_common::kernels::{Activations, Kernels};
use shimmer_common::profile::NumericProfile;
use shimmer_common::quant::Format;
use shimmer_node::tls::{self, Credentials};
use shimmer_node::{JoinOptions, NodeConfig, NodeError, Records};

pub const HIDDEN: usize = 128;
pub const LAYERS: [u16; 2] = [3, 4];
pub const EXPERTS: usize = 16;
pub const FINGERPRINT: Fingerprint = Fingerprint([0x3f; 32]);
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Random int8 (layer 3) and bf16 (layer 4) experts in memory.
pub struct Synthetic {
    layout: ExpertLayout,
    /// Experts this copy holds.
    pub holds: fn(ExpertId) -> bool,
    /// Blocks every read until the flag is cleared.
    pub stuck: Arc<std::sync::atomic::AtomicBool>,
}

pub fn layout() -> ExpertLayout {
    let spec = |format, inner| {
        let up = MatrixSpec { format, rows: inner, cols: HIDDEN };
        ExpertSpec { gate: up, up, down: MatrixSpec { format, rows: HIDDEN, cols: inner } }
    };
    ExpertLayout {
        hidden_size: HIDDEN,
        specs: vec![spec(Format::Int8Row, 64), spec(Format::Bf16, 32)],
        layers: LAYERS.into_iter().zip([vec![0; EXPERTS], vec![1; EXPERTS]]).collect(),
    }
}

impl Synthetic {
    pub fn new(holds: fn(ExpertId) -> bool) -> Self {
        Self { layout: layout(), holds, stuck: Arc::default() }
    }
}

impl ExpertSource for Synthetic {
    fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.layout.spec(id).is_some() && (self.holds)(id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        if !self.contains(id) {
            return Err(ExpertError::Missing {
                id,
                holder: self.describe(),
                remedy: "look elsewhere".into(),
            });
        }
        let record = record(id, self.layout.spec(id).unwrap());
        let (len, stuck) = (record.len(), Arc::clone(&self.stuck));
        let read = move |buf: &mut [u8], offset: u64| {
            while stuck.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::yield_now();
            }
            buf.copy_from_slice(&record[offset as usize..][..buf.len()]);
            Ok(buf.len())
        };
        let file = Arc::new(SharedFile::custom(Path::new("synthetic"), 0, Arc::new(read)));
        Ok(vec![Segment { file, offset: 0, len, at: 0 }])
    }

    fn finish(&self, _: ExpertId, _: &mut [u8]) -> Result<(), ExpertError> {
        Ok(())
    }

    fn describe(&self) -> String {
        "synthetic model".into()
    }
}

/// The record of a synthetic expert.
fn record(id: ExpertId, spec: &ExpertSpec) -> Vec<u8> {
    let mut record = vec![0; spec.record_bytes()];
    let mut random = Random(u64::from(id.layer) << 32 | u64::from(id.index) << 8 | 1);
    for part in spec.parts() {
        let bytes = &mut record[part.range()];
        let is_bf16 = spec.matrix(part.matrix).format == Format::Bf16;
        match (part.scales, is_bf16) {
            (true, _) => {
                bytes.chunks_mut(4).for_each(|b| b.copy_from_slice(&(random.unit() / 256.0).to_le_bytes()));
            }
            (false, true) => bytes.chunks_mut(2).for_each(|b| {
                b.copy_from_slice(&(random.signed().to_bits() >> 16).to_le_bytes()[..2]);
            }),
            (false, false) => bytes.iter_mut().for_each(|b| *b = (random.next() % 255) as u8 ^ 0x80 | 1),
        }
    }
    record
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub fn signed(&mut self) -> f32 {
        self.unit() - 0.5
    }
}

/// A batch of `rows` rows, each routed to four experts.
pub fn batch(layer: u16, rows: usize, seed: u64) -> RoutedBatch {
    const K: usize = 4;
    let mut random = Random(seed);
    let x = (0..rows * HIDDEN).map(|_| random.signed()).collect();
    let mut ids = Vec::new();
    for _ in 0..rows {
        let first = random.next() as usize;
        ids.extend((0..K).map(|i| ((first + i * 5) % EXPERTS) as u16));
    }
    let gates: Vec<f32> = ids.iter().map(|_| random.unit()).collect();
    RoutedBatch::from_routes(layer, Activations::from_f32(x, HIDDEN).quantized(), &ids, &gates, K)
}

pub fn store(source: Arc<dyn ExpertSource>) -> Arc<LocalStore> {
    Arc::new(LocalStore::new(source, Kernels::best(), NumericProfile::default(), 64 << 20).unwrap())
}

/// What every topology must return.
pub fn expected(batch: &RoutedBatch) -> FixedRows {
    let store = store(Arc::new(Synthetic::new(|_| true)));
    store.compute(batch, &mut || {}).unwrap()
}

/// A coordinator on a directory of its own.
pub struct Cluster {
    pub root: tempfile::TempDir,
    pub state: ClusterState,
    pub experts: Arc<ClusterExperts>,
}

pub struct Setup {
    pub local: bool,
    pub options: ClusterOptions,
    pub source: Synthetic,
}

impl Default for Setup {
    fn default() -> Self {
        Self { local: true, options: ClusterOptions::default(), source: Synthetic::new(|_| true) }
    }
}

impl Cluster {
    pub fn start(setup: Setup) -> Self {
        let root = tempfile::tempdir().unwrap();
        let state = ClusterState::init(&root.path().join("cluster"), "127.0.0.1:0".parse().unwrap()).unwrap();
        let experts = start_coordinator(&state, setup);
        Self { root, state, experts }
    }

    pub fn invite(&self) -> String {
        self.state.invite(&[self.experts.control_addr()], Duration::from_secs(60), 1).unwrap()
    }

    /// Joins a node called `name`.
    pub fn join(&self, name: &str) -> NodeConfig {
        shimmer_node::join(&self.invite(), &self.root.path().join(name), options(name)).unwrap()
    }

    /// Joins and runs a node that serves `source`.
    pub fn node(&self, name: &str, source: Synthetic) -> Node {
        let mut config = self.join(name);
        config.records = Records::Source { source: Arc::new(source), fingerprint: FINGERPRINT };
        Node::start(config, "127.0.0.1:0".parse().unwrap())
    }

    /// Stops the coordinator; directory and nodes remain.
    pub fn stop(self) -> (tempfile::TempDir, ClusterState) {
        drop(self.experts);
        (self.root, self.state)
    }

    pub fn status(&self, name: &str) -> shimmer::cluster::NodeStatus {
        self.experts.nodes().into_iter().find(|n| n.name == name).unwrap()
    }

    /// Computes over the cluster and checks every bit.
    pub fn check(&self, batch: &RoutedBatch) {
        let mut meanwhile = 0;
        let sums = self.experts.compute(batch, &mut || meanwhile += 1).unwrap();
        assert_eq!(meanwhile, 1, "the caller's work is done exactly once");
        assert!(sums == expected(batch), "the sums differ from the local ones");
    }
}

pub fn start_coordinator(state: &ClusterState, setup: Setup) -> Arc<ClusterExperts> {
    let source: Arc<dyn ExpertSource> = Arc::new(setup.source);
    let local = setup.local.then(|| store(source.clone()));
    let demand = ExpertDemand::unknown(4);
    let model =
        ClusterModel { fingerprint: FINGERPRINT, profile: NumericProfile::default(), source, local, demand };
    ClusterExperts::start(state.clone(), model, setup.options).unwrap()
}

/// A client of the coordinator's control port with the certificate of `config`, or without any.
pub fn control_channel(
    cluster: &Cluster,
    config: Option<&NodeConfig>,
) -> (tokio::runtime::Runtime, tonic::transport::Channel) {
    let credentials = match config {
        Some(config) => config.credentials().unwrap(),
        None => Credentials {
            ca_pem: std::fs::read_to_string(cluster.state.dir().join("ca.crt")).unwrap(),
            identity: None,
        },
    };
    channel(&credentials, cluster.experts.control_addr(), tls::COORDINATOR_NAME)
}

pub fn channel(
    credentials: &Credentials,
    addr: SocketAddr,
    name: &str,
) -> (tokio::runtime::Runtime, tonic::transport::Channel) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let channel = runtime.block_on(tls::connect(credentials, &addr.to_string(), name, PATIENCE)).unwrap();
    (runtime, channel)
}

/// The coordinator's own certificate and key.
pub fn coordinator_credentials(state: &ClusterState) -> Credentials {
    let read = |name: &str| std::fs::read_to_string(state.dir().join(name)).unwrap();
    Credentials { ca_pem: read("ca.crt"), identity: Some((read("coordinator.crt"), read("coordinator.key"))) }
}

pub fn options(name: &str) -> JoinOptions {
    JoinOptions {
        name: name.to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: Vec::new(),
        ram_bytes: Some(64 << 20),
        isa: None,
        threads: Some(1),
        pack: None,
        discovery: false,
        interface: None,
        adopt: Vec::new(),
    }
}

/// A running node; dropping it closes its connections, as a killed process would.
pub struct Node {
    pub config: NodeConfig,
    pub addr: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), NodeError>>>,
}

impl Node {
    pub fn start(config: NodeConfig, addr: SocketAddr) -> Self {
        let listener = TcpListener::bind(addr).unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = config.clone();
        let thread = std::thread::spawn(move || {
            shimmer_node::run(running, listener, async {
                let _ = stopped.await;
            })
        });
        Self { config, addr, stop: Some(stop), thread: Some(thread) }
    }

    /// Waits for a node that ends by itself.
    pub fn end(mut self) -> Result<(), NodeError> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Stops the node and gives back what is needed to start it again.
    pub fn stop(mut self) -> (NodeConfig, SocketAddr) {
        self.shut_down();
        (self.config.clone(), self.addr)
    }

    fn shut_down(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.shut_down();
        }
    }
}

/// Waits until `done` holds.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::yield_now();
    }
}

/// Serves `services` with the certificate of `config` and tells the coordinator where, until the runtime is
/// dropped: a member whose behaviour is the test's.
pub fn serve_as(
    cluster: &Cluster,
    config: &NodeConfig,
    services: tonic::service::Routes,
) -> tokio::runtime::Runtime {
    let credentials = config.credentials().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let tls = tonic::transport::ServerTlsConfig::new()
            .identity(credentials.tonic_identity().unwrap())
            .client_ca_root(credentials.tonic_ca());
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = tonic::transport::Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_routes(services)
            .serve_with_incoming(incoming);
        tokio::spawn(server);
        crate::peers::register(cluster, &credentials, port).await.unwrap();
    });
    runtime
}
