//! A node as dispatch sees it: what it can compute, when, and the dispatches on their way.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use prost::Message as _;
use shimmer_common::experts::ExpertId;
use shimmer_proto::v1;

use super::super::latency::{Cost, Machine, Patience};
use super::super::owed::Event;
use super::super::pace::Expected;
use super::{Inner, Node, Status};

/// Whether a node should be given work now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Standing {
    /// Yes.
    Good,
    /// An answer takes longer than usual: only where nobody else can do it.
    Late,
    /// It missed a deadline: only as a last hope.
    Suspect,
    /// It cannot be.
    Away,
}

/// What a node can do for a layer.
pub(in super::super) struct Offer {
    pub(in super::super) standing: Standing,
    /// For each expert asked about, whether the node holds it.
    pub(in super::super) holds: Vec<bool>,
    /// Whether it can be expected to have the expert in memory or to be able to read it.
    pub(in super::super) reads: Vec<bool>,
    /// Whether it has the expert in memory, as far as is known.
    pub(in super::super) resident: Vec<bool>,
    pub(in super::super) expected: Expected,
}

impl Node {
    /// What the node can do for these experts with about `rows` rows each.
    pub(in super::super) fn offer(
        &self,
        layer: u16,
        experts: &[u16],
        rows: usize,
        record_bytes: usize,
    ) -> Offer {
        let mut inner = self.lock();
        let now = Instant::now();
        self.expire(&mut inner, now);
        let ids = || experts.iter().map(|&index| ExpertId { layer, index });
        Offer {
            standing: inner.standing(now),
            holds: ids().map(|id| inner.held.contains(id)).collect(),
            reads: ids().map(|id| inner.resident.contains(id) || inner.disk.reads(id, now)).collect(),
            resident: ids().map(|id| inner.resident.contains(id)).collect(),
            expected: inner.owed.pace.expected(
                rows,
                record_bytes,
                inner.measurement.as_ref().map(|m| m.disk_bytes_per_s),
            ),
        }
    }

    /// Marks what is overdue although nobody waits for it any more.
    pub(super) fn expire(&self, inner: &mut Inner, now: Instant) {
        if let Some((wait, count)) = inner.owed.expire(now) {
            self.failures.fetch_add(count, Ordering::Relaxed);
            self.settle(inner, &format!("no answer within {} ms", wait.as_millis()));
        }
    }

    /// Whether the node missed a deadline and has not made up for it.
    pub(in super::super) fn is_suspect(&self) -> bool {
        self.lock().status == Status::Suspect
    }

    /// How long to wait for a dispatch of this cost.
    pub(in super::super) fn patience(&self, cost: Cost) -> Patience {
        let inner = self.lock();
        let machine = inner.measurement.as_ref().map(Machine::measured).unwrap_or_default();
        inner.owed.latency.patience(cost, &machine, inner.owed.reads())
    }

    /// Sends a dispatch; its bytes, or `None` when the node went away meanwhile.
    pub(in super::super) fn send(
        &self,
        layer: u16,
        dispatch: v1::Dispatch,
        cost: Cost,
        patience: Patience,
        events: &mpsc::Sender<Event>,
    ) -> Option<usize> {
        let mut inner = self.lock();
        let stream = inner.stream.clone()?;
        let id = dispatch.id;
        let experts = dispatch.experts.iter().filter_map(|&e| u16::try_from(e).ok()).collect();
        inner.owed.sent(id, layer, experts, cost, patience, events.clone());
        let message = v1::ToNode { message: Some(v1::to_node::Message::Dispatch(dispatch)) };
        let bytes = message.encoded_len();
        if stream.send(message).is_err() {
            inner.owed.forget(id);
            return None;
        }
        Some(bytes)
    }

    /// An answer came, in time or not.
    pub(in super::super) fn answered(&self, reply: v1::Reply) {
        let mut inner = self.lock();
        let Some(answered) = inner.owed.answered(&reply) else { return };
        if let Some(v1::reply::Outcome::Failure(failure)) = &reply.outcome {
            // A missed deadline has been counted already, and who gave up a dispatch gets no more.
            let counts = !answered.missed && !answered.cancelled;
            self.failures.fetch_add(u64::from(counts), Ordering::Relaxed);
            let index = failure.expert.and_then(|e| u16::try_from(e).ok());
            if let Some(index) = index {
                inner.lacks(ExpertId { layer: answered.layer, index }, failure.code());
            }
        }
        if let Some(v1::reply::Outcome::Sums(_)) = &reply.outcome {
            let layer = answered.layer;
            for &index in &answered.experts {
                inner.resident.insert(ExpertId { layer, index });
                inner.disk.computed(ExpertId { layer, index });
            }
        }
        if answered.missed {
            self.settle(&mut inner, "");
        }
        answered.tell(reply);
    }

    /// A deadline passed: the node is suspect until it answers, and need not begin this any more.
    pub(in super::super) fn missed(&self, id: u64, waited: Duration) {
        let mut inner = self.lock();
        if inner.owed.missed(id) {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.settle(&mut inner, &format!("no answer within {} ms", waited.as_millis()));
        }
    }

    /// Nobody waits for `id` any more. It stays owed: a node that never answers stands still.
    pub(in super::super) fn cancel(&self, id: u64) {
        let mut inner = self.lock();
        if inner.owed.cancelled(id)
            && let Some(stream) = &inner.stream
        {
            let message = v1::to_node::Message::Cancel(v1::Cancel { id });
            let _ = stream.send(v1::ToNode { message: Some(message) });
        }
    }

    /// Whether hints for this node may save time: it reads from its disk and takes them.
    pub(in super::super) fn wants_hints(&self) -> bool {
        let inner = self.lock();
        let now = Instant::now();
        inner.vitals.takes_hints()
            && inner.owed.is_disk_bound()
            && inner.standing(now) == Standing::Good
            && !inner.disk.is_sick(now)
    }

    /// Notes what the node measured of its own machine.
    pub(in super::super) fn set_measurement(&self, measurement: v1::Measurement) {
        self.lock().measurement = Some(measurement);
    }

    /// A hint was sent: until the node says what is in its memory, these experts are taken to be.
    pub(in super::super) fn will_hold(&self, hint: &v1::Hint) {
        let mut inner = self.lock();
        let Ok(layer) = u16::try_from(hint.layer) else { return };
        let now = Instant::now();
        for index in hint.experts.iter().filter_map(|&e| u16::try_from(e).ok()) {
            let id = ExpertId { layer, index };
            if inner.disk.reads(id, now) {
                inner.resident.insert(id);
            }
        }
    }
}

impl Inner {
    /// The node cannot compute `id` for a reason that may be gone later.
    fn lacks(&mut self, id: ExpertId, code: v1::ErrorCode) {
        match code {
            // Until the node says again what it holds, others compute this expert.
            v1::ErrorCode::NotHeld | v1::ErrorCode::Damaged => self.held.remove(id),
            v1::ErrorCode::Read => {
                self.resident.remove(id);
                if let Some(pause) = self.disk.failed(id, Instant::now()) {
                    tracing::warn!(
                        node = self.name,
                        seconds = pause.as_secs(),
                        "its disk fails; only what it has in memory is asked of it for a while"
                    );
                }
            }
            _ => {}
        }
    }

    fn standing(&self, now: Instant) -> Standing {
        match self.status {
            Status::Ready | Status::Syncing if self.owed.is_late(now) => Standing::Late,
            Status::Ready | Status::Syncing => Standing::Good,
            Status::Suspect if self.stream.is_some() => Standing::Suspect,
            _ => Standing::Away,
        }
    }
}
