//! Intermediate values recorded for tests and `score --trace`.

use std::collections::BTreeMap;

/// One recorded tensor; rows are appended chunk by chunk.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceTensor {
    /// f32 values.
    F32 {
        /// Row length.
        width: usize,
        /// Values.
        data: Vec<f32>,
    },
    /// i32 values; rows may have different lengths, padded with -1 when written.
    I32 {
        /// Rows.
        rows: Vec<Vec<i32>>,
    },
}

/// Tensors by name (`hidden.3`, `router_ids.3`, …).
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The recorded tensors.
    pub tensors: BTreeMap<String, TraceTensor>,
}
