//! The limits a bench divides by, measured between its own measurements.

use std::path::Path;

use shimmer_common::io::{Caching, IoMode, IoOptions};
use shimmer_common::kernels::{Isa, Probe};
use shimmer_common::machine;
use shimmer_common::measure::Reads;
use shimmer_common::size::Size;

use super::disk::timed_reads;
use crate::cli::bandwidth::{best_probe, mac_rate, memory_buffer, read_rate};
use crate::cli::error::CliError;

/// What memory is measured with beside a model: far beyond the caches, small beside the model.
const BUFFER_BYTES: usize = 256 << 20;

/// Most bytes read from the disk per measurement.
const DISK_BYTES: u64 = 256 << 20;

/// Rounds of the int8 loop: some ten milliseconds.
const MAC_ROUNDS: u64 = 10_000;

/// Numbers of threads to measure with: those asked for, else 1 and all physical cores.
pub fn thread_counts(wish: &[usize]) -> Vec<usize> {
    let mut counts = if wish.is_empty() { vec![1, machine::physical_cores()] } else { wish.to_vec() };
    counts.dedup();
    counts
}

/// Bytes of the last-level cache; 32 MiB where the system does not tell.
fn cache_bytes() -> u64 {
    const UNKNOWN: u64 = 32 << 20;
    let caches = (0..8).filter_map(|i| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size");
        let text = std::fs::read_to_string(Path::new(&path)).ok()?;
        let (number, factor) = match text.trim().strip_suffix('K') {
            Some(kib) => (kib, 1 << 10),
            None => (text.trim().strip_suffix('M')?, 1 << 20),
        };
        number.parse::<u64>().ok()?.checked_mul(factor)
    });
    caches.max().unwrap_or(UNKNOWN)
}

/// The measuring loops of `isa`.
///
/// # Errors
/// [`CliError::Usage`] when this CPU lacks it.
pub fn probe(isa: Isa) -> Result<Probe, CliError> {
    let lacking = || CliError::Usage(format!("this CPU does not support {isa}; use --isa auto"));
    Probe::new(isa).ok_or_else(lacking)
}

/// Refuses a `--size` that the caches could hold a good part of.
///
/// # Errors
/// [`CliError::Usage`] with the least size.
pub fn check_size(size: Size) -> Result<(), CliError> {
    let cache = cache_bytes();
    let least = Size(cache.saturating_mul(4));
    if size.0 >= least.0 {
        return Ok(());
    }
    let cache = Size(cache);
    let what = format!("--size {size} is too small: the last-level cache has {cache}, give at least {least}");
    Err(CliError::Usage(what))
}

/// Bytes per second that `threads` threads read from memory; `None` when there is none to measure with.
pub fn memory(threads: usize) -> Option<f64> {
    let (probe, buffer) = (best_probe()?, memory_buffer(BUFFER_BYTES).ok()?);
    let rate = |_| read_rate(probe, &buffer, threads, 2);
    (0..3).map(rate).max_by(f64::total_cmp)
}

/// int8 multiply-adds per second of `threads` threads.
pub fn int8(probe: Probe, threads: usize) -> f64 {
    mac_rate(threads, || probe.int8(MAC_ROUNDS).count)
}

/// The better of both ways to read experts directly, in bytes per second, with the default depth.
pub fn disk(reads: &Reads, seed: u64) -> Option<f64> {
    let rate = |mode| {
        let options = IoOptions { mode, caching: Caching::Direct, ..IoOptions::default() };
        timed_reads(reads, options, seed, DISK_BYTES).ok()
    };
    [IoMode::Auto, IoMode::Pread].into_iter().filter_map(rate).max_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_one_and_all_unless_named() {
        assert_eq!(thread_counts(&[3, 3, 1]), [3, 1]);
        assert_eq!(thread_counts(&[])[0], 1);
        assert!(cache_bytes() > 0);
    }
}
