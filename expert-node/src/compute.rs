//! The compute side of a node: one thread that owns the rayon pool and works off dispatches in order.
//!
//! Nothing here touches the network runtime: jobs come through a channel and answers leave through
//! one, so a cold disk read or a long prefill never delays liveness.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use shimmer_common::experts::usage::UsageKeeper;
use shimmer_common::experts::{
    CallTally, ExpertCompute as _, ExpertError, ExpertSource, LocalStore, MemoryWatch, StoreOptions,
};
use shimmer_common::kernels::Kernels;
use shimmer_common::profile::NumericProfile;
use shimmer_proto::v1;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::NodeError;
use crate::hints::{self, Slack};
use crate::pace::Working;
use crate::wire::{Held, WireError, dispatch_from_wire, hints_from_wire};

/// Answers on their way to the coordinator.
pub(crate) type Answers = UnboundedSender<Outgoing>;

/// A message, and the room in the intake that is given back when the network has taken it.
pub(crate) struct Outgoing {
    pub(crate) message: v1::FromNode,
    pub(crate) _room: Option<OwnedSemaphorePermit>,
}

/// Ids the coordinator no longer waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancelled(Arc<Mutex<BTreeSet<u64>>>);

impl Cancelled {
    /// Ids kept: cancels of dispatches already computed are forgotten oldest first.
    const KEPT: usize = 256;

    pub(crate) fn add(&self, id: u64) {
        let mut ids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ids.insert(id);
        if ids.len() > Self::KEPT {
            ids.pop_first();
        }
    }

    fn take(&self, id: u64) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }
}

/// One dispatch to be computed.
pub(crate) struct Job {
    pub(crate) dispatch: v1::Dispatch,
    pub(crate) received: Instant,
    pub(crate) cancelled: Cancelled,
    pub(crate) answers: Answers,
    /// Its share of the intake, held until its answer is gone.
    pub(crate) room: OwnedSemaphorePermit,
    /// Records are sent to others more slowly while it exists.
    pub(crate) _working: Working,
}

/// Handle of the compute thread; the thread ends when the last handle is gone.
#[derive(Clone)]
pub(crate) struct Compute {
    jobs: mpsc::Sender<Job>,
    /// Looked at from outside; the thread owns it.
    store: Weak<LocalStore>,
    counts: Arc<Counts>,
    slack: Arc<Slack>,
}

#[derive(Default)]
struct Counts {
    /// Jobs waiting or in work.
    queued: AtomicU32,
    /// Jobs ever taken in.
    dispatches: AtomicU64,
}

impl Compute {
    /// Starts the thread over `source`, keeping at most `ram_bytes` of records resident: those that
    /// `usage` says are needed most. `alive` is dropped when the thread has saved the usage and let go of
    /// the source.
    ///
    /// # Errors
    /// [`NodeError::Experts`] when the budget holds no record, [`NodeError::Machine`].
    pub(crate) fn start(
        source: Arc<dyn ExpertSource>,
        kernels: Kernels,
        profile: NumericProfile,
        ram_bytes: usize,
        threads: usize,
        usage: UsageKeeper,
        alive: mpsc::Sender<()>,
    ) -> Result<Self, NodeError> {
        let options = StoreOptions { policy: usage.policy(true), ..StoreOptions::new(ram_bytes) };
        let store = Arc::new(LocalStore::open(source, kernels, profile, options)?);
        usage.pin(&store, ram_bytes as u64);
        let watch = MemoryWatch::start(&store, 0);
        let (jobs, queue) = mpsc::channel::<Job>();
        let (seen, counts) = (Arc::downgrade(&store), Arc::<Counts>::default());
        let done = counts.clone();
        let slack = Arc::<Slack>::default();
        let hints = slack.clone();
        let (started, ready) = mpsc::channel();
        std::thread::Builder::new()
            .name("shimmer-compute".to_owned())
            .spawn(move || {
                // This thread is the pool's first worker: with one thread nothing changes hands.
                let pool =
                    rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).use_current_thread().build();
                let failed = pool.as_ref().err().map(ToString::to_string);
                let _ = started.send(failed);
                let Ok(pool) = pool else { return };
                while let Ok(job) = queue.recv() {
                    pool.install(|| work(&store, &hints, job));
                    done.queued.fetch_sub(1, Ordering::Relaxed);
                }
                drop((watch, usage, store));
                drop(alive);
            })
            .map_err(|e| NodeError::Machine {
                what: "cannot start the compute thread",
                cause: e.to_string(),
            })?;
        match ready.recv() {
            Ok(None) => Ok(Self { jobs, store: seen, counts, slack }),
            Ok(Some(cause)) => Err(NodeError::Machine { what: "cannot start the compute threads", cause }),
            Err(e) => Err(NodeError::Machine { what: "the compute thread ended", cause: e.to_string() }),
        }
    }

    /// Queues a job. A dead compute thread shows as the coordinator's missing answer, so the answer
    /// channel is dropped with the job.
    pub(crate) fn submit(&self, job: Job) {
        self.counts.queued.fetch_add(1, Ordering::Relaxed);
        self.counts.dispatches.fetch_add(1, Ordering::Relaxed);
        if self.jobs.send(job).is_err() {
            tracing::error!("the compute thread is gone; restart the node");
        }
    }
}

impl Compute {
    /// The store, for looking at.
    pub(crate) fn store(&self) -> Weak<LocalStore> {
        self.store.clone()
    }

    /// Adds what the store and the queue are doing.
    pub(crate) fn describe(&self, load: &mut v1::Load) {
        let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        load.queued = self.counts.queued.load(Ordering::Relaxed);
        load.dispatches = self.counts.dispatches.load(Ordering::Relaxed);
        let Some(store) = self.store.upgrade() else { return };
        let stats = store.stats();
        let layout = store.layout();
        let record = layout.max_record_bytes().max(1) as u64;
        let taken = store.ram_taken() as u64;
        load.pinned = count(stats.pinned_bytes / record);
        load.cached = count(taken.saturating_sub(stats.pinned_bytes) / record);
        load.slots = count(store.ram_capacity() as u64 / record);
        load.experts = stats.computed;
        load.hits = stats.hits;
        load.misses = stats.misses;
        load.read_bytes = stats.bytes_read;
        load.hinted_bytes = stats.prefetch_issued_bytes;
        load.hinted_used_bytes = stats.prefetch_used_bytes;
        load.hinted_wasted_bytes = stats.prefetch_wasted_bytes;
        load.takes_hints = self.slack.takes_hints(&store);
        let mut resident = Held::none(layout);
        store.resident_ids().into_iter().for_each(|id| resident.insert(id));
        load.resident = resident.to_wire();
    }
}

/// Computes one job and sends its answer.
fn work(store: &LocalStore, slack: &Slack, job: Job) {
    let begun = Instant::now();
    let queued = begun.duration_since(job.received);
    let id = job.dispatch.id;
    let expired = queued > Duration::from_millis(job.dispatch.deadline_ms.into());
    if job.answers.is_closed() {
        return;
    }
    let mut tally = CallTally::default();
    let outcome = if job.cancelled.take(id) || expired {
        Err(failure(v1::ErrorCode::Expired, "the deadline passed before work began"))
    } else {
        compute(store, slack, &job.dispatch).map(|(sums, of_call)| {
            tally = of_call;
            sums
        })
    };
    let disk = tally.disk_wait;
    let reply = v1::Reply {
        id,
        outcome: Some(match outcome {
            Ok(sums) => v1::reply::Outcome::Sums(sums.into()),
            Err(failure) => v1::reply::Outcome::Failure(failure),
        }),
        queue_us: micros(queued),
        disk_us: micros(disk),
        compute_us: micros(begun.elapsed().saturating_sub(disk)),
        hits: tally.hits as u32,
        misses: tally.misses as u32,
        read_bytes: tally.read_bytes as u64,
    };
    // A closed stream means that the coordinator has gone on without us.
    let message = v1::FromNode { message: Some(v1::from_node::Message::Reply(reply)) };
    let _ = job.answers.send(Outgoing { message, _room: Some(job.room) });
}

/// Hints are taken when the dispatch's own reads are queued: those come first.
fn compute(
    store: &LocalStore,
    slack: &Slack,
    dispatch: &v1::Dispatch,
) -> Result<(Vec<u8>, CallTally), v1::Failure> {
    let malformed = |e: WireError| failure(v1::ErrorCode::Malformed, &e.to_string());
    let batch = dispatch_from_wire(dispatch, store.layout()).map_err(malformed)?;
    let hints = hints_from_wire(dispatch, store.layout()).map_err(malformed)?;
    let mut take_hints = || hints::take(store, slack, batch.layer, &hints);
    let computed = store.compute_tallied(batch.layer, &batch.x, &batch.work, &mut take_hints);
    let (sums, tally) = computed.map_err(|e| {
        let (code, id) = match &e {
            ExpertError::Missing { id, .. } => (v1::ErrorCode::NotHeld, Some(id)),
            ExpertError::Read { id, .. } => (v1::ErrorCode::Read, Some(id)),
            ExpertError::Damaged { id, .. } => (v1::ErrorCode::Damaged, Some(id)),
            ExpertError::Compute { id, .. } => (v1::ErrorCode::Compute, Some(id)),
            ExpertError::Unfit { .. } => (v1::ErrorCode::Malformed, None),
            ExpertError::Budget { .. } | ExpertError::Unreachable(_) => (v1::ErrorCode::Read, None),
        };
        tracing::warn!(layer = batch.layer, error = %e, "a dispatch failed");
        v1::Failure { expert: id.map(|id| id.index.into()), ..failure(code, &e.to_string()) }
    })?;
    Ok((sums.pack(), tally))
}

fn failure(code: v1::ErrorCode, sentence: &str) -> v1::Failure {
    v1::Failure { code: code.into(), sentence: sentence.to_owned(), expert: None }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
