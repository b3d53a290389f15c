//! One node: its state and the dispatches it owes.
//!
//! A node is `Joining` (never reached), `Syncing` (serves while still fetching), `Ready`, `Suspect`
//! (missed a deadline; gets no work until everything it owes has been answered; or its pulses are
//! overdue) or `Lost` (no connection). Links and pulses write here (`vitals`), dispatch reads and writes
//! (`dispatching`); every lock is held for microseconds.

mod disk;
mod dispatching;
mod vitals;

pub(super) use dispatching::{Offer, Standing};
pub use vitals::StateChange;
pub(super) use vitals::{LOST_AFTER, PING_EVERY};

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shimmer_common::experts::{ExpertId, ExpertLayout};
use shimmer_node::wire::Held;
use shimmer_proto::v1;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};

use super::NodeStatus;
use super::membership::Changed;
use super::owed::Owed;
use super::placement::Seed;
use disk::Disk;
use vitals::Vitals;

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

struct Inner {
    name: String,
    /// Given by the user, tried first.
    fixed: Option<String>,
    /// What the node told us.
    addresses: Vec<String>,
    /// When it last did.
    registered: Option<Instant>,
    /// The process that told us.
    instance: Vec<u8>,
    /// Process and addresses before that.
    replaced: (Vec<u8>, Vec<String>),
    /// The address that answered last, tried first.
    reached: Option<String>,
    /// Why no address answers; empty when one does, or nobody tried.
    unreachable: String,
    /// Why the connection was cut.
    cut_why: String,
    /// Whether its clock is known to be wrong.
    skewed: bool,
    vitals: Vitals,
    status: Status,
    since: Instant,
    /// Why the node is suspect or lost.
    why: String,
    syncing: bool,
    held: Held,
    stream: Option<UnboundedSender<v1::ToNode>>,
    owed: Owed,
    /// What the node measured of its machine.
    measurement: Option<v1::Measurement>,
    /// The experts it has in memory, as far as is known.
    resident: Held,
    disk: Disk,
    /// Payload of the link, measured once per connection.
    link_bytes_per_s: Option<f64>,
}

/// What was measured of the way to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Way {
    /// Lowest of recent pings: what is above it is a busy machine, as one that has just started is.
    pub(super) round_trip_us: Option<f64>,
    /// Payload of the link.
    pub(super) bytes_per_s: Option<f64>,
}

/// One node.
pub(super) struct Node {
    pub(super) id: String,
    pub(super) seed: Seed,
    inner: Mutex<Inner>,
    /// Rung when there is a reason to dial at once.
    pub(super) wake: Notify,
    /// Rung when there is a reason to ask for a pulse at once.
    pub(super) watch: Notify,
    /// Changes when the connection must end.
    pub(super) cuts: watch::Sender<u64>,
    revoked: AtomicBool,
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
                instance: Vec::new(),
                replaced: (Vec::new(), Vec::new()),
                reached: None,
                unreachable: String::new(),
                cut_why: String::new(),
                skewed: false,
                vitals: Vitals::default(),
                status: Status::Joining,
                since: Instant::now(),
                why: String::new(),
                syncing: true,
                held: Held::none(layout),
                stream: None,
                owed: Owed::default(),
                measurement: None,
                resident: Held::none(layout),
                disk: Disk::default(),
                link_bytes_per_s: None,
            }),
            wake: Notify::new(),
            watch: Notify::new(),
            cuts: watch::Sender::new(0),
            revoked: AtomicBool::new(false),
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
        let known = || inner.fixed.iter().chain(&inner.addresses);
        let reached = inner.reached.as_ref().filter(|&reached| known().any(|a| a == reached));
        let others = known().filter(|&a| Some(a) != reached);
        reached.into_iter().chain(others).cloned().collect()
    }

    /// Notes an address the user gave.
    pub(super) fn fix_address(&self, address: String) {
        self.lock().fixed = Some(address);
        self.wake.notify_one();
    }

    /// Takes over where a node's process says it is. `Err` with a sentence when another process with
    /// this identity is alive: it pulses, or this one goes back to an address while the one that
    /// replaced it registers. They would take the connection from each other for ever.
    pub(super) fn introduce(&self, name: &str, addresses: &[String], instance: &[u8]) -> Result<(), String> {
        let mut inner = self.lock();
        let same = !instance.is_empty() && inner.instance == instance;
        if !same && (inner.instance != instance || inner.addresses != addresses) {
            let alive = inner.registered.is_some_and(|at| at.elapsed() < SIGN_OF_LIFE);
            let (process, place) = &inner.replaced;
            let returns = alive && process == instance && place == addresses;
            if returns || inner.vitals.is_twin(instance) {
                return Err(format!(
                    "another process serves as node {name} at {}; a copied --data directory is the same node, so stop one of them and join it again under a new directory",
                    inner.addresses.join(", ")
                ));
            }
            // What was tried was another process or place.
            inner.unreachable.clear();
            inner.replaced = (
                std::mem::replace(&mut inner.instance, instance.to_vec()),
                std::mem::replace(&mut inner.addresses, addresses.to_vec()),
            );
        }
        inner.addresses = addresses.to_vec();
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
        inner.vitals.forgive();
        self.watch.notify_one();
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
        inner.owed.drop_all(why);
        if inner.status == Status::Joining {
            inner.why = why.to_owned();
        } else {
            self.settle(&mut inner, why);
        }
    }

    /// Derives the state from the facts.
    fn settle(&self, inner: &mut Inner, why: &str) {
        let status = if inner.stream.is_none() {
            Status::Lost
        } else if inner.vitals.is_overdue() || inner.owed.is_overdue() {
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
            inner.vitals.note_change(inner.status, status, why);
            inner.status = status;
            inner.since = Instant::now();
            inner.why = why.to_owned();
        } else if status == Status::Lost {
            // Why the latest attempt failed.
            inner.why = why.to_owned();
        }
        self.changed.ring();
    }

    /// The way to it, as far as it was measured.
    pub(super) fn way(&self) -> Way {
        let inner = self.lock();
        let lowest = inner.vitals.rtt_us(0.0);
        Way { round_trip_us: (lowest > 0).then(|| lowest.into()), bytes_per_s: inner.link_bytes_per_s }
    }

    /// Notes the payload of the link.
    pub(super) fn set_link_rate(&self, bytes_per_s: f64) {
        self.lock().link_bytes_per_s = Some(bytes_per_s);
    }

    /// Whether it holds all of `experts`.
    pub(super) fn covers(&self, experts: &Held) -> bool {
        self.lock().held.covers(experts)
    }

    /// Whether the node is ready and complete.
    pub(super) fn is_ready(&self) -> bool {
        self.lock().status == Status::Ready
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
        let mut inner = self.lock();
        self.expire(&mut inner, Instant::now());
        NodeStatus {
            id: self.id.clone(),
            name: inner.name.clone(),
            addr: inner.fixed.iter().chain(&inner.addresses).next().cloned().unwrap_or_default(),
            state: inner.status.name().to_owned(),
            experts_held: inner.held.len(),
            experts_served: self.served.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            latency_ms: inner.owed.latency.median().map_or(0.0, |m| m.as_secs_f64() * 1e3),
            why: inner.why.clone(),
            unreachable: inner.unreachable.clone(),
            ping_p50_us: inner.vitals.rtt_us(0.5),
            ping_p95_us: inner.vitals.rtt_us(0.95),
            load: inner.vitals.load(),
            pulse_age_ms: inner.vitals.pulse_age_ms(),
            changes: inner.vitals.changes(),
            disk: if inner.disk.is_sick(Instant::now()) { "sick" } else { "ok" }.to_owned(),
            read_failures: inner.disk.failures(),
        }
    }
}
