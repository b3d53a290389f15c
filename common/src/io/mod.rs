//! Reading from disks: many reads at once, the urgent ones first.
//!
//! An [`IoEngine`] takes reads of whole records ([`Read`]) and cuts them into pieces of about 1 MiB,
//! which it hands to the disk they lie on, a few at a time. Reads of class [`Class::Demand`] go before
//! those of class [`Class::Prefetch`]: piece by piece, so that a demand waits for at most the few
//! pieces under way. Within a class reads are served in the order they came, so that the first is
//! complete as early as possible. A prefetch can be taken back or made a demand ([`Ticket`]).
//!
//! | file | idea |
//! |---|---|
//! | `file` | one content and its copies; direct reads, page cache |
//! | `buffer` | the memory a read fills, shared by the threads that fill it |
//! | `piece` | cutting a read into pieces |
//! | `op` | one read under way, its end |
//! | `queue` | per disk: what is queued, what runs, how fast |
//! | `pread`, `uring` | two ways to run pieces |
//! | `behind` | writing without filling the page cache |
//! | `recover` | retries, other copies, the final error |
//!
//! *Copies.* A file may be had from several disks. A read goes to the copy with the shortest expected
//! wait: bytes queued on its disk divided by the speed measured there.
//!
//! *Locks.* One mutex guards all queues; it is never held during a read or a callback. Callbacks run
//! on threads of the engine, without locks held.

mod behind;
mod buffer;
mod file;
mod op;
mod os;
mod piece;
mod pread;
mod queue;
mod recover;
#[allow(unsafe_code)]
mod resident;
mod stats;
#[cfg(test)]
mod tests;
#[cfg(target_os = "linux")]
mod uring;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use behind::{Behind, Trail};
pub use file::{ReadAt, SharedFile};
pub use op::Ticket;
pub(crate) use os::BLOCK_BYTES;
pub use os::{forget, forget_file};
pub use stats::{ClassStats, DiskStats, IoStats};

use self::file::Bounce;
use self::op::Op;
use self::queue::Shared;

/// How urgent a read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Somebody waits for it.
    Demand,
    /// A guess; it runs only while no demand is queued.
    Prefetch,
}

/// How pieces are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// What measured best on this system.
    #[default]
    Auto,
    /// io_uring, where the kernel allows it; a pool of threads where not.
    Uring,
    /// A pool of threads.
    Pread,
}

/// What happens to the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// What the cache holds already is taken from it, the rest is read past it.
    #[default]
    Auto,
    /// Always from the disk, where the file system allows it.
    Direct,
    /// Through the cache, which keeps everything.
    Buffered,
}

/// How an engine reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoOptions {
    /// How pieces are run.
    pub mode: IoMode,
    /// What happens to the page cache.
    pub caching: Caching,
    /// Pieces under way at once, per disk.
    pub depth: usize,
    /// As long as this many pieces or more are under way, no prefetch is begun.
    pub prefetch_depth: usize,
    /// Bytes of a piece, rounded up to whole 4 KiB.
    pub piece_bytes: usize,
    /// Attempts after the first that fail for good reason.
    pub retries: u32,
    /// Pause before the first of them; doubled for each.
    pub retry_pause: Duration,
}

impl Default for IoOptions {
    fn default() -> Self {
        Self {
            mode: IoMode::Auto,
            caching: Caching::Auto,
            depth: 32,
            prefetch_depth: 2,
            piece_bytes: 1 << 20,
            retries: 3,
            retry_pause: Duration::from_millis(10),
        }
    }
}

impl IoOptions {
    /// Most memory an engine takes per disk for reads that cannot go straight to their place.
    pub fn buffer_bytes(&self) -> usize {
        // What is on its way, and what waits for being copied.
        self.depth.saturating_mul(2).saturating_mul(Bounce::of(self.piece_bytes).allocated_bytes())
    }
}

/// A range of a file and where it belongs in the buffer.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The file.
    pub file: Arc<SharedFile>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    /// First byte in the buffer.
    pub at: usize,
}

/// What is called when a read has ended: with the buffer, on a thread of the engine.
pub type Done<B> = Box<dyn FnOnce(B, Result<(), ReadError>) + Send>;

/// A read to be done: segments that fill disjoint parts of a buffer.
pub struct Read<B> {
    /// Filled by the read. Best on a page boundary: then whole blocks go straight into it.
    pub buf: B,
    /// What to read where.
    pub segments: Vec<Segment>,
    /// How urgent it is.
    pub class: Class,
    /// Called once, unless [`Ticket::cancel`] gives the buffer back. Must not panic or wait for long.
    pub done: Done<B>,
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It was taken back.
    #[error("the read was cancelled")]
    Cancelled,
    /// The engine ended before the read could begin.
    #[error("the reading threads have stopped")]
    Stopped,
    /// Neither repetition nor another copy helped.
    #[error("cannot read {len} bytes at offset {offset} of {path}: {source}")]
    Failed {
        /// The copy tried last.
        path: PathBuf,
        /// First byte of the piece.
        offset: u64,
        /// Bytes of the piece.
        len: usize,
        /// Operating system error.
        source: std::io::Error,
    },
    /// Segments overlap or leave the buffer.
    #[error("a read was asked for that does not fit its buffer: {0}")]
    Unfit(String),
}

/// Threads that read. Dropping it cancels what is queued and waits for what runs.
pub struct IoEngine {
    shared: Arc<Shared>,
}

impl IoEngine {
    /// Starts an engine. Threads are started when a disk is first read from.
    pub fn start(options: IoOptions) -> Self {
        Self { shared: Shared::start(options) }
    }

    /// Queues a read. `done` is called on a thread of the engine, whatever happens.
    pub fn submit<B: AsMut<[u8]> + Send + 'static>(&self, read: Read<B>) -> Ticket<B> {
        let Read { buf, segments, class, done } = read;
        let op = Op::new(buf, class, done);
        self.shared.submit(&op, &segments);
        Ticket::new(op, &self.shared)
    }

    /// Reads and waits: the buffer and how it went.
    ///
    /// # Errors
    /// As [`Read::done`] is told.
    pub fn read<B: AsMut<[u8]> + Send + 'static>(
        &self,
        buf: B,
        segments: Vec<Segment>,
        class: Class,
    ) -> (Option<B>, Result<(), ReadError>) {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let done = Box::new(move |buf, result| {
            // The receiver waits below.
            let _ = sender.send((buf, result));
        });
        let _ticket = self.submit(Read { buf, segments, class, done });
        match receiver.recv() {
            Ok((buf, result)) => (Some(buf), result),
            Err(_) => (None, Err(ReadError::Stopped)),
        }
    }

    /// Counters and speeds so far.
    pub fn stats(&self) -> IoStats {
        self.shared.stats()
    }

    /// The options it was started with.
    pub fn options(&self) -> &IoOptions {
        self.shared.options()
    }
}

impl Drop for IoEngine {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
