//! The one engine thread: jobs wait in a bounded queue and run one at a time, first come first served.
//!
//! ```text
//! gateway / cli ──EngineHandle::submit──▶ queue ──▶ engine thread ──(in the rayon pool)──▶ Session::generate
//!        ▲                                                                                     │
//!        └──────────────────────────── JobReceiver ◀──── JobEvent ─────────────────────────────┘
//! ```
//!
//! A full queue refuses (a normal answer: HTTP 429). Events travel over an unbounded channel, whose length
//! `max_tokens` bounds, so that a slow reader never holds up the engine. Dropping the [`JobReceiver`] cancels
//! the job at its next event and frees its place in the queue; [`CancelHandle::cancel`] does so while still
//! delivering the final [`JobEvent::Done`].
//!
//! The thread keeps one [`Session`], so consecutive requests that share a token prefix (the turns of a
//! conversation) do not process it again; by the contract this changes the speed only.
//!
//! Locks: `Shared::queue` is the only one and is never held while a job runs.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use super::{DecodeError, Engine, Event, GenerateRequest, Generation, Session};

/// What a [`JobReceiver`] yields: events, then exactly one `Done`.
#[derive(Debug)]
pub enum JobEvent {
    /// Progress.
    Event(Event),
    /// The end; nothing follows.
    Done(Result<Generation, DecodeError>),
}

/// Why a job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many jobs wait as the queue allows.
    #[error("{waiting} requests are already waiting; try again later")]
    QueueFull {
        /// Waiting jobs, the running one not counted.
        waiting: usize,
    },
    /// The engine was stopped.
    #[error("the engine is shutting down")]
    Stopped,
}

/// Ends one job early; the job still reports `Done` with [`super::FinishReason::Cancelled`].
#[derive(Clone, Debug, Default)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Asks the job to stop at its next event.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The receiving end of one job; dropping it cancels the job.
#[derive(Debug)]
pub struct JobReceiver {
    events: mpsc::UnboundedReceiver<JobEvent>,
    cancel: CancelHandle,
}

impl JobReceiver {
    /// Waits for the next event in async code; `None` after `Done` or when the engine was stopped.
    pub async fn recv(&mut self) -> Option<JobEvent> {
        self.events.recv().await
    }

    /// Waits for the next event on a plain thread (panics inside an async runtime, as tokio's does).
    pub fn blocking_recv(&mut self) -> Option<JobEvent> {
        self.events.blocking_recv()
    }

    /// A handle that ends the job early.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// Runs to the end on a plain thread, handing each event to `on_event`.
    ///
    /// # Errors
    /// The job's own error; [`DecodeError::Internal`] if the engine was stopped before it ran.
    pub fn wait(mut self, mut on_event: impl FnMut(Event)) -> Result<Generation, DecodeError> {
        while let Some(event) = self.blocking_recv() {
            match event {
                JobEvent::Event(event) => on_event(event),
                JobEvent::Done(result) => return result,
            }
        }
        Err(DecodeError::Internal { message: "the engine was stopped".into() })
    }
}

struct Job {
    request: GenerateRequest,
    events: mpsc::UnboundedSender<JobEvent>,
    cancel: CancelHandle,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
    /// No new jobs; the thread ends once `jobs` is empty.
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    limit: usize,
    /// Cancels the running job as well.
    stop: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No statement under the lock leaves the queue half changed, so a poisoned lock is still sound.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the queue when the last [`EngineHandle`] goes.
struct Closer(Arc<Shared>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.wake.notify_all();
    }
}

/// Submits jobs to the engine thread. Cheap to clone; when the last clone is dropped the thread finishes
/// what is queued and ends.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    _closer: Arc<Closer>,
    engine: Arc<Engine>,
}

impl EngineHandle {
    /// Starts the engine thread. Compute runs inside `pool`; at most `queue_limit` jobs wait beside the
    /// running one.
    ///
    /// # Errors
    /// The operating system's, when no thread can be started.
    pub fn start(
        engine: Engine,
        pool: Arc<rayon::ThreadPool>,
        queue_limit: usize,
    ) -> std::io::Result<EngineHandle> {
        let engine = Arc::new(engine);
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Condvar::new(),
            limit: queue_limit,
            stop: AtomicBool::new(false),
        });
        let (worker_engine, worker_shared) = (engine.clone(), shared.clone());
        std::thread::Builder::new()
            .name("shimmer-engine".into())
            .spawn(move || run_jobs(&worker_engine, &pool, &worker_shared))?;
        Ok(EngineHandle { _closer: Arc::new(Closer(shared.clone())), shared, engine })
    }

    /// Queues a job.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn submit(&self, request: GenerateRequest) -> Result<JobReceiver, SubmitError> {
        let (events, receiver) = mpsc::unbounded_channel();
        let cancel = CancelHandle::default();
        let mut queue = self.shared.lock();
        if queue.closed {
            return Err(SubmitError::Stopped);
        }
        // Places of clients that went away are free again.
        queue.jobs.retain(|job| !job.events.is_closed());
        let waiting = queue.jobs.len();
        if waiting >= self.shared.limit && (queue.running || waiting > 0) {
            return Err(SubmitError::QueueFull { waiting });
        }
        queue.jobs.push_back(Job { request, events, cancel: cancel.clone() });
        drop(queue);
        self.shared.wake.notify_one();
        Ok(JobReceiver { events: receiver, cancel })
    }

    /// Model and text of the served checkpoint.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Jobs that wait, the running one not counted.
    pub fn waiting(&self) -> usize {
        self.shared.lock().jobs.len()
    }

    /// Whether a job is running.
    pub fn is_running(&self) -> bool {
        self.shared.lock().running
    }

    /// Refuses new jobs, drops the waiting ones and cancels the running one at its next event.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut queue = self.shared.lock();
        queue.closed = true;
        queue.jobs.clear();
        drop(queue);
        self.shared.wake.notify_all();
    }
}

fn run_jobs(engine: &Engine, pool: &rayon::ThreadPool, shared: &Shared) {
    let mut session = Session::new();
    loop {
        let mut queue = shared.lock();
        queue.running = false;
        let job = loop {
            if let Some(job) = queue.jobs.pop_front() {
                break job;
            }
            if queue.closed {
                return;
            }
            queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        queue.running = true;
        drop(queue);
        if job.events.is_closed() {
            continue;
        }
        let result = run_job(engine, pool, shared, &mut session, &job);
        // A receiver that went away needs no answer.
        let _ = job.events.send(JobEvent::Done(result));
    }
}

fn run_job(
    engine: &Engine,
    pool: &rayon::ThreadPool,
    shared: &Shared,
    session: &mut Session,
    job: &Job,
) -> Result<Generation, DecodeError> {
    let mut on_event = |event: Event| {
        let stopped = shared.stop.load(Ordering::Relaxed) || job.cancel.is_cancelled();
        if job.events.send(JobEvent::Event(event)).is_err() || stopped {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let run = AssertUnwindSafe(|| pool.install(|| session.generate(engine, &job.request, &mut on_event)));
    match catch_unwind(run) {
        Ok(result) => result,
        Err(panic) => {
            // Whatever the caches hold now, nobody may build on it.
            *session = Session::new();
            let message = panic_message(panic.as_ref());
            tracing::error!(%message, "a generation panicked");
            Err(DecodeError::Internal { message })
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".into())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Sender;
    use std::time::{Duration, Instant};

    use super::super::FinishReason;
    use super::super::fake::{self, FakeModel, PANIC};
    use super::*;

    fn start(queue_limit: usize) -> (EngineHandle, Sender<()>) {
        let (model, permits) = FakeModel::new(1, 500, true).gated();
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        (EngineHandle::start(fake::engine(model), pool, queue_limit).unwrap(), permits)
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "{what} did not happen");
            std::thread::yield_now();
        }
    }

    #[test]
    fn jobs_run_in_order_and_a_full_queue_refuses() {
        let (handle, permits) = start(2);
        let first = handle.submit(fake::request(&[1, 2], 3)).unwrap();
        wait_until("the first job", || handle.is_running() && handle.waiting() == 0);
        let second = handle.submit(fake::request(&[1, 2], 4)).unwrap();
        let third = handle.submit(fake::request(&[1, 2], 5)).unwrap();
        let refused = handle.submit(fake::request(&[1, 2], 6)).unwrap_err();
        assert_eq!(refused, SubmitError::QueueFull { waiting: 2 });
        // A client that went away frees its place.
        drop(second);
        let fourth = handle.submit(fake::request(&[1, 2], 7)).unwrap();
        drop(permits);
        let mut tokens = 0;
        let done = first.wait(|event| tokens += usize::from(matches!(event, Event::Token { .. }))).unwrap();
        assert_eq!((done.ids.len(), tokens), (3, 3));
        let third = third.wait(|_| ()).unwrap();
        let fourth = fourth.wait(|_| ()).unwrap();
        assert_eq!((third.ids.len(), fourth.ids.len()), (5, 7));
        // The engine keeps the session between jobs, and the answers agree.
        assert_eq!((third.stats.reused_tokens, fourth.stats.reused_tokens), (1, 1));
        assert_eq!(fourth.ids[..3], done.ids);
    }

    #[test]
    fn a_job_can_be_cancelled_both_ways() {
        let (handle, permits) = start(8);
        let cancelled = handle.submit(fake::request(&[1], 1000)).unwrap();
        cancelled.cancel_handle().cancel();
        // Whether it was already in its first step or not.
        permits.send(()).unwrap();
        assert_eq!(cancelled.wait(|_| ()).unwrap().finish, FinishReason::Cancelled);

        let dropped = handle.submit(fake::request(&[1], 400)).unwrap();
        wait_until("the job", || handle.is_running());
        drop(dropped);
        // The running step ends, the next event finds nobody.
        for _ in 0..2 {
            permits.send(()).unwrap();
        }
        wait_until("the end", || !handle.is_running());
        assert_eq!(handle.waiting(), 0);
    }

    #[test]
    fn a_panic_is_an_error_and_the_engine_goes_on() {
        let (handle, permits) = start(8);
        drop(permits);
        let error = handle.submit(fake::request(&[1, PANIC], 3)).unwrap().wait(|_| ()).unwrap_err();
        assert!(
            matches!(&error, DecodeError::Internal { message } if message.contains("told to panic")),
            "{error}"
        );
        assert_eq!(handle.submit(fake::request(&[1], 3)).unwrap().wait(|_| ()).unwrap().ids.len(), 3);
    }

    #[test]
    fn stopping_ends_everything() {
        let (handle, permits) = start(8);
        let running = handle.submit(fake::request(&[1], 1000)).unwrap();
        wait_until("the job", || handle.is_running());
        let waiting = handle.submit(fake::request(&[1], 3)).unwrap();
        handle.stop();
        drop(permits);
        assert_eq!(running.wait(|_| ()).unwrap().finish, FinishReason::Cancelled);
        assert!(waiting.wait(|_| ()).is_err());
        assert_eq!(handle.submit(fake::request(&[1], 3)).unwrap_err(), SubmitError::Stopped);
    }

    #[tokio::test]
    async fn events_arrive_in_async_code_after_the_handle_is_gone() {
        let (handle, permits) = start(8);
        let mut job = handle.submit(fake::request(&[1], 3)).unwrap();
        drop(permits);
        drop(handle);
        let mut tokens = 0;
        let done = loop {
            match job.recv().await.unwrap() {
                JobEvent::Event(Event::Token { .. }) => tokens += 1,
                JobEvent::Event(_) => {}
                JobEvent::Done(result) => break result.unwrap(),
            }
        };
        assert_eq!((tokens, done.ids.len()), (3, 3));
        assert!(job.recv().await.is_none());
    }
}
