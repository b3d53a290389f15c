//! Running pieces on a pool of threads, each of which reads one piece at a time.

#![allow(unsafe_code)]

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use super::file::{Bounce, Served};
use super::queue::{Shared, Task, Wake};
use super::recover::recover;
use super::{Caching, ReadError};

/// Starts the threads of a disk; their number.
pub(super) fn start(shared: &Arc<Shared>, disk: usize, wake: &Arc<Wake>) -> usize {
    let start = |i: usize| {
        let (shared, wake) = (Arc::clone(shared), Arc::clone(wake));
        let body = {
            let shared = Arc::clone(&shared);
            move || {
                let mut bounce = Bounce::of(shared.options().piece_bytes);
                while let Some(task) = shared.next(disk, &wake) {
                    run(&shared, task, &mut bounce);
                }
            }
        };
        shared.spawn(format!("io-{disk}-{i}"), body)
    };
    (0..shared.options().depth).filter(|&i| start(i)).count()
}

/// Reads everything queued for a disk on the calling thread.
pub(super) fn drain(shared: &Shared, disk: usize) {
    let mut bounce = Bounce::of(shared.options().piece_bytes);
    while let Some(task) = shared.try_next(disk, 0) {
        run(shared, task, &mut bounce);
    }
}

/// Reads one piece and ends the read if it was the last.
pub(super) fn run(shared: &Shared, task: Task, bounce: &mut Bounce) {
    // A reader that panics is an error like any other, or whoever waits would wait for ever.
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| read(shared, &task, bounce)));
    let result = result.unwrap_or_else(|_| Err(panicked(&task)));
    if let Some(ended) = shared.finish(&task, result) {
        ended.call();
    }
}

fn panicked(task: &Task) -> ReadError {
    ReadError::Failed {
        path: task.piece.file.path().to_owned(),
        offset: task.piece.offset,
        len: task.piece.len,
        source: std::io::Error::other("the reader panicked"),
    }
}

fn read(shared: &Shared, task: &Task, bounce: &mut Bounce) -> Result<Served, ReadError> {
    let Task { op, piece, .. } = task;
    // SAFETY: the task counts as running, so the buffer stays parked; the segments of a read do not
    // overlap (`piece::check`), nor do the pieces they are cut into, and each is taken once.
    let buf = unsafe { op.target.part(piece.at, piece.len) };
    let Some(replica) = piece.file.copies().get(piece.copy) else {
        return Err(ReadError::Unfit("the chosen copy does not exist".into()));
    };
    let caching = shared.options().caching;
    let read = replica.read(buf, piece.offset, caching, !op.is_cold(), bounce);
    if caching == Caching::Auto && !matches!(read, Ok(Served::Cache)) {
        op.set_cold();
    }
    read.or_else(|error| recover(shared, piece, buf, error, bounce))
}
