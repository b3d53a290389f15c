//! What memory, cores and disk of this machine give: measured by `plan` in a fraction of a second, by
//! `bench` at length.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use shimmer_common::kernels::{Kernels, Probe};
use shimmer_common::machine;
use shimmer_common::mem::AlignedBuf;

/// Longest time a measurement of `plan` takes.
const BUDGET: Duration = Duration::from_millis(150);

/// What `plan` reads to measure memory: larger than the last-level cache of desktop CPUs.
const MEMORY_BYTES: usize = 128 << 20;

/// Bytes per read and most bytes read from the disk.
const READ_BYTES: usize = 1 << 20;
const DISK_BYTES: usize = 256 << 20;

/// The measuring loops of the fastest instruction set.
pub fn best_probe() -> Option<Probe> {
    Probe::new(Kernels::best().isa())
}

/// Memory to measure with: really allocated, on huge pages where the system has them.
///
/// # Errors
/// The operating system's when there is not enough.
pub fn memory_buffer(bytes: usize) -> std::io::Result<AlignedBuf> {
    let mut buffer = AlignedBuf::zeroed(bytes)?;
    // A page that was never written is not memory but one page of zeros, which the caches hold.
    for page in buffer.chunks_mut(4096) {
        page[0] = 1;
    }
    Ok(buffer)
}

/// Bytes per second that `threads` threads together read from `buffer`, each its own part of it, `passes`
/// times. Every thread reads with wide registers, front to back.
pub fn read_rate(probe: Probe, buffer: &[u8], threads: usize, passes: usize) -> f64 {
    let part = buffer.len().div_ceil(threads.max(1)).next_multiple_of(4096);
    let parts: Vec<&[u8]> = buffer.chunks(part.max(4096)).collect();
    let seconds = together(parts.len(), |i| {
        for _ in 0..passes {
            std::hint::black_box(probe.read(std::hint::black_box(parts[i])));
        }
    });
    (buffer.len() * passes) as f64 / seconds
}

/// Multiply-adds per second of `threads` threads together; `work` is one round on one thread and returns
/// the number of multiply-adds.
pub fn mac_rate(threads: usize, work: impl Fn() -> u64 + Sync) -> f64 {
    let count = std::sync::atomic::AtomicU64::new(0);
    let seconds = together(threads, |_| {
        count.fetch_add(work(), std::sync::atomic::Ordering::Relaxed);
    });
    count.into_inner() as f64 / seconds
}

/// Runs `work(i)` on `threads` threads at once; the seconds from the first start to the last end.
fn together(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let (barrier, work) = (&Barrier::new(threads), &work);
    let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let one = |i| {
            move || {
                barrier.wait();
                let started = Instant::now();
                work(i);
                (started, Instant::now())
            }
        };
        let workers: Vec<_> = (0..threads).map(|i| scope.spawn(one(i))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    let first = times.iter().map(|(start, _)| *start).min();
    let last = times.iter().map(|(_, end)| *end).max();
    let seconds = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
    seconds.max(1e-9)
}

/// The part of `buffer` that lies on huge pages; `None` where the system does not tell.
pub fn huge_share(buffer: &[u8]) -> Option<f64> {
    let bytes = huge_bytes_in(&std::fs::read_to_string("/proc/self/smaps").ok()?, buffer.as_ptr() as u64)?;
    Some((bytes as f64 / buffer.len() as f64).min(1.0))
}

/// How many bytes of the mapping that holds `address` lie on huge pages.
fn huge_bytes_in(smaps: &str, address: u64) -> Option<u64> {
    let holds = |line: &str| {
        let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(begin)?..number(end)?).contains(&address))
    };
    let mut lines = smaps.lines().skip_while(|line| holds(line) != Some(true)).skip(1);
    let line =
        lines.by_ref().take_while(|line| holds(line).is_none()).find(|l| l.starts_with("AnonHugePages:"))?;
    let kib = line.split_whitespace().nth(1)?.parse::<u64>().ok()?;
    kib.checked_mul(1024)
}

/// Bytes per second that all cores together read from memory; a low default where it cannot be measured.
pub fn memory() -> f64 {
    const UNKNOWN: f64 = 10e9;
    let Some((probe, buffer)) = best_probe().zip(memory_buffer(MEMORY_BYTES).ok()) else { return UNKNOWN };
    let threads = machine::physical_cores();
    let started = Instant::now();
    let mut best = 0f64;
    while best == 0.0 || started.elapsed() < BUDGET {
        best = best.max(read_rate(probe, &buffer, threads, 2));
    }
    best
}

/// Bytes per second of reading the largest file in `dir`, from the disk where the system can be asked to
/// forget its cache; a low default where nothing can be read.
pub fn disk(dir: &Path) -> f64 {
    const UNKNOWN: f64 = 500e6;
    let Some((path, length)) = largest_file(dir) else { return UNKNOWN };
    measure(&path, length).filter(|b| b.is_finite() && *b > 0.0).unwrap_or(UNKNOWN)
}

fn largest_file(dir: &Path) -> Option<(PathBuf, u64)> {
    let files = std::fs::read_dir(dir).ok()?.flatten().filter_map(|entry| {
        let length = entry.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
        Some((entry.path(), length))
    });
    files.max_by_key(|(_, length)| *length).filter(|(_, length)| *length > 0)
}

#[cfg(unix)]
fn measure(path: &Path, length: u64) -> Option<f64> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).ok()?;
    // Advice only; cached pages then make the estimate too good, never wrong in kind.
    shimmer_common::io::forget(&file, 0, length);
    let mut buffer = vec![0u8; READ_BYTES];
    let started = Instant::now();
    let mut read = 0usize;
    // From the middle on: the front is cached because headers were read.
    let mut offset = length / 2;
    while read < DISK_BYTES && started.elapsed() < BUDGET {
        match file.read_at(&mut buffer, offset).ok()? {
            0 => break,
            n => {
                read += n;
                offset += n as u64;
            }
        }
    }
    (read > 0).then(|| read as f64 / started.elapsed().as_secs_f64())
}

#[cfg(not(unix))]
fn measure(path: &Path, _length: u64) -> Option<f64> {
    use std::io::Read;
    let mut file = File::open(path).ok()?;
    let mut buffer = vec![0u8; READ_BYTES];
    let started = Instant::now();
    let mut read = 0usize;
    while read < DISK_BYTES && started.elapsed() < BUDGET {
        match file.read(&mut buffer).ok()? {
            0 => break,
            n => read += n,
        }
    }
    (read > 0).then(|| read as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_are_positive() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("shard"), vec![7u8; 4 << 20]).unwrap();
        assert!(disk(dir.path()) > 0.0 && memory() > 0.0);
        assert!(disk(&dir.path().join("missing")) > 0.0);
        let probe = best_probe().unwrap();
        assert!(mac_rate(2, || probe.int8(1).count) > 0.0);
    }

    #[test]
    fn every_part_of_the_buffer_is_read_by_some_thread() {
        let probe = best_probe().unwrap();
        let buffer = memory_buffer(3 * 4096 + 5).unwrap();
        for threads in [1, 2, 3, 7] {
            assert!(read_rate(probe, &buffer, threads, 1) > 0.0);
        }
    }

    #[test]
    fn the_mapping_of_an_address_is_found() {
        let smaps = "1000-2000 rw-p 00000000 00:00 0\nSize: 4 kB\nAnonHugePages: 0 kB\n\
                     7f00000-7f80000 rw-p 00000000 00:00 0\nSize: 512 kB\nAnonHugePages:    2048 kB\nLocked: 0 kB\n\
                     8000000-9000000 rw-p 00000000 00:00 0\nAnonHugePages: 1 kB\n";
        assert_eq!(huge_bytes_in(smaps, 0x7f0_0010), Some(2048 << 10));
        assert_eq!(huge_bytes_in(smaps, 0x1000), Some(0));
        assert_eq!(huge_bytes_in(smaps, 0x3000), None);
        assert_eq!(huge_bytes_in("", 0x3000), None);
    }
}
