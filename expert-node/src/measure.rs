//! What this node can do: measured once while it serves, then followed by what its store sees.
//!
//! A thread of its own measures when the records are known. Where every expert of the model fits into this
//! node's RAM the disk does not matter and is left alone.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use shimmer_common::disk;
use shimmer_common::experts::{LocalStore, MatrixSpec};
use shimmer_common::io::IoOptions;
use shimmer_common::kernels::Kernels;
use shimmer_common::measure::{self, MeasureError, Reads, Scratch};
use shimmer_proto::v1;

use crate::fetch::room::room_for_records;
use crate::tls::unix_millis;

/// Time spent on each measurement.
const BUDGET: Duration = Duration::from_millis(150);
/// Measuring begins when the first answers are out.
const START_AFTER: Duration = Duration::from_millis(500);
/// How often what was measured is brought up to date.
const PERIOD: Duration = Duration::from_secs(10);
/// Where there are few records yet, a file of this size is read instead, if the disk has plenty of room.
const SCRATCH_BYTES: u64 = 256 << 20;
const SCRATCH_PART: u64 = 20;
/// Disk time within a period from which what the store saw counts.
const SEEN_ENOUGH: Duration = Duration::from_secs(1);
/// Weight of a period's rate.
const FOLLOW: f64 = 0.3;

/// The latest measurement of a node.
#[derive(Clone, Default)]
pub(crate) struct Meter(Arc<Mutex<Option<v1::Measurement>>>);

impl Meter {
    /// What was measured last; `None` before the first measurement has ended.
    pub(crate) fn read(&self) -> Option<v1::Measurement> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures in the background, with the records and kernels of `store`, until the store is gone.
    pub(crate) fn start(&self, store: Weak<LocalStore>, records: &Path, threads: usize) {
        let (meter, records) = (self.clone(), records.to_owned());
        let spawned = std::thread::Builder::new()
            .name("shimmer-measure".to_owned())
            .spawn(move || meter.follow(&store, &records, threads));
        if let Err(error) = spawned {
            tracing::warn!(%error, "this node cannot measure itself; placement assumes a common PC");
        }
    }

    fn follow(&self, store: &Weak<LocalStore>, records: &Path, threads: usize) {
        std::thread::sleep(START_AFTER);
        let Some(subject) = store.upgrade().map(|store| Subject::of(&store)) else { return };
        let mut measured = subject.measure(records, threads);
        let mut seen = (0, 0);
        loop {
            // Never held for longer than a look: whoever ends the node waits for the store to go.
            let Some(store) = store.upgrade() else { return };
            let stats = store.stats();
            let (bytes, busy_us) = (stats.bytes_read - seen.0, stats.disk_busy_us - seen.1);
            if Duration::from_micros(busy_us) > SEEN_ENOUGH {
                let rate = bytes as f64 / (busy_us as f64 / 1e6);
                let known = measured.disk_bytes_per_s;
                let from = if known > 0.0 { known } else { rate };
                measured.disk_bytes_per_s = from + FOLLOW * (rate - from);
                seen = (stats.bytes_read, stats.disk_busy_us);
            }
            measured.ram_bytes = store.ram_limit() as u64;
            measured.disk_bytes = room(&store, records);
            measured.unix_ms = unix_millis();
            drop(store);
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(measured);
            std::thread::sleep(PERIOD);
        }
    }
}

/// What the first measurement needs of a store.
struct Subject {
    kernels: Kernels,
    spec: Option<MatrixSpec>,
    record_bytes: usize,
    /// Whether the disk matters.
    reads: bool,
    /// The records that are there.
    held: Option<Reads>,
}

impl Subject {
    fn of(store: &LocalStore) -> Self {
        let layout = store.source().layout();
        Self {
            kernels: store.kernels(),
            spec: layout.specs.first().map(|spec| spec.gate),
            record_bytes: layout.max_record_bytes(),
            reads: !store.has_room_for_all(),
            held: Reads::of_experts(store.source().as_ref()).ok(),
        }
    }

    fn measure(self, records: &Path, threads: usize) -> v1::Measurement {
        let mut measured = v1::Measurement { threads: threads as u32, ..v1::Measurement::default() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
        if let (Some(spec), Ok(pool)) = (self.spec, pool) {
            match pool.install(|| measure::gemv_bytes_per_s(self.kernels, &spec, BUDGET)) {
                Ok(rate) => measured.gemv_bytes_per_s = rate,
                Err(error) => tracing::warn!(%error, "the speed of computing was not measured"),
            }
        }
        if self.reads {
            match self.disk_speed(records) {
                Ok(speed) => {
                    measured.disk_bytes_per_s = speed.bytes_per_s;
                    measured.disk_read_us = speed.read_s * 1e6;
                }
                Err(error) => tracing::warn!(%error, "the speed of the disk was not measured"),
            }
        }
        tracing::info!(
            disk_bytes_per_s = measured.disk_bytes_per_s,
            gemv_bytes_per_s = measured.gemv_bytes_per_s,
            "measured"
        );
        measured
    }

    /// Reads the records that are there, or a file made for it.
    fn disk_speed(&self, records: &Path) -> Result<measure::DiskSpeed, MeasureError> {
        if let Some(reads) = self.held.as_ref().filter(|reads| reads.total_bytes() >= SCRATCH_BYTES / 2) {
            return measure::disk_speed(reads, IoOptions::default(), 1, BUDGET);
        }
        let free = disk::free_bytes(records).unwrap_or(0);
        let scratch = Scratch::new(records, SCRATCH_BYTES.min(free / SCRATCH_PART))?;
        let reads = scratch.reads(self.record_bytes.max(1));
        measure::disk_speed(&reads, IoOptions::default(), 1, BUDGET)
    }
}

/// Bytes of records this node can keep: those it holds and what is free.
fn room(store: &LocalStore, records: &Path) -> u64 {
    let source = store.source();
    let layout = source.layout();
    let held = layout.ids().filter(|&id| source.contains(id)).filter_map(|id| layout.record_bytes(id));
    let held: u64 = held.map(|bytes| bytes as u64).sum();
    held.saturating_add(room_for_records(disk::free_bytes(records).unwrap_or(0)))
}
