//! Dispatches (rows, experts, gates) and the sums that answer them.

use prost::Message as _;
use shimmer_common::experts::{ExpertLayout, ExpertWork, RoutedBatch, RoutedRow};
use shimmer_common::fixed::FixedRows;
use shimmer_common::kernels::{Activations, GROUP, QuantRows};
use shimmer_proto::v1;

use super::{WireError, floats_from_le, floats_to_le};

/// Most rows of one dispatch.
pub const MAX_ROWS: usize = 16_384;

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

/// Decodes and checks a serialised dispatch, as a node does with what the network gives it.
///
/// # Errors
/// [`WireError`]; never panics, whatever the bytes are.
pub fn decode_dispatch(bytes: &[u8], layout: &ExpertLayout) -> Result<(u64, RoutedBatch), WireError> {
    let wire = v1::Dispatch::decode(bytes).map_err(|e| WireError::new("dispatch", e.to_string()))?;
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
