//! What a store has done since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct StoreStats {
    /// Experts computed.
    pub computed: u64,
    /// Served from RAM, or from a read that another call or a right guess had already begun.
    pub hits: u64,
    /// Read from disk because a call asked for them.
    pub misses: u64,
    /// Bytes read, for whatever reason.
    pub bytes_read: u64,
    /// Microseconds in which calls had nothing to compute and waited for a read.
    pub wait_us: u64,
    /// Microseconds in calls, the callers' own work meanwhile not counted.
    pub call_us: u64,
    /// Microseconds in which at least one read was under way.
    pub disk_busy_us: u64,
    /// Bytes of reads begun on a guess.
    pub prefetch_issued_bytes: u64,
    /// Bytes of guessed reads that a call then asked for.
    pub prefetch_used_bytes: u64,
    /// Bytes read on a guess and given up without having been used.
    pub prefetch_wasted_bytes: u64,
    /// Bytes of guessed reads called off before they were read.
    pub prefetch_cancelled_bytes: u64,
    /// Experts guessed for layers that were then computed.
    pub guessed: u64,
    /// Of those, the ones the layer asked for.
    pub guessed_right: u64,
    /// Experts asked for by layers for which there was a guess.
    pub guessable: u64,
    /// Experts pinned, resident or not.
    pub pinned: u64,
    /// Bytes of pinned experts that are resident.
    pub pinned_bytes: u64,
    /// Experts that gave way to others.
    pub evictions: u64,
}

/// The counters behind [`StoreStats`] that many threads add to.
#[derive(Default)]
pub(super) struct Counters {
    computed: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    bytes_read: AtomicU64,
    wait_us: AtomicU64,
    call_us: AtomicU64,
}

impl Counters {
    /// Adds experts asked for: found (or coming) and to be read.
    pub fn claimed(&self, hits: usize, misses: usize) {
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add(misses as u64, Ordering::Relaxed);
    }

    /// Adds experts computed.
    pub fn computed(&self, experts: usize) {
        self.computed.fetch_add(experts as u64, Ordering::Relaxed);
    }

    /// Adds bytes of a record that was read.
    pub fn was_read(&self, bytes: usize) {
        self.bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Adds the time a call waited.
    pub fn waited(&self, time: Duration) {
        self.wait_us.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Adds the time a call took.
    pub fn called(&self, time: Duration) {
        self.call_us.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The values now; what others count is left at zero.
    pub fn read(&self) -> StoreStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreStats {
            computed: read(&self.computed),
            hits: read(&self.hits),
            misses: read(&self.misses),
            bytes_read: read(&self.bytes_read),
            wait_us: read(&self.wait_us),
            call_us: read(&self.call_us),
            ..StoreStats::default()
        }
    }
}
