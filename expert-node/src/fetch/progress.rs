//! How far the fetching of records is: for the coordinator, and in `progress.json` for people.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shimmer_proto::v1;

/// Name of the file in the data directory.
pub(crate) const PROGRESS_FILE: &str = "progress.json";
/// The rate is that of these last seconds.
const RATE_WINDOW: Duration = Duration::from_secs(5);
/// How often the rate is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);
/// A longer file is not one of ours.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Counts what arrives.
#[derive(Debug, Default)]
pub(crate) struct Progress(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    wanted: (u32, u64),
    held: (u32, u64),
    received_bytes: u64,
    /// When how many bytes had been received.
    samples: VecDeque<(Instant, u64)>,
    /// How many calls each source answers now.
    sources: BTreeMap<String, usize>,
    problem: String,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what is wanted and what of it is held, as records and bytes.
    pub(crate) fn plan(&self, wanted: (u32, u64), held: (u32, u64)) {
        let mut counts = self.lock();
        (counts.wanted, counts.held) = (wanted, held);
    }

    /// Bytes of records arrived.
    pub(crate) fn received(&self, bytes: usize) {
        let mut counts = self.lock();
        let now = Instant::now();
        if counts.samples.back().is_none_or(|&(at, _)| now - at >= SAMPLE_EVERY) {
            let before = counts.received_bytes;
            counts.samples.push_back((now, before));
        }
        counts.received_bytes += bytes as u64;
        counts.forget_old(now);
    }

    /// A record is complete and kept.
    pub(crate) fn stored(&self, bytes: usize) {
        let mut counts = self.lock();
        counts.held = (counts.held.0 + 1, counts.held.1 + bytes as u64);
    }

    /// A source begins to send.
    pub(crate) fn begin(&self, source: &str) {
        *self.lock().sources.entry(source.to_owned()).or_default() += 1;
    }

    /// A source is done.
    pub(crate) fn end(&self, source: &str) {
        let mut counts = self.lock();
        if let Some(calls) = counts.sources.get_mut(source) {
            *calls -= 1;
            if *calls == 0 {
                counts.sources.remove(source);
            }
        }
    }

    /// Says why nothing goes on; an empty sentence when it does.
    pub(crate) fn set_problem(&self, problem: String) {
        self.lock().problem = problem;
    }

    /// As the coordinator is told.
    pub(crate) fn to_wire(&self) -> v1::SyncProgress {
        let mut counts = self.lock();
        counts.forget_old(Instant::now());
        let bytes_per_s = match counts.samples.front() {
            Some(&(at, before)) => {
                let seconds = at.elapsed().max(SAMPLE_EVERY).as_secs_f64();
                (counts.received_bytes - before) as f64 / seconds
            }
            None => 0.0,
        };
        let missing = counts.wanted.1.saturating_sub(counts.held.1);
        let known = missing > 0 && bytes_per_s > 0.0;
        v1::SyncProgress {
            wanted_records: counts.wanted.0,
            held_records: counts.held.0,
            wanted_bytes: counts.wanted.1,
            held_bytes: counts.held.1,
            received_bytes: counts.received_bytes,
            bytes_per_s,
            eta_s: if known { missing as f64 / bytes_per_s } else { 0.0 },
            sources: counts.sources.keys().cloned().collect(),
            problem: counts.problem.clone(),
        }
    }
}

impl Counts {
    fn forget_old(&mut self, now: Instant) {
        while self.samples.front().is_some_and(|&(at, _)| now.saturating_duration_since(at) > RATE_WINDOW) {
            self.samples.pop_front();
        }
    }
}

/// `progress.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SyncReport {
    /// Records this node should hold.
    pub wanted_records: u32,
    /// Those of them that it holds.
    pub held_records: u32,
    /// Their bytes.
    pub wanted_bytes: u64,
    /// Bytes of those held.
    pub held_bytes: u64,
    /// Bytes received since the process began.
    pub received_bytes: u64,
    /// Bytes per second now.
    pub bytes_per_s: f64,
    /// Seconds to go at that rate; 0 when nothing is missing or the rate is not known.
    pub eta_s: f64,
    /// Who sends.
    pub sources: Vec<String>,
    /// Why nothing goes on; empty when it does.
    pub problem: String,
}

impl From<v1::SyncProgress> for SyncReport {
    fn from(wire: v1::SyncProgress) -> Self {
        Self {
            wanted_records: wire.wanted_records,
            held_records: wire.held_records,
            wanted_bytes: wire.wanted_bytes,
            held_bytes: wire.held_bytes,
            received_bytes: wire.received_bytes,
            bytes_per_s: wire.bytes_per_s,
            eta_s: wire.eta_s,
            sources: wire.sources,
            problem: wire.problem,
        }
    }
}

impl SyncReport {
    /// Reads a file's contents; `None` when they are damaged or make no sense.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let report: Self = serde_json::from_slice(bytes).ok()?;
        let rates = [report.bytes_per_s, report.eta_s];
        rates.iter().all(|rate| rate.is_finite() && *rate >= 0.0).then_some(report)
    }

    /// The report of the node on `data_dir`; `None` when there is none to be had.
    pub(crate) fn read(data_dir: &Path) -> Option<Self> {
        let bytes = shimmer_common::disk::read_small(&data_dir.join(PROGRESS_FILE), MAX_FILE_BYTES).ok()?;
        Self::parse(&bytes)
    }

    /// Replaces the file, whole or not at all, without waiting for the disk: it is news, not knowledge.
    /// Where the disk is full, which is what it may have to say, the old file is written over.
    pub(crate) fn write(&self, data_dir: &Path) -> std::io::Result<()> {
        let (new, path) = (data_dir.join(".new-progress.json"), data_dir.join(PROGRESS_FILE));
        let bytes = serde_json::to_vec(self)?;
        match std::fs::write(&new, &bytes) {
            Ok(()) => std::fs::rename(new, path),
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                std::fs::remove_file(&new)?;
                let file = std::fs::OpenOptions::new().write(true).open(path)?;
                shimmer_common::disk::write_all_at(&file, &bytes, 0)?;
                file.set_len(bytes.len() as u64)
            }
            Err(error) => Err(error),
        }
    }

    /// One line for people; names from elsewhere are shown without control characters.
    pub fn line(&self) -> String {
        let gib = |bytes: u64| shimmer_common::size::Size(bytes).to_string();
        let mut line = format!(
            "{} of {} records, {} of {}",
            self.held_records,
            self.wanted_records,
            gib(self.held_bytes),
            gib(self.wanted_bytes)
        );
        if self.bytes_per_s > 0.0 && self.held_bytes < self.wanted_bytes {
            line += &format!(", {:.1} MB/s", self.bytes_per_s / 1e6);
        }
        if self.eta_s > 0.0 {
            line += &format!(", {:.0} s to go", self.eta_s);
        }
        if !self.sources.is_empty() {
            line += &format!(", from {}", self.sources.join(", "));
        }
        if !self.problem.is_empty() {
            line += &format!("; {}", self.problem);
        }
        line.chars().filter(|c| !c.is_control()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_a_rate_and_an_end() {
        let progress = Progress::default();
        progress.plan((10, 1000), (4, 400));
        assert_eq!(progress.to_wire().eta_s, 0.0, "no rate is known yet");
        progress.begin("the coordinator");
        progress.received(100);
        progress.stored(100);
        let now = progress.to_wire();
        assert_eq!((now.held_records, now.held_bytes, now.received_bytes), (5, 500, 100));
        assert!(now.bytes_per_s > 0.0 && now.bytes_per_s <= 1000.0, "{now:?}");
        assert!((now.eta_s - 500.0 / now.bytes_per_s).abs() < 1e-6, "{now:?}");
        assert_eq!(now.sources, ["the coordinator"]);
        progress.end("the coordinator");
        assert!(progress.to_wire().sources.is_empty());
    }

    #[test]
    fn reports_survive_their_file_and_damage_does_not_matter() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(SyncReport::read(dir.path()), None);
        let report = SyncReport {
            wanted_records: 3,
            bytes_per_s: 1.5,
            sources: vec!["node\u{7} a".to_owned()],
            ..SyncReport::default()
        };
        report.write(dir.path()).unwrap();
        assert_eq!(SyncReport::read(dir.path()), Some(report.clone()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(report.line().contains("from node a"), "{}", report.line());
        let whole = serde_json::to_vec(&report).unwrap();
        for at in 0..whole.len() {
            assert_eq!(SyncReport::parse(&whole[..at]), None);
            for bit in 0..8 {
                let mut bad = whole.clone();
                bad[at] ^= 1 << bit;
                if let Some(read) = SyncReport::parse(&bad) {
                    assert!(!read.line().chars().any(char::is_control));
                }
            }
        }
    }
}
