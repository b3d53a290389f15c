//! The record layout and the set of held experts, as peers send them at the handshake.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use shimmer_node::wire::{Held, layout_from_wire, layout_to_wire};
use shimmer_proto::v1;

fuzz_target!(|input: (&[u8], &[u8])| {
    let Ok(wire) = v1::Layout::decode(input.0) else { return };
    let Ok(layout) = layout_from_wire(&wire) else { return };
    assert_eq!(layout_from_wire(&layout_to_wire(&layout)).as_ref(), Ok(&layout));
    if let Ok(held) = Held::from_wire(&layout, input.1) {
        assert!(held.len() <= layout.ids().count());
    }
});
