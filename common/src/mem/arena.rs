//! One large piece of memory, lent out in pieces that come back by themselves.
//!
//! The arena is a single anonymous map that starts on a 2 MiB boundary and asks for huge pages, so that
//! even records much smaller than a huge page lie on them. Pieces start on 4 KiB boundaries, as direct
//! reads need. No byte of it is in RAM before it is first written, and what lies beyond a lowered limit is
//! given back to the system.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use super::HUGE_PAGE_BYTES;
use super::extents::Extents;

/// Pieces start on and are rounded up to multiples of this.
const PAGE_BYTES: usize = 4096;

/// Memory lent out in pieces. Clones lend from the same memory.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    map: MmapMut,
    /// First aligned byte of `map`; `capacity` bytes from there are in the map.
    base: NonNull<u8>,
    capacity: usize,
    extents: Mutex<Extents>,
}

// SAFETY: `base` points into `map`, which `Inner` owns; bytes are reached through disjoint `ArenaBuf`s only.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the pages of a range that nobody holds back to the system.
    fn give_back(&self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        #[cfg(unix)]
        {
            let skipped = self.base.as_ptr().addr() - self.map.as_ptr().addr();
            // SAFETY: the callers hold the lock, under which no piece covers the range; its bytes read as
            // zeros afterwards, which is as good as any other content of a piece lent out anew.
            let advised = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    skipped + range.start,
                    range.len(),
                )
            };
            if let Err(error) = advised {
                tracing::warn!(%error, "memory cannot be given back to the system");
            }
        }
    }
}

impl Arena {
    /// An arena of `bytes`, rounded down to whole 4 KiB. Address space only: RAM is taken as it is written.
    ///
    /// # Errors
    /// The operating system's error when the map is refused.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let capacity = bytes / PAGE_BYTES * PAGE_BYTES;
        let too_large =
            || std::io::Error::new(std::io::ErrorKind::OutOfMemory, "larger than the address space");
        let mut map = MmapMut::map_anon(capacity.checked_add(HUGE_PAGE_BYTES).ok_or_else(too_large)?)?;
        let start = map.as_mut_ptr();
        let skipped = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
        #[cfg(target_os = "linux")]
        {
            // Advice only: a kernel without huge pages answers EINVAL and nothing is lost.
            let _ = map.advise_range(memmap2::Advice::HugePage, skipped, capacity);
        }
        // SAFETY: `skipped` is below the 2 MiB that the map is longer than `capacity`.
        let base = NonNull::new(unsafe { start.add(skipped) }).ok_or_else(too_large)?;
        Ok(Self {
            inner: Arc::new(Inner { map, base, capacity, extents: Mutex::new(Extents::new(capacity)) }),
        })
    }

    /// Bytes of the arena.
    pub fn capacity(&self) -> usize {
        self.inner.capacity
    }

    /// Bytes in use at most now: nothing beyond this offset is lent out.
    pub fn limit(&self) -> usize {
        self.inner.extents().end()
    }

    /// Changes the limit, within the capacity. Free memory beyond it is given back to the system at once,
    /// pieces there when they come back.
    pub fn set_limit(&self, bytes: usize) {
        let mut extents = self.inner.extents();
        for range in extents.set_end(bytes / PAGE_BYTES * PAGE_BYTES) {
            self.inner.give_back(range);
        }
    }

    /// Bytes lent out.
    pub fn taken(&self) -> usize {
        self.inner.extents().taken()
    }

    /// Free extents below the limit: offset and length, ascending.
    pub fn free(&self) -> Vec<(usize, usize)> {
        self.inner.extents().free()
    }

    /// Bytes that a piece of `len` bytes takes from an arena; `None` beyond the address space.
    pub fn extent_of(len: usize) -> Option<usize> {
        len.checked_next_multiple_of(PAGE_BYTES)
    }

    /// Lends `len` bytes of arbitrary content from the smallest free extent that holds them.
    pub fn take(&self, len: usize) -> Option<ArenaBuf> {
        let rounded = Self::extent_of(len)?;
        let offset = self.inner.extents().take(rounded)?;
        Some(ArenaBuf { inner: Arc::clone(&self.inner), offset, len })
    }

    /// As [`Arena::take`], at `offset`.
    pub fn take_at(&self, offset: usize, len: usize) -> Option<ArenaBuf> {
        let rounded = Self::extent_of(len)?;
        let taken = offset.is_multiple_of(PAGE_BYTES) && self.inner.extents().take_at(offset, rounded);
        taken.then(|| ArenaBuf { inner: Arc::clone(&self.inner), offset, len })
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arena({} of {} bytes taken)", self.taken(), self.capacity())
    }
}

/// A piece of an [`Arena`], given back when dropped.
pub struct ArenaBuf {
    inner: Arc<Inner>,
    offset: usize,
    len: usize,
}

impl ArenaBuf {
    /// Offset in the arena.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes taken from the arena: the length in whole pages.
    pub fn extent(&self) -> usize {
        self.len.next_multiple_of(PAGE_BYTES)
    }
}

impl Deref for ArenaBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `offset..offset + len` was taken from the extents of `capacity` bytes behind `base`, lies
        // in the map, which lives as long as `inner`, is initialised (zeros at first) and covered by no
        // other piece until this one is dropped.
        unsafe { std::slice::from_raw_parts(self.inner.base.as_ptr().add(self.offset), self.len) }
    }
}

impl DerefMut for ArenaBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.inner.base.as_ptr().add(self.offset), self.len) }
    }
}

impl AsMut<[u8]> for ArenaBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for ArenaBuf {
    fn drop(&mut self) {
        let mut extents = self.inner.extents();
        let beyond = extents.release(self.offset, self.extent());
        self.inner.give_back(beyond);
    }
}

impl std::fmt::Debug for ArenaBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ArenaBuf({} bytes at {})", self.len, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_disjoint_and_come_back() {
        let arena = Arena::new(10 * PAGE_BYTES + 7).unwrap();
        assert_eq!(arena.capacity(), 10 * PAGE_BYTES);
        let mut pieces: Vec<_> = (0..5).map(|_| arena.take(PAGE_BYTES + 1).unwrap()).collect();
        assert!(arena.take(1).is_none());
        assert_eq!(pieces[0].as_ptr().addr() % HUGE_PAGE_BYTES, 0);
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!((piece.as_ptr().addr() % PAGE_BYTES, piece.len()), (0, PAGE_BYTES + 1));
            piece.fill(i as u8 + 1);
        }
        assert!(pieces.iter().enumerate().all(|(i, piece)| piece.iter().all(|&b| b == i as u8 + 1)));
        drop(pieces.remove(2));
        assert_eq!(arena.free(), [(4 * PAGE_BYTES, 2 * PAGE_BYTES)]);
        assert!(arena.take_at(4 * PAGE_BYTES + 1, 1).is_none() && arena.take_at(0, 1).is_none());
        let again = arena.take_at(5 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!((again.offset(), again.extent()), (5 * PAGE_BYTES, PAGE_BYTES));
        drop((pieces, again));
        assert_eq!(arena.taken(), 0);
    }

    #[test]
    fn memory_beyond_a_lowered_limit_is_given_back_and_empty() {
        let arena = Arena::new(8 * PAGE_BYTES).unwrap();
        let mut low = arena.take(4 * PAGE_BYTES).unwrap();
        let mut high = arena.take(4 * PAGE_BYTES).unwrap();
        low.fill(1);
        high.fill(2);
        arena.set_limit(2 * PAGE_BYTES);
        assert!(
            low.iter().all(|&b| b == 1) && high.iter().all(|&b| b == 2),
            "pieces in use stay as they are"
        );
        drop((low, high));
        assert!(arena.take(2 * PAGE_BYTES + 1).is_none());
        arena.set_limit(usize::MAX);
        let all = arena.take(8 * PAGE_BYTES).unwrap();
        assert!(all[..2 * PAGE_BYTES].iter().all(|&b| b == 1));
        if cfg!(target_os = "linux") {
            assert!(all[2 * PAGE_BYTES..].iter().all(|&b| b == 0));
        }
    }
}
