//! Gives memory back before the system runs out of it, and takes it again when there is plenty.
//!
//! Once a second the watch looks at what is left: within the memory cgroup (version 1 or 2) and its
//! ancestors, and on the machine. Where the kernel reports pressure (PSI), tasks that stall for memory count
//! as well, whatever is left. What the rest of the process was promised and has not taken yet (a long prompt's
//! buffers, a cache that grows) counts as taken. The budget of the store shrinks at once by what is missing and grows slowly,
//! a little at a time, after some seconds of plenty, never beyond what the store was opened with.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::LocalStore;
use crate::machine::{self, Memory};
use crate::size::Size;

const INTERVAL: Duration = Duration::from_secs(1);

/// Memory is short below this part of the total (of the limit, where a cgroup sets one).
const SHORT_PART: u64 = 50;
/// The budget grows where more than this many times as much is left.
const PLENTY: u64 = 3;
/// Share of the last ten seconds in which all tasks stalled for memory, in per cent, that calls for less.
const STALLED_PERCENT: f64 = 5.0;
/// Stalls are answered by giving back this part.
const STALL_PART: usize = 16;
/// Looks in a row with plenty of memory before the budget grows.
const CALM_LOOKS: u32 = 10;
/// The budget grows by this part of the whole at a time.
const GROWTH_PART: usize = 32;

/// A watch over a store's memory; dropping it ends it.
pub struct MemoryWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWatch {
    /// Watches for as long as the store lives. `other_bytes` is what the process may take beside the store's
    /// records, 0 where nobody knows. Where no thread can be started, nobody watches.
    pub fn start(store: &Arc<LocalStore>, other_bytes: u64) -> Self {
        let watched = Arc::downgrade(store);
        let look = move || {
            let records = watched.upgrade().map_or(0, |store| store.ram_taken() as u64);
            let unclaimed = machine::resident_bytes().map_or(0, |all| unclaimed(other_bytes, all, records));
            let mut memory = machine::memory();
            memory.available_bytes = memory.available_bytes.saturating_sub(unclaimed);
            Look { memory, stalled_percent: machine::memory_stall_percent() }
        };
        Self::start_with(store, INTERVAL, look)
    }

    fn start_with(
        store: &Arc<LocalStore>,
        interval: Duration,
        mut look: impl FnMut() -> Look + Send + 'static,
    ) -> Self {
        let (stop, stopped) = channel::<()>();
        let store: Weak<LocalStore> = Arc::downgrade(store);
        let run = move || {
            let mut calm = 0;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                let Some(store) = store.upgrade() else { return };
                adjust(&store, &look(), &mut calm);
            }
        };
        let thread = std::thread::Builder::new().name("memory-watch".into()).spawn(run);
        if let Err(error) = &thread {
            tracing::warn!(%error, "no thread watches memory; the budget stays as it is");
        }
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it has nothing to tell any more.
            let _ = thread.join();
        }
    }
}

/// What is seen at one moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    memory: Memory,
    stalled_percent: Option<f64>,
}

/// What of `promised` bytes a process with `resident` bytes, `records` of them the store's, has yet to take.
fn unclaimed(promised: u64, resident: u64, records: u64) -> u64 {
    promised.saturating_sub(resident.saturating_sub(records))
}

fn adjust(store: &LocalStore, look: &Look, calm: &mut u32) {
    let (limit, budget) = (store.ram_limit(), store.ram_capacity());
    let next = next_limit(limit, budget, look, calm);
    if next == limit {
        return;
    }
    store.set_ram_limit(next);
    let next = store.ram_limit();
    if next < limit {
        let (from, to) = (Size(limit as u64), Size(next as u64));
        tracing::warn!(%from, %to, "memory is short, the expert cache gives some back");
    }
}

/// The budget after this look.
fn next_limit(limit: usize, budget: usize, look: &Look, calm: &mut u32) -> usize {
    let Memory { total_bytes, available_bytes, .. } = look.memory;
    let short = total_bytes / SHORT_PART;
    let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let stalled = look.stalled_percent.is_some_and(|percent| percent > STALLED_PERCENT);
    if total_bytes > 0 && available_bytes < short {
        *calm = 0;
        // Somewhat more than is missing, so that the next look does not find the same.
        return limit.saturating_sub(bytes(2 * short - available_bytes));
    }
    if stalled {
        *calm = 0;
        return limit - limit / STALL_PART;
    }
    if limit >= budget || available_bytes < PLENTY * short {
        *calm = 0;
        return limit;
    }
    *calm += 1;
    if *calm < CALM_LOOKS {
        return limit;
    }
    let growth = (budget / GROWTH_PART).min(bytes((available_bytes - 2 * short) / 2));
    limit.saturating_add(growth).min(budget)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::experts::testing::MemorySource;
    use crate::kernels::Kernels;
    use crate::profile::NumericProfile;

    #[test]
    fn promised_memory_counts_until_it_is_taken() {
        assert_eq!(unclaimed(100, 340, 300), 60);
        assert_eq!(unclaimed(100, 500, 300), 0);
        assert_eq!(unclaimed(0, 10, 20), 0);
    }

    fn look(available_bytes: u64) -> Look {
        let memory = Memory { total_bytes: 1000, available_bytes, cgroup_limit_bytes: None };
        Look { memory, stalled_percent: None }
    }

    #[test]
    fn what_is_missing_is_given_back_at_once() {
        let mut calm = 7;
        assert_eq!(next_limit(500, 600, &look(5), &mut calm), 500 - 35);
        assert_eq!(calm, 0);
        assert_eq!(next_limit(20, 600, &look(0), &mut calm), 0);
        assert_eq!(next_limit(500, 600, &look(20), &mut calm), 500);
    }

    #[test]
    fn stalls_count_whatever_is_left() {
        let stalled = Look { stalled_percent: Some(20.0), ..look(900) };
        assert_eq!(next_limit(480, 600, &stalled, &mut 0), 450);
    }

    #[test]
    fn the_budget_comes_back_slowly_and_not_beyond_what_it_was() {
        let mut calm = 0;
        let mut limit = 500;
        for _ in 0..9 {
            limit = next_limit(limit, 560, &look(200), &mut calm);
        }
        assert_eq!(limit, 500, "memory has been plenty for nine looks only");
        for _ in 0..10 {
            limit = next_limit(limit, 560, &look(200), &mut calm);
        }
        assert_eq!(limit, 560);
        assert_eq!(next_limit(500, 560, &look(59), &mut 100), 500, "neither short nor plenty");
    }

    #[test]
    fn a_store_shrinks_under_pressure_and_grows_again() {
        let source = Arc::new(MemorySource::new(12, 128, 64));
        let largest = source.layout.max_record_bytes();
        let store = LocalStore::new(source, Kernels::best(), NumericProfile::default(), 6 * largest).unwrap();
        let (store, budget) = (Arc::new(store), 6 * largest);
        let total = 20 * largest as u64;
        let available = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&available);
        let probe = move || Look {
            memory: Memory {
                total_bytes: total,
                available_bytes: seen.load(Ordering::Relaxed),
                cgroup_limit_bytes: None,
            },
            stalled_percent: None,
        };
        let watch = MemoryWatch::start_with(&store, Duration::from_millis(1), probe);
        let deadline = Instant::now() + Duration::from_secs(20);
        while store.ram_limit() != largest {
            assert!(Instant::now() < deadline, "the budget did not shrink to one record");
            std::thread::yield_now();
        }
        available.store(total, Ordering::Relaxed);
        while store.ram_limit() != budget {
            assert!(Instant::now() < deadline, "the budget did not come back");
            std::thread::yield_now();
        }
        drop(watch);
    }
}
