//! Routing traces. The input is one block of events; head, length and checksum are put around it, or nothing
//! would get past them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::experts::usage::{LayerShape, TraceEvent, TraceReader, TraceShape, TraceWriter};

fuzz_target!(|payload: &[u8]| {
    let layer = |layer, experts| LayerShape { layer, experts, record_bytes: 4096 };
    let shape = TraceShape { model: String::new(), layers: vec![layer(1, 32), layer(3, 300)] };
    let Ok(mut bytes) = TraceWriter::new(Vec::new(), &shape).and_then(TraceWriter::finish) else { return };
    bytes.truncate(bytes.len() - 4);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&blake3::hash(payload).as_bytes()[..16]);
    bytes.extend_from_slice(payload);
    let Ok(mut reader) = TraceReader::new(bytes.as_slice()) else { return };
    while let Ok(Some(event)) = reader.next_event() {
        if let TraceEvent::Batch(batch) = event {
            let experts = if batch.layer == 1 { 32 } else { 300 };
            assert!(batch.rows.iter().all(|row| row.is_sorted() && row.iter().all(|&id| id < experts)));
        }
    }
});
