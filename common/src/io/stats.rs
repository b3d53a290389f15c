//! Counting: bytes, time, speed.

use std::time::{Duration, Instant};

/// Counters of one class of reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// Reads submitted.
    pub submitted: u64,
    /// Reads that ended well.
    pub completed: u64,
    /// Reads that ended with an error.
    pub failed: u64,
    /// Reads that were taken back before they were complete.
    pub cancelled: u64,
    /// Bytes read from disks.
    pub disk_bytes: u64,
    /// Bytes found in the page cache.
    pub cached_bytes: u64,
    /// Bytes queued and not begun.
    pub queued_bytes: u64,
    /// Pieces running.
    pub running: usize,
    /// Time during which at least one piece of this class was running.
    pub busy: Duration,
}

/// One disk as it was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskStats {
    /// The system's number of the device.
    pub device: u64,
    /// Time during which at least one piece was running.
    pub busy: Duration,
    /// Bytes read.
    pub bytes: u64,
    /// Bytes per second while busy, over the last second or so; `None` before the first read.
    pub bytes_per_s: Option<f64>,
    /// Time from the start of a piece to its end, averaged over the last ones.
    pub latency: Duration,
    /// Whether pieces run through io_uring.
    pub uring: bool,
}

/// Counters of an engine since it was started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IoStats {
    /// Reads somebody waits for.
    pub demand: ClassStats,
    /// Guesses.
    pub prefetch: ClassStats,
    /// Time during which at least one piece was running anywhere.
    pub busy: Duration,
    /// Repeated pieces.
    pub retries: u64,
    /// Pieces that another copy had to serve.
    pub rescued: u64,
    /// The disks read from.
    pub disks: Vec<DiskStats>,
}

/// Adds up the time during which something runs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Busy {
    running: usize,
    since: Option<Instant>,
    total: Duration,
}

impl Busy {
    pub(super) fn begin(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    pub(super) fn end(&mut self, now: Instant) {
        self.running = self.running.saturating_sub(1);
        if self.running == 0
            && let Some(since) = self.since.take()
        {
            self.total += now.saturating_duration_since(since);
        }
    }

    pub(super) fn running(&self) -> usize {
        self.running
    }

    pub(super) fn total(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

/// Busy seconds after which older bytes count half.
const RATE_WINDOW_S: f64 = 1.0;
/// Weight of the newest piece in the average latency.
const LATENCY_WEIGHT: f64 = 0.125;
/// Assumed of a disk that was never read from.
const UNKNOWN_BYTES_PER_S: f64 = 1e9;

/// Speed of a disk while it is busy.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    bytes: f64,
    seconds: f64,
    latency_s: f64,
    last: Option<Instant>,
}

impl Rate {
    /// Notes a piece that began and ended at the given times. Pieces may overlap.
    pub(super) fn note(&mut self, bytes: usize, began: Instant, ended: Instant) {
        let from = self.last.map_or(began, |last| last.max(began));
        self.last = Some(ended);
        self.seconds += ended.saturating_duration_since(from).as_secs_f64();
        self.bytes += bytes as f64;
        if self.seconds > RATE_WINDOW_S {
            self.seconds /= 2.0;
            self.bytes /= 2.0;
        }
        let took = ended.saturating_duration_since(began).as_secs_f64();
        let weight = if self.latency_s == 0.0 { 1.0 } else { LATENCY_WEIGHT };
        self.latency_s += weight * (took - self.latency_s);
    }

    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        (self.seconds > 0.0 && self.bytes > 0.0).then(|| self.bytes / self.seconds)
    }

    pub(super) fn latency(&self) -> Duration {
        Duration::try_from_secs_f64(self.latency_s).unwrap_or_default()
    }

    /// Seconds until `bytes` are read.
    pub(super) fn wait_s(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_s().unwrap_or(UNKNOWN_BYTES_PER_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_work_is_counted_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut busy = Busy::default();
        busy.begin(at(0));
        busy.begin(at(10));
        busy.end(at(20));
        assert_eq!(busy.total(at(25)), Duration::from_millis(25));
        busy.end(at(30));
        busy.begin(at(50));
        busy.end(at(60));
        assert_eq!(busy.total(at(100)), Duration::from_millis(40));
    }

    #[test]
    fn a_rate_is_bytes_over_busy_time_and_follows_changes() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rate = Rate::default();
        assert_eq!(rate.wait_s(1_000_000_000), 1.0);
        // Two pieces at a time, 100 MB every 100 ms, then an idle second that does not count.
        rate.note(100_000_000, at(0), at(100));
        rate.note(100_000_000, at(0), at(200));
        rate.note(100_000_000, at(1200), at(1300));
        let per_s = rate.bytes_per_s().unwrap();
        assert!((per_s - 1e9).abs() < 1e3, "{per_s}");
        for i in 0..100 {
            rate.note(10_000_000, at(2000 + i * 100), at(2100 + i * 100));
        }
        let slow = rate.bytes_per_s().unwrap();
        assert!((slow - 1e8).abs() < 1e7, "{slow}");
        assert!((rate.latency().as_secs_f64() - 0.1).abs() < 0.01);
    }
}
