//! The engine on disks that wait, fail and lie, and on real files.

use std::collections::HashMap;
use std::io::{Error, ErrorKind};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::mem::AlignedBuf;

const PIECE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(20);

/// A disk that reads only when allowed to, and fails where told to.
#[derive(Default)]
struct Fake {
    state: Mutex<FakeState>,
    changed: Condvar,
}

#[derive(Default)]
struct FakeState {
    /// Offsets in the order their reads began.
    begun: Vec<u64>,
    /// Reads that may end.
    permits: usize,
    /// How often the read at an offset fails from now on.
    failures: HashMap<u64, usize>,
}

const ALWAYS: usize = usize::MAX;

impl Fake {
    fn open() -> Arc<Self> {
        let fake = Self::default();
        fake.allow(1 << 40);
        Arc::new(fake)
    }

    fn shut() -> Arc<Self> {
        Arc::default()
    }

    fn allow(&self, reads: usize) {
        self.state.lock().unwrap().permits += reads;
        self.changed.notify_all();
    }

    fn fail(&self, offset: u64, times: usize) {
        self.state.lock().unwrap().failures.insert(offset, times);
    }

    fn begun(&self) -> Vec<u64> {
        self.state.lock().unwrap().begun.clone()
    }

    fn wait_for(&self, begun: usize) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, |state| state.begun.len() < begun);
        assert!(!waited.unwrap().1.timed_out(), "{begun} reads never began");
    }

    fn byte(offset: u64) -> u8 {
        (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    fn file(self: &Arc<Self>, disk: u64) -> Arc<SharedFile> {
        Arc::new(self.copy(disk))
    }

    fn copy(self: &Arc<Self>, disk: u64) -> SharedFile {
        SharedFile::custom(Path::new(&format!("disk-{disk}/shard")), disk, Arc::clone(self) as _)
    }
}

impl ReadAt for Fake {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let mut state = self.state.lock().unwrap();
        state.begun.push(offset);
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, |state| state.permits == 0);
        state = waited.unwrap().0;
        state.permits = state.permits.saturating_sub(1);
        match state.failures.get_mut(&offset) {
            None | Some(0) => {}
            Some(&mut ALWAYS) => return Err(Error::other("input/output error")),
            Some(times) => {
                *times -= 1;
                return Err(Error::other("input/output error"));
            }
        }
        drop(state);
        buf.iter_mut().zip(offset..).for_each(|(byte, offset)| *byte = Self::byte(offset));
        Ok(buf.len())
    }
}

/// One piece at a time, no pauses.
fn options() -> IoOptions {
    IoOptions {
        depth: 1,
        prefetch_depth: 1,
        piece_bytes: PIECE,
        retry_pause: Duration::ZERO,
        ..IoOptions::default()
    }
}

type Outcome = Receiver<(Vec<u8>, Result<(), ReadError>)>;

fn submit(
    engine: &IoEngine,
    file: &Arc<SharedFile>,
    offset: u64,
    len: usize,
    class: Class,
) -> (Ticket<Vec<u8>>, Outcome) {
    let (sender, receiver) = channel();
    let segments = vec![Segment { file: Arc::clone(file), offset, len, at: 0 }];
    let done: Done<Vec<u8>> = Box::new(move |buf, result| drop(sender.send((buf, result))));
    (engine.submit(Read { buf: vec![0; len], segments, class, done }), receiver)
}

fn outcome(receiver: &Outcome) -> (Vec<u8>, Result<(), ReadError>) {
    receiver.recv_timeout(PATIENCE).expect("the callback was never called")
}

fn check_bytes(buf: &[u8], offset: u64) {
    assert!(buf.iter().zip(offset..).all(|(&byte, offset)| byte == Fake::byte(offset)));
}

fn offsets(first: u64, pieces: std::ops::Range<u64>) -> Vec<u64> {
    pieces.map(|i| first + i * PIECE as u64).collect()
}

#[test]
fn demands_overtake_prefetches_between_pieces() {
    let disk = Fake::shut();
    let file = disk.file(1);
    let engine = IoEngine::start(options());
    let (_p, prefetch) = submit(&engine, &file, 0, 3 * PIECE, Class::Prefetch);
    disk.wait_for(1);
    let (_d, demand) = submit(&engine, &file, 1 << 20, 2 * PIECE, Class::Demand);
    let (_e, second) = submit(&engine, &file, 1 << 21, PIECE, Class::Demand);
    disk.allow(6);
    for (receiver, offset) in [(demand, 1 << 20), (second, 1 << 21), (prefetch, 0)] {
        let (buf, result) = outcome(&receiver);
        result.unwrap();
        check_bytes(&buf, offset);
    }
    let order = [vec![0], offsets(1 << 20, 0..2), vec![1 << 21], offsets(0, 1..3)].concat();
    assert_eq!(disk.begun(), order);
    let stats = engine.stats();
    assert_eq!((stats.demand.completed, stats.prefetch.completed), (2, 1));
    assert_eq!((stats.demand.disk_bytes, stats.prefetch.disk_bytes), (3 * 4096, 3 * 4096));
    assert_eq!((stats.demand.queued_bytes, stats.prefetch.running), (0, 0));
    assert!(stats.busy >= stats.demand.busy && stats.busy > Duration::ZERO);
    assert_eq!((stats.disks.len(), stats.disks[0].bytes), (1, 6 * 4096));
}

#[test]
fn a_queued_prefetch_comes_back_at_once_a_running_one_after_its_piece() {
    let disk = Fake::shut();
    let file = disk.file(1);
    let engine = IoEngine::start(options());
    let (running, a) = submit(&engine, &file, 0, 3 * PIECE, Class::Prefetch);
    disk.wait_for(1);
    let (queued, b) = submit(&engine, &file, 1 << 20, PIECE, Class::Prefetch);
    assert_eq!(queued.cancel().unwrap().len(), PIECE);
    assert!(b.recv().is_err(), "the callback was called although the buffer came back");
    assert!(queued.cancel().is_none());
    assert!(running.cancel().is_none());
    disk.allow(9);
    let (_, result) = outcome(&a);
    assert!(matches!(result, Err(ReadError::Cancelled)), "{result:?}");
    // The last piece is not stopped.
    let disk = Fake::shut();
    let (last, c) = submit(&engine, &disk.file(2), 0, PIECE, Class::Prefetch);
    disk.wait_for(1);
    assert!(last.cancel().is_none());
    disk.allow(1);
    outcome(&c).1.unwrap();
    assert!(last.cancel().is_none());
    let stats = engine.stats();
    assert_eq!((stats.prefetch.cancelled, stats.prefetch.completed), (2, 1));
    assert_eq!(stats.prefetch.queued_bytes, 0);
}

#[test]
fn a_promoted_prefetch_is_a_demand() {
    let disk = Fake::shut();
    let file = disk.file(1);
    let engine = IoEngine::start(options());
    let (_a, a) = submit(&engine, &file, 0, PIECE, Class::Demand);
    disk.wait_for(1);
    let (_b, b) = submit(&engine, &file, 1 << 20, PIECE, Class::Prefetch);
    let (ticket, c) = submit(&engine, &file, 1 << 21, 2 * PIECE, Class::Prefetch);
    let (_d, d) = submit(&engine, &file, 1 << 22, PIECE, Class::Demand);
    ticket.promote();
    ticket.promote();
    disk.allow(9);
    [a, b, c, d].iter().for_each(|receiver| outcome(receiver).1.unwrap());
    assert_eq!(disk.begun(), [vec![0, 1 << 22], offsets(1 << 21, 0..2), vec![1 << 20]].concat());
}

#[test]
fn prefetches_leave_most_of_the_depth_to_demands() {
    let disk = Fake::shut();
    let file = disk.file(1);
    let engine = IoEngine::start(IoOptions { depth: 4, prefetch_depth: 2, ..options() });
    let (_p, prefetch) = submit(&engine, &file, 0, 8 * PIECE, Class::Prefetch);
    disk.wait_for(2);
    assert_eq!(engine.stats().prefetch.running, 2);
    let (_d, demand) = submit(&engine, &file, 1 << 20, 2 * PIECE, Class::Demand);
    disk.wait_for(4);
    assert_eq!(engine.stats().demand.running, 2);
    disk.allow(100);
    outcome(&demand).1.unwrap();
    outcome(&prefetch).1.unwrap();
}

#[test]
fn a_disk_that_fails_for_a_moment_is_asked_again() {
    let disk = Fake::open();
    disk.fail(PIECE as u64, 3);
    let engine = IoEngine::start(options());
    let (_t, receiver) = submit(&engine, &disk.file(1), 0, 3 * PIECE, Class::Demand);
    let (buf, result) = outcome(&receiver);
    result.unwrap();
    check_bytes(&buf, 0);
    assert_eq!(engine.stats().retries, 3);
}

#[test]
fn what_one_disk_cannot_read_another_copy_serves() {
    let (bad, good) = (Fake::open(), Fake::open());
    bad.fail(PIECE as u64, ALWAYS);
    let file = Arc::new(bad.copy(1).or(good.copy(2)));
    let engine = IoEngine::start(options());
    let (_t, receiver) = submit(&engine, &file, 0, 3 * PIECE, Class::Demand);
    let (buf, result) = outcome(&receiver);
    result.unwrap();
    check_bytes(&buf, 0);
    assert_eq!((engine.stats().retries, engine.stats().rescued), (3, 1));
    // From now on the good copy is preferred.
    let begun = bad.begun().len();
    let (_t, receiver) = submit(&engine, &file, 0, 3 * PIECE, Class::Demand);
    outcome(&receiver).1.unwrap();
    assert_eq!(bad.begun().len(), begun);
}

#[test]
fn an_error_for_good_names_file_and_offset_and_gives_the_buffer_back() {
    let disk = Fake::open();
    disk.fail(PIECE as u64, ALWAYS);
    let engine = IoEngine::start(options());
    let (_t, receiver) = submit(&engine, &disk.file(7), 0, 9 * PIECE, Class::Demand);
    let (buf, result) = outcome(&receiver);
    assert_eq!(buf.len(), 9 * PIECE);
    let sentence = result.unwrap_err().to_string();
    assert_eq!(sentence, "cannot read 4096 bytes at offset 4096 of disk-7/shard: input/output error");
    // What was not begun is not read.
    assert!(!disk.begun().contains(&(8 * PIECE as u64)));
    assert_eq!(engine.stats().demand.failed, 1);
}

#[test]
fn copies_share_the_load() {
    let (a, b) = (Fake::shut(), Fake::shut());
    let file = Arc::new(a.copy(1).or(b.copy(2)));
    let engine = IoEngine::start(options());
    let reads: Vec<_> =
        (0..6).map(|i| submit(&engine, &file, i * PIECE as u64, PIECE, Class::Demand)).collect();
    a.allow(9);
    b.allow(9);
    reads.iter().for_each(|(_, receiver)| outcome(receiver).1.unwrap());
    assert_eq!((a.begun().len(), b.begun().len()), (3, 3), "equal disks get equal shares");
}

#[test]
fn reads_that_cannot_be_done_end_all_the_same() {
    let disk = Fake::open();
    let file = disk.file(1);
    let engine = IoEngine::start(options());
    let segment = |at| Segment { file: Arc::clone(&file), offset: 0, len: 10, at };
    let (buf, result) = engine.read(vec![0; 15], vec![segment(0), segment(5)], Class::Demand);
    assert_eq!(buf.unwrap().len(), 15);
    assert!(matches!(result, Err(ReadError::Unfit(_))), "{result:?}");
    engine.read(vec![0; 15], Vec::new(), Class::Demand).1.unwrap();
    // A panicking reader and a panicking callback harm nobody else.
    let broken: Arc<dyn ReadAt> =
        Arc::new(|_: &mut [u8], _| -> std::io::Result<usize> { panic!("on purpose") });
    let explosive = Arc::new(SharedFile::custom(Path::new("bomb"), 1, broken));
    let (_t, receiver) = submit(&engine, &explosive, 0, 10, Class::Demand);
    let sentence = outcome(&receiver).1.unwrap_err().to_string();
    assert!(sentence.contains("bomb") && sentence.contains("panicked"), "{sentence}");
    let done: Done<Vec<u8>> = Box::new(|_, _| panic!("on purpose"));
    drop(engine.submit(Read { buf: vec![0; 20], segments: vec![segment(3)], class: Class::Demand, done }));
    let (_t, receiver) = submit(&engine, &file, 0, 10, Class::Demand);
    outcome(&receiver).1.unwrap();
}

#[test]
fn an_engine_that_ends_tells_everybody_who_waits() {
    let disk = Fake::shut();
    let file = disk.file(1);
    let engine = IoEngine::start(options());
    let (_a, running) = submit(&engine, &file, 0, 2 * PIECE, Class::Demand);
    disk.wait_for(1);
    let (b, queued) = submit(&engine, &file, 0, PIECE, Class::Prefetch);
    let ending = std::thread::spawn(move || drop(engine));
    assert!(matches!(outcome(&queued).1, Err(ReadError::Stopped)));
    disk.allow(1);
    assert!(matches!(outcome(&running).1, Err(ReadError::Stopped)));
    ending.join().unwrap();
    assert!(b.cancel().is_none());
}

fn modes() -> Vec<IoOptions> {
    let mut all = Vec::new();
    for mode in [IoMode::Pread, IoMode::Uring] {
        for caching in [Caching::Auto, Caching::Direct, Caching::Buffered] {
            all.push(IoOptions { mode, caching, depth: 4, piece_bytes: 8192, ..options() });
        }
    }
    all
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(Fake::byte).collect()
}

#[test]
fn truncated_files_are_told_from_failing_disks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard");
    for len in [0, 1, 4095, 4096, 4097, 20_000] {
        std::fs::write(&path, pattern(len)).unwrap();
        let file = Arc::new(SharedFile::new(&path, true));
        for options in modes() {
            let engine = IoEngine::start(options);
            let segments = |offset, len| vec![Segment { file: Arc::clone(&file), offset, len, at: 0 }];
            let (buf, result) = engine.read(vec![0; len], segments(0, len), Class::Demand);
            result.unwrap();
            assert_eq!(buf.unwrap(), pattern(len), "{len} {options:?}");
            let result = engine.read(vec![0; len + 1], segments(0, len + 1), Class::Demand).1;
            let Err(ReadError::Failed { path: failed, source, .. }) = result else { panic!("{result:?}") };
            assert_eq!((failed, source.kind()), (path.clone(), ErrorKind::UnexpectedEof));
            assert!(source.to_string().contains(&format!("nothing at byte {len}, ")), "{source}");
            let mut buf = [0];
            assert_eq!(
                file.read_exact_at(&mut buf, len as u64).unwrap_err().kind(),
                ErrorKind::UnexpectedEof
            );
        }
    }
    let engine = IoEngine::start(options());
    let file = Arc::new(SharedFile::new(&dir.path().join("missing"), true));
    let (_t, receiver) = submit(&engine, &file, 0, 10, Class::Demand);
    assert!(outcome(&receiver).1.unwrap_err().to_string().contains("missing"));
    assert_eq!(engine.stats().retries, 0);
}

#[test]
fn only_the_automatic_choice_takes_bytes_from_the_page_cache() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard");
    std::fs::write(&path, pattern(50_000)).unwrap();
    for options in modes() {
        let engine = IoEngine::start(options);
        let file = Arc::new(SharedFile::new(&path, true));
        let (_t, receiver) = submit(&engine, &file, 100, 49_000, Class::Demand);
        assert_eq!(outcome(&receiver).0, pattern(50_000)[100..49_100]);
        let ClassStats { cached_bytes, disk_bytes, .. } = engine.stats().demand;
        assert_eq!(cached_bytes + disk_bytes, 49_000, "{options:?}");
        assert!(cached_bytes == 0 || options.caching == Caching::Auto, "{options:?}");
        assert!(engine.stats().disks[0].bytes == disk_bytes);
    }
}

#[test]
fn a_file_is_found_at_its_second_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard");
    std::fs::write(&path, pattern(10_000)).unwrap();
    let file = SharedFile::new(&dir.path().join("missing"), true).or(SharedFile::new(&path, false));
    let mut buf = vec![0; 10_000];
    file.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(buf, pattern(10_000));
    let (file, engine) = (Arc::new(file), IoEngine::start(options()));
    let (_t, receiver) = submit(&engine, &file, 0, 10_000, Class::Demand);
    assert_eq!(outcome(&receiver).0, pattern(10_000));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any segments, aligned or not, give the file's bytes and leave the rest of the buffer alone.
    #[test]
    fn every_backend_reads_the_same_bytes(
        len in 1usize..60_000,
        wanted in proptest::collection::vec((any::<u16>(), 0usize..30_000, any::<bool>(), 0usize..5000), 1..5),
        keep_open in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        let bytes = pattern(len);
        std::fs::write(&path, &bytes).unwrap();
        let file = Arc::new(SharedFile::new(&path, keep_open));
        let mut segments = Vec::new();
        let mut expected = Vec::new();
        for (offset, take, aligned, gap) in wanted {
            let mut offset = usize::from(offset) % len;
            let mut at = expected.len() + gap;
            if aligned {
                (offset, at) = (offset / 4096 * 4096, at.next_multiple_of(4096));
            }
            let take = take.min(len - offset);
            expected.resize(at, 0xa5);
            expected.extend(&bytes[offset..offset + take]);
            segments.push(Segment { file: Arc::clone(&file), offset: offset as u64, len: take, at });
        }
        for options in modes() {
            let engine = IoEngine::start(options);
            let mut buf = AlignedBuf::zeroed(expected.len()).unwrap();
            buf.fill(0xa5);
            let (buf, result) = engine.read(buf, segments.clone(), Class::Demand);
            result.unwrap();
            prop_assert!(buf.unwrap()[..] == expected[..], "{:?}", options);
            let (buf, result) = engine.read(vec![0xa5; expected.len()], segments.clone(), Class::Prefetch);
            result.unwrap();
            prop_assert!(buf.unwrap() == expected, "{:?}", options);
        }
    }
}
