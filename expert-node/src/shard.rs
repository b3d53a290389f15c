//! The records of a node: a pack it was given, or a shard it fetches and keeps whole.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::pack::{Pack, PackError, PackStore};
use shimmer_common::experts::{ExpertError, ExpertId, ExpertLayout, ExpertSource};
use shimmer_common::io::Segment;
use tokio::sync::watch;
use tonic::transport::Channel;

use crate::config::{NodeConfig, Records};
use crate::error::NodeError;
use crate::fetch::fetch;
use crate::service::Shared;
use crate::wire::Held;

/// How often the coordinator is told of new records while fetching.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Where the records of a node come from.
pub(crate) enum Shard {
    /// Records that do not change: a pack, or a source of this process.
    Fixed,
    /// Fetched into this directory.
    Fetched { dir: PathBuf, store: Option<Arc<PackStore>>, fetching: Arc<Mutex<bool>> },
}

impl Shard {
    /// Opens what is there and puts it into `shared`.
    pub(crate) fn open(config: &NodeConfig, shared: &Shared) -> Result<Self, NodeError> {
        match &config.records {
            Records::Source { source, fingerprint } => {
                let _ = shared.records.set((source.clone(), *fingerprint));
                Ok(Self::Fixed)
            }
            Records::Pack(dir) => {
                let pack = Pack::open(dir).map_err(|e| pack_error(dir, e))?;
                let fingerprint = pack.fingerprint();
                let _ = shared.records.set((Arc::new(pack), fingerprint));
                Ok(Self::Fixed)
            }
            Records::Fetched => {
                let dir = config.data_dir.join("shard");
                let mut shard = Self::Fetched { dir: dir.clone(), store: None, fetching: Arc::default() };
                // Not read strictly as a pack: what is damaged is forgotten and fetched again.
                match PackStore::open(&dir) {
                    Ok(store) => shard.hold(shared, store),
                    Err(PackError::NotAPack { .. }) => {}
                    Err(error) => return Err(shard_error(&dir, error)),
                }
                Ok(shard)
            }
        }
    }

    /// Makes sure that there are records of the coordinator's model; a fetched shard is begun here.
    pub(crate) fn begin(
        &mut self,
        shared: &Shared,
        fingerprint: Fingerprint,
        layout: &ExpertLayout,
    ) -> Result<(), NodeError> {
        if let Some((source, ours)) = shared.records.get() {
            if *ours == fingerprint && source.layout() == layout {
                return Ok(());
            }
            return Err(NodeError::Mismatch(format!(
                "{} and the coordinator's model have different experts: give both the same model",
                source.describe()
            )));
        }
        let Self::Fetched { dir, .. } = self else { return Ok(()) };
        let opened = PackStore::open_or_create(dir, fingerprint, layout).map_err(|e| shard_error(dir, e))?;
        self.hold(shared, opened);
        Ok(())
    }

    /// Puts an opened store into `shared`.
    fn hold(&mut self, shared: &Shared, opened: PackStore) {
        let Self::Fetched { store, .. } = self else { return };
        let fingerprint = opened.fingerprint();
        for what in opened.repairs() {
            tracing::warn!(what, "the shard was damaged, fetching again");
        }
        let opened = store.insert(Arc::new(opened)).clone();
        let healing = Healing { store: opened, held_changed: shared.held_changed.clone() };
        let _ = shared.records.set((Arc::new(healing), fingerprint));
    }

    /// Starts fetching what is assigned and missing, unless that is already under way.
    pub(crate) fn fetch_missing(&self, shared: &Arc<Shared>, channel: Channel, assigned: &Held) {
        let Self::Fetched { store: Some(store), fetching, .. } = self else { return };
        let wanted: Vec<ExpertId> = store.layout().ids().filter(|&id| assigned.contains(id)).collect();
        let missing = store.missing(&wanted);
        shared.set_syncing(!missing.is_empty());
        if missing.is_empty() || std::mem::replace(&mut *lock(fetching), true) {
            return;
        }
        let (shared, store, fetching) = (shared.clone(), store.clone(), fetching.clone());
        tokio::spawn(async move {
            fetch_all(&shared, channel, &store, &missing).await;
            *lock(&fetching) = false;
        });
    }
}

fn lock(flag: &Mutex<bool>) -> std::sync::MutexGuard<'_, bool> {
    flag.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn fetch_all(shared: &Shared, channel: Channel, store: &Arc<PackStore>, missing: &[ExpertId]) {
    let total: u64 = missing.iter().filter_map(|&id| store.layout().record_bytes(id)).map(|b| b as u64).sum();
    tracing::info!(records = missing.len(), bytes = total, "fetching records");
    // Draws on a terminal only.
    let bar = indicatif::ProgressBar::new(total);
    let mut told = Instant::now();
    let begun = told;
    let fetched = fetch(channel, &shared.facts(), store, missing, |bytes| {
        bar.inc(bytes as u64);
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            shared.held_changed.send_modify(|n| *n += 1);
        }
    })
    .await;
    bar.finish_and_clear();
    match fetched {
        Ok(()) => {
            tracing::info!(
                records = missing.len(),
                elapsed_ms = begun.elapsed().as_millis() as u64,
                "all records are here"
            );
            shared.set_syncing(false);
        }
        Err(error) => tracing::warn!(%error, "fetching stopped, trying again"),
    }
    shared.held_changed.send_modify(|n| *n += 1);
}

/// As [`pack_error`], for records that can be fetched again.
fn shard_error(dir: &Path, error: PackError) -> NodeError {
    match error {
        PackError::Damaged { .. } | PackError::Occupied { .. } => NodeError::Data {
            path: dir.to_owned(),
            what: format!(
                "the fetched records cannot be used any more ({error}); delete this directory and start again, the node fetches them anew"
            ),
        },
        error => pack_error(dir, error),
    }
}

/// A pack's error as a node's.
fn pack_error(dir: &Path, error: PackError) -> NodeError {
    match error {
        PackError::Io { action: _, path, source } => NodeError::File { action: "use", path, source },
        PackError::Mismatch { .. } => NodeError::Mismatch(format!(
            "{error}; to serve the coordinator's model, move {} away and start again",
            dir.display()
        )),
        PackError::Expert(error) => NodeError::Experts(error),
        other => NodeError::Pack(other),
    }
}

/// A shard that forgets a record found damaged, so that it is fetched again.
struct Healing {
    store: Arc<PackStore>,
    held_changed: watch::Sender<u64>,
}

impl ExpertSource for Healing {
    fn layout(&self) -> &ExpertLayout {
        self.store.layout()
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.store.contains(id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        self.store.plan(id)
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        let finished = self.store.finish(id, record);
        if let Err(ExpertError::Damaged { .. }) = &finished {
            match self.store.forget(id) {
                Ok(()) => self.held_changed.send_modify(|n| *n += 1),
                Err(error) => tracing::error!(%error, "a damaged record cannot be forgotten"),
            }
        }
        finished
    }

    fn describe(&self) -> String {
        self.store.describe()
    }
}
