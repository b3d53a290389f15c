//! A pack that grows: an expert node's shard, and what `shimmer pack` writes before it is sealed.
//!
//! A record is written before its index entry, so a process that dies at any byte leaves at worst a
//! record without entry (overwritten later) or half an entry (its checksum fails; cut). A machine
//! that loses power may keep an entry and lose its record; therefore data and index are synced every
//! 64 MiB, and opening re-hashes that much of the tail. Whatever is not intact counts as
//! missing and is fetched again.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::super::{ExpertError, ExpertId, ExpertLayout, ExpertSource, read_plainly};
use super::index::{Catalog, ENTRY_BYTES, Entry, encode_all};
use super::manifest::{Manifest, Seal};
use super::reader::{Verified, data_file_lengths, read_index, segment, verify};
use super::{FILE_BYTES, INDEX, LOCK, MANIFEST, PackError, data_file_name};
use crate::container::Fingerprint;
use crate::disk;
use crate::io::{Segment, SharedFile, forget};

/// Bytes that may be lost to a power failure, and are re-read when a pack is opened.
const SYNC_BYTES: u64 = 64 << 20;

/// A pack open for appending and reading, from any number of threads of one process.
pub struct PackStore {
    dir: PathBuf,
    layout: ExpertLayout,
    fingerprint: Fingerprint,
    shared: RwLock<Shared>,
    /// Taken before `shared` where both are needed.
    writer: Mutex<Writer>,
    repairs: Vec<String>,
    verified: Verified,
    _lock: File,
}

/// A data file, open for writing and, apart from that, for reading.
struct DataFile {
    path: PathBuf,
    file: File,
    reader: Arc<SharedFile>,
}

impl DataFile {
    fn new(path: PathBuf, file: File) -> Self {
        let reader = Arc::new(SharedFile::new(&path, true));
        Self { path, file, reader }
    }

    /// Reads and checks a record.
    fn read(&self, entry: &Entry, record: &mut [u8]) -> Result<(), ExpertError> {
        self.reader
            .read_exact_at(record, entry.offset)
            .map_err(|source| ExpertError::unreadable(entry.id, self.path.clone(), source))?;
        verify(&self.path, entry, record)
    }
}

#[derive(Default)]
struct Shared {
    entries: HashMap<ExpertId, Entry>,
    files: BTreeMap<u32, Arc<DataFile>>,
}

struct Writer {
    index: File,
    /// Entries in the index.
    records: u64,
    /// Number and length of the data file being filled.
    tail: Option<(u32, u64)>,
    file_bytes: u64,
    unsynced_bytes: u64,
    sealed: bool,
}

impl PackStore {
    /// Opens the pack of the model `fingerprint` at `dir`, or begins one there. A damaged record list
    /// is mended by forgetting what is not intact, see [`PackStore::repairs`].
    ///
    /// # Errors
    /// [`PackError::Busy`], [`PackError::Occupied`] when `dir` holds other files,
    /// [`PackError::Mismatch`] when it holds another model's pack, [`PackError::Damaged`] for a damaged
    /// manifest, [`PackError::Io`].
    pub fn open_or_create(
        dir: &Path,
        fingerprint: Fingerprint,
        layout: &ExpertLayout,
    ) -> Result<Self, PackError> {
        Self::open_with_file_bytes(dir, fingerprint, layout, FILE_BYTES)
    }

    /// Opens the pack at `dir`, whichever model it belongs to, mending it as
    /// [`PackStore::open_or_create`] does.
    ///
    /// # Errors
    /// [`PackError::NotAPack`] when there is none, and those of [`PackStore::open_or_create`].
    pub fn open(dir: &Path) -> Result<Self, PackError> {
        let Manifest { fingerprint, layout, .. } = Manifest::read(dir)?;
        Self::open_or_create(dir, fingerprint, &layout)
    }

    pub(super) fn open_with_file_bytes(
        dir: &Path,
        fingerprint: Fingerprint,
        layout: &ExpertLayout,
        file_bytes: u64,
    ) -> Result<Self, PackError> {
        layout.validate().map_err(|what| PackError::Mismatch {
            path: dir.to_owned(),
            what: format!("a pack cannot hold this model's experts: {what}"),
        })?;
        std::fs::create_dir_all(dir).map_err(PackError::io("create", dir))?;
        let fresh = is_fresh(dir)?;
        let lock = take_lock(dir)?;
        remove_leftovers(dir)?;
        let manifest = if fresh {
            let manifest = Manifest { fingerprint, layout: layout.clone(), seal: None };
            manifest.write(dir)?;
            manifest
        } else {
            Manifest::read(dir)?
        };
        check_model(dir, &manifest, fingerprint, layout)?;
        let lengths = data_file_lengths(dir)?;
        let mut catalog = Catalog::build(&read_index(dir)?, &fingerprint, layout, &lengths);
        let files = open_files(dir, &lengths)?;
        let mut repairs = std::mem::take(&mut catalog.problems);
        if manifest.seal.is_none() {
            repairs.extend(recheck_tail(&mut catalog.entries, &files));
        }
        let index = dir.join(INDEX);
        if !repairs.is_empty() || catalog.torn_bytes > 0 || !index.exists() {
            let bytes = encode_all(&catalog.entries, &fingerprint);
            disk::write_atomic(&index, &bytes).map_err(PackError::io("write", &index))?;
        }
        let tail = tail_of(&catalog.entries, &lengths);
        cut_torn_tail(&files, tail)?;
        let writer = Writer {
            index: OpenOptions::new().write(true).open(&index).map_err(PackError::io("write", &index))?,
            records: catalog.entries.len() as u64,
            tail,
            file_bytes,
            unsynced_bytes: 0,
            sealed: manifest.seal.is_some(),
        };
        let entries = catalog.entries.into_iter().map(|entry| (entry.id, entry)).collect();
        let (layout, dir) = (manifest.layout, dir.to_owned());
        let (shared, writer) = (RwLock::new(Shared { entries, files }), Mutex::new(writer));
        Ok(Self {
            dir,
            layout,
            fingerprint,
            shared,
            writer,
            repairs,
            verified: Verified::default(),
            _lock: lock,
        })
    }

    fn shared(&self) -> RwLockReadGuard<'_, Shared> {
        self.shared.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared_mut(&self) -> RwLockWriteGuard<'_, Shared> {
        self.shared.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What was found damaged while opening and is now missing, one clause each. For the log.
    pub fn repairs(&self) -> &[String] {
        &self.repairs
    }

    /// The model the records belong to.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The experts of `wanted` that are not held, in the given order.
    pub fn missing(&self, wanted: &[ExpertId]) -> Vec<ExpertId> {
        let shared = self.shared();
        wanted.iter().copied().filter(|id| !shared.entries.contains_key(id)).collect()
    }

    /// The experts held, ascending.
    pub fn ids(&self) -> Vec<ExpertId> {
        let mut ids: Vec<_> = self.shared().entries.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Stores one record after checking it against `hash`. `false` when it is held already.
    ///
    /// # Errors
    /// [`PackError::WrongRecord`] when length or hash do not fit (nothing is stored),
    /// [`PackError::Io`], e.g. on a full disk (the pack stays as it was).
    pub fn append(&self, id: ExpertId, record: &[u8], hash: [u8; 32]) -> Result<bool, PackError> {
        let wrong = |what: String| PackError::WrongRecord { id, what };
        let expected =
            self.layout.record_bytes(id).ok_or_else(|| wrong("the model has no such expert".into()))?;
        if record.len() != expected {
            return Err(wrong(format!("it has {} bytes instead of {expected}", record.len())));
        }
        if blake3::hash(record) != hash {
            return Err(wrong("it does not match its BLAKE3".into()));
        }
        let mut writer = self.writer();
        if self.shared().entries.contains_key(&id) {
            return Ok(false);
        }
        self.unseal(&mut writer)?;
        let (file, offset) = self.place(&writer, record.len() as u64)?;
        let data =
            Arc::clone(self.shared().files.get(&file).ok_or_else(|| {
                PackError::damaged(&self.dir.join(data_file_name(file)), "the file vanished")
            })?);
        let entry = Entry { id, file, offset, bytes: record.len() as u64, hash };
        disk::write_all_at(&data.file, record, offset).map_err(PackError::io("write", &data.path))?;
        let position = writer.records;
        let raw = entry.encode(&self.fingerprint, position);
        let at = position.saturating_mul(ENTRY_BYTES as u64);
        disk::write_all_at(&writer.index, &raw, at).map_err(PackError::io("write", &self.dir.join(INDEX)))?;
        writer.records += 1;
        writer.tail = Some((file, entry.end()));
        self.shared_mut().entries.insert(id, entry);
        writer.unsynced_bytes += entry.bytes;
        if writer.unsynced_bytes >= SYNC_BYTES {
            self.sync(&mut writer)?;
        }
        Ok(true)
    }

    /// Where the next record of `bytes` goes; begins a new data file where the current one is full.
    fn place(&self, writer: &Writer, bytes: u64) -> Result<(u32, u64), PackError> {
        let number = match writer.tail {
            Some((file, end)) if end == 0 || end.saturating_add(bytes) <= writer.file_bytes => {
                return Ok((file, end));
            }
            Some((file, _)) => file.checked_add(1).ok_or_else(|| {
                PackError::damaged(
                    &self.dir.join(data_file_name(file)),
                    "its number leaves no room for another file",
                )
            })?,
            None => 0,
        };
        let path = self.dir.join(data_file_name(number));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .map_err(PackError::io("create", &path))?;
        disk::sync_dir(&self.dir).map_err(PackError::io("write", &self.dir))?;
        self.shared_mut().files.insert(number, Arc::new(DataFile::new(path, file)));
        Ok((number, 0))
    }

    fn find(&self, id: ExpertId) -> Result<(Arc<DataFile>, Entry), ExpertError> {
        let shared = self.shared();
        let entry = shared.entries.get(&id).copied();
        entry.and_then(|entry| Some((Arc::clone(shared.files.get(&entry.file)?), entry))).ok_or_else(|| {
            ExpertError::Missing { id, holder: self.describe(), remedy: "it has to be fetched first".into() }
        })
    }

    /// Makes everything appended so far survive a power failure.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn flush(&self) -> Result<(), PackError> {
        self.sync(&mut self.writer())
    }

    fn sync(&self, writer: &mut Writer) -> Result<(), PackError> {
        // Only the last two files can have been written since the last sync: one file holds more
        // than SYNC_BYTES. Small files exist only in tests, where power does not fail.
        let files: Vec<_> = self.shared().files.values().rev().take(2).map(Arc::clone).collect();
        for data in files {
            data.file.sync_data().map_err(PackError::io("write", &data.path))?;
            forget(&data.file, 0, u64::MAX);
        }
        writer.index.sync_data().map_err(PackError::io("write", &self.dir.join(INDEX)))?;
        writer.unsynced_bytes = 0;
        Ok(())
    }

    /// Forgets a record, e.g. one that a read found damaged, so that it is fetched again. Its bytes
    /// stay in the data file as a hole.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn forget(&self, id: ExpertId) -> Result<(), PackError> {
        let mut writer = self.writer();
        if self.shared_mut().entries.remove(&id).is_none() {
            return Ok(());
        }
        self.verified.doubt(id);
        self.unseal(&mut writer)?;
        self.sync(&mut writer)?;
        let mut entries: Vec<_> = self.shared().entries.values().copied().collect();
        entries.sort_by_key(|entry| (entry.file, entry.offset));
        let path = self.dir.join(INDEX);
        let bytes = encode_all(&entries, &self.fingerprint);
        disk::write_atomic(&path, &bytes).map_err(PackError::io("write", &path))?;
        writer.index = OpenOptions::new().write(true).open(&path).map_err(PackError::io("write", &path))?;
        writer.records = entries.len() as u64;
        Ok(())
    }

    /// Promises that the pack is complete as it is: from now on a lost tail is damage.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn seal(&self) -> Result<(), PackError> {
        let mut writer = self.writer();
        self.sync(&mut writer)?;
        let seal = Seal {
            records: writer.records,
            index_blake3: blake3::hash(&read_index(&self.dir)?).to_hex().to_string(),
            files: data_file_lengths(&self.dir)?,
        };
        self.write_manifest(Some(seal))?;
        writer.sealed = true;
        Ok(())
    }

    fn unseal(&self, writer: &mut Writer) -> Result<(), PackError> {
        if std::mem::take(&mut writer.sealed) {
            self.write_manifest(None)?;
        }
        Ok(())
    }

    fn write_manifest(&self, seal: Option<Seal>) -> Result<(), PackError> {
        Manifest { fingerprint: self.fingerprint, layout: self.layout.clone(), seal }.write(&self.dir)
    }
}

impl Drop for PackStore {
    fn drop(&mut self) {
        // Best effort: what is lost here is fetched again.
        let _ = self.flush();
    }
}

impl ExpertSource for PackStore {
    fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.shared().entries.contains_key(&id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        let (data, entry) = self.find(id)?;
        Ok(vec![segment(&data.reader, &entry)])
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        let (data, entry) = self.find(id)?;
        self.verified.check(&data.path, &entry, record)
    }

    fn read(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        self.verified.doubt(id);
        read_plainly(self, id, record)
    }

    fn record_hash(&self, id: ExpertId) -> Option<[u8; 32]> {
        self.shared().entries.get(&id).map(|entry| entry.hash)
    }

    fn describe(&self) -> String {
        format!("pack {}", self.dir.display())
    }
}

/// Whether `dir` holds nothing yet (but perhaps what a killed creation left).
fn is_fresh(dir: &Path) -> Result<bool, PackError> {
    let mut foreign = false;
    for entry in std::fs::read_dir(dir).map_err(PackError::io("read", dir))? {
        let name = entry.map_err(PackError::io("read", dir))?.file_name();
        if name == MANIFEST {
            return Ok(false);
        }
        foreign |= name != LOCK && !name.to_string_lossy().starts_with(".tmp-");
    }
    if foreign { Err(PackError::Occupied { path: dir.to_owned() }) } else { Ok(true) }
}

/// Removes temporary files of a process that was killed; the lock says that no other one lives.
fn remove_leftovers(dir: &Path) -> Result<(), PackError> {
    for entry in std::fs::read_dir(dir).map_err(PackError::io("read", dir))? {
        let path = entry.map_err(PackError::io("read", dir))?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".tmp-")) {
            std::fs::remove_file(&path).map_err(PackError::io("remove", &path))?;
        }
    }
    Ok(())
}

fn take_lock(dir: &Path) -> Result<File, PackError> {
    let path = dir.join(LOCK);
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let lock = lock.map_err(PackError::io("create", &path))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => Err(PackError::Busy { path: dir.to_owned() }),
        Err(std::fs::TryLockError::Error(error)) => Err(PackError::io("lock", &path)(error)),
    }
}

fn check_model(
    dir: &Path,
    manifest: &Manifest,
    fingerprint: Fingerprint,
    layout: &ExpertLayout,
) -> Result<(), PackError> {
    if manifest.fingerprint == fingerprint && manifest.layout == *layout {
        return Ok(());
    }
    let what = if manifest.fingerprint == fingerprint {
        "the pack stores the experts of this model in other formats; name a new directory".to_owned()
    } else {
        let found = manifest.fingerprint;
        format!(
            "the pack belongs to model {found}, not to {fingerprint}; name a new directory or use that model"
        )
    };
    Err(PackError::Mismatch { path: dir.to_owned(), what })
}

fn open_files(dir: &Path, lengths: &BTreeMap<u32, u64>) -> Result<BTreeMap<u32, Arc<DataFile>>, PackError> {
    let open = |&number: &u32| {
        let path = dir.join(data_file_name(number));
        let file =
            OpenOptions::new().read(true).write(true).open(&path).map_err(PackError::io("write", &path))?;
        Ok((number, Arc::new(DataFile::new(path, file))))
    };
    lengths.keys().map(open).collect()
}

/// Re-hashes the records that may not have been synced, newest first, and drops those that are not
/// intact. Returns a clause for each.
fn recheck_tail(entries: &mut Vec<Entry>, files: &BTreeMap<u32, Arc<DataFile>>) -> Vec<String> {
    let mut dropped = Vec::new();
    let mut checked_bytes = 0u64;
    let mut record = Vec::new();
    for i in (0..entries.len()).rev() {
        if checked_bytes > SYNC_BYTES {
            break;
        }
        let entry = entries[i];
        checked_bytes = checked_bytes.saturating_add(entry.bytes);
        record.resize(entry.bytes as usize, 0);
        let read = files.get(&entry.file).map(|data| data.read(&entry, &mut record));
        if let Some(Err(error)) = read {
            dropped.push(error.to_string());
            entries.remove(i);
        }
    }
    dropped
}

/// Number and used length of the last data file.
fn tail_of(entries: &[Entry], lengths: &BTreeMap<u32, u64>) -> Option<(u32, u64)> {
    let (&last, _) = lengths.last_key_value()?;
    let end = entries.iter().filter(|entry| entry.file == last).map(Entry::end).max();
    Some((last, end.unwrap_or(0)))
}

/// Removes what lies beyond the last record: a record that never got its entry.
fn cut_torn_tail(files: &BTreeMap<u32, Arc<DataFile>>, tail: Option<(u32, u64)>) -> Result<(), PackError> {
    let Some((number, end)) = tail else { return Ok(()) };
    let Some(data) = files.get(&number) else { return Ok(()) };
    data.file.set_len(end).map_err(PackError::io("write", &data.path))
}
