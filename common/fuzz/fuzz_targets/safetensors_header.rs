//! The input is a whole safetensors file. Whatever a clean header promises must lie inside it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::container::safetensors::read_header_with;

fuzz_target!(|file: &[u8]| {
    let read = |buf: &mut [u8], offset: u64| {
        let start = usize::try_from(offset).expect("offsets are within the file");
        buf.copy_from_slice(&file[start..start + buf.len()]);
        Ok(())
    };
    let header = read_header_with(file.len() as u64, read).expect("reads of a slice succeed");
    if header.flaws.is_empty() {
        for (_, tensor) in &header.tensors {
            assert!(tensor.begin <= tensor.end && tensor.end <= file.len() as u64);
        }
    }
});
