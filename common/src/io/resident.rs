//! Asking whether the page cache holds a range of a file, without reading it.
//!
//! A read that must not wait (`RWF_NOWAIT`) is no way to ask: on a miss Linux starts reading the range
//! into the cache. `mincore` on a map that is never touched only looks. It tells the truth about files
//! that the caller owns or may write, and claims everything of others to be there.

use std::fs::File;

/// Whether [`is_resident`] can be believed for this file.
pub(super) fn is_known(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt;
        let euid = rustix::process::geteuid();
        let owned = || file.metadata().is_ok_and(|meta| meta.uid() == euid.as_raw());
        euid.is_root() || owned()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// Whether every page of `len` bytes at `offset` is in the page cache; `false` when that is unknown.
#[cfg(target_os = "linux")]
pub(super) fn is_resident(file: &File, offset: u64, len: usize) -> bool {
    let page = rustix::param::page_size();
    let begin = offset / page as u64 * page as u64;
    let Some(len) = len.checked_add((offset - begin) as usize).filter(|&len| len > 0) else {
        return false;
    };
    // SAFETY: the map is read by nobody: `mincore` gets its address and looks at page tables only. So it
    // does not matter what other processes do to the file.
    let Ok(map) = (unsafe { memmap2::MmapOptions::new().offset(begin).len(len).map(file) }) else {
        return false;
    };
    let mut pages = vec![0u8; len.div_ceil(page)];
    // SAFETY: `map` is page-aligned (its offset is) and `len` bytes long, and `pages` has one byte for
    // every page of it.
    let answer = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), len, pages.as_mut_ptr()) };
    answer == 0 && pages.iter().all(|page| page & 1 == 1)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_resident(_file: &File, _offset: u64, _len: usize) -> bool {
    false
}
