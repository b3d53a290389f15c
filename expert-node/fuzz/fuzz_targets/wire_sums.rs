//! Packed fixed-point sums as the coordinator gets them; what decodes must encode to the same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::fixed::FixedRows;

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (rows, cols, bytes) = (usize::from(input.0), usize::from(input.1), input.2);
    if let Ok(sums) = FixedRows::unpack(rows, cols, 24, bytes) {
        assert_eq!(FixedRows::unpack(rows, cols, 24, &sums.pack()), Ok(sums));
    }
});
