//! What the operating systems offer beyond plain positional reads: reads past the page cache, reads that
//! only take what the cache holds, and advice to forget.

use std::fs::File;
use std::io::Result;
use std::path::Path;

/// Direct reads have offset, length and memory on multiples of this. Devices with smaller blocks take
/// it too; one with larger blocks fails the probe and is read through the page cache.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Opens `path` for reads past the page cache; `None` where the system or the file system has none.
pub(super) fn open_direct(path: &Path) -> Option<File> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
    }
    #[cfg(target_vendor = "apple")]
    {
        let file = File::open(path).ok()?;
        rustix::fs::fcntl_nocache(&file, true).ok()?;
        Some(file)
    }
    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    {
        let _ = path;
        None
    }
}

/// Reads up to `buf.len()` bytes at `offset`; 0 at the end of the file.
pub(super) fn read_at(file: &File, buf: &mut [u8], offset: u64) -> Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, buf, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, buf, offset);
}

/// Copies what the page cache holds at `offset` without waiting for a disk; the number of bytes, 0 when
/// there are none or the system cannot tell.
pub(super) fn read_cached(file: &File, buf: &mut [u8], offset: u64) -> usize {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::{ReadWriteFlags, preadv2};
        let mut parts = [std::io::IoSliceMut::new(buf)];
        preadv2(file, &mut parts, offset, ReadWriteFlags::NOWAIT).unwrap_or(0)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, buf, offset);
        0
    }
}

/// Tells the system that reads of `file` are not sequential, so that it fetches nothing unasked.
pub(super) fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Drops `len` bytes at `offset` from the page cache, so far as nobody has changed them. Advice only.
pub fn forget(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    {
        // Only whole pages are dropped; the neighbours' part of a page costs them one more read at most.
        let begin = offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let end = offset.saturating_add(len).checked_next_multiple_of(BLOCK_BYTES as u64);
        // No length means up to the end of the file.
        let len = end.and_then(|end| std::num::NonZeroU64::new(end.saturating_sub(begin)));
        if len.is_some() || end.is_none() {
            let _ = rustix::fs::fadvise(file, begin, len, rustix::fs::Advice::DontNeed);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

/// As [`forget`], for a whole file; one that cannot be opened is left alone.
pub fn forget_file(path: &Path) {
    if let Ok(file) = File::open(path) {
        forget(&file, 0, file.metadata().map_or(0, |meta| meta.len()));
    }
}

/// Which device a file lies on.
pub(super) fn device(meta: &std::fs::Metadata) -> u64 {
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::dev(meta);
    #[cfg(not(unix))]
    {
        let _ = meta;
        0
    }
}
