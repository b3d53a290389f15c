//! Fetching records from the coordinator and from other nodes.
//!
//! | file | idea |
//! |---|---|
//! | `manager` | the task that aims at what the coordinator wants and keeps the workers busy |
//! | `worker` | fetching from one source |
//! | `room` | room on the disk |
//! | `work` | what is missing, and which source gets which record |
//! | `receive` | one call: every part is on the disk before the next one is taken |
//! | `assembler` | what the parts of a call mean |
//! | `progress` | how far it is, for the coordinator and for people |
//!
//! Every heartbeat brings a [`Target`]; one task keeps a worker per source busy until nothing is missing.
//! Whatever is hashed is compared with what the coordinator says, never with what a peer says.

mod assembler;
mod manager;
pub(crate) mod progress;
mod receive;
pub(crate) mod room;
mod work;
mod worker;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shimmer_common::experts::{ExpertId, ExpertSource as _};
use tokio::sync::watch;
use tonic::transport::Channel;

use crate::pace::Slots;
use crate::records::NodeRecords;
use crate::service::Shared;
use crate::tls::Credentials;
use crate::wire::Held;
use assembler::Wanted;
use progress::Progress;
use work::{SourceId, Work};

/// A node that records can be fetched from.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) addresses: Vec<String>,
    pub(crate) held: Held,
}

/// What the coordinator wants this node to have, and where to get it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) wanted: Vec<ExpertId>,
    pub(crate) coordinator: Channel,
    pub(crate) peers: Vec<Peer>,
    /// Most bytes per second; 0 = no limit.
    pub(crate) bytes_per_s: u64,
}

/// What the task and its workers share.
struct Context {
    shared: Arc<Shared>,
    records: Arc<NodeRecords>,
    credentials: Credentials,
    data_dir: PathBuf,
    work: Mutex<Work>,
    slots: Slots,
    bytes_per_s: AtomicU64,
    /// Records came since the coordinator was told.
    news: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    fn progress(&self) -> &Progress {
        &self.shared.sharing.progress
    }

    /// Notes a hash that the coordinator vouches for.
    fn know(&self, id: ExpertId, hash: [u8; 32]) {
        self.shared.sharing.hashes.write().unwrap_or_else(PoisonError::into_inner).insert(id, hash);
    }

    /// A record is complete and in the shard.
    fn stored(&self, id: ExpertId, new: bool) {
        lock(&self.work).stored(id);
        self.news.store(true, Ordering::Relaxed);
        if new {
            self.progress().stored(self.records.layout().record_bytes(id).unwrap_or(0));
        }
    }

    /// Compares what should be here with what is; returns what is missing.
    fn plan(&self, target: &Target) -> Vec<ExpertId> {
        let (held, missing): (Vec<_>, Vec<_>) =
            target.wanted.iter().partition(|&&id| self.records.contains(id));
        self.progress().plan(self.size_of(&target.wanted), self.size_of(&held));
        let mut work = lock(&self.work);
        work.set_missing(&missing);
        work.set_sources(target.peers.iter().map(|peer| (peer.id.clone(), peer.held.clone())));
        missing
    }

    fn take(&self, source: &SourceId) -> Vec<Wanted> {
        let hashes = self.shared.sharing.hashes.read().unwrap_or_else(PoisonError::into_inner);
        lock(&self.work).take(source, &hashes, self.records.layout())
    }

    /// Experts of `ids` with their bytes.
    fn size_of(&self, ids: &[ExpertId]) -> (u32, u64) {
        let bytes = ids.iter().filter_map(|&id| self.records.layout().record_bytes(id));
        (u32::try_from(ids.len()).unwrap_or(u32::MAX), bytes.map(|bytes| bytes as u64).sum())
    }
}

/// The handle of the fetching task; it ends with the handle.
pub(crate) struct Fetcher {
    target: watch::Sender<Option<Target>>,
}

impl Fetcher {
    /// Starts the task on the current runtime.
    pub(crate) fn start(
        shared: Arc<Shared>,
        records: Arc<NodeRecords>,
        credentials: Credentials,
        data_dir: PathBuf,
    ) -> Self {
        let (target, targets) = watch::channel(None);
        let context = Arc::new(Context {
            shared,
            records,
            credentials,
            data_dir,
            work: Mutex::default(),
            slots: Slots::new(),
            bytes_per_s: AtomicU64::new(0),
            news: AtomicBool::new(false),
        });
        tokio::spawn(manager::Manager::new(context).run(targets));
        Self { target }
    }

    /// Tells the task what to aim at from now on.
    pub(crate) fn aim(&self, target: Target) {
        self.target.send_replace(Some(target));
    }
}
