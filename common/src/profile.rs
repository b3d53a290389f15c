//! The numeric profile: the choices that decide bits and therefore must be equal on every machine.

use serde::{Deserialize, Serialize};

/// Choices that change logits. Two peers with different profiles refuse each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumericProfile {
    /// Fractional bits F of the fixed-point expert sums (rule N5).
    pub fraction_bits: u8,
}

impl Default for NumericProfile {
    fn default() -> Self {
        Self { fraction_bits: 24 }
    }
}
