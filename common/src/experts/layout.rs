//! Record layout: how the three matrices of an expert lie in one record.
//!
//! A record is `down.w | gate.w | up.w | down.s | gate.s | up.s` (the order of a container sorted by
//! name), every part starting on a 64-byte boundary, the whole padded with zeros to 4 KiB.
//! For GLM-5.2 at int4 no padding is needed.

use serde::{Deserialize, Serialize};

use super::ExpertId;
use crate::ffn::FfnRef;
use crate::quant::{Format, MatrixRef};

// Scales are copied between files and records as bytes and viewed as f32 in place.
const _: () =
    assert!(cfg!(target_endian = "little"), "model files are little-endian and are viewed in place");

/// Every part of a record starts on a multiple of this: one cache line, one AVX-512 register.
const PART_ALIGN_BYTES: usize = 64;
/// Records are multiples of this, so that direct reads need no rounding.
const RECORD_ALIGN_BYTES: usize = 4096;
/// Largest accepted side of an expert matrix; sides up to here cannot overflow any size below.
const MAX_SIDE: usize = 1 << 24;

/// Shape and format of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MatrixSpec {
    /// Storage format.
    pub format: Format,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
}

impl MatrixSpec {
    /// Bytes of the weight payload.
    pub fn weight_bytes(&self) -> usize {
        self.format.weight_bytes(self.rows, self.cols)
    }

    /// Bytes of the f32 scales.
    pub fn scale_bytes(&self) -> usize {
        self.format.scale_count(self.rows, self.cols) * size_of::<f32>()
    }

    /// Bytes of weights and scales together.
    pub fn bytes(&self) -> usize {
        self.weight_bytes() + self.scale_bytes()
    }

    /// Whether sides and group size are in the range all size arithmetic is safe for. Specs that come
    /// from a file or the network must be checked before any other method is called.
    pub fn is_sane(&self) -> bool {
        let group_fits = match self.format {
            Format::Int4Grouped { group } => {
                group > 0 && group.is_multiple_of(8) && group as usize <= MAX_SIDE
            }
            _ => true,
        };
        let side_fits = |side: usize| (1..=MAX_SIDE).contains(&side);
        group_fits && side_fits(self.rows) && side_fits(self.cols)
    }
}

/// The three matrices of an expert, in record order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertMatrix {
    /// `down_proj`.
    Down,
    /// `gate_proj`.
    Gate,
    /// `up_proj`.
    Up,
}

impl ExpertMatrix {
    /// All three, in record order.
    pub const ALL: [Self; 3] = [Self::Down, Self::Gate, Self::Up];

    /// The checkpoint's word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "down_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
        }
    }
}

/// One of the six parts of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordPart {
    /// Which matrix it belongs to.
    pub matrix: ExpertMatrix,
    /// Scales (f32) or weight payload.
    pub scales: bool,
    /// First byte within the record.
    pub offset: usize,
    /// Bytes, 0 for the scales of a float format.
    pub len: usize,
}

impl RecordPart {
    /// Byte range within the record.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Shapes and formats of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertSpec {
    /// Gate projection `[inner, hidden]`.
    pub gate: MatrixSpec,
    /// Up projection `[inner, hidden]`.
    pub up: MatrixSpec,
    /// Down projection `[hidden, inner]`.
    pub down: MatrixSpec,
}

impl ExpertSpec {
    /// Shape and format of one of the matrices.
    pub fn matrix(&self, matrix: ExpertMatrix) -> &MatrixSpec {
        match matrix {
            ExpertMatrix::Down => &self.down,
            ExpertMatrix::Gate => &self.gate,
            ExpertMatrix::Up => &self.up,
        }
    }

    /// Whether all three matrices are in range and fit together (see [`MatrixSpec::is_sane`]).
    pub fn is_sane(&self) -> bool {
        let same_shape = self.gate.rows == self.up.rows && self.gate.cols == self.up.cols;
        let transposed = self.down.rows == self.gate.cols && self.down.cols == self.gate.rows;
        ExpertMatrix::ALL.iter().all(|&m| self.matrix(m).is_sane()) && same_shape && transposed
    }

    /// The six parts of the record, in ascending offset.
    pub fn parts(&self) -> [RecordPart; 6] {
        let mut end = 0usize;
        let mut place = |matrix: ExpertMatrix, scales: bool| {
            let spec = self.matrix(matrix);
            let len = if scales { spec.scale_bytes() } else { spec.weight_bytes() };
            let offset = end.next_multiple_of(PART_ALIGN_BYTES);
            end = offset + len;
            RecordPart { matrix, scales, offset, len }
        };
        let [down, gate, up] = ExpertMatrix::ALL;
        [
            place(down, false),
            place(gate, false),
            place(up, false),
            place(down, true),
            place(gate, true),
            place(up, true),
        ]
    }

    /// Bytes of weights and scales without the record's padding.
    pub fn payload_bytes(&self) -> usize {
        ExpertMatrix::ALL.iter().map(|&m| self.matrix(m).bytes()).sum()
    }

    /// Whether the parts follow each other without padding between them, so that a file can hold the record
    /// as it is.
    pub fn is_gapless(&self) -> bool {
        let parts = self.parts();
        parts.windows(2).all(|pair| matches!(pair, [a, b] if a.range().end == b.offset))
    }

    /// Bytes of the record, a multiple of 4096.
    pub fn record_bytes(&self) -> usize {
        let [.., last] = self.parts();
        last.range().end.next_multiple_of(RECORD_ALIGN_BYTES)
    }

    /// Views the matrices inside a record; `None` when its length or alignment does not fit.
    pub fn view<'a>(&self, record: &'a [u8]) -> Option<FfnRef<'a>> {
        if record.len() != self.record_bytes() {
            return None;
        }
        let [down_w, gate_w, up_w, down_s, gate_s, up_s] = self.parts();
        let matrix = |spec: &MatrixSpec, weights: RecordPart, scales: RecordPart| {
            let scales = bytemuck::try_cast_slice(record.get(scales.range())?).ok()?;
            MatrixRef::new(spec.format, spec.rows, spec.cols, record.get(weights.range())?, scales)
        };
        Some(FfnRef {
            gate: matrix(&self.gate, gate_w, gate_s)?,
            up: matrix(&self.up, up_w, up_s)?,
            down: matrix(&self.down, down_w, down_s)?,
        })
    }
}

/// Specs of every routed expert of a model, compactly: few distinct specs, one index per expert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLayout {
    /// Hidden size of the model.
    pub hidden_size: usize,
    /// Distinct specs.
    pub specs: Vec<ExpertSpec>,
    /// Per MoE layer (checkpoint index), the spec of each expert.
    pub layers: std::collections::BTreeMap<u16, Vec<u8>>,
}

impl ExpertLayout {
    /// Checks a layout that came from a file or the network; only a checked layout may be used.
    ///
    /// # Errors
    /// What is out of range.
    pub fn validate(&self) -> Result<(), String> {
        for (i, spec) in self.specs.iter().enumerate() {
            if !spec.is_sane() || spec.gate.cols != self.hidden_size {
                return Err(format!("expert spec {i} has impossible or mismatched sizes"));
            }
        }
        for (layer, experts) in &self.layers {
            if experts.len() > usize::from(u16::MAX) {
                return Err(format!("layer {layer} claims {} experts", experts.len()));
            }
            if let Some(spec) = experts.iter().find(|&&s| usize::from(s) >= self.specs.len()) {
                return Err(format!("layer {layer} uses expert spec {spec}, which does not exist"));
            }
        }
        Ok(())
    }

    /// Spec of one expert, `None` when the model has no such expert.
    pub fn spec(&self, id: ExpertId) -> Option<&ExpertSpec> {
        let spec = *self.layers.get(&id.layer)?.get(usize::from(id.index))?;
        self.specs.get(usize::from(spec))
    }

    /// Record size of one expert.
    pub fn record_bytes(&self, id: ExpertId) -> Option<usize> {
        self.spec(id).map(ExpertSpec::record_bytes)
    }

    /// Largest record of the model.
    pub fn max_record_bytes(&self) -> usize {
        self.specs.iter().map(ExpertSpec::record_bytes).max().unwrap_or(0)
    }

    /// Whether every gate and up matrix of `layer` takes int8 activations, so that rows travel as
    /// int8 (rule N1); otherwise they travel as f32.
    pub fn int8_activations(&self, layer: u16) -> bool {
        self.layers.get(&layer).is_some_and(|experts| {
            experts
                .iter()
                .filter_map(|&s| self.specs.get(usize::from(s)))
                .all(|s| s.gate.format.is_integer() && s.up.format.is_integer())
        })
    }

    /// All experts in ascending order.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        self.layers.iter().flat_map(|(&layer, experts)| {
            (0..experts.len()).map(move |index| ExpertId { layer, index: index as u16 })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(format: Format, inner: usize, hidden: usize) -> ExpertSpec {
        let wide = MatrixSpec { format, rows: inner, cols: hidden };
        ExpertSpec { gate: wide, up: wide, down: MatrixSpec { format, rows: hidden, cols: inner } }
    }

    #[test]
    fn glm_records_have_the_sizes_of_the_formats_page_and_no_padding() {
        for (format, bytes) in [
            (Format::Int4Row, 18_915_328),
            (Format::Int4Grouped { group: 64 }, 21_233_664),
            (Format::Int4Grouped { group: 128 }, 20_054_016),
            (Format::Int4Grouped { group: 32 }, 23_592_960),
            (Format::Int8Row, 37_789_696),
            (Format::Int3G64, 16_515_072),
            (Format::Int2Row, 9_478_144),
        ] {
            let spec = spec(format, 2048, 6144);
            assert_eq!(spec.record_bytes(), bytes, "{format}");
            assert_eq!(spec.payload_bytes(), bytes, "{format}");
        }
        assert_eq!(spec(Format::Fp8Block, 2048, 6144).payload_bytes(), 37_757_952);
    }

    #[test]
    fn parts_are_aligned_ordered_and_inside_the_record() {
        let spec = spec(Format::Int4Grouped { group: 64 }, 24, 131);
        let mut end = 0;
        for part in spec.parts() {
            assert_eq!(part.offset % PART_ALIGN_BYTES, 0);
            assert!(part.offset >= end && part.offset < end + PART_ALIGN_BYTES);
            end = part.range().end;
        }
        assert!(end <= spec.record_bytes());
        assert!(spec.record_bytes().is_multiple_of(RECORD_ALIGN_BYTES));
    }

    #[test]
    fn a_view_needs_the_exact_length_and_aligned_scales() {
        let spec = spec(Format::Int8Row, 8, 16);
        let buf = crate::mem::AlignedBuf::zeroed(spec.record_bytes() + 1).unwrap();
        let ffn = spec.view(&buf[..spec.record_bytes()]).unwrap();
        assert_eq!((ffn.gate.rows, ffn.down.rows, ffn.up.scales.len()), (8, 16, 8));
        assert!(spec.view(&buf).is_none());
        assert!(spec.view(&buf[1..]).is_none(), "scales are not on a multiple of four");
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let good = spec(Format::Int4Row, 8, 16);
        let layout = |spec: ExpertSpec, hidden_size, index| ExpertLayout {
            hidden_size,
            specs: vec![spec],
            layers: [(3u16, vec![index])].into(),
        };
        assert!(layout(good, 16, 0).validate().is_ok());
        assert!(layout(good, 16, 1).validate().is_err());
        assert!(layout(good, 17, 0).validate().is_err());
        let mut huge = good;
        huge.gate.rows = usize::MAX;
        assert!(layout(huge, 16, 0).validate().is_err());
        let mut zero_group = good;
        zero_group.up.format = Format::Int4Grouped { group: 0 };
        assert!(layout(zero_group, 16, 0).validate().is_err());
    }
}
