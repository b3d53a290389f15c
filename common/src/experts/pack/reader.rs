//! Reading a pack that nobody writes to.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::{ExpertError, ExpertId, ExpertLayout, ExpertSource, read_plainly};
use super::index::{Catalog, Entry};
use super::manifest::Manifest;
use super::{INDEX, MANIFEST, PackError, data_file_name};
use crate::container::Fingerprint;
use crate::io::{Segment, SharedFile};

/// The segment that is the whole record of `entry`.
pub(super) fn segment(file: &Arc<SharedFile>, entry: &Entry) -> Segment {
    Segment { file: Arc::clone(file), offset: entry.offset, len: entry.bytes as usize, at: 0 }
}

/// The records that have been read and found intact since the pack was opened. Reading one again for
/// computing does not hash it again (some 5 ms of one core for 20 MB): what lies on the disk was right, and
/// drives and buses have checksums of their own.
#[derive(Default)]
pub(super) struct Verified(Mutex<HashSet<ExpertId>>);

impl Verified {
    fn lock(&self) -> MutexGuard<'_, HashSet<ExpertId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`verify`], once.
    pub(super) fn check(&self, path: &Path, entry: &Entry, record: &[u8]) -> Result<(), ExpertError> {
        if !self.lock().contains(&entry.id) {
            verify(path, entry, record)?;
            self.lock().insert(entry.id);
        }
        Ok(())
    }

    /// Has the next read hash the record.
    pub(super) fn doubt(&self, id: ExpertId) {
        self.lock().remove(&id);
    }
}

/// Compares a record with the hash that was noted when it was stored.
pub(super) fn verify(path: &Path, entry: &Entry, record: &[u8]) -> Result<(), ExpertError> {
    let Entry { id, offset, bytes, .. } = *entry;
    if blake3::hash(record) == entry.hash {
        return Ok(());
    }
    let what = format!("the {bytes} bytes at offset {offset} do not match their BLAKE3");
    Err(ExpertError::Damaged { id, path: path.to_owned(), what })
}

/// Lengths of the data files that lie in `dir`, by number.
pub(super) fn data_file_lengths(dir: &Path) -> Result<BTreeMap<u32, u64>, PackError> {
    let mut lengths = BTreeMap::new();
    for entry in std::fs::read_dir(dir).map_err(PackError::io("read", dir))? {
        let entry = entry.map_err(PackError::io("read", dir))?;
        let name = entry.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix("experts-")?.strip_suffix(".pack")?.parse().ok());
        if let Some(number) = number.filter(|&number| *name == *data_file_name(number)) {
            let meta = std::fs::metadata(entry.path()).map_err(PackError::io("read", &entry.path()))?;
            lengths.insert(number, meta.len());
        }
    }
    Ok(lengths)
}

/// Reads the index; a pack without records may lack it.
pub(super) fn read_index(dir: &Path) -> Result<Vec<u8>, PackError> {
    let path = dir.join(INDEX);
    match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(PackError::io("read", &path)),
    }
}

/// A pack opened for reading. A record is hashed and compared when it is first read for computing, and at
/// every [`ExpertSource::read`].
pub struct Pack {
    dir: PathBuf,
    manifest: Manifest,
    entries: HashMap<ExpertId, Entry>,
    files: BTreeMap<u32, Arc<SharedFile>>,
    verified: Verified,
}

/// Outcome of [`Pack::verify_all`].
#[derive(Debug)]
pub struct VerifyReport {
    /// Records read.
    pub records: usize,
    /// Bytes read.
    pub bytes: u64,
    /// Records that cannot be read or do not match their hash.
    pub damaged: Vec<ExpertError>,
}

impl Pack {
    /// Opens the pack at `dir` and checks manifest, index and file lengths; records are checked when
    /// they are read. The torn tail of a growing pack is ignored.
    ///
    /// # Errors
    /// [`PackError::NotAPack`], [`PackError::Damaged`] with the first problem and their number,
    /// [`PackError::Mismatch`] for a newer version, [`PackError::Io`].
    pub fn open(dir: &Path) -> Result<Self, PackError> {
        let manifest = Manifest::read(dir)?;
        // In this order: a record that is appended meanwhile is in the data before it is in the index.
        let index = read_index(dir)?;
        let lengths = data_file_lengths(dir)?;
        let entries = usable_entries(dir, &manifest, &index, &lengths)?;
        let mut files = BTreeMap::new();
        for &number in lengths.keys() {
            let path = dir.join(data_file_name(number));
            let file = File::open(&path).map_err(PackError::io("read", &path))?;
            files.insert(number, Arc::new(SharedFile::opened(&path, file)));
        }
        let entries = entries.into_iter().map(|entry| (entry.id, entry)).collect();
        Ok(Self { dir: dir.to_owned(), manifest, entries, files, verified: Verified::default() })
    }

    /// The model the records belong to.
    pub fn fingerprint(&self) -> Fingerprint {
        self.manifest.fingerprint
    }

    /// Whether the pack was finished; a growing one may lack any record.
    pub fn is_sealed(&self) -> bool {
        self.manifest.seal.is_some()
    }

    /// The experts held, ascending.
    pub fn ids(&self) -> Vec<ExpertId> {
        let mut ids: Vec<_> = self.entries.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Bytes of all records held.
    pub fn bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.bytes).sum()
    }

    /// Reads and checks every record in disk order. `progress` gets bytes done and in total and may
    /// stop the work; the report then covers what was read.
    pub fn verify_all(&self, progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>) -> VerifyReport {
        let total = self.bytes();
        let mut entries: Vec<_> = self.entries.values().collect();
        entries.sort_by_key(|entry| (entry.file, entry.offset));
        let mut report = VerifyReport { records: 0, bytes: 0, damaged: Vec::new() };
        let mut record = Vec::new();
        for entry in entries {
            record.resize(entry.bytes as usize, 0);
            report.damaged.extend(self.read(entry.id, &mut record).err());
            report.records += 1;
            report.bytes += entry.bytes;
            if progress(report.bytes, total).is_break() {
                break;
            }
        }
        report
    }
}

impl Pack {
    fn find(&self, id: ExpertId) -> Result<(&Arc<SharedFile>, &Entry), ExpertError> {
        let missing = || ExpertError::Missing {
            id,
            holder: self.describe(),
            remedy: "write the pack again with this expert, or use the container".into(),
        };
        let entry = self.entries.get(&id).ok_or_else(missing)?;
        Ok((self.files.get(&entry.file).ok_or_else(missing)?, entry))
    }
}

/// Checks the manifest and the index of a pack against the lengths of its data files and returns the
/// experts it holds: what [`Pack::open`] does, on bytes in memory.
///
/// # Errors
/// As [`Pack::open`].
pub fn check(
    manifest: &[u8],
    index: &[u8],
    data_file_bytes: &BTreeMap<u32, u64>,
) -> Result<Vec<ExpertId>, PackError> {
    let dir = Path::new("");
    let manifest = Manifest::parse(manifest, dir)?;
    let entries = usable_entries(dir, &manifest, index, data_file_bytes)?;
    Ok(entries.iter().map(|entry| entry.id).collect())
}

/// The entries of the index, all of them in order.
fn usable_entries(
    dir: &Path,
    manifest: &Manifest,
    index: &[u8],
    lengths: &BTreeMap<u32, u64>,
) -> Result<Vec<Entry>, PackError> {
    let catalog = Catalog::build(index, &manifest.fingerprint, &manifest.layout, lengths);
    check_seal(dir, manifest, index, lengths, &catalog)?;
    match catalog.problems.as_slice() {
        [] => Ok(catalog.entries),
        [first, rest @ ..] => {
            let more =
                if rest.is_empty() { String::new() } else { format!(" (and {} more problems)", rest.len()) };
            Err(PackError::damaged(&dir.join(INDEX), format!("{first}{more}")))
        }
    }
}

/// Compares a sealed pack with what its seal promises.
fn check_seal(
    dir: &Path,
    manifest: &Manifest,
    index: &[u8],
    lengths: &BTreeMap<u32, u64>,
    catalog: &Catalog,
) -> Result<(), PackError> {
    let Some(seal) = &manifest.seal else { return Ok(()) };
    for (&number, &promised) in &seal.files {
        let path = dir.join(data_file_name(number));
        match lengths.get(&number) {
            None => return Err(PackError::damaged(&path, "the file is missing")),
            Some(&len) if len != promised => {
                return Err(PackError::damaged(&path, format!("it has {len} bytes instead of {promised}")));
            }
            Some(_) => {}
        }
    }
    if let Some(&number) = lengths.keys().find(|number| !seal.files.contains_key(number)) {
        return Err(PackError::damaged(
            &dir.join(data_file_name(number)),
            "the file does not belong to the pack",
        ));
    }
    let path = dir.join(INDEX);
    if let Some(problem) = catalog.problems.first() {
        return Err(PackError::damaged(&path, problem.clone()));
    }
    if catalog.entries.len() as u64 != seal.records || catalog.torn_bytes != 0 {
        let (found, promised, dir) = (catalog.entries.len(), seal.records, MANIFEST);
        return Err(PackError::damaged(
            &path,
            format!("it lists {found} intact records, {dir} promises {promised}"),
        ));
    }
    if blake3::hash(index).to_hex().as_str() != seal.index_blake3 {
        return Err(PackError::damaged(&path, "its contents do not match the BLAKE3 in manifest.json"));
    }
    Ok(())
}

impl ExpertSource for Pack {
    fn layout(&self) -> &ExpertLayout {
        &self.manifest.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.entries.contains_key(&id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        let (file, entry) = self.find(id)?;
        Ok(vec![segment(file, entry)])
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        let (file, entry) = self.find(id)?;
        self.verified.check(file.path(), entry, record)
    }

    fn read(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        self.verified.doubt(id);
        read_plainly(self, id, record)
    }

    fn record_hash(&self, id: ExpertId) -> Option<[u8; 32]> {
        self.entries.get(&id).map(|entry| entry.hash)
    }

    fn describe(&self) -> String {
        format!("pack {}", self.dir.display())
    }
}
