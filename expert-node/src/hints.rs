//! Hints of coming layers: what a node reads ahead, and when it would rather not.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shimmer_common::experts::{ExpertCompute as _, LocalStore, Lookahead, StoreStats};

/// Time over which the disk is looked at.
const WINDOW: Duration = Duration::from_secs(1);
/// With more of the time spent on reads somebody waits for there is no slack; with less there is again.
const BUSY: f64 = 0.9;
const IDLE: f64 = 0.8;

/// Whether the disk has time for reads nobody waits for yet.
#[derive(Debug, Default)]
pub(crate) struct Slack(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    begun: Option<(Instant, StoreStats)>,
    none: bool,
}

impl Slack {
    /// Whether hints are worth taking: something is not in memory, guesses are right often enough and
    /// the disk is not busy anyway.
    pub(crate) fn takes_hints(&self, store: &LocalStore) -> bool {
        store.lookahead().depth > 0 && store.guesses_pay() && self.is_left(&store.stats(), Instant::now())
    }

    fn is_left(&self, stats: &StoreStats, now: Instant) -> bool {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((begun, before)) = window.begun else {
            window.begun = Some((now, *stats));
            return true;
        };
        let passed = now.duration_since(begun);
        if passed >= WINDOW {
            let share = demanded_share(&before, stats, passed);
            window.none = share > if window.none { IDLE } else { BUSY };
            window.begun = Some((now, *stats));
        }
        !window.none
    }
}

/// The share of `passed` in which the disk was busy with reads that were asked for.
fn demanded_share(before: &StoreStats, now: &StoreStats, passed: Duration) -> f64 {
    let read = now.bytes_read.saturating_sub(before.bytes_read) as f64;
    let guessed = |s: &StoreStats| s.prefetch_used_bytes + s.prefetch_wasted_bytes;
    let guessed = guessed(now).saturating_sub(guessed(before)) as f64;
    let busy_s = now.disk_busy_us.saturating_sub(before.disk_busy_us) as f64 / 1e6;
    if read <= 0.0 {
        return 0.0;
    }
    busy_s / passed.as_secs_f64() * ((read - guessed) / read).max(0.0)
}

/// Begins to read what a dispatch for `layer` hints at. Hints for that layer and those before end, as do
/// those of layers that are far away: they are of an earlier step.
pub(crate) fn take(store: &LocalStore, slack: &Slack, layer: u16, hints: &[Lookahead]) {
    store.end_guesses(|guessed| guessed <= layer || guessed > layer.saturating_add(FARTHEST));
    if hints.is_empty() || !slack.takes_hints(store) {
        return;
    }
    for hint in hints.iter().filter(|hint| hint.layer > layer) {
        store.prefetch(hint);
    }
}

/// Layers a hint looks ahead at most.
const FARTHEST: u16 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(read: u64, used: u64, busy_ms: u64) -> StoreStats {
        StoreStats {
            bytes_read: read,
            prefetch_used_bytes: used,
            disk_busy_us: busy_ms * 1000,
            ..StoreStats::default()
        }
    }

    #[test]
    fn a_disk_busy_with_what_was_asked_for_has_no_slack_and_one_busy_with_hints_has() {
        let slack = Slack::default();
        let start = Instant::now();
        let after = |s| start + Duration::from_secs(s);
        assert!(slack.is_left(&stats(0, 0, 0), start));
        assert!(slack.is_left(&stats(1000, 700, 1000), after(1)), "hints keep it busy");
        assert!(!slack.is_left(&stats(2000, 700, 1950), after(2)), "95 % for what was asked for");
        assert!(!slack.is_left(&stats(3000, 700, 2800), after(3)), "85 %: not yet");
        assert!(slack.is_left(&stats(4000, 700, 3500), after(4)), "70 %");
        assert!(slack.is_left(&stats(4000, 700, 3500), after(5)), "nothing was read");
    }
}
