//! Wire types of Shimmer (package `shimmer.v1`): the `.proto` files and the code generated from them,
//! nothing else. Conversions to domain types, with all their checks, are in `shimmer_node::wire`.
//!
//! The generated code is committed, so that building Shimmer runs no code generator. The test
//! `generated` compares it with a fresh generation; `UPDATE=1 cargo test -p shimmer-proto` rewrites it.
#![forbid(unsafe_code)]

/// Version of the protocol. Peers with different versions refuse each other: raise it whenever a
/// message changes its meaning.
pub const PROTOCOL_VERSION: u32 = 2;

/// Package `shimmer.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!("generated/shimmer.v1.rs");
}
