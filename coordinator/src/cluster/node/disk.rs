//! What a node's disk failed to read, and when to ask for it again.
//!
//! A failed read says nothing for ever: a cable comes loose, a USB disk goes to sleep. One expert that
//! could not be read is left out for a while; several in a short time mean that the disk is sick, and then
//! only what is in the node's memory is asked of it. Both pauses double while it goes on.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use shimmer_common::experts::ExpertId;

/// For how long an expert is left out after a failed read, at first and at most.
const EXPERT_PAUSE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(300));
/// The same for a whole disk.
const DISK_PAUSE: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(120));
/// So many different experts that fail within this time make a disk sick.
const SICK_EXPERTS: usize = 3;
const SICK_WITHIN: Duration = Duration::from_secs(10);

/// A time without questions.
#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Pause {
    /// The pause that follows `earlier`: twice as long, unless that one is long past.
    fn after(earlier: Option<Pause>, (first, longest): (Duration, Duration), now: Instant) -> Self {
        let recent = earlier.filter(|pause| now < pause.until + longest);
        let length = recent.map_or(first, |pause| (pause.length * 2).min(longest));
        Self { until: now + length, length }
    }
}

/// The reads of one node.
#[derive(Default)]
pub(super) struct Disk {
    unread: HashMap<ExpertId, Pause>,
    /// Recent failures of different experts, oldest first.
    recent: VecDeque<(Instant, ExpertId)>,
    sick: Option<Pause>,
    failures: u64,
}

impl Disk {
    /// A read failed. Returns for how long the disk is left alone when this made it sick.
    pub(super) fn failed(&mut self, id: ExpertId, now: Instant) -> Option<Duration> {
        self.failures += 1;
        // What had been sent before the pause began tells nothing new.
        if self.is_paused(id, now) {
            return None;
        }
        let pause = Pause::after(self.unread.get(&id).copied(), EXPERT_PAUSE, now);
        self.unread.insert(id, pause);
        if self.is_sick(now) {
            return None;
        }
        self.recent.retain(|&(at, other)| now < at + SICK_WITHIN && other != id);
        self.recent.push_back((now, id));
        if self.recent.len() < SICK_EXPERTS {
            return None;
        }
        self.recent.clear();
        let pause = Pause::after(self.sick, DISK_PAUSE, now);
        self.sick = Some(pause);
        Some(pause.length)
    }

    /// The node computed `id`.
    pub(super) fn computed(&mut self, id: ExpertId) {
        self.unread.remove(&id);
    }

    /// Whether reading `id` failed a short time ago.
    pub(super) fn is_paused(&self, id: ExpertId, now: Instant) -> bool {
        self.unread.get(&id).is_some_and(|pause| now < pause.until)
    }

    /// Whether reads are not to be asked for at all.
    pub(super) fn is_sick(&self, now: Instant) -> bool {
        self.sick.is_some_and(|pause| now < pause.until)
    }

    /// Whether the node is likely to be able to read `id`.
    pub(super) fn reads(&self, id: ExpertId, now: Instant) -> bool {
        !self.is_sick(now) && !self.is_paused(id, now)
    }

    /// Reads that failed so far.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u16) -> ExpertId {
        ExpertId { layer: 3, index }
    }

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn an_expert_that_could_not_be_read_is_asked_for_again_later() {
        let (mut disk, start) = (Disk::default(), Instant::now());
        disk.failed(id(0), start);
        assert!(!disk.reads(id(0), after(start, 19)) && disk.reads(id(0), after(start, 20)));
        assert!(disk.reads(id(1), start), "another one");
        disk.failed(id(0), after(start, 20));
        assert!(!disk.reads(id(0), after(start, 59)) && disk.reads(id(0), after(start, 60)), "twice as long");
        disk.computed(id(0));
        disk.failed(id(0), after(start, 60));
        assert!(disk.reads(id(0), after(start, 80)), "as at first");
        assert_eq!(disk.failures(), 3);
    }

    #[test]
    fn pauses_end_and_have_a_longest() {
        let (mut disk, mut now) = (Disk::default(), Instant::now());
        for _ in 0..10 {
            disk.failed(id(0), now);
            now += EXPERT_PAUSE.1;
            assert!(disk.reads(id(0), now));
        }
    }

    #[test]
    fn several_failures_in_a_short_time_make_a_disk_sick() {
        let (mut disk, start) = (Disk::default(), Instant::now());
        assert_eq!(disk.failed(id(0), start), None);
        assert_eq!(disk.failed(id(0), start), None, "the same one");
        assert_eq!(disk.failed(id(1), start), None);
        assert_eq!(disk.failed(id(2), after(start, 1)), Some(DISK_PAUSE.0));
        assert!(!disk.reads(id(9), after(start, 15)) && disk.reads(id(9), after(start, 16)));
        for index in 3..5 {
            assert_eq!(disk.failed(id(index), after(start, 17)), None);
        }
        assert_eq!(disk.failed(id(5), after(start, 17)), Some(DISK_PAUSE.0 * 2));
        assert!(disk.is_sick(after(start, 46)) && !disk.is_sick(after(start, 47)));
    }

    #[test]
    fn failures_far_apart_do_not() {
        let (mut disk, start) = (Disk::default(), Instant::now());
        for index in 0..20 {
            assert_eq!(disk.failed(id(index), after(start, 6 * u64::from(index))), None);
        }
    }
}
