//! The usage file. The input is what the checksum covers; it is put before it, or nothing would get past.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::usage::{Usage, UsageOptions, file};

fuzz_target!(|rest: &[u8]| {
    let head = [b"SHMUSAGE", &1u32.to_le_bytes()[..], blake3::hash(rest).as_bytes()].concat();
    if let Ok(saved) = file::decode(&[&head, rest].concat(), Fingerprint([0; 32])) {
        let usage = Usage::resume(saved, UsageOptions::default());
        assert!(usage.heats().all(|(_, heat)| heat >= 0.0 && heat.is_finite()));
    }
});
