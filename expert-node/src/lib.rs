//! The expert node of Shimmer: owns a shard of the routed experts and computes them for the coordinator.
//!
//! A node joins once ([`join`]), then runs ([`run`]): it serves the `Experts` service over mutual TLS
//! to its coordinator only, registers with the coordinator as a heartbeat and fetches the records
//! assigned to it. The network runs on one thread, the arithmetic on others, and they meet in channels.
//! [`wire`], [`tls`], [`token`], [`files`], [`gate`], [`discover`] and [`interfaces`] are used by the
//! coordinator too.
#![forbid(unsafe_code)]

pub mod cli;
mod compute;
mod config;
pub mod discover;
mod error;
mod fetch;
pub mod files;
pub mod gate;
mod hints;
pub mod interfaces;
mod join;
mod lease;
mod liveness;
mod machine;
mod measure;
pub mod pace;
pub mod probe;
mod records;
mod register;
mod roster;
mod run;
mod service;
mod shard;
pub mod shards;
#[cfg(test)]
mod testing;
pub mod tls;
pub mod token;
pub mod wire;

pub use config::{NodeConfig, Records, Settings};
pub use error::NodeError;
pub use fetch::progress::SyncReport;
pub use join::{JoinOptions, join};
pub use register::Backoff;
pub use run::run;
