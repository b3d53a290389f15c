//! Reading records in the background, through the engine that knows disks.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use super::super::{ExpertError, ExpertId, ExpertSource};
use crate::io::{Class, IoEngine, IoOptions, Read, ReadError};
use crate::mem::ArenaBuf;

/// What is called when a read has ended: with the slot, on a reading thread. `None` was called off.
pub(super) type Done = Box<dyn FnOnce(ArenaBuf, Option<Result<(), ExpertError>>) + Send>;

/// A read that was queued.
pub(super) type Ticket = crate::io::Ticket<ArenaBuf>;

/// Reads records of one source.
pub(super) struct Loader {
    source: Arc<dyn ExpertSource>,
    engine: IoEngine,
}

impl Loader {
    pub(super) fn start(source: Arc<dyn ExpertSource>, options: IoOptions) -> Self {
        Self { source, engine: IoEngine::start(options) }
    }

    /// Queues the read of `id` into `slot`. The record is checked on the thread that ends the read, while
    /// others go on reading. `None` when the source cannot say where the record is; then `done` has been
    /// called on this thread.
    pub(super) fn submit(&self, id: ExpertId, slot: ArenaBuf, class: Class, done: Done) -> Option<Ticket> {
        let segments = match guarded(self.source.as_ref(), id, || self.source.plan(id)) {
            Ok(segments) => segments,
            Err(error) => {
                done(slot, Some(Err(error)));
                return None;
            }
        };
        let source = Arc::clone(&self.source);
        let checked = move |mut slot: ArenaBuf, result: Result<(), ReadError>| {
            let outcome = match result {
                Err(ReadError::Cancelled) => None,
                Err(error) => Some(Err(ExpertError::from_read(id, &source.describe(), error))),
                Ok(()) => Some(guarded(source.as_ref(), id, || source.finish(id, &mut slot))),
            };
            done(slot, outcome);
        };
        Some(self.engine.submit(Read { buf: slot, segments, class, done: Box::new(checked) }))
    }

    /// Time during which at least one read was under way.
    pub(super) fn busy(&self) -> Duration {
        self.engine.stats().busy
    }
}

/// A panic of the source is an error like any other, or a waiter would never wake.
fn guarded<T>(
    source: &dyn ExpertSource,
    id: ExpertId,
    work: impl FnOnce() -> Result<T, ExpertError>,
) -> Result<T, ExpertError> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(ExpertError::Read {
            id,
            path: source.describe().into(),
            source: std::io::Error::other("the reader panicked"),
        })
    })
}
