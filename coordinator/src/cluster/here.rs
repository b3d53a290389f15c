//! The coordinator's own machine as one that may own experts.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use shimmer_common::experts::LocalStore;
use shimmer_common::io::IoOptions;
use shimmer_common::measure::{self, Reads};

use super::placement::{LOCAL, Rates, Worker};

/// Time spent on each measurement.
const BUDGET: Duration = Duration::from_millis(300);
/// Disk time after which what the store saw counts more than what was measured at the start.
const SEEN_ENOUGH: Duration = Duration::from_secs(2);

/// Measures this machine once, and watches its store.
pub(super) struct Here {
    store: Arc<LocalStore>,
    measured: OnceLock<Rates>,
}

impl Here {
    pub(super) fn new(store: Arc<LocalStore>) -> Self {
        Self { store, measured: OnceLock::new() }
    }

    /// This machine as it is now. The first call takes about half a second.
    pub(super) fn worker(&self) -> Worker {
        let mut rates = *self.measured.get_or_init(|| measure(&self.store));
        let stats = self.store.stats();
        let busy = Duration::from_micros(stats.disk_busy_us);
        if busy > SEEN_ENOUGH {
            rates.disk_bytes_per_s = stats.bytes_read as f64 / busy.as_secs_f64();
        }
        Worker {
            id: LOCAL.to_owned(),
            name: "this machine".to_owned(),
            rates: rates.sane(),
            ram_bytes: self.store.ram_limit() as u64,
            disk_bytes: None,
        }
    }
}

fn measure(store: &LocalStore) -> Rates {
    let layout = store.source().layout();
    let spec = layout.specs.first().map(|spec| spec.gate);
    let gemv = spec.and_then(|spec| measure::gemv_bytes_per_s(store.kernels(), &spec, BUDGET).ok());
    // Where everything is in memory the disk does not matter.
    let disk = if store.has_room_for_all() {
        None
    } else {
        let reads = Reads::of_experts(store.source().as_ref()).ok();
        reads.and_then(|reads| measure::disk_speed(&reads, IoOptions::default(), 1, BUDGET).ok())
    };
    Rates {
        disk_bytes_per_s: disk.map_or(Rates::ASSUMED.disk_bytes_per_s, |speed| speed.bytes_per_s),
        gemv_bytes_per_s: gemv.unwrap_or(Rates::ASSUMED.gemv_bytes_per_s),
        round_trip_s: 0.0,
        link_bytes_per_s: Rates::NO_LINK,
    }
}
