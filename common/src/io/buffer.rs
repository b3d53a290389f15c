//! The memory of a read under way: owned by the read, filled piece by piece by several threads.

#![allow(unsafe_code)]

use std::ptr::NonNull;

/// An owner of memory, put aside while the memory is being filled.
///
/// It lies in a box of its own that is not touched until [`Parked::take`], so that the bytes found
/// through [`AsMut`] once stay where they are and nobody else refers to them.
pub(super) struct Parked<B> {
    owner: NonNull<B>,
}

// SAFETY: it owns a `B` like a box does.
unsafe impl<B: Send> Send for Parked<B> {}

impl<B: AsMut<[u8]>> Parked<B> {
    /// Puts `buf` aside. The target is usable until the parked buffer is taken or dropped.
    pub(super) fn new(buf: B) -> (Self, Target) {
        let mut owner = NonNull::from(Box::leak(Box::new(buf)));
        // SAFETY: the box was leaked just now, so it is valid and nobody else refers to it.
        let bytes = unsafe { owner.as_mut() }.as_mut();
        let target = Target { len: bytes.len(), start: NonNull::from(bytes).cast() };
        (Self { owner }, target)
    }
}

impl<B> Parked<B> {
    /// Takes the buffer back.
    pub(super) fn take(self) -> B {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: it came from `Box::leak`, and `self` is not dropped.
        *unsafe { Box::from_raw(this.owner.as_ptr()) }
    }
}

impl<B> Drop for Parked<B> {
    fn drop(&mut self) {
        // SAFETY: it came from `Box::leak`, and `take` does not run this.
        drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
    }
}

/// The bytes of a parked buffer.
#[derive(Clone, Copy)]
pub(super) struct Target {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address; using it is up to the callers of `part`.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether the byte at `at` lies on a multiple of `bytes`.
    #[cfg(target_os = "linux")]
    pub(super) fn is_aligned(&self, at: usize, bytes: usize) -> bool {
        self.start.as_ptr().addr().wrapping_add(at).is_multiple_of(bytes)
    }

    /// The `len` bytes from `at` on.
    ///
    /// # Safety
    /// The parked buffer is neither taken nor dropped while the slice lives, and no other slice that
    /// overlaps it exists meanwhile.
    ///
    /// # Panics
    /// When the part leaves the buffer.
    pub(super) unsafe fn part<'a>(&self, at: usize, len: usize) -> &'a mut [u8] {
        assert!(at <= self.len && len <= self.len - at, "a piece leaves its buffer");
        // SAFETY: the range is inside the buffer, which lives and is borrowed by nobody else (above).
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) }
    }
}
