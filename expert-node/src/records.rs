//! The records of a node that fetches: its shard, and directories it adopted.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use shimmer_common::container::{Container, Fingerprint};
use shimmer_common::experts::pack::{Pack, PackError, PackStore};
use shimmer_common::experts::{ExpertError, ExpertId, ExpertLayout, ExpertSource, RecordHashes};
use shimmer_common::io::Segment;
use tokio::sync::watch;

use crate::error::NodeError;

/// Hashes that the coordinator vouches for, as their users share them.
pub(crate) type KnownHashes = Arc<RwLock<RecordHashes>>;

/// A model directory or pack that was on this machine before the node: its experts are not transferred.
pub(crate) struct Adopted {
    dir: PathBuf,
    source: Arc<dyn ExpertSource>,
    fingerprint: Fingerprint,
    /// Experts compared with the coordinator's hash.
    checked: Mutex<HashSet<ExpertId>>,
    /// Experts that turned out not to be what the coordinator has; they are fetched instead.
    refused: Mutex<HashSet<ExpertId>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Adopted {
    fn new(dir: &Path, source: Arc<dyn ExpertSource>, fingerprint: Fingerprint) -> Self {
        let (checked, refused) = (Mutex::default(), Mutex::default());
        Self { dir: dir.to_owned(), source, fingerprint, checked, refused }
    }

    /// Opens `dirs`: each pack for itself, all others together as the parts of one model.
    ///
    /// # Errors
    /// [`NodeError::Data`] when a directory is neither.
    pub(crate) fn open(dirs: &[PathBuf]) -> Result<Vec<Self>, NodeError> {
        let mut adopted = Vec::new();
        let mut model = Vec::new();
        for dir in dirs {
            match Pack::open(dir) {
                Ok(pack) => {
                    let fingerprint = pack.fingerprint();
                    adopted.push(Self::new(dir, Arc::new(pack), fingerprint));
                }
                Err(PackError::NotAPack { .. }) => model.push(dir.clone()),
                Err(error) => return Err(cannot_adopt(dir, &error)),
            }
        }
        if let Some(first) = model.first() {
            let container = Container::open(&model).map_err(|e| cannot_adopt(first, &e))?;
            let fingerprint = container.fingerprint().map_err(|e| cannot_adopt(first, &e))?;
            adopted.push(Self::new(first, container.experts(), fingerprint));
        }
        Ok(adopted)
    }

    /// Whether its records are those of this model.
    ///
    /// # Errors
    /// [`NodeError::Mismatch`] with one sentence.
    pub(crate) fn check(&self, model: Fingerprint, layout: &ExpertLayout) -> Result<(), NodeError> {
        if self.fingerprint == model && self.source.layout() == layout {
            return Ok(());
        }
        Err(NodeError::Mismatch(format!(
            "{} cannot be adopted: it holds model {}, the coordinator serves model {model}; join again without this --adopt, or with the directory of that model",
            self.dir.display(),
            self.fingerprint
        )))
    }

    fn has(&self, id: ExpertId) -> bool {
        self.source.contains(id) && !lock(&self.refused).contains(&id)
    }

    /// As [`ExpertSource::finish`]; the first time the record is also compared with the coordinator's
    /// hash, where that is known.
    fn finish(&self, id: ExpertId, record: &mut [u8], known: Option<[u8; 32]>) -> Result<(), ExpertError> {
        self.source.finish(id, record)?;
        let Some(known) = known.filter(|_| !lock(&self.checked).contains(&id)) else { return Ok(()) };
        if *blake3::hash(record).as_bytes() == known {
            lock(&self.checked).insert(id);
            return Ok(());
        }
        let what = "it is not the record that the coordinator has".to_owned();
        Err(ExpertError::Damaged { id, path: self.dir.clone(), what })
    }
}

fn cannot_adopt(dir: &Path, error: &dyn std::error::Error) -> NodeError {
    NodeError::Data {
        path: dir.to_owned(),
        what: format!(
            "cannot be adopted: {error}; name a model directory or an expert pack, or leave out --adopt"
        ),
    }
}

/// A shard that forgets a record found damaged, so that it is fetched again, and what was adopted.
pub(crate) struct NodeRecords {
    store: Arc<PackStore>,
    adopted: Vec<Adopted>,
    hashes: KnownHashes,
    held_changed: watch::Sender<u64>,
}

impl NodeRecords {
    pub(crate) fn new(
        store: Arc<PackStore>,
        adopted: Vec<Adopted>,
        hashes: KnownHashes,
        held_changed: watch::Sender<u64>,
    ) -> Self {
        Self { store, adopted, hashes, held_changed }
    }

    /// Where fetched records go.
    pub(crate) fn store(&self) -> &Arc<PackStore> {
        &self.store
    }

    /// Whether some records are those of an adopted directory.
    pub(crate) fn has_adopted(&self) -> bool {
        !self.adopted.is_empty()
    }

    /// The adopted directory that `id` is read from: what was fetched comes first.
    fn adopted(&self, id: ExpertId) -> Option<&Adopted> {
        if self.store.contains(id) {
            return None;
        }
        self.adopted.iter().find(|adopted| adopted.has(id))
    }

    /// Lets go of a record that is not what it should be.
    fn give_up(&self, id: ExpertId, adopted: Option<&Adopted>) {
        match adopted {
            Some(adopted) => {
                lock(&adopted.refused).insert(id);
            }
            None => {
                if let Err(error) = self.store.forget(id) {
                    tracing::error!(%error, "a damaged record cannot be forgotten");
                    return;
                }
            }
        }
        self.held_changed.send_modify(|n| *n += 1);
    }
}

impl ExpertSource for NodeRecords {
    fn layout(&self) -> &ExpertLayout {
        self.store.layout()
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.store.contains(id) || self.adopted(id).is_some()
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        match self.adopted(id) {
            Some(adopted) => adopted.source.plan(id),
            None => self.store.plan(id),
        }
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        let adopted = self.adopted(id);
        let finished = match adopted {
            Some(adopted) => {
                let known = self.hashes.read().unwrap_or_else(PoisonError::into_inner).get(id);
                adopted.finish(id, record, known)
            }
            None => self.store.finish(id, record),
        };
        if let Err(ExpertError::Damaged { .. }) = &finished {
            self.give_up(id, adopted);
        }
        finished
    }

    fn record_hash(&self, id: ExpertId) -> Option<[u8; 32]> {
        self.store.record_hash(id)
    }

    fn describe(&self) -> String {
        let dirs: Vec<String> = self.adopted.iter().map(|a| a.dir.display().to_string()).collect();
        let adopted = if dirs.is_empty() { String::new() } else { format!(" with {}", dirs.join(", ")) };
        self.store.describe() + &adopted
    }
}
