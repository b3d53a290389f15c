//! What is queued and what runs, per disk, and the choice of what comes next.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::file::{DiskId, Served, SharedFile};
use super::op::{Ended, Op};
use super::os::BLOCK_BYTES;
use super::piece::{self, Piece};
use super::stats::{Busy, Rate};
use super::{Class, ClassStats, DiskStats, IoOptions, IoStats, ReadError, Segment, pread};

/// Most threads for what must not hold up a disk: repeated reads, and with io_uring copies and callbacks.
const MAX_HELPERS: usize = 4;

/// Added to the expected wait of a copy that failed.
const FAILED_PENALTY_S: f64 = 1e6;

/// Work for a helper.
pub(super) type Errand = Box<dyn FnOnce() + Send>;

/// Pieces of one read that lie on one disk.
struct Batch {
    op: Arc<Op>,
    pieces: VecDeque<Piece>,
}

impl Batch {
    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len as u64).sum()
    }
}

/// A piece to be run now.
pub(super) struct Task {
    pub op: Arc<Op>,
    pub piece: Piece,
    pub disk: usize,
    pub began: Instant,
    class: Class,
}

/// How the threads of a disk are told that there is work.
#[derive(Default)]
pub(super) struct Wake {
    condvar: Condvar,
    /// Watched by a ring, which cannot wait for a condition variable.
    #[cfg(target_os = "linux")]
    event: Option<Arc<std::os::fd::OwnedFd>>,
}

impl Wake {
    #[cfg(target_os = "linux")]
    pub(super) fn with_event(event: Arc<std::os::fd::OwnedFd>) -> Self {
        Self { event: Some(event), ..Self::default() }
    }

    fn notify(&self, pieces: usize) {
        #[cfg(target_os = "linux")]
        if let Some(event) = &self.event {
            // A full counter wakes just as well.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            return;
        }
        (0..pieces).for_each(|_| self.condvar.notify_one());
    }
}

struct Disk {
    id: DiskId,
    queues: [VecDeque<Batch>; 2],
    queued_bytes: [u64; 2],
    running_bytes: u64,
    busy: Busy,
    bytes: u64,
    rate: Rate,
    wake: Arc<Wake>,
    uring: bool,
    threads: usize,
}

#[derive(Default)]
struct State {
    disks: Vec<Disk>,
    numbers: BTreeMap<DiskId, usize>,
    classes: [ClassStats; 2],
    class_busy: [Busy; 2],
    busy: Busy,
    stopping: bool,
}

/// What the engine, its threads and its tickets share.
pub(super) struct Shared {
    options: IoOptions,
    state: Mutex<State>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    helpers: Mutex<Option<Sender<Errand>>>,
    pub(super) retries: AtomicU64,
    pub(super) rescued: AtomicU64,
}

impl Shared {
    pub(super) fn start(options: IoOptions) -> Arc<Self> {
        let options = IoOptions {
            depth: options.depth.clamp(1, 1024),
            prefetch_depth: options.prefetch_depth.clamp(1, 1024),
            piece_bytes: options.piece_bytes.clamp(1, 1 << 30).next_multiple_of(BLOCK_BYTES),
            ..options
        };
        let (sender, errands) = channel();
        let shared = Arc::new(Self {
            options,
            state: Mutex::default(),
            threads: Mutex::default(),
            helpers: Mutex::new(Some(sender)),
            retries: AtomicU64::new(0),
            rescued: AtomicU64::new(0),
        });
        let errands = Arc::new(Mutex::new(errands));
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
        for i in 0..cores.clamp(2, MAX_HELPERS) {
            let errands = Arc::clone(&errands);
            shared.spawn(format!("io-help-{i}"), move || run_errands(&errands));
        }
        shared
    }

    pub(super) fn options(&self) -> &IoOptions {
        &self.options
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the thread could be started.
    pub(super) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> bool {
        match std::thread::Builder::new().name(name).spawn(body) {
            Ok(thread) => {
                self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread for reading");
                false
            }
        }
    }

    /// Has a helper do it; on this thread when there is none any more.
    pub(super) fn errand(&self, errand: Errand) {
        let sender = self.helpers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match sender {
            Some(sender) => {
                if let Err(unsent) = sender.send(errand) {
                    (unsent.0)();
                }
            }
            None => errand(),
        }
    }

    /// Queues the pieces of a read.
    pub(super) fn submit(self: &Arc<Self>, op: &Arc<Op>, segments: &[Segment]) {
        if let Err(error) = piece::check(segments, op.target.len()) {
            op.progress().error = Some(error);
        }
        // Asking a file for its disk may open it: not under the lock.
        for replica in segments.iter().flat_map(|segment| segment.file.copies()) {
            let _ = replica.disk();
        }
        let mut state = self.lock();
        let class = op.progress().class;
        state.classes[class as usize].submitted += 1;
        if state.stopping {
            op.progress().error.get_or_insert(ReadError::Stopped);
        }
        let mut batches: BTreeMap<usize, Batch> = BTreeMap::new();
        if op.progress().error.is_none() {
            for segment in segments.iter().filter(|segment| segment.len > 0) {
                let (copy, disk) = state.choose(&segment.file, class, segment.len as u64);
                let new = || Batch { op: Arc::clone(op), pieces: VecDeque::new() };
                let batch = batches.entry(disk).or_insert_with(new);
                batch.pieces.extend(piece::cut(segment, copy, self.options.piece_bytes));
                // At once, so that the next segment sees it.
                state.disks[disk].queued_bytes[class as usize] += segment.len as u64;
            }
        }
        op.progress().left = batches.values().map(|batch| batch.pieces.len()).sum();
        if batches.is_empty() {
            let ended = op.progress().ended();
            state.count_end(class, ended.as_ref());
            drop(state);
            if let Some(ended) = ended {
                self.errand(Box::new(|| ended.call()));
            }
            return;
        }
        let mut unserved = Vec::new();
        for (number, batch) in batches {
            let pieces = batch.pieces.len();
            let threads = self.ready(&mut state, number);
            let disk = &mut state.disks[number];
            disk.queues[class as usize].push_back(batch);
            if threads {
                disk.wake.notify(pieces.min(self.options.depth));
            } else {
                unserved.push(number);
            }
        }
        drop(state);
        // Without any thread the read is done here, late but done.
        for number in unserved {
            pread::drain(self, number);
        }
    }

    /// Starts the threads of a disk when it is first used.
    fn ready(self: &Arc<Self>, state: &mut State, number: usize) -> bool {
        let disk = &mut state.disks[number];
        if disk.threads == 0 {
            start_threads(self, number, disk);
        }
        disk.threads > 0
    }

    /// The next piece of a disk, if one may begin now. `aside` of those that count as running no longer
    /// keep the disk busy.
    pub(super) fn try_next(&self, disk: usize, aside: usize) -> Option<Task> {
        self.lock().take(disk, aside, &self.options)
    }

    /// Waits for the next piece of a disk; `None` when the engine stops.
    pub(super) fn next(&self, disk: usize, wake: &Wake) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.take(disk, 0, &self.options) {
                return Some(task);
            }
            if state.stopping {
                return None;
            }
            state = wake.condvar.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the engine stops.
    #[cfg(target_os = "linux")]
    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Notes the end of a piece. The result is to be called when it was the read's last one.
    pub(super) fn finish(&self, task: &Task, result: Result<Served, ReadError>) -> Option<Ended> {
        let Task { op, class, .. } = task;
        let now = Instant::now();
        let mut state = self.lock();
        state.end_piece(task, now, &result);
        let mut progress = op.progress();
        progress.left -= 1;
        progress.running -= 1;
        if let Err(error) = result {
            progress.error.get_or_insert(error);
            progress.left -= state.withdraw(op);
        }
        let ended = progress.ended();
        drop(progress);
        if ended.is_some() {
            state.count_end(*class, ended.as_ref());
        }
        // A prefetch waits for the running pieces to become few, a ring for helpers to be done.
        let disk = &state.disks[task.disk];
        let waiting = |class: Class| !disk.queues[class as usize].is_empty();
        if waiting(Class::Prefetch) || (disk.uring && waiting(Class::Demand)) {
            disk.wake.notify(1);
        }
        ended
    }

    /// Takes everything of a read out of the queues. Its end, if nothing of it is running.
    pub(super) fn cancel(&self, op: &Arc<Op>) -> Option<Ended> {
        let mut state = self.lock();
        let withdrawn = state.withdraw(op);
        let mut progress = op.progress();
        if withdrawn == 0 {
            return None;
        }
        progress.left -= withdrawn;
        progress.error.get_or_insert(ReadError::Cancelled);
        let ended = progress.ended();
        let class = progress.class;
        drop(progress);
        if ended.is_some() {
            state.count_end(class, ended.as_ref());
        }
        ended
    }

    /// Moves what is queued of a prefetch to the demands.
    pub(super) fn promote(&self, op: &Arc<Op>) {
        let mut state = self.lock();
        let mut progress = op.progress();
        if progress.class == Class::Demand {
            return;
        }
        progress.class = Class::Demand;
        drop(progress);
        for disk in &mut state.disks {
            let (from, to) = (Class::Prefetch as usize, Class::Demand as usize);
            let Some(i) = disk.queues[from].iter().position(|batch| Arc::ptr_eq(&batch.op, op)) else {
                continue;
            };
            let Some(batch) = disk.queues[from].remove(i) else { continue };
            let bytes = batch.bytes();
            disk.queued_bytes[from] = disk.queued_bytes[from].saturating_sub(bytes);
            disk.queued_bytes[to] += bytes;
            disk.wake.notify(batch.pieces.len().min(self.options.depth));
            disk.queues[to].push_back(batch);
        }
    }

    pub(super) fn stats(&self) -> IoStats {
        let now = Instant::now();
        let state = self.lock();
        let class = |class: Class| {
            let i = class as usize;
            ClassStats {
                queued_bytes: state.disks.iter().map(|disk| disk.queued_bytes[i]).sum(),
                running: state.class_busy[i].running(),
                busy: state.class_busy[i].total(now),
                ..state.classes[i]
            }
        };
        let disk = |disk: &Disk| DiskStats {
            device: match disk.id {
                DiskId::Device(number) | DiskId::Custom(number) => number,
            },
            busy: disk.busy.total(now),
            bytes: disk.bytes,
            bytes_per_s: disk.rate.bytes_per_s(),
            latency: disk.rate.latency(),
            uring: disk.uring,
        };
        IoStats {
            demand: class(Class::Demand),
            prefetch: class(Class::Prefetch),
            busy: state.busy.total(now),
            retries: self.retries.load(Ordering::Relaxed),
            rescued: self.rescued.load(Ordering::Relaxed),
            disks: state.disks.iter().map(disk).collect(),
        }
    }

    /// Cancels what is queued, waits for what runs, ends the threads.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        let mut ended = Vec::new();
        for number in 0..state.disks.len() {
            for class in [Class::Demand, Class::Prefetch] {
                let batches = std::mem::take(&mut state.disks[number].queues[class as usize]);
                state.disks[number].queued_bytes[class as usize] = 0;
                for Batch { op, pieces } in batches {
                    let mut progress = op.progress();
                    progress.left -= pieces.len();
                    progress.error.get_or_insert(ReadError::Stopped);
                    ended.extend(progress.ended());
                }
            }
            let wake = &state.disks[number].wake;
            wake.condvar.notify_all();
            wake.notify(1);
        }
        drop(state);
        ended.into_iter().for_each(Ended::call);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // Disks first: they may still have something for the helpers.
        let (helpers, disks): (Vec<_>, Vec<_>) =
            threads.into_iter().partition(|t| t.thread().name().is_some_and(|n| n.starts_with("io-help")));
        join(disks);
        *self.helpers.lock().unwrap_or_else(PoisonError::into_inner) = None;
        join(helpers);
    }
}

/// Waits for threads, except when called from one of them (the last owner was a callback).
fn join(threads: Vec<JoinHandle<()>>) {
    let me = std::thread::current().id();
    for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
        // A thread that panicked has said so on stderr.
        let _ = thread.join();
    }
}

fn run_errands(errands: &Mutex<Receiver<Errand>>) {
    loop {
        let errand = errands.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match errand {
            Ok(errand) => errand(),
            Err(_) => return,
        }
    }
}

/// Starts the threads of a disk: one with a ring, or a pool. Leaves their number at 0 if none starts.
fn start_threads(shared: &Arc<Shared>, number: usize, disk: &mut Disk) {
    #[cfg(target_os = "linux")]
    if shared.options.mode != super::IoMode::Pread
        && matches!(disk.id, DiskId::Device(_))
        && let Some(wake) = super::uring::start(shared, number)
    {
        (disk.wake, disk.threads, disk.uring) = (wake, 1, true);
        return;
    }
    disk.threads = pread::start(shared, number, &disk.wake);
}

impl State {
    /// The number of a disk, new ones included.
    fn number(&mut self, id: DiskId) -> usize {
        let next = self.disks.len();
        let number = *self.numbers.entry(id).or_insert(next);
        if number == next {
            self.disks.push(Disk {
                id,
                queues: Default::default(),
                queued_bytes: [0; 2],
                running_bytes: 0,
                busy: Busy::default(),
                bytes: 0,
                rate: Rate::default(),
                wake: Arc::default(),
                uring: false,
                threads: 0,
            });
        }
        number
    }

    /// The copy with the shortest expected wait, and the number of its disk. Copies that failed come
    /// last, equal ones in order.
    fn choose(&mut self, file: &SharedFile, class: Class, bytes: u64) -> (usize, usize) {
        let mut best = (0, 0);
        let mut best_wait = f64::INFINITY;
        for (copy, replica) in file.copies().iter().enumerate() {
            let number = self.number(replica.disk());
            let disk = &self.disks[number];
            let ahead = match class {
                Class::Demand => disk.queued_bytes[Class::Demand as usize],
                Class::Prefetch => disk.queued_bytes.iter().sum(),
            };
            let penalty = if replica.has_failed() { FAILED_PENALTY_S } else { 0.0 };
            let wait = penalty + disk.rate.wait_s(ahead + disk.running_bytes + bytes);
            if copy == 0 || wait < best_wait {
                (best, best_wait) = ((copy, number), wait);
            }
        }
        best
    }

    /// Takes the next piece of a disk that may begin.
    fn take(&mut self, number: usize, aside: usize, options: &IoOptions) -> Option<Task> {
        let disk = self.disks.get_mut(number)?;
        let running = disk.busy.running().saturating_sub(aside);
        let class = if !disk.queues[Class::Demand as usize].is_empty() {
            (running < options.depth).then_some(Class::Demand)?
        } else {
            (running < options.prefetch_depth.min(options.depth)).then_some(Class::Prefetch)?
        };
        let queue = &mut disk.queues[class as usize];
        let batch = queue.front_mut()?;
        let (op, piece) = (Arc::clone(&batch.op), batch.pieces.pop_front()?);
        if batch.pieces.is_empty() {
            queue.pop_front();
        }
        let now = Instant::now();
        disk.queued_bytes[class as usize] =
            disk.queued_bytes[class as usize].saturating_sub(piece.len as u64);
        disk.running_bytes += piece.len as u64;
        disk.busy.begin(now);
        self.busy.begin(now);
        self.class_busy[class as usize].begin(now);
        op.progress().running += 1;
        Some(Task { op, piece, disk: number, began: now, class })
    }

    fn end_piece(&mut self, task: &Task, now: Instant, result: &Result<Served, ReadError>) {
        let Task { piece, disk, began, class, .. } = task;
        let bytes = piece.len as u64;
        let disk = &mut self.disks[*disk];
        disk.running_bytes = disk.running_bytes.saturating_sub(bytes);
        disk.busy.end(now);
        self.busy.end(now);
        self.class_busy[*class as usize].end(now);
        let class = &mut self.classes[*class as usize];
        match result {
            Ok(Served::Cache) => class.cached_bytes += bytes,
            Ok(Served::Disk) => {
                class.disk_bytes += bytes;
                disk.bytes += bytes;
                disk.rate.note(piece.len, *began, now);
            }
            Err(_) => {}
        }
    }

    /// Takes the queued pieces of a read out; their number.
    fn withdraw(&mut self, op: &Arc<Op>) -> usize {
        let mut withdrawn = 0;
        for disk in &mut self.disks {
            for (queue, queued_bytes) in disk.queues.iter_mut().zip(&mut disk.queued_bytes) {
                while let Some(i) = queue.iter().position(|batch| Arc::ptr_eq(&batch.op, op)) {
                    let Some(batch) = queue.remove(i) else { break };
                    withdrawn += batch.pieces.len();
                    *queued_bytes = queued_bytes.saturating_sub(batch.bytes());
                }
            }
        }
        withdrawn
    }

    fn count_end(&mut self, class: Class, ended: Option<&Ended>) {
        let class = &mut self.classes[class as usize];
        match ended.map(Ended::result) {
            Some(Ok(())) => class.completed += 1,
            Some(Err(ReadError::Cancelled)) => class.cancelled += 1,
            Some(Err(_)) => class.failed += 1,
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    #[test]
    fn reads_are_split_by_measured_speed() {
        let copy = |disk| {
            let reader = |_: &mut [u8], _| -> std::io::Result<usize> { Ok(0) };
            SharedFile::custom(Path::new("shard"), disk, Arc::new(reader))
        };
        let file = copy(1).or(copy(2));
        let mut state = State::default();
        let start = Instant::now();
        // 3 GB/s and 1 GB/s.
        for (disk, bytes) in [(1, 300_000_000), (2, 100_000_000)] {
            let number = state.number(DiskId::Custom(disk));
            state.disks[number].rate.note(bytes, start, start + Duration::from_millis(100));
        }
        for class in [Class::Demand, Class::Prefetch] {
            let mut reads = [0; 2];
            for _ in 0..40 {
                let (copy, number) = state.choose(&file, class, 20_000_000);
                state.disks[number].queued_bytes[class as usize] += 20_000_000;
                reads[copy] += 1;
            }
            assert_eq!(reads, [30, 10]);
            // Demands do not wait for queued prefetches; prefetches wait for everything.
            state.disks.iter_mut().for_each(|disk| disk.queued_bytes = [0; 2]);
        }
        state.disks[0].queued_bytes[Class::Prefetch as usize] = 1 << 40;
        assert_eq!(state.choose(&file, Class::Demand, 1).0, 0);
        assert_eq!(state.choose(&file, Class::Prefetch, 1).0, 1);
        file.copies()[0].mark_failed();
        assert_eq!(state.choose(&file, Class::Demand, 1).0, 1);
    }
}
