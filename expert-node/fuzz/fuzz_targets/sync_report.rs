//! `progress.json` as `shimmer-node status` reads it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_node::SyncReport;

fuzz_target!(|bytes: &[u8]| {
    if let Some(report) = SyncReport::parse(bytes) {
        assert!(report.eta_s >= 0.0 && report.bytes_per_s >= 0.0);
        assert!(!report.line().chars().any(char::is_control));
    }
});
