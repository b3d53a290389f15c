//! What the records of the model hash to, as far as this coordinator has seen them.
//!
//! Kept in the cluster directory, one file per model, so that after a restart too a node can fetch a
//! record from any other and check it against the coordinator's word. A file that is damaged or of
//! another model is ignored: its records are served, and hashed, once more.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shimmer_common::container::Fingerprint;
use shimmer_common::disk::read_small;
use shimmer_common::experts::{ExpertId, ExpertSource, RecordHashes};
use shimmer_node::files::write_private;

/// The file is written at most this often; what a kill loses is hashed again.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// A model of 80,000 experts needs 3 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The table. Clones share it.
#[derive(Clone)]
pub(super) struct HashTable(Arc<Inner>);

struct Inner {
    path: PathBuf,
    model: Fingerprint,
    source: Arc<dyn ExpertSource>,
    table: Mutex<Table>,
}

struct Table {
    hashes: RecordHashes,
    /// Whether the file lacks something.
    changed: bool,
    saved: Instant,
}

impl HashTable {
    /// Opens the table of `source` in the directory `dir`.
    pub(super) fn open(dir: &std::path::Path, model: Fingerprint, source: Arc<dyn ExpertSource>) -> Self {
        let short: String = model.to_string().chars().take(16).collect();
        let path = dir.join(format!("hashes-{short}.bin"));
        let hashes = match read_small(&path, MAX_FILE_BYTES) {
            Ok(bytes) => RecordHashes::decode(&bytes, &model, source.layout()).unwrap_or_else(|| {
                tracing::warn!(path = %path.display(), "the table of record hashes is damaged and begun anew");
                RecordHashes::default()
            }),
            Err(_) => RecordHashes::default(),
        };
        let table = Mutex::new(Table { hashes, changed: false, saved: Instant::now() });
        Self(Arc::new(Inner { path, model, source, table }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the record of `id` hashes to, if that is known.
    pub(super) fn get(&self, id: ExpertId) -> Option<[u8; 32]> {
        // A pack's own list first: it cannot be of another version of the model.
        self.0.source.record_hash(id).or_else(|| self.table().hashes.get(id))
    }

    /// Notes what a record was found to hash to.
    pub(super) fn note(&self, id: ExpertId, hash: [u8; 32]) {
        if self.0.source.record_hash(id).is_none() {
            let mut table = self.table();
            table.changed |= table.hashes.insert(id, hash);
        }
    }

    /// Writes the file when it is due. Blocks.
    pub(super) fn save_if_due(&self) {
        if self.table().saved.elapsed() >= SAVE_EVERY {
            self.save();
        }
    }

    /// Writes the file if there is news.
    pub(super) fn save(&self) {
        let mut table = self.table();
        table.saved = Instant::now();
        if !std::mem::take(&mut table.changed) {
            return;
        }
        let bytes = table.hashes.encode(&self.0.model);
        drop(table);
        if let Err(error) = write_private(&self.0.path, &bytes) {
            tracing::warn!(path = %self.0.path.display(), %error, "the table of record hashes cannot be written");
            self.table().changed = true;
        }
    }
}
