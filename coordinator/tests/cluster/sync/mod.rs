//! Fetching records from the coordinator and from other nodes, over real TLS on loopback.

mod adopt;
mod disk;
mod liar;
mod peers;
mod resume;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shimmer::cluster::{ClusterExperts, ClusterModel, ClusterOptions, ClusterState};
use shimmer_common::experts::pack::{Pack, PackStore, parse_partial_name};
use shimmer_common::experts::{ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertSpec, MatrixSpec};
use shimmer_common::io::{Segment, SharedFile};
use shimmer_common::profile::NumericProfile;
use shimmer_common::quant::Format;
use shimmer_node::{NodeConfig, SyncReport};

use crate::support::{FINGERPRINT, Node, Random, wait_until};

/// Records of 1.5 MB, six parts each, that are never computed with.
pub struct Large {
    layout: ExpertLayout,
}

pub const LARGE_EXPERTS: usize = 4;

impl Large {
    pub fn new() -> Self {
        let matrix = |rows, cols| MatrixSpec { format: Format::Int8Row, rows, cols };
        let spec = ExpertSpec { gate: matrix(512, 1024), up: matrix(512, 1024), down: matrix(1024, 512) };
        let layers = [(1, vec![0; LARGE_EXPERTS])].into();
        Self { layout: ExpertLayout { hidden_size: 1024, specs: vec![spec], layers } }
    }

    pub fn record(&self, id: ExpertId) -> Vec<u8> {
        let mut random = Random(u64::from(id.layer) << 32 | u64::from(id.index));
        let mut record = vec![0; self.layout.record_bytes(id).unwrap()];
        record.chunks_mut(8).for_each(|bytes| bytes.copy_from_slice(&random.next().to_le_bytes()));
        record
    }

    pub fn bytes(&self) -> u64 {
        self.layout.ids().map(|id| self.layout.record_bytes(id).unwrap() as u64).sum()
    }
}

impl ExpertSource for Large {
    fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.layout.spec(id).is_some()
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        let record = self.record(id);
        let len = record.len();
        let read = move |buf: &mut [u8], offset: u64| {
            buf.copy_from_slice(&record[offset as usize..][..buf.len()]);
            Ok(buf.len())
        };
        let file = Arc::new(SharedFile::custom(Path::new("large"), 0, Arc::new(read)));
        Ok(vec![Segment { file, offset: 0, len, at: 0 }])
    }

    fn finish(&self, _: ExpertId, _: &mut [u8]) -> Result<(), ExpertError> {
        Ok(())
    }

    fn describe(&self) -> String {
        "large records".into()
    }
}

/// Starts a coordinator on `state` that serves `source`.
pub fn coordinator(
    state: &ClusterState,
    source: Arc<dyn ExpertSource>,
    sync_rate: Option<u64>,
) -> Arc<ClusterExperts> {
    let model = ClusterModel {
        fingerprint: FINGERPRINT,
        profile: NumericProfile::default(),
        source,
        local: None,
        demand: shimmer::cluster::ExpertDemand::unknown(4),
    };
    let options = ClusterOptions { sync_rate, ..ClusterOptions::default() };
    ClusterExperts::start(state.clone(), model, options).unwrap()
}

/// A coordinator of large records; a node's data directory lies under `root`.
pub struct LargeCluster {
    pub root: tempfile::TempDir,
    pub state: ClusterState,
    pub experts: Arc<ClusterExperts>,
    pub source: Arc<Large>,
}

impl LargeCluster {
    pub fn start(sync_rate: Option<u64>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let state = ClusterState::init(&root.path().join("cluster"), free_address()).unwrap();
        let source = Arc::new(Large::new());
        let experts = coordinator(&state, source.clone(), sync_rate);
        Self { root, state, experts, source }
    }

    pub fn join(&self, data: &Path) -> NodeConfig {
        let token = self.state.invite(&[self.experts.control_addr()], crate::PATIENCE, 1).unwrap();
        shimmer_node::join(&token, data, crate::support::options("large")).unwrap()
    }

    /// Checks every record of the node's shard, which must have them all.
    pub fn check_shard(&self, config: &NodeConfig) {
        let pack = Pack::open(&config.data_dir.join("shard")).unwrap();
        assert_eq!(pack.ids().len(), LARGE_EXPERTS);
        for id in pack.ids() {
            let mut record = vec![0; self.source.layout().record_bytes(id).unwrap()];
            pack.read(id, &mut record).unwrap();
            assert!(record == self.source.record(id), "{id} is wrong");
        }
        assert_eq!(partials(config), []);
    }
}

/// An address nobody listens on, for coordinators that are started again.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The beginnings of records in a node's shard.
pub fn partials(config: &NodeConfig) -> Vec<(PathBuf, u64)> {
    let Ok(files) = std::fs::read_dir(config.data_dir.join("shard")) else { return Vec::new() };
    let files = files
        .filter_map(Result::ok)
        .filter(|file| file.file_name().to_str().and_then(parse_partial_name).is_some());
    files.filter_map(|file| Some((file.path(), file.metadata().ok()?.len()))).collect()
}

/// Bytes of records and beginnings of records on a stopped node's disk.
pub fn bytes_on_disk(config: &NodeConfig) -> u64 {
    let store = PackStore::open(&config.data_dir.join("shard")).unwrap();
    let records: u64 = store.ids().iter().map(|&id| store.layout().record_bytes(id).unwrap() as u64).sum();
    records + store.partials().unwrap().iter().map(|partial| partial.bytes).sum::<u64>()
}

/// Starts a stopped node again, without what it last said of its fetching.
pub fn start_again(config: NodeConfig, addr: SocketAddr) -> Node {
    let _ = std::fs::remove_file(config.data_dir.join("progress.json"));
    Node::start(config, addr)
}

/// What a node says of its fetching.
pub fn report(config: &NodeConfig) -> Option<SyncReport> {
    SyncReport::parse(&std::fs::read(config.data_dir.join("progress.json")).ok()?)
}

/// Waits until a node says that it has `records` records, and returns what it says.
pub fn wait_synced(config: &NodeConfig, records: u32) -> SyncReport {
    let mut last = SyncReport::default();
    wait_until("everything is here", || {
        last = report(config).unwrap_or_default();
        last.held_records == records && last.wanted_records == records && last.sources.is_empty()
    });
    last
}
