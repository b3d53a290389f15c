//! Which tensors go into which file, and what they are filled with.

use crate::container::config::ModelConfig;
use crate::container::format::{Evidence, Verdict, resolve};
use crate::container::safetensors::Dtype;
use crate::container::tensors::{ExpertLayer, Need, Part, TensorShape, Want, expert_name, required};
use crate::container::write::TensorHeader;
use crate::experts::{ExpertMatrix, MatrixSpec};
use crate::io::BLOCK_BYTES;
use crate::quant::Format;

use super::SynthOptions;
use super::random::Stream;

/// What a tensor is filled with.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// Elements of a matrix whose decoded weights have this standard deviation.
    Weights { format: Format, sigma: f64 },
    /// Its scales.
    Scales { format: Format, sigma: f64 },
    /// f32 values `centre ± spread`, uniform.
    Vector { centre: f32, spread: f32 },
    /// f32 values as they are.
    Exact(Vec<f32>),
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub header: TensorHeader,
    pub content: Content,
    /// The storage format's name where the byte counts alone could be read otherwise.
    pub stamp: Option<String>,
}

impl Piece {
    pub fn bytes(&self) -> u64 {
        self.header.bytes().unwrap_or(u64::MAX)
    }
}

/// One safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OutputFile {
    pub name: String,
    pub pieces: Vec<Piece>,
}

/// Tensors that stay together: the six of an expert, or a dense matrix and its scales.
struct Unit {
    pieces: Vec<Piece>,
    is_expert: bool,
}

impl Unit {
    fn bytes(&self) -> u64 {
        self.pieces.iter().map(Piece::bytes).fold(0, u64::saturating_add)
    }
}

/// The output projection of the attention is damped: averaging over positions keeps what all tokens have in
/// common and cancels the rest, and at full strength every layer would add to it.
const ATTENTION_GAIN: f64 = 0.25;

/// All files, in the order they are written.
///
/// # Errors
/// A matrix whose format a reader could not tell.
pub(super) fn files(config: &ModelConfig, options: &SynthOptions) -> Result<Vec<OutputFile>, String> {
    let (wants, expert_layers) = required(config);
    let of = |mtp: bool, indexer: bool| {
        let mut units = Vec::new();
        for want in &wants {
            let own = match want.need {
                // Published checkpoints share the main model's.
                Need::MtpOwn => false,
                Need::Mtp | Need::MtpIndexer => mtp,
                Need::Always | Need::Indexer => !mtp,
            };
            if own && mtp | ((want.part == Part::Indexer) == indexer) {
                units.push(dense_unit(want, options)?);
            }
        }
        for layer in expert_layers.iter().filter(|layer| (layer.need == Need::Mtp) == mtp && !indexer) {
            let format = if mtp { options.mtp_format } else { options.expert_format };
            for expert in 0..layer.experts {
                units.push(expert_unit(layer, expert, format)?);
            }
        }
        Ok::<_, String>(units)
    };
    let mut files = shards("out-", of(false, false)?, options.shard_bytes);
    files.extend(shards("out-idx-", of(false, true)?, options.shard_bytes));
    files.extend(shards("out-mtp-", of(true, false)?, options.shard_bytes));
    Ok(files)
}

/// Cuts `units` into files of at most `limit` bytes (or one unit), laid out as the converter does it
/// (docs/formats.md §10): whole experts first, then what consists of whole blocks, then f32, then the rest.
fn shards(prefix: &str, units: Vec<Unit>, limit: u64) -> Vec<OutputFile> {
    let mut groups: Vec<(u64, Vec<Unit>)> = Vec::new();
    for unit in units {
        let bytes = unit.bytes();
        match groups.last_mut() {
            Some((sum, group)) if sum.saturating_add(bytes) <= limit => {
                *sum += bytes;
                group.push(unit);
            }
            _ => groups.push((bytes, vec![unit])),
        }
    }
    let file = |(number, (_, mut group)): (usize, (u64, Vec<Unit>))| {
        group.sort_by_key(|unit| !unit.is_expert);
        let experts = group.iter().filter(|unit| unit.is_expert).map(|unit| unit.pieces.len()).sum();
        let mut pieces: Vec<Piece> = group.into_iter().flat_map(|unit| unit.pieces).collect();
        pieces[experts..].sort_by_key(|piece| {
            (!piece.bytes().is_multiple_of(BLOCK_BYTES as u64), piece.header.dtype != Dtype::F32)
        });
        OutputFile { name: format!("{prefix}{number:05}.safetensors"), pieces }
    };
    groups.into_iter().enumerate().map(file).collect()
}

fn expert_unit(layer: &ExpertLayer, expert: usize, format: Format) -> Result<Unit, String> {
    let mut weights = Vec::new();
    let mut scales = Vec::new();
    for matrix in ExpertMatrix::ALL {
        let (rows, cols) = layer.shape(matrix);
        let name = expert_name(layer.layer, expert, matrix);
        let mut pieces = matrix_pieces(&name, MatrixSpec { format, rows, cols }, 1.0)?.into_iter();
        weights.extend(pieces.next());
        scales.extend(pieces);
    }
    weights.append(&mut scales);
    Ok(Unit { pieces: weights, is_expert: true })
}

fn dense_unit(want: &Want, options: &SynthOptions) -> Result<Unit, String> {
    let pieces = match want.shape {
        TensorShape::Vector { len } => vec![vector_piece(want, len, options)],
        TensorShape::Matrix { rows, cols } => {
            let format = match (want.part, want.need) {
                (Part::Router, _) => Format::F32,
                (Part::EmbeddingsHead, _) => options.embedding_format,
                (Part::Indexer, _) => options.indexer_format,
                (_, Need::Mtp) => options.mtp_format,
                _ => options.dense_format,
            };
            let gain = if want.name.ends_with("self_attn.o_proj.weight") { ATTENTION_GAIN } else { 1.0 };
            matrix_pieces(&want.name, MatrixSpec { format, rows, cols }, gain)?
        }
    };
    Ok(Unit { pieces, is_expert: false })
}

fn vector_piece(want: &Want, len: usize, options: &SynthOptions) -> Piece {
    let content = if want.part == Part::Router {
        let mut random = Stream::new(options.seed, &want.name);
        Content::Exact(options.router.bias(len, options.shape.num_experts_per_tok, &mut random))
    } else if want.name.ends_with(".bias") {
        Content::Vector { centre: 0.0, spread: 0.1 }
    } else {
        Content::Vector { centre: 1.0, spread: 0.1 }
    };
    let header = TensorHeader { name: want.name.clone(), dtype: Dtype::F32, shape: vec![len as u64] };
    Piece { header, content, stamp: None }
}

/// Weights, then scales. Rows of unit deviation keep it: `σ = gain / √cols`.
fn matrix_pieces(name: &str, spec: MatrixSpec, gain: f64) -> Result<Vec<Piece>, String> {
    let MatrixSpec { format, rows, cols } = spec;
    let sigma = gain / (cols as f64).sqrt();
    let content = Content::Weights { format, sigma };
    let float = match format {
        Format::F32 => Some(Dtype::F32),
        Format::F16 => Some(Dtype::F16),
        Format::Bf16 => Some(Dtype::Bf16),
        _ => None,
    };
    if let Some(dtype) = float {
        let shape = vec![rows as u64, cols as u64];
        let header = TensorHeader { name: name.to_owned(), dtype, shape };
        return Ok(vec![Piece { header, content, stamp: None }]);
    }
    let shape = vec![spec.weight_bytes() as u64];
    let weights = TensorHeader { name: name.to_owned(), dtype: Dtype::U8, shape };
    let shape = vec![format.scale_count(rows, cols) as u64];
    let scales = TensorHeader { name: format!("{name}.qs"), dtype: Dtype::F32, shape };
    let stamp = stamp(spec).map_err(|what| format!("{name}: {what}"))?;
    Ok(vec![
        Piece { header: weights, content, stamp },
        Piece { header: scales, content: Content::Scales { format, sigma }, stamp: None },
    ])
}

/// The name of the format, unless the reader finds it without (docs/formats.md §4.3).
fn stamp(spec: MatrixSpec) -> Result<Option<String>, String> {
    let name = spec.format.to_string();
    let read = |stamp| {
        resolve(&Evidence {
            rows: spec.rows,
            cols: spec.cols,
            weight_bytes: spec.weight_bytes() as u64,
            scale_bytes: spec.scale_bytes() as u64,
            stamp,
            group_hint: None,
            agreed_group: None,
        })
    };
    // A row of one group has the bytes of a row with one scale.
    let same = |verdict| match (verdict, spec.format) {
        (Ok(Verdict::Is(Format::Int4Row)), Format::Int4Grouped { group }) => spec.cols <= group as usize,
        (verdict, format) => verdict == Ok(Verdict::Is(format)),
    };
    if same(read(None)) {
        Ok(None)
    } else if same(read(Some(&name))) {
        Ok(Some(name))
    } else {
        let MatrixSpec { rows, cols, .. } = spec;
        Err(format!(
            "a [{rows}, {cols}] matrix as {name} has the bytes of another format; choose another width or format"
        ))
    }
}
