//! Running pieces through io_uring: one thread per disk that keeps as many reads in flight as allowed.
//!
//! The thread does nothing but submit and reap. What takes time goes to a helper: copying what came by
//! way of a bounce buffer, what the page cache holds, failed reads, and the callbacks of finished reads.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::{IoUring, Probe, opcode, types};

use super::file::{Bounce, Opened, Served, ends_early};
use super::op::Ended;
use super::os::{self, BLOCK_BYTES};
use super::queue::{Shared, Task, Wake};
use super::recover::recover;
use super::{Caching, ReadError, pread};
use crate::mem::AlignedBuf;

/// Marks the completion that only says that there is work.
const EVENT: u64 = u64::MAX;

/// Starts the thread of a disk; `None` where the kernel does not allow it.
pub(super) fn start(shared: &Arc<Shared>, disk: usize) -> Option<Arc<Wake>> {
    let refused =
        |error: &dyn std::fmt::Display| tracing::debug!(%error, "no io_uring; reading with threads");
    let (driver, wake) = match Driver::new(Arc::clone(shared), disk) {
        Ok(made) => made,
        Err(error) => {
            refused(&error);
            return None;
        }
    };
    let started = shared.spawn(format!("io-uring-{disk}"), move || driver.run());
    started.then_some(wake)
}

/// A read that the kernel works on.
struct Flight {
    task: Task,
    /// Holds the blocks where they cannot go straight to their place.
    bounce: Option<AlignedBuf>,
    /// Open as long as the read runs, where the file is not kept open anyway.
    _once: Option<File>,
    fd: RawFd,
    /// Through the page cache.
    cached: bool,
    /// Bytes between the start of the block and the first one wanted.
    skip: usize,
    /// Bytes there so far, `skip` included.
    done: usize,
}

impl Flight {
    /// Bytes that must come.
    fn needed(&self) -> usize {
        self.skip + self.task.piece.len
    }

    fn offset(&self) -> u64 {
        self.task.piece.offset - self.skip as u64
    }
}

type Bounces = Arc<Mutex<Vec<AlignedBuf>>>;

struct Driver {
    ring: IoUring,
    shared: Arc<Shared>,
    disk: usize,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    bounces: Bounces,
    /// Pieces that the disk has delivered and a helper still has to deal with.
    aside: Arc<AtomicUsize>,
    event: Arc<OwnedFd>,
    /// What the read of the event fills.
    counter: Box<[u8; 8]>,
    /// That read is in flight.
    listening: bool,
}

impl Driver {
    fn new(shared: Arc<Shared>, disk: usize) -> std::io::Result<(Self, Arc<Wake>)> {
        let depth = shared.options().depth;
        let ring = IoUring::new((depth as u32 + 1).next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(ErrorKind::Unsupported.into());
        }
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).map_err(Error::from)?;
        let event = Arc::new(event);
        let wake = Arc::new(Wake::with_event(Arc::clone(&event)));
        let driver = Self {
            ring,
            shared,
            disk,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).collect(),
            bounces: Bounces::default(),
            aside: Arc::default(),
            event,
            counter: Box::default(),
            listening: false,
        };
        Ok((driver, wake))
    }

    fn run(mut self) {
        loop {
            self.listen();
            // The disk is kept busy while helpers copy, but not arbitrarily far ahead of them.
            let aside = self.aside.load(Ordering::Relaxed).min(self.flights.len());
            while !self.free.is_empty()
                && let Some(task) = self.shared.try_next(self.disk, aside)
            {
                self.begin(task);
            }
            if self.shared.is_stopping() && self.free.len() == self.flights.len() {
                return;
            }
            self.wait();
        }
    }

    /// Submits what is queued and handles what has come.
    fn wait(&mut self) {
        if let Err(error) = self.ring.submit_and_wait(1)
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
        {
            // Nothing that waiting could not mend: the ring was fine when it was made.
            tracing::warn!(%error, "io_uring does not take reads");
            std::thread::sleep(self.shared.options().retry_pause);
        }
        let arrived: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (number, result) in arrived {
            if number == EVENT {
                self.listening = false;
            } else if let Some(flight) = self.flights.get_mut(number as usize).and_then(Option::take) {
                self.free.push(number as usize);
                self.arrived(flight, result);
            }
        }
    }

    /// Has the ring tell when the event is set.
    fn listen(&mut self) {
        if self.listening {
            return;
        }
        let fd = types::Fd(self.event.as_raw_fd());
        let entry = opcode::Read::new(fd, self.counter.as_mut_ptr(), self.counter.len() as u32).build();
        // SAFETY: the counter is a box of the driver's, which outlives the read: dropping the driver
        // waits for it.
        self.listening = unsafe { self.ring.submission().push(&entry.user_data(EVENT)) }.is_ok();
    }

    /// Puts a piece under way, by whichever way is right for it.
    fn begin(&mut self, task: Task) {
        let caching = self.shared.options().caching;
        let piece = &task.piece;
        let Some(replica) = piece.file.copies().get(piece.copy) else { return self.help(task) };
        if caching == Caching::Auto && !task.op.is_cold() {
            if replica.is_cached(piece.offset, piece.len) {
                return self.help(task);
            }
            task.op.set_cold();
        }
        let direct = if caching == Caching::Buffered { None } else { replica.direct() };
        let cached = direct.is_none();
        let Some(opened) = direct.or_else(|| replica.cached().ok()) else { return self.help(task) };
        let (fd, once) = match opened {
            Opened::Kept(file) => (file.as_raw_fd(), None),
            Opened::Once(file) => (file.as_raw_fd(), Some(file)),
        };
        let whole_blocks = piece.len.is_multiple_of(BLOCK_BYTES)
            && piece.offset.is_multiple_of(BLOCK_BYTES as u64)
            && task.op.target.is_aligned(piece.at, BLOCK_BYTES);
        let (bounce, skip) = if cached || whole_blocks {
            (None, 0)
        } else {
            let Some(buf) = self.bounce() else { return self.help(task) };
            (Some(buf), (piece.offset % BLOCK_BYTES as u64) as usize)
        };
        self.push(Flight { task, bounce, _once: once, fd, cached, skip, done: 0 });
    }

    fn bounce(&self) -> Option<AlignedBuf> {
        let spare = self.bounces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.or_else(|| Bounce::of(self.shared.options().piece_bytes).into_buf().ok())
    }

    /// Submits the rest of a read.
    fn push(&mut self, mut flight: Flight) {
        let Some(number) = self.free.pop() else { return self.help(flight.task) };
        let (done, piece) = (flight.done, &flight.task.piece);
        let (start, len) = match &mut flight.bounce {
            // Whole blocks, so a little more than needed.
            Some(buf) => {
                let blocks = (flight.skip + piece.len).next_multiple_of(BLOCK_BYTES);
                let rest = &mut buf[done..blocks];
                (rest.as_mut_ptr(), rest.len())
            }
            None => {
                // SAFETY: as in `pread`: the piece counts as running until `finish`.
                let rest = unsafe { flight.task.op.target.part(piece.at + done, piece.len - done) };
                (rest.as_mut_ptr(), rest.len())
            }
        };
        let entry = opcode::Read::new(types::Fd(flight.fd), start, len as u32)
            .offset(flight.offset() + done as u64)
            .build()
            .user_data(number as u64);
        // SAFETY: memory and descriptor are held by the flight, which stays in its place until the
        // completion has come; dropping the driver waits for that.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            self.flights[number] = Some(flight);
        } else {
            self.free.push(number);
            self.help(flight.task);
        }
    }

    /// Goes on with a read as its completion demands.
    fn arrived(&mut self, mut flight: Flight, result: i32) {
        let Ok(n) = usize::try_from(result) else {
            let error = Error::from_raw_os_error(-result);
            return match error.kind() {
                // Told so too late, like everything about direct reads; a helper knows the other way.
                ErrorKind::InvalidInput if !flight.cached => {
                    if let Some(replica) = flight.task.piece.file.copies().get(flight.task.piece.copy) {
                        replica.refuse_direct();
                    }
                    self.help(flight.task)
                }
                ErrorKind::Interrupted | ErrorKind::WouldBlock => self.push(flight),
                _ => self.rescue(flight, error),
            };
        };
        flight.done += n;
        if flight.done >= flight.needed() {
            return self.complete(flight);
        }
        // A direct read that stops inside a block has met the end of the file.
        if n == 0 || (!flight.cached && !n.is_multiple_of(BLOCK_BYTES)) {
            let (piece, done) = (&flight.task.piece, flight.done.saturating_sub(flight.skip));
            let error = ends_early(piece.offset, piece.len, done);
            return self.rescue(flight, error);
        }
        self.push(flight);
    }

    fn complete(&self, mut flight: Flight) {
        let shared = Arc::clone(&self.shared);
        if let Some(buf) = flight.bounce.take() {
            let (bounces, aside) = (Arc::clone(&self.bounces), Arc::clone(&self.aside));
            aside.fetch_add(1, Ordering::Relaxed);
            return self.shared.errand(Box::new(move || {
                let Flight { task, skip, .. } = flight;
                let piece = &task.piece;
                // SAFETY: as in `pread`; the kernel has finished with the piece.
                let target = unsafe { task.op.target.part(piece.at, piece.len) };
                target.copy_from_slice(&buf[skip..skip + piece.len]);
                bounces.lock().unwrap_or_else(PoisonError::into_inner).push(buf);
                aside.fetch_sub(1, Ordering::Relaxed);
                let ended = shared.finish(&task, Ok(Served::Disk));
                drop(task);
                if let Some(ended) = ended {
                    ended.call();
                }
            }));
        }
        let Flight { task, cached, .. } = flight;
        if cached && shared.options().caching != Caching::Buffered {
            let copy = task.piece.file.copies().get(task.piece.copy);
            if let Some(Ok(file)) = copy.map(|replica| replica.cached()) {
                os::forget(&file, task.piece.offset, task.piece.len as u64);
            }
        }
        if let Some(ended) = shared.finish(&task, Ok(Served::Disk)) {
            shared.errand(Box::new(move || ended.call()));
        }
    }

    /// Leaves a whole piece to a helper.
    fn help(&self, task: Task) {
        let shared = Arc::clone(&self.shared);
        self.shared.errand(Box::new(move || {
            let mut bounce = Bounce::of(shared.options().piece_bytes);
            pread::run(&shared, task, &mut bounce);
        }));
    }

    /// Leaves a failed piece to a helper.
    fn rescue(&self, flight: Flight, error: Error) {
        let shared = Arc::clone(&self.shared);
        self.shared.errand(Box::new(move || {
            let Flight { task, .. } = flight;
            let mut bounce = Bounce::of(shared.options().piece_bytes);
            // SAFETY: as in `pread`; the kernel has finished with the piece.
            let buf = unsafe { task.op.target.part(task.piece.at, task.piece.len) };
            let result: Result<Served, ReadError> = recover(&shared, &task.piece, buf, error, &mut bounce);
            if let Some(ended) = shared.finish(&task, result) {
                Ended::call(ended);
            }
        }));
    }
}

impl Drop for Driver {
    /// The kernel may still write to memory that belongs to reads in flight: waits for all of them.
    fn drop(&mut self) {
        if self.listening {
            // Ends the read of the event.
            let _ = rustix::io::write(&*self.event, &1u64.to_ne_bytes());
        }
        while self.listening || self.flights.iter().any(Option::is_some) {
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.raw_os_error() != Some(libc::EINTR)
            {
                // Rather lose the memory than have it overwritten by a late read.
                self.flights.drain(..).flatten().for_each(std::mem::forget);
                std::mem::forget(std::mem::take(&mut self.counter));
                return;
            }
            for entry in self.ring.completion().collect::<Vec<_>>() {
                match self.flights.get_mut(entry.user_data() as usize) {
                    Some(flight) => drop(flight.take()),
                    None => self.listening = false,
                }
            }
        }
    }
}
