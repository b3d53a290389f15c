//! Random reads of whole records.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::experts::{ExpertError, ExpertSource};
use crate::io::{self, Class, IoEngine, IoOptions, Read, ReadError, Segment, SharedFile};
use crate::mem::AlignedBuf;
use crate::synth::shuffled;

/// Reads in flight: the experts of one layer that are missing.
pub const WINDOW: usize = 8;
/// Reads measured one at a time.
const ALONE: usize = 3;

/// Why reading could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// A source without records.
    #[error("{0} holds no experts to read; measure where some are")]
    Nothing(String),
    /// A record cannot be found.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// A read failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file to measure with cannot be made, or memory be had.
    #[error("cannot {action}: {source}; free some space or name another directory")]
    Io {
        /// What was tried.
        action: String,
        /// Operating system error.
        source: std::io::Error,
    },
}

/// Reads that lie somewhere in files.
pub struct Reads {
    items: Vec<Vec<Segment>>,
    paths: Vec<PathBuf>,
    /// Largest read.
    buffer_bytes: usize,
}

impl Reads {
    /// One read per expert of `source`.
    ///
    /// # Errors
    /// [`MeasureError::Nothing`] when the source has no experts.
    pub fn of_experts(source: &dyn ExpertSource) -> Result<Self, MeasureError> {
        let layout = source.layout();
        let ids = layout.ids().filter(|id| source.contains(*id));
        let items: Vec<Vec<Segment>> = ids.map(|id| source.plan(id)).collect::<Result<_, _>>()?;
        if items.is_empty() {
            return Err(MeasureError::Nothing(source.describe()));
        }
        let mut paths: Vec<PathBuf> =
            items.iter().flatten().map(|segment| segment.file.path().to_owned()).collect();
        paths.sort();
        paths.dedup();
        Ok(Self { items, paths, buffer_bytes: layout.max_record_bytes() })
    }

    /// One file of `file_bytes` cut into reads of `read_bytes`.
    pub fn of_file(path: &Path, file_bytes: u64, read_bytes: usize) -> Self {
        let file = Arc::new(SharedFile::new(path, true));
        let count = file_bytes / read_bytes.max(1) as u64;
        let segment =
            |i: u64| Segment { file: file.clone(), offset: i * read_bytes as u64, len: read_bytes, at: 0 };
        let items = (0..count).map(|i| vec![segment(i)]).collect();
        Self { items, paths: vec![path.to_owned()], buffer_bytes: read_bytes }
    }

    /// Number of reads.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes of all reads.
    pub fn total_bytes(&self) -> u64 {
        self.items.iter().flatten().map(|segment| segment.len as u64).sum()
    }

    /// Reads in the order of the files.
    pub fn in_file_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.items.len()).collect();
        order.sort_by_key(|&i| self.items[i].first().map(|s| (s.file.path().to_owned(), s.offset)));
        order
    }

    /// Drops the files from the page cache, so far as the system lets us.
    pub fn forget(&self) {
        self.paths.iter().for_each(|path| io::forget_file(path));
    }

    /// Bytes per second with a fresh engine: reads in the given order, `window` at once, no new ones begun
    /// after `limit` bytes or `budget`. The first read opens files and starts threads; it does not count.
    ///
    /// # Errors
    /// [`MeasureError`] when a read fails.
    pub fn timed(
        &self,
        options: IoOptions,
        order: &[usize],
        window: usize,
        limit: u64,
        budget: Duration,
    ) -> Result<f64, MeasureError> {
        let engine = IoEngine::start(options);
        let (sender, receiver) = mpsc::channel();
        let submit = |buf: AlignedBuf, segments: Vec<Segment>| {
            let sender = sender.clone();
            let done = Box::new(move |buf: AlignedBuf, result: Result<(), ReadError>| {
                // The receiver outlives every read, or nobody waits any more.
                let _ = sender.send((buf, result));
            });
            drop(engine.submit(Read { buf, segments, class: Class::Demand, done }));
        };
        let receive = || {
            let (buffer, result) = receiver.recv().map_err(|_| ReadError::Stopped)?;
            result.map(|()| buffer)
        };
        let mut free = self.buffers(window)?;
        let mut order = order.iter().filter_map(|&i| self.items.get(i));
        if let (Some(buffer), Some(first)) = (free.pop(), order.next()) {
            submit(buffer, first.clone());
            free.push(receive()?);
        }
        let (mut bytes, mut running) = (0, 0);
        let started = Instant::now();
        loop {
            while bytes < limit
                && (bytes == 0 || started.elapsed() < budget)
                && let Some(buffer) = free.pop()
            {
                let Some(next) = order.next() else {
                    free.push(buffer);
                    break;
                };
                bytes += next.iter().map(|segment| segment.len as u64).sum::<u64>();
                submit(buffer, next.clone());
                running += 1;
            }
            if running == 0 {
                break;
            }
            free.push(receive()?);
            running -= 1;
        }
        Ok(bytes as f64 / started.elapsed().as_secs_f64().max(1e-9))
    }

    /// Memory that is really there: a page that was never written is one page of zeros for all.
    fn buffers(&self, count: usize) -> Result<Vec<AlignedBuf>, MeasureError> {
        let one = |_| {
            let mut buffer = AlignedBuf::zeroed(self.buffer_bytes).map_err(|source| MeasureError::Io {
                action: format!("allocate {} bytes", self.buffer_bytes),
                source,
            })?;
            buffer.chunks_mut(4096).for_each(|page| page[0] = 1);
            Ok(buffer)
        };
        (0..count).map(one).collect()
    }
}

/// A file to measure with where there are no records yet; gone when dropped.
pub struct Scratch {
    file: tempfile::NamedTempFile,
    bytes: u64,
}

impl Scratch {
    /// Writes `bytes` of noise into `dir`.
    ///
    /// # Errors
    /// [`MeasureError::Io`].
    pub fn new(dir: &Path, bytes: u64) -> Result<Self, MeasureError> {
        use std::io::Write as _;
        const CHUNK: usize = 1 << 20;
        let failed =
            |source| MeasureError::Io { action: format!("write a file in {}", dir.display()), source };
        let mut file = tempfile::Builder::new().prefix(".speed-").tempfile_in(dir).map_err(failed)?;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        // Noise, so that no file system stores it smaller than it is.
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .take(CHUNK / 8)
        .flatten()
        .collect();
        let mut left = bytes;
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            file.write_all(&noise[..part]).map_err(failed)?;
            left -= part as u64;
        }
        file.as_file().sync_all().map_err(failed)?;
        Ok(Self { file, bytes })
    }

    /// Its reads of `read_bytes` each.
    pub fn reads(&self, read_bytes: usize) -> Reads {
        Reads::of_file(self.file.path(), self.bytes, read_bytes)
    }
}

/// How fast records come from a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskSpeed {
    /// Several at once, bytes per second.
    pub bytes_per_s: f64,
    /// One alone, seconds.
    pub read_s: f64,
}

/// Measures random reads for about `budget`, past the page cache.
///
/// # Errors
/// [`MeasureError`].
pub fn disk_speed(
    reads: &Reads,
    options: IoOptions,
    seed: u64,
    budget: Duration,
) -> Result<DiskSpeed, MeasureError> {
    let options = IoOptions { caching: io::Caching::Direct, ..options };
    let order = shuffled(reads.len(), seed);
    let alone = order.len().min(ALONE + 1);
    let one = reads.timed(options, &order[..alone], 1, u64::MAX, budget / 4)?;
    let bytes_per_s = reads.timed(options, &order, WINDOW, u64::MAX, budget)?;
    let mean = reads.total_bytes() as f64 / reads.len().max(1) as f64;
    Ok(DiskSpeed { bytes_per_s, read_s: if one > 0.0 { mean / one } else { 0.0 } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_file_is_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(dir.path(), (3 << 20) + 5).unwrap();
        let reads = scratch.reads(256 << 10);
        assert_eq!((reads.len(), reads.total_bytes()), (12, 3 << 20));
        let speed = disk_speed(&reads, IoOptions::default(), 1, Duration::from_millis(50)).unwrap();
        assert!(speed.bytes_per_s > 0.0 && speed.read_s > 0.0, "{speed:?}");
        drop(scratch);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_directory_is_an_error_with_its_name() {
        let error = Scratch::new(Path::new("/nonexistent/dir"), 1).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/dir"), "{error}");
    }
}
