//! The records of a node: a pack it was given, or a shard it fetches and keeps whole.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::pack::{Pack, PackError, PackStore};
use shimmer_common::experts::{ExpertId, ExpertLayout, ExpertSource as _};

use crate::config::{NodeConfig, Records};
use crate::error::NodeError;
use crate::fetch::{Fetcher, Target};
use crate::records::{Adopted, NodeRecords};
use crate::register::Registration;
use crate::service::Shared;
use crate::tls::Credentials;

/// Where the records of a node come from.
pub(crate) enum Shard {
    /// Records that do not change: a pack, or a source of this process.
    Fixed,
    /// Fetched into a directory, besides what was adopted.
    Fetched(Fetched),
}

/// A shard that is fetched.
pub(crate) struct Fetched {
    data_dir: PathBuf,
    dir: PathBuf,
    /// Until the shard is opened.
    adopted: Vec<Adopted>,
    records: Option<Arc<NodeRecords>>,
    fetcher: Option<Fetcher>,
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
                // Complete only when the coordinator has said so.
                shared.settling.store(true, Ordering::Relaxed);
                let mut fetched = Fetched {
                    data_dir: config.data_dir.clone(),
                    dir: config.data_dir.join("shard"),
                    adopted: Adopted::open(&config.settings.adopt)?,
                    records: None,
                    fetcher: None,
                };
                // Not read strictly as a pack: what is damaged is forgotten and fetched again.
                match PackStore::open(&fetched.dir) {
                    Ok(store) => fetched.hold(shared, store)?,
                    Err(PackError::NotAPack { .. }) => {}
                    Err(error) => return Err(shard_error(&fetched.dir, error)),
                }
                Ok(Self::Fetched(fetched))
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
        let Self::Fetched(fetched) = self else { return Ok(()) };
        let dir = &fetched.dir;
        // Before anything is made on the disk.
        fetched.adopted.iter().try_for_each(|adopted| adopted.check(fingerprint, layout))?;
        let opened = PackStore::open_or_create(dir, fingerprint, layout).map_err(|e| shard_error(dir, e))?;
        fetched.hold(shared, opened)
    }

    /// Fetches from now on what this registration says is wanted and missing.
    pub(crate) fn fetch_missing(
        &mut self,
        shared: &Arc<Shared>,
        credentials: &Credentials,
        registration: &Registration,
    ) {
        let Self::Fetched(Fetched { records: Some(records), fetcher, data_dir, .. }) = self else { return };
        let layout = records.store().layout();
        let wanted: Vec<ExpertId> = layout.ids().filter(|&id| registration.assigned.contains(id)).collect();
        let fetcher = fetcher.get_or_insert_with(|| {
            Fetcher::start(shared.clone(), records.clone(), credentials.clone(), data_dir.clone())
        });
        // Before anybody can take a node without records for a complete one.
        shared.settling.store(registration.settling, Ordering::Relaxed);
        shared.set_syncing(wanted.iter().any(|&id| !records.contains(id)));
        fetcher.aim(Target {
            wanted,
            coordinator: registration.channel.clone(),
            peers: registration.peers.clone(),
            bytes_per_s: registration.fetch_bytes_per_s,
        });
    }
}

impl Fetched {
    /// Puts an opened store, with what is adopted, into `shared`.
    fn hold(&mut self, shared: &Shared, opened: PackStore) -> Result<(), NodeError> {
        let fingerprint = opened.fingerprint();
        for what in opened.repairs() {
            tracing::warn!(what, "the shard was damaged, fetching again");
        }
        let adopted = std::mem::take(&mut self.adopted);
        adopted.iter().try_for_each(|adopted| adopted.check(fingerprint, opened.layout()))?;
        let hashes = shared.sharing.hashes.clone();
        let records = NodeRecords::new(Arc::new(opened), adopted, hashes, shared.held_changed.clone());
        let records = self.records.insert(Arc::new(records)).clone();
        let _ = shared.records.set((records, fingerprint));
        Ok(())
    }
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
