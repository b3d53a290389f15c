//! The kinds of integer codes that weights are stored in.

use crate::quant::Format;

/// How the integers of a matrix are coded; decides the order of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// Nibbles, value plus 8.
    Int4,
    /// Two's complement bytes, unsigned after adding 128.
    Int8,
    /// Bit pairs, value plus 2.
    Int2,
    /// Bit pairs and a plane of high bits, value plus 4.
    Int3,
}

impl Code {
    /// Number of codes.
    pub(super) const COUNT: usize = 4;

    /// The code of an integer format.
    ///
    /// # Panics
    /// For a float format.
    pub(super) fn of(format: Format) -> Self {
        match format {
            Format::Int4Row | Format::Int4Grouped { .. } => Code::Int4,
            Format::Int8Row => Code::Int8,
            Format::Int2Row => Code::Int2,
            Format::Int3G64 => Code::Int3,
            Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block => {
                unreachable!("float formats take f32 activations")
            }
        }
    }

    /// The unsigned code of the value zero.
    pub(super) fn zero(self) -> i32 {
        match self {
            Code::Int4 => 8,
            Code::Int8 => 128,
            Code::Int2 => 2,
            Code::Int3 => 4,
        }
    }
}
