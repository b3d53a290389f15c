//! Storage formats of weight matrices and their decoding (docs/formats.md).
//!
//! A matrix is `[rows, cols]` = output × input, `y = W x`, rows stored one after another.

pub(crate) mod decode;
mod encode;
mod matrix;

pub use encode::{EncodeError, encode, encode_row};
pub use matrix::{Matrix, MatrixRef};
use serde::{Deserialize, Serialize};

/// How the elements of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Little-endian f32.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// e4m3fn with one f32 scale per 128×128 block.
    Fp8Block,
    /// int8, one f32 scale per row.
    Int8Row,
    /// Nibbles minus 8, even column in the low nibble, one f32 scale per row.
    Int4Row,
    /// Nibbles as [`Format::Int4Row`], one f32 scale per row and `group` columns.
    Int4Grouped {
        /// Columns per scale; always a multiple of 8.
        group: u32,
    },
    /// 3-bit values minus 4 in two planes, groups of 64 columns.
    Int3G64,
    /// 2-bit values minus 2, one f32 scale per row.
    Int2Row,
}

impl Format {
    /// Whether matrices of this format take int8 activations (rule N1) instead of f32 (rule N3).
    pub fn is_integer(self) -> bool {
        !matches!(self, Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block)
    }

    /// Bytes of the weight payload of one row.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::F16 | Format::Bf16 => cols * 2,
            Format::Fp8Block | Format::Int8Row => cols,
            Format::Int4Row | Format::Int4Grouped { .. } => cols.div_ceil(2),
            Format::Int3G64 => cols.div_ceil(64) * 24,
            Format::Int2Row => cols.div_ceil(4),
        }
    }

    /// Bytes of the weight payload of a `[rows, cols]` matrix.
    pub fn weight_bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols)
    }

    /// Number of f32 scales of a `[rows, cols]` matrix.
    pub fn scale_count(self, rows: usize, cols: usize) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => 0,
            Format::Fp8Block => rows.div_ceil(128) * cols.div_ceil(128),
            Format::Int8Row | Format::Int4Row | Format::Int2Row => rows,
            Format::Int4Grouped { group } => rows * cols.div_ceil(group as usize),
            Format::Int3G64 => rows * cols.div_ceil(64),
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Format::F32 => f.write_str("f32"),
            Format::F16 => f.write_str("f16"),
            Format::Bf16 => f.write_str("bf16"),
            Format::Fp8Block => f.write_str("fp8-e4m3-b128"),
            Format::Int8Row => f.write_str("int8-row"),
            Format::Int4Row => f.write_str("int4-row"),
            Format::Int4Grouped { group } => write!(f, "int4-g{group}"),
            Format::Int3G64 => f.write_str("int3-g64"),
            Format::Int2Row => f.write_str("int2-row"),
        }
    }
}
