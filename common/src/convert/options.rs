//! What to store in which format.

use serde::{Deserialize, Serialize};

use crate::quant::Format;

/// Columns per scale of grouped int4.
pub(super) const GROUP_SIZE: u32 = 64;

/// Formats the converter writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetFormat {
    /// 4 bits, one scale per row and 64 columns.
    Int4G64,
    /// 4 bits, one scale per row: smaller by a tenth, two to three times the quality loss.
    Int4Row,
    /// 8 bits, one scale per row.
    Int8,
    /// bfloat16, no scales.
    Bf16,
}

impl TargetFormat {
    const ALL: [Self; 4] = [Self::Int4G64, Self::Int4Row, Self::Int8, Self::Bf16];

    /// The spelling of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int4G64 => "int4-g64",
            Self::Int4Row => "int4-row",
            Self::Int8 => "int8",
            Self::Bf16 => "bf16",
        }
    }

    /// The storage format.
    pub fn format(self) -> Format {
        match self {
            Self::Int4G64 => Format::Int4Grouped { group: GROUP_SIZE },
            Self::Int4Row => Format::Int4Row,
            Self::Int8 => Format::Int8Row,
            Self::Bf16 => Format::Bf16,
        }
    }
}

impl std::fmt::Display for TargetFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for TargetFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| format!("{text:?} is not a storage format; the formats are {}", known()))
    }
}

/// Format of every class of matrices. Norms, biases and the router stay f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvertOptions {
    /// Routed experts of the main layers.
    pub experts: TargetFormat,
    /// Attention, dense MLPs, shared experts. 4 bits ruin some models; measure before use.
    pub dense: TargetFormat,
    /// Every matrix of the MTP layer but its indexer; a 4-bit draft head is hardly ever accepted.
    pub mtp: TargetFormat,
    /// DSA indexers, the MTP layer's included.
    pub indexer: TargetFormat,
    /// Embedding table and output head.
    pub embeddings: TargetFormat,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            experts: TargetFormat::Int4G64,
            dense: TargetFormat::Int8,
            mtp: TargetFormat::Int8,
            indexer: TargetFormat::Int8,
            embeddings: TargetFormat::Int8,
        }
    }
}

impl ConvertOptions {
    /// Names and values, in the order of the command line.
    pub(super) fn named(&self) -> [(&'static str, TargetFormat); 5] {
        [
            ("experts", self.experts),
            ("dense", self.dense),
            ("mtp", self.mtp),
            ("indexer", self.indexer),
            ("embeddings", self.embeddings),
        ]
    }

    /// Refuses combinations that are not offered.
    pub(super) fn check(&self) -> Result<(), String> {
        for (name, format) in self.named() {
            let offered: &[TargetFormat] = match name {
                "experts" => &TargetFormat::ALL,
                "dense" | "mtp" => &[TargetFormat::Int8, TargetFormat::Int4G64, TargetFormat::Bf16],
                _ => &[TargetFormat::Int8, TargetFormat::Bf16],
            };
            if !offered.contains(&format) {
                let offered: Vec<_> = offered.iter().map(|format| format.name()).collect();
                return Err(format!("{name} cannot be stored as {format}; choose {}", offered.join(", ")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_parse_as_they_print() {
        for format in TargetFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert!("int5".parse::<TargetFormat>().unwrap_err().contains("int4-g64, int4-row, int8, bf16"));
    }

    #[test]
    fn an_int4_indexer_is_refused_by_name() {
        let options = ConvertOptions { indexer: TargetFormat::Int4G64, ..ConvertOptions::default() };
        assert!(options.check().unwrap_err().starts_with("indexer cannot be stored as int4-g64"));
        assert_eq!(ConvertOptions::default().check(), Ok(()));
    }
}
