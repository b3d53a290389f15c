//! The record layout of a model as the coordinator tells it to a node that has nothing yet.

use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec};
use shimmer_common::quant::Format;
use shimmer_proto::v1;

use super::WireError;

/// The wire form of a layout.
pub fn layout_to_wire(layout: &ExpertLayout) -> v1::Layout {
    let specs = layout
        .specs
        .iter()
        .map(|s| v1::ExpertSpec {
            gate: Some(matrix_to_wire(&s.gate)),
            up: Some(matrix_to_wire(&s.up)),
            down: Some(matrix_to_wire(&s.down)),
        })
        .collect();
    let layers = layout
        .layers
        .iter()
        .map(|(&layer, specs)| v1::LayerSpec { layer: layer.into(), specs: specs.clone().into() })
        .collect();
    v1::Layout { hidden_size: layout.hidden_size as u32, specs, layers }
}

/// Reads and checks a layout.
///
/// # Errors
/// [`WireError`] naming the layer, expert spec or size that does not fit.
pub fn layout_from_wire(wire: &v1::Layout) -> Result<ExpertLayout, WireError> {
    let bad = |what: String| WireError::new("layout", what);
    if wire.specs.len() > 256 {
        return Err(bad(format!("{} expert specs", wire.specs.len())));
    }
    let mut specs = Vec::with_capacity(wire.specs.len());
    for (i, spec) in wire.specs.iter().enumerate() {
        specs.push(spec_from_wire(spec).ok_or_else(|| bad(format!("expert spec {i}")))?);
    }
    let mut layers = std::collections::BTreeMap::new();
    for entry in &wire.layers {
        let layer = u16::try_from(entry.layer).map_err(|_| bad(format!("layer {}", entry.layer)))?;
        if layers.insert(layer, entry.specs.to_vec()).is_some() {
            return Err(bad(format!("layer {layer} appears twice")));
        }
    }
    let layout = ExpertLayout { hidden_size: wire.hidden_size as usize, specs, layers };
    layout.validate().map_err(bad)?;
    Ok(layout)
}

fn spec_from_wire(wire: &v1::ExpertSpec) -> Option<ExpertSpec> {
    Some(ExpertSpec {
        gate: matrix_from_wire(wire.gate.as_ref()?)?,
        up: matrix_from_wire(wire.up.as_ref()?)?,
        down: matrix_from_wire(wire.down.as_ref()?)?,
    })
}

fn matrix_to_wire(spec: &MatrixSpec) -> v1::MatrixSpec {
    let (format, group) = match spec.format {
        Format::F32 => (v1::Format::F32, 0),
        Format::F16 => (v1::Format::F16, 0),
        Format::Bf16 => (v1::Format::Bf16, 0),
        Format::Fp8Block => (v1::Format::Fp8Block, 0),
        Format::Int8Row => (v1::Format::Int8Row, 0),
        Format::Int4Row => (v1::Format::Int4Row, 0),
        Format::Int4Grouped { group } => (v1::Format::Int4Grouped, group),
        Format::Int3G64 => (v1::Format::Int3G64, 0),
        Format::Int2Row => (v1::Format::Int2Row, 0),
    };
    v1::MatrixSpec { format: format.into(), group, rows: spec.rows as u32, cols: spec.cols as u32 }
}

fn matrix_from_wire(wire: &v1::MatrixSpec) -> Option<MatrixSpec> {
    let format = match wire.format() {
        v1::Format::Unspecified => return None,
        v1::Format::F32 => Format::F32,
        v1::Format::F16 => Format::F16,
        v1::Format::Bf16 => Format::Bf16,
        v1::Format::Fp8Block => Format::Fp8Block,
        v1::Format::Int8Row => Format::Int8Row,
        v1::Format::Int4Row => Format::Int4Row,
        v1::Format::Int4Grouped => Format::Int4Grouped { group: wire.group },
        v1::Format::Int3G64 => Format::Int3G64,
        v1::Format::Int2Row => Format::Int2Row,
    };
    Some(MatrixSpec { format, rows: wire.rows as usize, cols: wire.cols as usize })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;

    #[test]
    fn layouts_survive_the_wire() {
        let mut layout = synthetic_layout(128, 64, &[3, 4, 78], 7);
        layout.specs[0].down.format = Format::Int4Grouped { group: 64 };
        assert_eq!(layout_from_wire(&layout_to_wire(&layout)).unwrap(), layout);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let good = layout_to_wire(&synthetic_layout(128, 64, &[3], 4));
        let mut cases = vec![];
        let mut with = |change: fn(&mut v1::Layout)| {
            let mut bad = good.clone();
            change(&mut bad);
            cases.push(bad);
        };
        with(|l| l.hidden_size = 0);
        with(|l| l.hidden_size = u32::MAX);
        with(|l| l.specs[0].down = None);
        with(|l| l.specs[0].down.as_mut().unwrap().rows = 64);
        with(|l| l.specs[0].gate.as_mut().unwrap().format = 99);
        with(|l| l.specs.clear());
        with(|l| l.layers[0].layer = 1 << 16);
        with(|l| l.layers.push(l.layers[0].clone()));
        for (i, bad) in cases.iter().enumerate() {
            assert!(layout_from_wire(bad).is_err(), "case {i} was accepted");
        }
    }
}
