//! Quick measurements for `plan`: a fraction of a second each, good to a factor, not to a percent.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest time a measurement takes.
const BUDGET: Duration = Duration::from_millis(150);

/// Larger than the last-level cache of desktop CPUs.
const MEMORY_BYTES: usize = 128 << 20;

/// Bytes per read and most bytes read from the disk.
const READ_BYTES: usize = 1 << 20;
const DISK_BYTES: usize = 256 << 20;

/// Bytes per second that all cores together read from memory.
pub fn memory() -> f64 {
    let words = vec![1u64; MEMORY_BYTES / 8];
    let threads = shimmer_common::machine::physical_cores();
    let part = words.len().div_ceil(threads).max(1);
    let started = Instant::now();
    let mut read = 0usize;
    let mut sum = 0u64;
    while read == 0 || started.elapsed() < BUDGET {
        sum = sum.wrapping_add(std::thread::scope(|scope| {
            let workers: Vec<_> = words
                .chunks(part)
                .map(|chunk| scope.spawn(move || chunk.iter().fold(0u64, |a, b| a.wrapping_add(*b))))
                .collect();
            workers.into_iter().filter_map(|w| w.join().ok()).fold(0u64, u64::wrapping_add)
        }));
        read += MEMORY_BYTES;
    }
    std::hint::black_box(sum);
    read as f64 / started.elapsed().as_secs_f64()
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
    #[cfg(target_os = "linux")]
    // Advice only; cached pages then make the estimate too good, never wrong in kind.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
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
    fn measurements_are_positive_and_short() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("shard"), vec![7u8; 4 << 20]).unwrap();
        let started = Instant::now();
        assert!(disk(dir.path()) > 0.0 && memory() > 0.0);
        assert!(disk(&dir.path().join("missing")) > 0.0);
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
