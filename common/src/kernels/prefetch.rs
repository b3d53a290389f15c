//! Asking for memory before it is needed.
//!
//! A row of a few thousand bytes is read faster than processors notice that another follows, and the window
//! of instructions in flight holds one to three kilobytes of weights: less than what has to be under way to
//! hide the latency of memory.

/// Bytes between what is computed and what is asked for.
pub(super) const AHEAD: usize = 16 << 10;

/// Bytes from a tile of weight rows to one that begins [`AHEAD`] bytes further on or soon after.
pub(super) fn tiles_ahead(tile_bytes: usize) -> usize {
    AHEAD.next_multiple_of(tile_bytes.max(1))
}

/// Asks for the cache lines of the chunk at `chunk` displaced by `ahead` bytes, wherever that is: nothing
/// happens where there is no memory.
#[inline(always)]
pub(super) fn displaced<const N: usize>(chunk: *const [u8; N], ahead: usize) {
    let first = chunk.cast::<u8>().wrapping_add(ahead);
    let mut byte = 0;
    while byte < N {
        line(first.wrapping_add(byte));
        byte += 64;
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: part of every x86-64; a prefetch changes nothing a program can see and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn line(_at: *const u8) {}
