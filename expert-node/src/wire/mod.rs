//! Conversions between wire messages and domain types, with every check a receiver needs.
//!
//! Both sides use this module: the node decodes dispatches and encodes replies, the coordinator the
//! reverse. Nothing received is trusted: lengths, ranges and orders are checked with checked
//! arithmetic before anything is allocated or indexed, and no input panics.

mod dispatch;
mod held;
mod layout;
mod peer;

pub use dispatch::{
    MAX_HINTS, MAX_MESSAGE_BYTES, MAX_ROWS, decode_dispatch, decode_sums, dispatch_from_wire,
    dispatch_to_wire, hints_from_wire,
};
pub use held::Held;
pub use layout::{layout_from_wire, layout_to_wire};
pub(crate) use peer::printable;
pub use peer::{Facts, check_peer, clean_text, peer_to_wire};

/// Why a message was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {message}: {what}")]
pub struct WireError {
    /// The message.
    pub message: &'static str,
    /// What does not fit.
    pub what: String,
}

impl WireError {
    fn new(message: &'static str, what: impl Into<String>) -> Self {
        Self { message, what: what.into() }
    }
}

/// Little-endian f32 values; `None` when the length is not a multiple of four.
fn floats_from_le(bytes: &[u8]) -> Option<Vec<f32>> {
    let (chunks, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| chunks.iter().map(|&c| f32::from_le_bytes(c)).collect())
}

/// Little-endian bytes of f32 values.
fn floats_to_le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
