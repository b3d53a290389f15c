//! One node: its state and the dispatches it owes.
//!
//! A node is `Joining` (never reached), `Syncing` (serves while still fetching), `Ready`, `Suspect`
//! (missed a deadline; gets no work until everything it owes has been answered) or `Lost` (no
//! connection). Links write here, dispatch reads and writes; every lock is held for microseconds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use shimmer_common::experts::{ExpertId, ExpertLayout};
use shimmer_node::wire::Held;
use shimmer_proto::v1;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use super::NodeStatus;
use super::latency::{Cost, Latency};
use super::membership::Changed;
use super::placement::Seed;

/// A node that registered within this time is alive: it registers every few seconds.
const SIGN_OF_LIFE: Duration = Duration::from_secs(8);

/// State of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Joining,
    Syncing,
    Ready,
    Suspect,
    Lost,
}

impl Status {
    pub(super) fn name(self) -> &'static str {
        match self {
            Status::Joining => "joining",
            Status::Syncing => "syncing",
            Status::Ready => "ready",
            Status::Suspect => "suspect",
            Status::Lost => "lost",
        }
    }
}

/// What became of a dispatch.
pub(super) struct Event {
    pub(super) id: u64,
    /// The answer, or why there will be none.
    pub(super) outcome: Result<v1::Reply, String>,
}

struct Pending {
    events: mpsc::Sender<Event>,
    sent: Instant,
    cost: Cost,
    layer: u16,
    /// Nobody waits for it any more; its answer proves that the node is alive.
    missed: bool,
}

struct Inner {
    name: String,
    /// Given by the user, tried first.
    fixed: Option<String>,
    /// What the node told us.
    addresses: Vec<String>,
    /// When it last did.
    registered: Option<Instant>,
    /// What it told us before that.
    replaced: Vec<String>,
    status: Status,
    since: Instant,
    /// Why the node is suspect or lost.
    why: String,
    syncing: bool,
    held: Held,
    stream: Option<UnboundedSender<v1::ToNode>>,
    pending: HashMap<u64, Pending>,
    latency: Latency,
}

/// One node.
pub(super) struct Node {
    pub(super) id: String,
    pub(super) seed: Seed,
    inner: Mutex<Inner>,
    /// Rung when there is a reason to dial at once.
    pub(super) wake: Notify,
    /// Rung when the connection must end (revoked).
    pub(super) cut: Notify,
    served: AtomicU64,
    failures: AtomicU64,
    changed: Arc<Changed>,
}

impl Node {
    /// A node nobody has reached yet.
    pub(super) fn new(
        id: &str,
        name: &str,
        addresses: &[String],
        layout: &ExpertLayout,
        changed: Arc<Changed>,
    ) -> Self {
        Self {
            id: id.to_owned(),
            seed: Seed::of(id),
            inner: Mutex::new(Inner {
                name: name.to_owned(),
                fixed: None,
                addresses: addresses.to_vec(),
                registered: None,
                replaced: Vec::new(),
                status: Status::Joining,
                since: Instant::now(),
                why: String::new(),
                syncing: true,
                held: Held::none(layout),
                stream: None,
                pending: HashMap::new(),
                latency: Latency::default(),
            }),
            wake: Notify::new(),
            cut: Notify::new(),
            served: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            changed,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn name(&self) -> String {
        self.lock().name.clone()
    }

    /// Where to dial, in order.
    pub(super) fn addresses(&self) -> Vec<String> {
        let inner = self.lock();
        inner.fixed.iter().chain(&inner.addresses).cloned().collect()
    }

    /// Notes an address the user gave.
    pub(super) fn fix_address(&self, address: String) {
        self.lock().fixed = Some(address);
        self.wake.notify_one();
    }

    /// Takes over where a node says it is. `Err` with a sentence when it goes back to an address while
    /// the one that replaced it is alive: then two processes have this identity, and would take the
    /// connection from each other for ever.
    pub(super) fn introduce(&self, name: &str, addresses: &[String]) -> Result<(), String> {
        let mut inner = self.lock();
        if inner.addresses != addresses {
            let alive = inner.registered.is_some_and(|at| at.elapsed() < SIGN_OF_LIFE);
            if alive && inner.replaced == addresses {
                return Err(format!(
                    "another process serves as node {name} at {}; a copied --data directory is the same node, so stop one of them and join it again under a new directory",
                    inner.addresses.join(", ")
                ));
            }
            inner.replaced = std::mem::replace(&mut inner.addresses, addresses.to_vec());
        }
        inner.registered = Some(Instant::now());
        inner.name = name.to_owned();
        drop(inner);
        self.wake.notify_one();
        Ok(())
    }

    /// The handshake is done.
    pub(super) fn connected(&self, stream: UnboundedSender<v1::ToNode>, held: Held, syncing: bool) {
        let mut inner = self.lock();
        inner.stream = Some(stream);
        inner.held = held;
        inner.syncing = syncing;
        self.settle(&mut inner, "");
    }

    pub(super) fn holds(&self, held: Held, syncing: bool) {
        let mut inner = self.lock();
        inner.held = held;
        inner.syncing = syncing;
        self.settle(&mut inner, "");
    }

    /// The connection ended: whoever waits is told.
    pub(super) fn lost(&self, why: &str) {
        let mut inner = self.lock();
        inner.stream = None;
        for (id, pending) in inner.pending.drain() {
            let _ = pending.events.send(Event { id, outcome: Err(why.to_owned()) });
        }
        if inner.status == Status::Joining {
            inner.why = why.to_owned();
        } else {
            self.settle(&mut inner, why);
        }
    }

    /// An answer came, in time or not.
    pub(super) fn answered(&self, reply: v1::Reply) {
        let mut inner = self.lock();
        let Some(pending) = inner.pending.remove(&reply.id) else { return };
        if let Some(v1::reply::Outcome::Failure(failure)) = &reply.outcome {
            // A missed deadline has been counted already.
            self.failures.fetch_add(u64::from(!pending.missed), Ordering::Relaxed);
            let unavailable = matches!(
                failure.code(),
                v1::ErrorCode::NotHeld | v1::ErrorCode::Read | v1::ErrorCode::Damaged
            );
            let index = failure.expert.filter(|_| unavailable).and_then(|e| u16::try_from(e).ok());
            if let Some(index) = index {
                // Until the node says again what it holds, others compute this expert.
                inner.held.remove(ExpertId { layer: pending.layer, index });
            }
        } else if !pending.missed {
            inner.latency.record(pending.cost, pending.sent.elapsed());
        }
        if pending.missed {
            self.settle(&mut inner, "");
        } else {
            // The receiver is gone when its whole batch has failed.
            let _ = pending.events.send(Event { id: reply.id, outcome: Ok(reply) });
        }
    }

    /// Derives the state from the facts.
    fn settle(&self, inner: &mut Inner, why: &str) {
        let status = if inner.stream.is_none() {
            Status::Lost
        } else if inner.pending.values().any(|p| p.missed) {
            Status::Suspect
        } else if inner.syncing {
            Status::Syncing
        } else {
            Status::Ready
        };
        if status != inner.status {
            tracing::info!(
                node = inner.name,
                id = self.id,
                from = inner.status.name(),
                to = status.name(),
                why,
                "node"
            );
            inner.status = status;
            inner.since = Instant::now();
            inner.why = why.to_owned();
        } else if status == Status::Lost {
            // Why the latest attempt failed.
            inner.why = why.to_owned();
        }
        self.changed.ring();
    }

    /// Which of a layer's experts the node can compute now.
    pub(super) fn can_compute(&self, layer: u16, experts: &[u16]) -> Vec<bool> {
        let inner = self.lock();
        let works = matches!(inner.status, Status::Ready | Status::Syncing);
        experts.iter().map(|&index| works && inner.held.contains(ExpertId { layer, index })).collect()
    }

    /// Whether the node is ready and complete.
    pub(super) fn is_ready(&self) -> bool {
        self.lock().status == Status::Ready
    }

    /// How long to wait for a dispatch of this cost.
    pub(super) fn deadline(&self, cost: Cost) -> Duration {
        self.lock().latency.deadline(cost)
    }

    /// Sends a dispatch; `false` when the node went away meanwhile.
    pub(super) fn send(
        &self,
        layer: u16,
        dispatch: v1::Dispatch,
        cost: Cost,
        events: &mpsc::Sender<Event>,
    ) -> bool {
        let mut inner = self.lock();
        let Some(stream) = inner.stream.clone() else { return false };
        let id = dispatch.id;
        let sent = Instant::now();
        inner.pending.insert(id, Pending { events: events.clone(), sent, cost, layer, missed: false });
        let message = v1::ToNode { message: Some(v1::to_node::Message::Dispatch(dispatch)) };
        let went = stream.send(message).is_ok();
        if !went {
            inner.pending.remove(&id);
        }
        went
    }

    /// A deadline passed: the node is suspect until it answers, and need not compute this any more.
    pub(super) fn missed(&self, id: u64, waited: Duration) {
        let mut inner = self.lock();
        let Some(pending) = inner.pending.get_mut(&id) else { return };
        pending.missed = true;
        self.failures.fetch_add(1, Ordering::Relaxed);
        if let Some(stream) = &inner.stream {
            let message = v1::to_node::Message::Cancel(v1::Cancel { id });
            let _ = stream.send(v1::ToNode { message: Some(message) });
        }
        self.settle(&mut inner, &format!("no answer within {} ms", waited.as_millis()));
    }

    /// Whether the node said, at its last connection, that it holds `id`.
    pub(super) fn held(&self, id: ExpertId) -> bool {
        self.lock().held.contains(id)
    }

    /// This node as a source of records, when it is connected and holds some of `missing`.
    pub(super) fn as_source(&self, missing: &Held) -> Option<v1::Source> {
        let inner = self.lock();
        let sends = matches!(inner.status, Status::Ready | Status::Syncing) && inner.held.meets(missing);
        sends.then(|| v1::Source {
            node_id: self.id.clone(),
            name: inner.name.clone(),
            addresses: inner.fixed.iter().chain(&inner.addresses).cloned().collect(),
            held: inner.held.to_wire(),
        })
    }

    pub(super) fn count_served(&self, experts: usize) {
        self.served.fetch_add(experts as u64, Ordering::Relaxed);
    }

    pub(super) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// "node kitchen-pc (lost 12 s ago: connection refused)".
    pub(super) fn describe(&self) -> String {
        let inner = self.lock();
        let ago = inner.since.elapsed().as_secs();
        let why = if inner.why.is_empty() { String::new() } else { format!(": {}", inner.why) };
        format!("node {} ({} since {ago} s{why})", inner.name, inner.status.name())
    }

    pub(super) fn status(&self) -> NodeStatus {
        let inner = self.lock();
        NodeStatus {
            id: self.id.clone(),
            name: inner.name.clone(),
            addr: inner.fixed.iter().chain(&inner.addresses).next().cloned().unwrap_or_default(),
            state: inner.status.name().to_owned(),
            experts_held: inner.held.len(),
            experts_served: self.served.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            latency_ms: inner.latency.median().map_or(0.0, |m| m.as_secs_f64() * 1e3),
        }
    }
}
