//! Dispatches (rows, experts, gates) and the sums that answer them.

use prost::Message as _;
use shimmer_common::experts::{ExpertLayout, ExpertWork, Lookahead, RoutedBatch, RoutedRow};
use shimmer_common::fixed::FixedRows;
use shimmer_common::kernels::{Activations, GROUP, QuantRows};
use shimmer_proto::v1;

use super::{WireError, floats_from_le, floats_to_le};

/// Most rows of one dispatch.
pub const MAX_ROWS: usize = 16_384;

/// Most hints of one dispatch.
pub const MAX_HINTS: usize = 8;

/// Message size accepted by both sides: enough for [`MAX_ROWS`] rows of a hidden size of 6144 as
/// int8, or 8192 rows of packed sums at five bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Picks the rows that `work` needs and writes them as a dispatch whose rows are numbered afresh.
/// Returns the dispatch and the batch row behind each of its rows.
///
/// Rows travel as int8 where the layer's matrices take int8 (rule N1), otherwise as f32. `None` when
/// the batch lacks the form needed.
pub fn dispatch_to_wire(
    layout: &ExpertLayout,
    batch: &RoutedBatch,
    work: &[&ExpertWork],
    id: u64,
    deadline_ms: u32,
) -> Option<(v1::Dispatch, Vec<usize>)> {
    const UNUSED: u32 = u32::MAX;
    let mut number = vec![UNUSED; batch.x.rows()];
    for entry in work.iter().flat_map(|w| &w.rows) {
        *number.get_mut(entry.row as usize)? = 0;
    }
    let mut rows = Vec::new();
    for (row, slot) in number.iter_mut().enumerate().filter(|(_, slot)| **slot != UNUSED) {
        *slot = rows.len() as u32;
        rows.push(row);
    }
    let mut wire = v1::Dispatch {
        id,
        deadline_ms,
        layer: batch.layer.into(),
        rows: rows.len() as u32,
        experts: work.iter().map(|w| w.expert.into()).collect(),
        counts: work.iter().map(|w| w.rows.len() as u32).collect(),
        ..v1::Dispatch::default()
    };
    for entry in work.iter().flat_map(|w| &w.rows) {
        wire.row_indices.push(*number.get(entry.row as usize)?);
        wire.gates.push(entry.gate);
    }
    if layout.int8_activations(batch.layer) {
        let fresh;
        let quant = match (batch.x.quant(), batch.x.floats()) {
            (Some(quant), _) => quant,
            (None, Some(floats)) => {
                fresh = QuantRows::quantize(floats, batch.x.rows(), batch.x.cols());
                &fresh
            }
            (None, None) => return None,
        };
        let values: Vec<u8> =
            pick(quant.values(), &rows, quant.cols())?.into_iter().map(|v| v as u8).collect();
        wire.values = values.into();
        wire.scales = floats_to_le(&pick(quant.scales(), &rows, quant.cols().div_ceil(GROUP))?).into();
    } else {
        wire.floats = floats_to_le(&pick(batch.x.floats()?, &rows, batch.x.cols())?).into();
    }
    Some((wire, rows))
}

/// The rows `rows` of a row-major matrix of `width` columns, one after another.
fn pick<T: Copy>(values: &[T], rows: &[usize], width: usize) -> Option<Vec<T>> {
    let mut out = Vec::with_capacity(rows.len() * width);
    for &row in rows {
        out.extend_from_slice(values.get(row * width..(row + 1) * width)?);
    }
    Some(out)
}

/// Checks the hints of a dispatch.
///
/// # Errors
/// [`WireError`] naming a layer or expert the model does not have, or one named twice.
pub fn hints_from_wire(wire: &v1::Dispatch, layout: &ExpertLayout) -> Result<Vec<Lookahead>, WireError> {
    let bad = |what: String| WireError::new("dispatch", what);
    if wire.hints.len() > MAX_HINTS {
        return Err(bad(format!("{} hints, allowed are {MAX_HINTS}", wire.hints.len())));
    }
    let mut hints: Vec<Lookahead> = Vec::with_capacity(wire.hints.len());
    for hint in &wire.hints {
        let layer = u16::try_from(hint.layer).ok().filter(|layer| hints.iter().all(|h| h.layer != *layer));
        let layer = layer.ok_or_else(|| bad(format!("a hint for layer {}", hint.layer)))?;
        let known = layout.layers.get(&layer).map_or(0, Vec::len);
        if hint.experts.len() > known {
            return Err(bad(format!("a hint of {} experts for layer {layer}", hint.experts.len())));
        }
        let mut seen = vec![false; known];
        let mut experts = Vec::with_capacity(hint.experts.len());
        for &expert in &hint.experts {
            let slot = seen.get_mut(expert as usize).filter(|seen| !**seen);
            *slot.ok_or_else(|| bad(format!("a hint of expert {expert} of layer {layer}")))? = true;
            experts.push(expert as u16);
        }
        hints.push(Lookahead { layer, experts });
    }
    Ok(hints)
}

/// Decodes and checks a serialised dispatch, as a node does with what the network gives it.
///
/// # Errors
/// [`WireError`]; never panics, whatever the bytes are.
pub fn decode_dispatch(bytes: &[u8], layout: &ExpertLayout) -> Result<(u64, RoutedBatch), WireError> {
    let wire = v1::Dispatch::decode(bytes).map_err(|e| WireError::new("dispatch", e.to_string()))?;
    hints_from_wire(&wire, layout)?;
    Ok((wire.id, dispatch_from_wire(&wire, layout)?))
}

/// Checks a dispatch against the layout of the handshake.
///
/// # Errors
/// [`WireError`] naming the field that does not fit.
pub fn dispatch_from_wire(wire: &v1::Dispatch, layout: &ExpertLayout) -> Result<RoutedBatch, WireError> {
    let bad = |what: String| WireError::new("dispatch", what);
    let layer = u16::try_from(wire.layer).map_err(|_| bad(format!("layer {}", wire.layer)))?;
    let experts =
        layout.layers.get(&layer).ok_or_else(|| bad(format!("layer {layer} has no experts")))?.len();
    let rows = wire.rows as usize;
    if rows == 0 || rows > MAX_ROWS {
        return Err(bad(format!("{rows} rows, allowed are 1 to {MAX_ROWS}")));
    }
    let work = work_from_wire(wire, experts).map_err(bad)?;
    let x = activations_from_wire(wire, layout, layer, rows).map_err(bad)?;
    Ok(RoutedBatch { layer, x, work })
}

fn work_from_wire(wire: &v1::Dispatch, experts: usize) -> Result<Vec<ExpertWork>, String> {
    if wire.experts.len() != wire.counts.len() {
        return Err(format!("{} experts but {} counts", wire.experts.len(), wire.counts.len()));
    }
    if wire.row_indices.len() != wire.gates.len() {
        return Err(format!("{} row indices but {} gates", wire.row_indices.len(), wire.gates.len()));
    }
    let mut entries = wire.row_indices.iter().zip(&wire.gates);
    let mut work: Vec<ExpertWork> = Vec::with_capacity(wire.experts.len());
    for (&expert, &count) in wire.experts.iter().zip(&wire.counts) {
        let index = u16::try_from(expert).ok().filter(|&e| usize::from(e) < experts);
        let index = index.ok_or_else(|| format!("expert {expert} of {experts}"))?;
        if work.last().is_some_and(|w| w.expert >= index) {
            return Err(format!("expert {expert} is out of order"));
        }
        if count == 0 || count > wire.rows {
            return Err(format!("expert {expert} has {count} of {} rows", wire.rows));
        }
        let mut rows: Vec<RoutedRow> = Vec::with_capacity(count as usize);
        for (&row, &gate) in entries.by_ref().take(count as usize) {
            let follows = rows.last().is_none_or(|r| r.row < row);
            if row >= wire.rows || !follows || !gate.is_finite() {
                return Err(format!("expert {expert}: row {row} with gate {gate}"));
            }
            rows.push(RoutedRow { row, gate });
        }
        if rows.len() != count as usize {
            return Err(format!("expert {expert} lacks rows"));
        }
        work.push(ExpertWork { expert: index, rows });
    }
    if entries.next().is_some() {
        return Err("rows are left over".to_owned());
    }
    Ok(work)
}

fn activations_from_wire(
    wire: &v1::Dispatch,
    layout: &ExpertLayout,
    layer: u16,
    rows: usize,
) -> Result<Activations, String> {
    let hidden = layout.hidden_size;
    let cells = rows.checked_mul(hidden).ok_or("too many activations")?;
    if layout.int8_activations(layer) {
        if wire.values.len() != cells || !wire.floats.is_empty() {
            return Err(format!("{} int8 activations for {rows} rows of {hidden}", wire.values.len()));
        }
        let values = wire.values.iter().map(|&b| b as i8).collect();
        let scales = floats_from_le(&wire.scales).ok_or("scales are not whole numbers of f32")?;
        let quant = QuantRows::from_parts(rows, hidden, values, scales);
        return quant
            .map(Activations::from_quant)
            .ok_or_else(|| "int8 activations or scales out of range".to_owned());
    }
    let floats = floats_from_le(&wire.floats).ok_or("activations are not whole numbers of f32")?;
    if floats.len() != cells || !wire.values.is_empty() || !wire.scales.is_empty() {
        return Err(format!("{} f32 activations for {rows} rows of {hidden}", floats.len()));
    }
    if floats.iter().any(|v| !v.is_finite()) {
        return Err("an f32 activation is not finite".to_owned());
    }
    Ok(Activations::from_f32(floats, hidden).quantized())
}

/// Unpacks the sums of a reply.
///
/// # Errors
/// [`WireError`] when they do not decode to `[rows, hidden_size]`.
pub fn decode_sums(
    bytes: &[u8],
    rows: usize,
    layout: &ExpertLayout,
    fraction_bits: u8,
) -> Result<FixedRows, WireError> {
    FixedRows::unpack(rows, layout.hidden_size, fraction_bits, bytes)
        .map_err(|e| WireError::new("reply", e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;
    use shimmer_common::experts::ExpertLayout;
    use shimmer_common::quant::Format;

    const HIDDEN: usize = 96;

    fn layout(format: Format) -> ExpertLayout {
        let mut layout = synthetic_layout(HIDDEN, 64, &[3], 8);
        layout.specs[0].gate.format = format;
        layout.specs[0].up.format = format;
        layout
    }

    fn batch() -> RoutedBatch {
        let x: Vec<f32> = (0..6 * HIDDEN).map(|i| (i as f32 * 0.37).sin()).collect();
        // Row 4 is routed to nobody here.
        let ids = [1, 5, 5, 7, 1, 2, 2, 5, 0, 0, 7, 1];
        let gates: Vec<f32> = (0..12).map(|i| 0.1 + i as f32 / 16.0).collect();
        let mut batch =
            RoutedBatch::from_routes(3, Activations::from_f32(x, HIDDEN).quantized(), &ids, &gates, 2);
        batch.work.retain(|w| w.expert != 0);
        batch
    }

    fn dispatch(layout: &ExpertLayout, batch: &RoutedBatch) -> (v1::Dispatch, Vec<usize>) {
        let work: Vec<&ExpertWork> = batch.work.iter().collect();
        dispatch_to_wire(layout, batch, &work, 77, 250).unwrap()
    }

    #[test]
    fn a_dispatch_carries_the_rows_its_experts_need() {
        let batch = batch();
        for format in [Format::Int8Row, Format::Bf16] {
            let layout = layout(format);
            let (wire, rows) = dispatch(&layout, &batch);
            assert_eq!(rows, [0, 1, 2, 3, 5], "row 4 stays at home");
            let (id, received) = decode_dispatch(&wire.encode_to_vec(), &layout).unwrap();
            assert_eq!((id, received.layer, received.x.rows()), (77, 3, 5));
            for (sent, got) in batch.work.iter().zip(&received.work) {
                assert_eq!(sent.expert, got.expert);
                let back: Vec<_> = got.rows.iter().map(|r| (rows[r.row as usize] as u32, r.gate)).collect();
                assert_eq!(back, sent.rows.iter().map(|r| (r.row, r.gate)).collect::<Vec<_>>());
            }
            let (ours, theirs) = (batch.x.quant().unwrap(), received.x.quant().unwrap());
            for (i, &row) in rows.iter().enumerate() {
                assert_eq!(theirs.values()[i * HIDDEN..][..HIDDEN], ours.values()[row * HIDDEN..][..HIDDEN]);
                assert_eq!(theirs.scales()[i * 2..][..2], ours.scales()[row * 2..][..2]);
            }
            assert_eq!(received.x.floats().is_some(), format == Format::Bf16, "{format}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let layout = layout(Format::Int8Row);
        let good = dispatch(&layout, &batch()).0;
        assert!(dispatch_from_wire(&good, &layout).is_ok());
        let changes: [fn(&mut v1::Dispatch); 18] = [
            |d| d.layer = 4,
            |d| d.layer = 1 << 20,
            |d| d.rows = 0,
            |d| d.rows = u32::MAX,
            |d| d.rows += 1,
            |d| d.experts[0] = 8,
            |d| d.experts.swap(0, 1),
            |d| d.experts[1] = d.experts[0],
            |d| d.experts.truncate(1),
            |d| d.counts[0] += 1,
            |d| d.counts[0] = 0,
            |d| d.counts[0] = u32::MAX,
            |d| d.row_indices[0] = 5,
            |d| d.row_indices.swap(0, 1),
            |d| d.gates[0] = f32::NAN,
            |d| d.gates.truncate(1),
            |d| d.scales = vec![0; 3].into(),
            |d| d.floats = vec![0; 4].into(),
        ];
        for (i, change) in changes.into_iter().enumerate() {
            let mut bad = good.clone();
            change(&mut bad);
            assert!(dispatch_from_wire(&bad, &layout).is_err(), "change {i} was accepted");
        }
        let mut bad = good.clone();
        bad.values = bad.values.iter().map(|_| 0x80).collect::<Vec<u8>>().into();
        assert!(dispatch_from_wire(&bad, &layout).is_err(), "-128 is not an activation");
        let mut bad = good;
        bad.scales =
            bad.scales.chunks(4).flat_map(|_| f32::INFINITY.to_le_bytes()).collect::<Vec<u8>>().into();
        assert!(dispatch_from_wire(&bad, &layout).is_err(), "infinite scale");
    }

    #[test]
    fn hints_name_experts_the_model_has_each_once() {
        let layout = layout(Format::Int8Row);
        let hint = |layer, experts: &[u32]| v1::Hint { layer, experts: experts.to_vec() };
        let of = |hints: Vec<v1::Hint>| {
            hints_from_wire(&v1::Dispatch { hints, ..v1::Dispatch::default() }, &layout)
        };
        let good = of(vec![hint(3, &[7, 0, 5])]).unwrap();
        assert_eq!(good, [Lookahead { layer: 3, experts: vec![7, 0, 5] }]);
        for bad in [
            vec![hint(4, &[0])],
            vec![hint(3 + (1 << 16), &[0])],
            vec![hint(3, &[8])],
            vec![hint(3, &[1, 1])],
            vec![hint(3, &[u32::MAX])],
            vec![hint(3, &[0]), hint(3, &[1])],
            vec![hint(3, &[0; 9])],
            vec![hint(3, &[]); MAX_HINTS + 1],
        ] {
            assert!(of(bad.clone()).is_err(), "{bad:?}");
        }
    }

    /// Whatever arrives: an error or a batch that fits, never a panic.
    #[test]
    fn mutated_bytes_never_panic() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        let batch = batch();
        let mut refused = 0;
        for format in [Format::Int8Row, Format::Bf16] {
            let layout = layout(format);
            let good = dispatch(&layout, &batch).0.encode_to_vec();
            for len in 0..good.len() {
                let _ = decode_dispatch(&good[..len], &layout);
            }
            for _ in 0..20_000 {
                let mut bytes = good.clone();
                for _ in 0..1 + random() % 4 {
                    let at = random() % bytes.len();
                    // Mostly the small fields at the beginning and end, not the activations.
                    let at = if at.is_multiple_of(2) { at % 24 } else { bytes.len() - 1 - at % 120 };
                    bytes[at] = random() as u8;
                }
                match decode_dispatch(&bytes, &layout) {
                    Err(_) => refused += 1,
                    Ok((_, batch)) => {
                        let rows = batch.x.rows();
                        assert!(batch.work.iter().flat_map(|w| &w.rows).all(|r| (r.row as usize) < rows));
                    }
                }
            }
        }
        assert!(refused > 10_000, "{refused} mutations were refused");
    }

    #[test]
    fn sums_decode_to_the_rows_asked_for_or_not_at_all() {
        let layout = layout(Format::Int8Row);
        let mut sums = FixedRows::zeroed(3, HIDDEN, 24);
        sums.add_weighted(1, 0.5, &[1.25; HIDDEN]).unwrap();
        let packed = sums.pack();
        assert_eq!(decode_sums(&packed, 3, &layout, 24).unwrap(), sums);
        assert!(decode_sums(&packed, 2, &layout, 24).is_err());
        assert!(decode_sums(&packed, usize::MAX, &layout, 24).is_err());
        for len in 0..packed.len() {
            assert!(decode_sums(&packed[..len], 3, &layout, 24).is_err(), "cut at {len}");
        }
    }
}
