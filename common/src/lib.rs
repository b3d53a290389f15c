//! What the coordinator and the expert nodes share: model files, quantisation, kernels, expert store.
//!
//! Nothing here knows of gRPC, tokio or HTTP. The numeric rules N1–N8 that make every placement
//! give the same bits are written down in `docs/architecture.md` and implemented in [`math`],
//! [`quant`], [`kernels`], [`fixed`] and [`ffn`].

#![deny(unsafe_code)]

pub mod container;
pub mod convert;
pub mod disk;
pub mod experts;
pub mod ffn;
pub mod fixed;
pub mod io;
pub mod kernels;
pub mod machine;
pub mod math;
pub mod measure;
pub mod mem;
pub mod profile;
pub mod quant;
pub mod size;
pub mod synth;
