//! The coordinator of Shimmer: models, decoding, cluster, gateway and command line.
//!
//! Arrows point one way: `cli → gateway → decode → model → common`, `model → (expert seam) ← cluster`.

#![forbid(unsafe_code)]

pub mod cli;
pub mod cluster;
pub mod decode;
pub mod gateway;
pub mod model;
pub mod text;
