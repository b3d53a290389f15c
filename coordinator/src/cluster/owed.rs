//! The answers a node owes, and what its answers taught.
//!
//! A dispatch stays owed until it is answered or the connection ends, whether anybody still waits for the
//! answer or not: one that is overdue shows that the node stands still.

use std::collections::HashMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use shimmer_proto::v1;

use super::latency::{Cost, Latency, Patience};
use super::pace::Pace;

/// Weight of the newest answer in the share of experts that had to be read.
const NEWEST: f64 = 0.1;
/// A smaller share is none: everything asked for is in memory.
const FEW: f64 = 0.005;

/// What became of a dispatch.
pub(super) struct Event {
    pub(super) id: u64,
    /// From sending to the answer's arrival.
    pub(super) round_trip: Duration,
    /// The answer, or why there will be none.
    pub(super) outcome: Result<v1::Reply, String>,
}

struct Pending {
    events: mpsc::Sender<Event>,
    sent: Instant,
    cost: Cost,
    layer: u16,
    experts: Vec<u16>,
    patience: Patience,
    /// The deadline has passed.
    missed: bool,
    /// Nobody waits for it any more.
    cancelled: bool,
}

/// An answer and the dispatch it belongs to.
pub(super) struct Answered {
    pub(super) layer: u16,
    pub(super) experts: Vec<u16>,
    /// It came too late to count as the node's answer.
    pub(super) missed: bool,
    pub(super) cancelled: bool,
    events: mpsc::Sender<Event>,
    round_trip: Duration,
}

impl Answered {
    /// Tells whoever waits. Late answers are passed on as well: the work may still be open.
    pub(super) fn tell(self, reply: v1::Reply) {
        // The receiver is gone when its whole batch is done.
        let event = Event { id: reply.id, round_trip: self.round_trip, outcome: Ok(reply) };
        let _ = self.events.send(event);
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Owed {
    pending: HashMap<u64, Pending>,
    pub(super) latency: Latency,
    pub(super) pace: Pace,
    /// Share of recent experts that had to be read; `None` before the first answer.
    misses: Option<f64>,
}

impl Owed {
    pub(super) fn sent(
        &mut self,
        id: u64,
        layer: u16,
        experts: Vec<u16>,
        cost: Cost,
        patience: Patience,
        events: mpsc::Sender<Event>,
    ) {
        let sent = Instant::now();
        let pending =
            Pending { events, sent, cost, layer, experts, patience, missed: false, cancelled: false };
        self.pending.insert(id, pending);
    }

    /// It was not sent after all.
    pub(super) fn forget(&mut self, id: u64) {
        self.pending.remove(&id);
    }

    /// Takes an answer in; `None` when nothing of that id is owed.
    pub(super) fn answered(&mut self, reply: &v1::Reply) -> Option<Answered> {
        let Pending { events, sent, cost, layer, experts, patience, missed, cancelled } =
            self.pending.remove(&reply.id)?;
        let round_trip = sent.elapsed();
        if let Some(v1::reply::Outcome::Sums(_)) = &reply.outcome {
            if missed {
                self.latency.record_missed(cost, round_trip, patience.deadline);
            } else {
                self.latency.record(cost, round_trip);
            }
            let busy = Duration::from_micros(u64::from(reply.disk_us) + u64::from(reply.compute_us));
            let queued = Duration::from_micros(reply.queue_us.into());
            // One that stood still for once is not slow.
            let wire = round_trip.saturating_sub(busy + queued).min(patience.hedge * 2);
            let micros = |us: u32| Duration::from_micros(us.into()).min(round_trip);
            self.pace.record(cost, wire, micros(reply.disk_us), reply.misses, micros(reply.compute_us));
            let share = f64::from(reply.misses) / cost.experts.max(1) as f64;
            let old = self.misses.unwrap_or(share);
            self.misses = Some(old + NEWEST * (share.min(1.0) - old));
        }
        Some(Answered { layer, experts, missed, cancelled, events, round_trip })
    }

    /// Marks `id` as missed; false when it is not owed or was marked before.
    pub(super) fn missed(&mut self, id: u64) -> bool {
        self.pending.get_mut(&id).is_some_and(|pending| !std::mem::replace(&mut pending.missed, true))
    }

    /// Marks `id` as wanted by nobody; false when it is not owed.
    pub(super) fn cancelled(&mut self, id: u64) -> bool {
        self.pending.get_mut(&id).is_some_and(|pending| !std::mem::replace(&mut pending.cancelled, true))
    }

    /// Marks what is overdue and nobody watches over as missed; the longest wait of what was not before.
    pub(super) fn expire(&mut self, now: Instant) -> Option<(Duration, u64)> {
        let mut worst = None;
        let mut count = 0;
        for pending in self.pending.values_mut().filter(|p| p.cancelled && !p.missed) {
            if pending.sent + pending.patience.deadline <= now {
                pending.missed = true;
                count += 1;
                worst = worst.max(Some(pending.patience.deadline));
            }
        }
        worst.map(|wait| (wait, count))
    }

    /// Whether a deadline was missed and is not made up for.
    pub(super) fn is_overdue(&self) -> bool {
        self.pending.values().any(|pending| pending.missed)
    }

    /// Whether an answer takes longer than usual.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.pending.values().any(|pending| pending.sent + pending.patience.hedge <= now)
    }

    /// Whether the node reads records from its disk; assumed before anything is known.
    pub(super) fn reads(&self) -> bool {
        self.misses.is_none_or(|share| share > FEW)
    }

    /// Whether it is known to.
    pub(super) fn is_disk_bound(&self) -> bool {
        self.misses.is_some_and(|share| share > FEW)
    }

    /// The connection ended: whoever waits is told why.
    pub(super) fn drop_all(&mut self, why: &str) {
        for (id, pending) in self.pending.drain() {
            let round_trip = pending.sent.elapsed();
            let _ = pending.events.send(Event { id, round_trip, outcome: Err(why.to_owned()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost { experts: 2, entries: 2, record_bytes: 0, touched_bytes: 0 };

    fn owed(deadline: Duration) -> (Owed, mpsc::Receiver<Event>) {
        let (sender, events) = mpsc::channel();
        let mut owed = Owed::default();
        owed.sent(7, 3, vec![1, 2], COST, Patience { hedge: deadline, deadline }, sender);
        (owed, events)
    }

    fn reply(id: u64, misses: u32) -> v1::Reply {
        let outcome = Some(v1::reply::Outcome::Sums(Vec::new().into()));
        v1::Reply { id, outcome, misses, ..v1::Reply::default() }
    }

    #[test]
    fn an_answer_is_taken_once_and_unknown_ids_are_nothing() {
        let (mut owed, events) = owed(Duration::from_secs(60));
        assert!(owed.answered(&reply(8, 0)).is_none());
        owed.answered(&reply(7, 1)).unwrap().tell(reply(7, 1));
        assert!(owed.answered(&reply(7, 1)).is_none());
        assert_eq!(events.try_iter().map(|event| event.id).collect::<Vec<_>>(), [7]);
        assert!(owed.is_disk_bound());
    }

    #[test]
    fn what_nobody_waits_for_becomes_overdue_by_itself_and_what_is_watched_does_not() {
        let (mut owed, _events) = owed(Duration::ZERO);
        let now = Instant::now();
        assert!(owed.is_late(now) && owed.expire(now).is_none() && !owed.is_overdue());
        assert!(owed.cancelled(7) && !owed.cancelled(7));
        assert_eq!(owed.expire(now), Some((Duration::ZERO, 1)));
        assert!(owed.is_overdue() && owed.expire(now).is_none() && !owed.missed(7));
        assert!(owed.answered(&reply(7, 0)).unwrap().missed && !owed.is_overdue());
    }

    #[test]
    fn a_lost_connection_is_told_to_everybody_who_waits() {
        let (mut owed, events) = owed(Duration::from_secs(60));
        owed.drop_all("gone");
        assert_eq!(events.try_recv().unwrap().outcome.unwrap_err(), "gone");
        assert!(owed.pending.is_empty());
    }
}
