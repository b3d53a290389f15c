//! What the end-to-end tests share: paths, running the program, clusters of real processes, tensors.
//!
//! Every test drives the real binary as a user would; nodes are separate processes on loopback with
//! mutual TLS, killed and stopped by real signals.

#![forbid(unsafe_code)]

pub mod cgroup;
pub mod http;
pub mod lab;
pub mod lan;
pub mod process;
pub mod random;
pub mod tensors;

use std::path::PathBuf;

/// A path below `tests/data`.
pub fn data(relative: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/data")).join(relative)
}
