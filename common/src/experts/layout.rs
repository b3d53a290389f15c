//! Record layout: how the three matrices of an expert lie in one record.
//!
//! A record is `down.w | gate.w | up.w | down.s | gate.s | up.s` (the order of a container sorted by
//! name), every part starting on a 64-byte boundary, the whole padded with zeros to 4 KiB.
//! For GLM-5.2 at int4 no padding is needed.

use serde::{Deserialize, Serialize};

use super::ExpertId;
use crate::ffn::FfnRef;
use crate::quant::Format;

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
    /// Bytes of the record, a multiple of 4096.
    pub fn record_bytes(&self) -> usize {
        todo!()
    }

    /// Views the matrices inside a record; `None` when its length or alignment does not fit.
    pub fn view<'a>(&self, record: &'a [u8]) -> Option<FfnRef<'a>> {
        let _ = record;
        todo!()
    }
}

/// Specs of every routed expert of a model, compactly: few distinct specs, one index per expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLayout {
    /// Hidden size of the model.
    pub hidden_size: usize,
    /// Distinct specs.
    pub specs: Vec<ExpertSpec>,
    /// Per MoE layer (checkpoint index), the spec of each expert.
    pub layers: std::collections::BTreeMap<u16, Vec<u8>>,
}

impl ExpertLayout {
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
