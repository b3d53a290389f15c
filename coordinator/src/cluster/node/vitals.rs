//! Signs of life of a node: pulses, their round trips, what they say, and how its state changed.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shimmer_node::wire::clean_text;
use shimmer_proto::v1;

use super::{Inner, Node, Status};

/// How often a node is pinged.
pub(in crate::cluster) const PING_EVERY: Duration = Duration::from_millis(500);
/// Pings without an answer after which a node is suspect (two pulses in a row are overdue) …
const SUSPECT_AFTER: u32 = 3;
/// … and after which its connection is given up: nothing else notices a pulled cable.
pub(in crate::cluster) const LOST_AFTER: u32 = 10;
/// Round trips and state changes remembered.
const KEPT_RTTS: usize = 128;
const KEPT_CHANGES: usize = 32;

/// A change of a node's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateChange {
    /// When, milliseconds since 1970.
    pub unix_ms: u64,
    /// State before.
    pub from: String,
    /// State after.
    pub to: String,
    /// Reason, for people; may be empty.
    pub why: String,
}

/// What is known of a node's life.
#[derive(Default)]
pub(super) struct Vitals {
    /// Pings sent since the latest pulse.
    strikes: u32,
    /// When the latest pulse came.
    latest: Option<Instant>,
    /// The process that pulses, while its stream is open.
    instance: Option<Vec<u8>>,
    /// Why the node does not work for this coordinator; empty when it does.
    refused: String,
    load: Option<v1::Load>,
    rtts_us: VecDeque<u32>,
    changes: VecDeque<StateChange>,
}

impl Vitals {
    pub(super) fn is_overdue(&self) -> bool {
        self.strikes >= SUSPECT_AFTER
    }

    /// A new connection has a fresh chance.
    pub(super) fn forgive(&mut self) {
        self.strikes = 0;
    }

    /// Whether another process than `instance` is alive under this identity.
    pub(super) fn is_twin(&self, instance: &[u8]) -> bool {
        let alive = self.latest.is_some_and(|at| at.elapsed() < PING_EVERY * SUSPECT_AFTER);
        !instance.is_empty() && alive && self.instance.as_ref().is_some_and(|ours| ours != instance)
    }

    pub(super) fn note_change(&mut self, from: Status, to: Status, why: &str) {
        self.changes.push_back(StateChange {
            unix_ms: shimmer_node::tls::unix_millis(),
            from: from.name().to_owned(),
            to: to.name().to_owned(),
            why: why.to_owned(),
        });
        if self.changes.len() > KEPT_CHANGES {
            self.changes.pop_front();
        }
    }

    pub(super) fn changes(&self) -> Vec<StateChange> {
        self.changes.iter().cloned().collect()
    }

    /// Round trip of pings in microseconds at a quantile; 0 before the first.
    pub(super) fn rtt_us(&self, quantile: f64) -> u32 {
        let mut sorted: Vec<u32> = self.rtts_us.iter().copied().collect();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * quantile).round() as usize).copied().unwrap_or(0)
    }

    /// What the node last said it is doing.
    pub(super) fn load(&self) -> Option<v1::Load> {
        self.load.clone()
    }

    /// Whether the node takes hints, as far as it has said.
    pub(super) fn takes_hints(&self) -> bool {
        self.load.as_ref().is_none_or(|load| load.takes_hints)
    }

    /// Milliseconds since the latest pulse.
    pub(super) fn pulse_age_ms(&self) -> Option<u64> {
        self.latest.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

impl Node {
    /// A pulse came; `first` of its stream.
    pub(in crate::cluster) fn pulsed(&self, pulse: v1::Pulse, rtt: Duration, first: bool) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let vitals = &mut inner.vitals;
        let was_overdue = vitals.is_overdue();
        let welcome_again = !vitals.refused.is_empty() && pulse.refused.is_empty();
        vitals.strikes = 0;
        vitals.latest = Some(Instant::now());
        vitals.instance = Some(pulse.instance.to_vec());
        vitals.refused = clean_text(&pulse.refused, 300);
        if let Some(mut load) = pulse.load {
            if let Ok(resident) = inner.held.another(&std::mem::take(&mut load.resident)) {
                inner.resident = resident;
            }
            inner.measurement = load.measurement.or(inner.measurement);
            vitals.load = Some(load);
        }
        vitals.rtts_us.push_back(u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX));
        if vitals.rtts_us.len() > KEPT_RTTS {
            vitals.rtts_us.pop_front();
        }
        if !inner.vitals.refused.is_empty() && inner.stream.is_some() {
            let why = inner.vitals.refused.clone();
            self.cut(inner, why);
        }
        if was_overdue {
            self.settle(inner, "");
        }
        if inner.stream.is_none() && (first || welcome_again) {
            // It listens: no need to wait for the next attempt.
            self.wake.notify_one();
        }
    }

    /// A ping went out, or should have.
    pub(in crate::cluster) fn count_strike(&self) {
        let mut inner = self.lock();
        if inner.stream.is_none() {
            return;
        }
        inner.vitals.strikes = inner.vitals.strikes.saturating_add(1);
        let silent = PING_EVERY * inner.vitals.strikes;
        if inner.vitals.strikes == SUSPECT_AFTER {
            self.settle(&mut inner, &format!("no pulse for {} ms", silent.as_millis()));
        } else if inner.vitals.strikes >= LOST_AFTER {
            self.cut(&mut inner, format!("no pulse for {} s", silent.as_secs()));
        }
    }

    /// The stream of pulses ended.
    pub(in crate::cluster) fn pulse_ended(&self) {
        self.lock().vitals.instance = None;
    }

    /// Ends the connection for a reason.
    fn cut(&self, inner: &mut Inner, why: String) {
        inner.cut_why = why;
        self.cuts.send_modify(|n| *n += 1);
    }

    /// Stops working with the node for good.
    pub(in crate::cluster) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
        let mut inner = self.lock();
        self.cut(&mut inner, "it was revoked or removed".to_owned());
        self.wake.notify_one();
    }

    pub(in crate::cluster) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Why the connection was cut.
    pub(in crate::cluster) fn cut_why(&self) -> String {
        self.lock().cut_why.clone()
    }

    /// Notes what dialling came to: the address that answered, or why none did.
    pub(in crate::cluster) fn dialled(&self, outcome: Result<&str, String>) {
        let mut inner = self.lock();
        match outcome {
            Ok(address) => {
                inner.reached = Some(address.to_owned());
                inner.unreachable.clear();
            }
            Err(why) => inner.unreachable = why,
        }
    }

    /// Why the node cannot be dialled; empty when it can, or nobody tried.
    pub(in crate::cluster) fn unreachable(&self) -> String {
        self.lock().unreachable.clone()
    }

    /// Whether work can be sent at all.
    pub(in crate::cluster) fn is_connected(&self) -> bool {
        self.lock().stream.is_some()
    }

    /// Warns once when the clocks drift apart.
    pub(in crate::cluster) fn note_skew(&self, skew: Option<String>) {
        let mut inner = self.lock();
        if let (Some(skew), false) = (&skew, inner.skewed) {
            tracing::warn!("{skew}");
        }
        inner.skewed = skew.is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_recent_round_trips() {
        let mut vitals = Vitals::default();
        assert_eq!(vitals.rtt_us(0.5), 0);
        vitals.rtts_us.extend(1..=101);
        assert_eq!((vitals.rtt_us(0.5), vitals.rtt_us(0.95), vitals.rtt_us(1.0)), (51, 96, 101));
    }

    #[test]
    fn a_twin_is_another_process_that_lives_now() {
        let mut vitals = Vitals { instance: Some(b"old".to_vec()), ..Vitals::default() };
        assert!(!vitals.is_twin(b"new"), "it never pulsed");
        vitals.latest = Some(Instant::now());
        assert!(vitals.is_twin(b"new") && !vitals.is_twin(b"old") && !vitals.is_twin(b""));
        vitals.instance = None;
        assert!(!vitals.is_twin(b"new"), "its stream has ended");
    }

    #[test]
    fn only_the_latest_changes_are_kept() {
        let mut vitals = Vitals::default();
        for i in 0..100 {
            vitals.note_change(Status::Ready, Status::Lost, &i.to_string());
        }
        assert_eq!(vitals.changes().len(), KEPT_CHANGES);
        assert_eq!(vitals.changes().last().map(|c| c.why.as_str()), Some("99"));
    }
}
