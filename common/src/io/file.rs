//! One file to read from, with all its copies: how each is opened, and one synchronous read.
//!
//! A copy is read past the page cache where the file system takes that (found out by one aligned read
//! at the first use), because every byte the cache would keep is a byte the expert store lacks. What
//! the cache holds already is taken from there: that never waits and adds nothing. File systems that
//! refuse direct reads are read through the cache, and the range is dropped from it at once.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::Caching;
use super::os::{self, BLOCK_BYTES};
use super::resident;
use crate::mem::{AlignedBuf, HUGE_PAGE_BYTES};

/// Largest piece of a synchronous direct read that has to be copied into place: half of a level-2 cache.
const MAX_BOUNCE_BYTES: usize = (512 << 10) + 2 * BLOCK_BYTES;

/// Something that can be read in place of a file: the tests' faulty disks, records in memory.
pub trait ReadAt: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`; 0 means that there are no more.
    ///
    /// # Errors
    /// Whatever stands for a failing disk.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize>;
}

impl<F: Fn(&mut [u8], u64) -> Result<usize> + Send + Sync> ReadAt for F {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self(buf, offset)
    }
}

/// A device; its copies share one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum DiskId {
    /// By the system's number.
    Device(u64),
    /// Made up, for readers that are no files.
    Custom(u64),
}

/// One content, to be had from one or several places.
pub struct SharedFile {
    copies: Vec<Replica>,
}

pub(super) struct Replica {
    path: PathBuf,
    backing: Backing,
    disk: OnceLock<DiskId>,
    /// Whether direct reads work; decided at the first use, may turn false later.
    direct: OnceLock<AtomicBool>,
    /// Whether the page cache can be asked about it; decided at the first use.
    known: OnceLock<bool>,
    /// A read failed for good; other copies are preferred from then on.
    failed: AtomicBool,
}

enum Backing {
    /// Stays open.
    Kept {
        cached: OnceLock<File>,
        direct: OnceLock<Option<File>>,
    },
    /// Opened for every read: models of thousands of files must not use up the descriptors.
    Reopened,
    Custom(Arc<dyn ReadAt>),
}

/// An open file, kept or only for now.
pub(super) enum Opened<'a> {
    Kept(&'a File),
    Once(File),
}

impl Deref for Opened<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Kept(file) => file,
            Self::Once(file) => file,
        }
    }
}

/// Where the bytes of a read came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// The page cache had all of them.
    Cache,
    Disk,
}

impl SharedFile {
    /// A file at `path`, kept open from the first read on, or opened for every read. Nothing is opened
    /// or checked now.
    pub fn new(path: &Path, keep_open: bool) -> Self {
        let backing = if keep_open {
            Backing::Kept { cached: OnceLock::new(), direct: OnceLock::new() }
        } else {
            Backing::Reopened
        };
        Self { copies: vec![Replica::new(path, backing)] }
    }

    /// Bytes in memory, read like a file on a disk of its own; `path` is for messages.
    pub fn in_memory(path: &Path, bytes: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let read = move |buf: &mut [u8], offset: u64| {
            let all = (*bytes).as_ref();
            let rest = usize::try_from(offset).ok().and_then(|offset| all.get(offset..)).unwrap_or(&[]);
            let n = rest.len().min(buf.len());
            buf[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        };
        Self::custom(path, 0, Arc::new(read))
    }

    /// An open file. It stays open.
    pub fn opened(path: &Path, file: File) -> Self {
        let backing = Backing::Kept { cached: OnceLock::from(file), direct: OnceLock::new() };
        Self { copies: vec![Replica::new(path, backing)] }
    }

    /// A reader of any kind; `disk` numbers the device it stands for and `path` is for messages.
    pub fn custom(path: &Path, disk: u64, reader: Arc<dyn ReadAt>) -> Self {
        let copy = Replica::new(path, Backing::Custom(reader));
        let _ = copy.disk.set(DiskId::Custom(disk));
        Self { copies: vec![copy] }
    }

    /// Adds places where the same bytes are found.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.copies.extend(other.copies);
        self
    }

    /// The first copy's path, for messages.
    pub fn path(&self) -> &Path {
        self.copies.first().map_or(Path::new(""), |copy| &copy.path)
    }

    /// Every copy's path.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.copies.iter().map(|copy| copy.path.as_path())
    }

    pub(super) fn copies(&self) -> &[Replica] {
        &self.copies
    }

    /// Fills `buf` from byte `offset` on the calling thread, from the first copy that can be read: past
    /// the page cache where that is possible, from it where it holds the bytes.
    ///
    /// # Errors
    /// The last copy's; a short file is [`ErrorKind::UnexpectedEof`].
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let mut bounce = Bounce::of(buf.len().min(512 << 10));
        let mut last = Error::new(ErrorKind::NotFound, "the file has no copy");
        for copy in &self.copies {
            match copy.read(buf, offset, Caching::Auto, true, &mut bounce) {
                Ok(_) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

impl std::fmt::Debug for SharedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.paths()).finish()
    }
}

/// Memory for direct reads whose place or length is not on block boundaries; made when first needed.
pub(super) struct Bounce {
    buf: Option<AlignedBuf>,
    bytes: usize,
}

impl Bounce {
    /// For pieces of up to `piece_bytes`.
    pub(super) fn of(piece_bytes: usize) -> Self {
        // One block more at either end.
        Self { buf: None, bytes: piece_bytes.next_multiple_of(BLOCK_BYTES) + 2 * BLOCK_BYTES }
    }

    /// Memory it takes when used.
    pub(super) fn allocated_bytes(&self) -> usize {
        if self.bytes > MAX_BOUNCE_BYTES { self.bytes.next_multiple_of(HUGE_PAGE_BYTES) } else { self.bytes }
    }

    /// Device drivers take a limited number of memory ranges per request: a megabyte of scattered 4 KiB
    /// pages may be one too many and becomes two requests. Hence huge pages, except for short reads.
    fn allocate(&self) -> Result<AlignedBuf> {
        if self.bytes > MAX_BOUNCE_BYTES {
            AlignedBuf::huge(self.bytes)
        } else {
            AlignedBuf::zeroed(self.bytes)
        }
    }

    /// The memory itself.
    #[cfg(target_os = "linux")]
    pub(super) fn into_buf(self) -> Result<AlignedBuf> {
        self.allocate()
    }

    fn get(&mut self) -> Result<&mut AlignedBuf> {
        if self.buf.is_none() {
            self.buf = Some(self.allocate()?);
        }
        self.buf.as_mut().ok_or_else(|| ErrorKind::OutOfMemory.into())
    }
}

impl Replica {
    fn new(path: &Path, backing: Backing) -> Self {
        Self {
            path: path.to_owned(),
            backing,
            disk: OnceLock::new(),
            direct: OnceLock::new(),
            known: OnceLock::new(),
            failed: AtomicBool::new(false),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn mark_failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_file(&self) -> bool {
        !matches!(self.backing, Backing::Custom(_))
    }

    /// The device. A file that cannot be asked goes to a queue of its own and fails there.
    pub(super) fn disk(&self) -> DiskId {
        *self.disk.get_or_init(|| {
            let meta = match self.cached() {
                Ok(file) => file.metadata(),
                Err(error) => Err(error),
            };
            DiskId::Device(meta.map_or(u64::MAX, |meta| os::device(&meta)))
        })
    }

    /// The file, read through the page cache.
    pub(super) fn cached(&self) -> Result<Opened<'_>> {
        let open = || {
            let file = File::open(&self.path)?;
            os::advise_random(&file);
            Ok(file)
        };
        match &self.backing {
            Backing::Kept { cached, .. } => {
                if let Some(file) = cached.get() {
                    return Ok(Opened::Kept(file));
                }
                let file = open()?;
                Ok(Opened::Kept(cached.get_or_init(|| file)))
            }
            Backing::Reopened => open().map(Opened::Once),
            Backing::Custom(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// The file, read past the page cache; `None` where that does not work.
    pub(super) fn direct(&self) -> Option<Opened<'_>> {
        let works = self.direct.get_or_init(|| AtomicBool::new(true));
        if !works.load(Ordering::Relaxed) {
            return None;
        }
        let opened = match &self.backing {
            Backing::Kept { direct, .. } => {
                direct.get_or_init(|| probed(&self.path)).as_ref().map(Opened::Kept)
            }
            Backing::Reopened => probed(&self.path).map(Opened::Once),
            Backing::Custom(_) => None,
        };
        if opened.is_none() {
            self.refuse_direct();
        }
        opened
    }

    /// Reads go through the page cache from now on.
    pub(super) fn refuse_direct(&self) {
        let works = self.direct.get_or_init(|| AtomicBool::new(false));
        if works.swap(false, Ordering::Relaxed) && self.is_file() {
            tracing::debug!(path = %self.path.display(), "direct reads are refused; reading through the page cache");
        }
    }

    /// Whether the page cache is known to hold the whole range.
    pub(super) fn is_cached(&self, offset: u64, len: usize) -> bool {
        if !self.is_file() {
            return false;
        }
        let Ok(file) = self.cached() else { return false };
        *self.known.get_or_init(|| resident::is_known(&file)) && resident::is_resident(&file, offset, len)
    }

    /// Takes the range from the page cache if all of it is there; the number of bytes, short only when
    /// the cache was emptied meanwhile.
    fn read_cached(&self, buf: &mut [u8], offset: u64) -> usize {
        let Ok(file) = self.cached() else { return 0 };
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match os::read_cached(&file, rest, offset + done as u64) {
                0 => break,
                n => done += n,
            }
        }
        done
    }

    /// Fills `buf` from byte `offset`. `look` says whether the page cache is asked first.
    pub(super) fn read(
        &self,
        buf: &mut [u8],
        offset: u64,
        caching: Caching,
        look: bool,
        bounce: &mut Bounce,
    ) -> Result<Served> {
        if let Backing::Custom(reader) = &self.backing {
            let read = |buf: &mut [u8], offset| reader.read_at(buf, offset);
            return fill(buf, offset, read).map(|()| Served::Disk);
        }
        let look = look && caching == Caching::Auto && self.is_cached(offset, buf.len());
        let cached = if look { self.read_cached(buf, offset) } else { 0 };
        let buf = &mut buf[cached..];
        let offset = offset + cached as u64;
        if buf.is_empty() {
            return Ok(Served::Cache);
        }
        if caching != Caching::Buffered
            && let Some(file) = self.direct()
        {
            match read_direct(&file, buf, offset, bounce) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => self.refuse_direct(),
                read => return read.map(|()| Served::Disk),
            }
        }
        let file = self.cached()?;
        fill(buf, offset, |buf, offset| os::read_at(&file, buf, offset))?;
        if caching != Caching::Buffered {
            os::forget(&file, offset, buf.len() as u64);
        }
        Ok(Served::Disk)
    }
}

/// Opens `path` for direct reads and tries one.
fn probed(path: &Path) -> Option<File> {
    let file = os::open_direct(path)?;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES).ok()?;
    match os::read_at(&file, &mut block, 0) {
        Ok(_) => Some(file),
        Err(_) => None,
    }
}

/// Reads until `buf` is full.
fn fill(buf: &mut [u8], offset: u64, read: impl Fn(&mut [u8], u64) -> Result<usize>) -> Result<()> {
    let wanted = buf.len();
    let mut done = 0;
    while done < wanted {
        match read(&mut buf[done..], offset + done as u64) {
            Ok(0) => return Err(ends_early(offset, wanted, done)),
            Ok(n) => done += n.min(wanted - done),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The error for a file that ends `done` bytes after `offset`.
pub(super) fn ends_early(offset: u64, wanted: usize, done: usize) -> Error {
    let end = offset + done as u64;
    let what = format!(
        "the file has nothing at byte {end}, {wanted} bytes from offset {offset} were wanted; it is truncated"
    );
    Error::new(ErrorKind::UnexpectedEof, what)
}

/// Whether a direct read may go straight to `buf`.
pub(super) fn is_aligned(buf: &[u8], offset: u64) -> bool {
    (buf.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)
        && buf.len().is_multiple_of(BLOCK_BYTES)
        && offset.is_multiple_of(BLOCK_BYTES as u64)
}

/// Direct reads: straight into `buf` where everything is on block boundaries, by way of `bounce` else.
fn read_direct(file: &File, buf: &mut [u8], offset: u64, bounce: &mut Bounce) -> Result<()> {
    let wanted = buf.len();
    if is_aligned(buf, offset) {
        return match read_blocks(file, buf, offset, wanted)? {
            n if n < wanted => Err(ends_early(offset, wanted, n)),
            _ => Ok(()),
        };
    }
    let bounce = bounce.get()?;
    let mut done = 0;
    while done < wanted {
        let at = offset + done as u64;
        let skip = (at % BLOCK_BYTES as u64) as usize;
        let take = (bounce.len() - skip).min(wanted - done);
        let blocks = (skip + take).next_multiple_of(BLOCK_BYTES);
        let n = read_blocks(file, &mut bounce[..blocks], at - skip as u64, skip + take)?;
        if n < skip + take {
            return Err(ends_early(offset, wanted, done + n.saturating_sub(skip)));
        }
        buf[done..done + take].copy_from_slice(&bounce[skip..skip + take]);
        done += take;
    }
    Ok(())
}

/// Fills at least the first `needed` bytes of the aligned `buf`, or as many as the file has; their number.
fn read_blocks(file: &File, buf: &mut [u8], offset: u64, needed: usize) -> Result<usize> {
    let mut done = 0;
    while done < needed {
        match os::read_at(file, &mut buf[done..], offset + done as u64) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(n) => {
                done += n;
                // A direct read that stops inside a block has met the end of the file.
                if n == 0 || !n.is_multiple_of(BLOCK_BYTES) {
                    break;
                }
            }
        }
    }
    Ok(done)
}
