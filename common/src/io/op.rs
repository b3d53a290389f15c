//! One read under way: its buffer, how much of it is left, and what happens at the end.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::buffer::{Parked, Target};
use super::queue::Shared;
use super::{Class, Done, ReadError};

/// A read under way.
pub(super) struct Op {
    pub target: Target,
    progress: Mutex<Progress>,
    /// A piece was not in the page cache, so the others are not looked for.
    cold: AtomicBool,
}

/// Changed under the engine's lock only.
pub(super) struct Progress {
    pub class: Class,
    /// Pieces queued or running.
    pub left: usize,
    pub running: usize,
    /// The first error.
    pub error: Option<ReadError>,
    completion: Option<Box<dyn Completion>>,
}

/// The buffer and who waits for it, of whatever type.
trait Completion: Send {
    fn call(self: Box<Self>, result: Result<(), ReadError>);

    /// The buffer, in a box of its own.
    fn give_back(self: Box<Self>) -> Box<dyn Any + Send>;
}

struct Waiting<B> {
    buf: Parked<B>,
    done: Done<B>,
}

impl<B: Send + 'static> Completion for Waiting<B> {
    fn call(self: Box<Self>, result: Result<(), ReadError>) {
        let Self { buf, done } = *self;
        done(buf.take(), result);
    }

    fn give_back(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.buf.take())
    }
}

/// A read that has ended; [`Ended::call`] tells whoever waits.
pub(super) struct Ended {
    completion: Box<dyn Completion>,
    result: Result<(), ReadError>,
}

impl Ended {
    pub(super) fn result(&self) -> &Result<(), ReadError> {
        &self.result
    }

    /// To be called without locks held.
    pub(super) fn call(self) {
        let Self { completion, result } = self;
        // A panic must not take the thread along that serves everybody else.
        if std::panic::catch_unwind(AssertUnwindSafe(|| completion.call(result))).is_err() {
            tracing::error!("a callback of a finished read panicked");
        }
    }
}

impl Op {
    pub(super) fn new<B: AsMut<[u8]> + Send + 'static>(buf: B, class: Class, done: Done<B>) -> Arc<Self> {
        let (buf, target) = Parked::new(buf);
        let completion: Option<Box<dyn Completion>> = Some(Box::new(Waiting { buf, done }));
        let progress = Progress { class, left: 0, running: 0, error: None, completion };
        Arc::new(Self { target, progress: Mutex::new(progress), cold: AtomicBool::new(false) })
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_cold(&self) -> bool {
        self.cold.load(Ordering::Relaxed)
    }

    pub(super) fn set_cold(&self) {
        self.cold.store(true, Ordering::Relaxed);
    }
}

impl Progress {
    /// The end of the read, if nothing of it is left. Comes out once.
    pub(super) fn ended(&mut self) -> Option<Ended> {
        if self.left > 0 {
            return None;
        }
        let completion = self.completion.take()?;
        let result = self.error.take().map_or(Ok(()), Err);
        Some(Ended { completion, result })
    }
}

/// A read that was submitted; dropping the ticket changes nothing.
pub struct Ticket<B> {
    op: Arc<Op>,
    shared: Weak<Shared>,
    buf: PhantomData<fn() -> B>,
}

impl<B> std::fmt::Debug for Ticket<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket({:?})", self.op.progress().class)
    }
}

impl<B: Send + 'static> Ticket<B> {
    pub(super) fn new(op: Arc<Op>, shared: &Arc<Shared>) -> Self {
        Self { op, shared: Arc::downgrade(shared), buf: PhantomData }
    }

    /// Takes the read back. When nothing of it is running the buffer comes back here, with whatever has
    /// been read so far, and the callback is dropped uncalled. Otherwise (`None`) the callback is or was
    /// called as usual: with [`ReadError::Cancelled`] after the pieces now running, or with the result
    /// if those were the last.
    pub fn cancel(&self) -> Option<B> {
        let completion = self.shared.upgrade()?.cancel(&self.op)?.completion;
        completion.give_back().downcast().ok().map(|buf| *buf)
    }

    /// Makes a prefetch a demand: it goes behind the demands queued so far.
    pub fn promote(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.promote(&self.op);
        }
    }
}
