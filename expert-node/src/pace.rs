//! Sending records must not slow down answers: how fast a source may send now.
//!
//! While dispatches are in work, or were a moment ago, all senders of a process together get a quarter
//! of the rate that one of them reached while nothing else went on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For how long after the last dispatch serving is taken to go on.
const BUSY_FOR: Duration = Duration::from_millis(200);
/// Share of the idle rate that is left for sending while dispatches are in work.
const BUSY_SHARE: f64 = 0.25;
/// Assumed until something has been sent while nothing else went on.
const FIRST_IDLE_BYTES_PER_S: f64 = 64e6;
/// Longest wait for one part, whatever was measured.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Whether this process serves dispatches now. Clones share one state.
#[derive(Clone, Debug)]
pub struct Activity(Arc<ActivityState>);

#[derive(Debug)]
struct ActivityState {
    begun: Instant,
    /// Milliseconds since `begun`, plus one; 0 = never.
    last: AtomicU64,
    in_work: AtomicUsize,
}

impl Activity {
    /// Nothing has happened yet.
    pub fn new() -> Self {
        let (last, in_work) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self(Arc::new(ActivityState { begun: Instant::now(), last, in_work }))
    }

    /// A dispatch is sent or received now.
    pub fn touch(&self) {
        let now = u64::try_from(self.0.begun.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.0.last.store(now + 1, Ordering::Relaxed);
    }

    /// A dispatch is in work until the guard is dropped.
    pub fn begin(&self) -> Working {
        self.touch();
        self.0.in_work.fetch_add(1, Ordering::Relaxed);
        Working(self.clone())
    }

    /// Whether a dispatch is in work, or was one within the last 200 ms.
    pub fn is_busy(&self) -> bool {
        if self.0.in_work.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let Some(last) = self.0.last.load(Ordering::Relaxed).checked_sub(1) else { return false };
        self.0.begun.elapsed() < Duration::from_millis(last) + BUSY_FOR
    }
}

impl Default for Activity {
    fn default() -> Self {
        Self::new()
    }
}

/// A dispatch in work.
#[derive(Debug)]
pub struct Working(Activity);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.0.in_work.fetch_sub(1, Ordering::Relaxed);
        self.0.touch();
    }
}

/// Hands out the time of one link: each asker gets the next free slot.
#[derive(Debug)]
pub(crate) struct Slots(Mutex<Instant>);

impl Slots {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    /// How long to wait before passing on `bytes` when `bytes_per_s` is the most for all askers
    /// together; nothing without a limit.
    pub(crate) fn pause(&self, bytes: usize, bytes_per_s: f64) -> Duration {
        if bytes_per_s <= 0.0 {
            return Duration::ZERO;
        }
        let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let pause = next.saturating_duration_since(now);
        let slot = Duration::try_from_secs_f64(bytes as f64 / bytes_per_s).unwrap_or(LONGEST_PAUSE);
        *next = now.max(*next) + slot.min(LONGEST_PAUSE);
        pause
    }
}

/// Paces everything a process sends to others that fetch.
#[derive(Debug)]
pub struct Pacer {
    activity: Activity,
    /// Bytes per second of one sender while nothing else went on.
    idle: Mutex<Option<f64>>,
    slots: Slots,
}

impl Pacer {
    /// A pacer that gives way to `activity`.
    pub fn new(activity: Activity) -> Self {
        Self { activity, idle: Mutex::default(), slots: Slots::new() }
    }

    fn idle(&self) -> MutexGuard<'_, Option<f64>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long to wait before sending the next part of `bytes`.
    pub(crate) fn pause(&self, bytes: usize) -> Duration {
        if !self.activity.is_busy() {
            return Duration::ZERO;
        }
        let idle = self.idle().unwrap_or(FIRST_IDLE_BYTES_PER_S);
        self.slots.pause(bytes, idle * BUSY_SHARE)
    }

    /// Learns from `bytes` that went out in `took` without any pause.
    pub(crate) fn measured(&self, bytes: usize, took: Duration) {
        let rate = bytes as f64 / took.as_secs_f64().max(1e-6);
        let mut idle = self.idle();
        *idle = Some(idle.map_or(rate, |old| 0.7 * old + 0.3 * rate));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_activity_until_it_is_done() {
        let activity = Activity::new();
        assert!(!activity.is_busy());
        let (first, second) = (activity.begin(), activity.clone().begin());
        drop(first);
        assert!(activity.is_busy());
        // However long it takes.
        activity.0.last.store(0, Ordering::Relaxed);
        assert!(activity.is_busy());
        drop(second);
        activity.0.last.store(0, Ordering::Relaxed);
        assert!(!activity.is_busy());
    }

    #[test]
    fn while_dispatches_are_in_work_a_quarter_is_left() {
        let activity = Activity::new();
        let pacer = Pacer::new(activity.clone());
        pacer.measured(100_000_000, Duration::from_secs(1));
        assert_eq!(
            (0..100).map(|_| pacer.pause(1 << 18)).max(),
            Some(Duration::ZERO),
            "nobody is in the way"
        );
        let _working = activity.begin();
        let begun = Instant::now();
        let last = (0..=100).map(|_| pacer.pause(250_000)).last().unwrap();
        // A hundred slots of 10 ms lie before the last one; the first began after `begun`.
        assert!(last + begun.elapsed() >= Duration::from_millis(1000), "{last:?}");
        assert!(last <= Duration::from_millis(1000), "{last:?}");
    }

    #[test]
    fn no_limit_is_no_wait_and_an_absurd_one_is_bounded() {
        let slots = Slots::new();
        assert_eq!((0..9).map(|_| slots.pause(1 << 30, 0.0)).max(), Some(Duration::ZERO));
        slots.pause(1 << 30, 1e-9);
        assert!(slots.pause(1, 1e-9) <= LONGEST_PAUSE);
    }
}
