//! How fast this machine reads and computes experts: what placement is decided by.
//!
//! Short measurements for programs that serve meanwhile; `shimmer bench` measures at length with the same
//! code.

mod disk;
mod gemv;

pub use disk::{DiskSpeed, MeasureError, Reads, Scratch, WINDOW, disk_speed};
pub use gemv::gemv_bytes_per_s;
