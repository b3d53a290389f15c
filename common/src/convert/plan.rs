//! What goes where: every tensor of the source, its target format, and its place in an output file.
//!
//! One output file per source shard and kind: `out-NNNNN` (main model), `out-mtp-NNNNN` (the MTP layer),
//! `out-idx-NNNNN` (indexers of the main layers), `NNNNN` being the source shard's number in sorted
//! order. Inside a file the experts come first, each as one whole record where its parts allow it
//! (docs/formats.md §5), then what else is whole blocks of 4 KiB, then the rest; so the data of all but the
//! small tensors starts on a block, and direct reads need no copy. Among these F32 tensors come first,
//! then BF16, then U8, each sorted by name.

use std::collections::BTreeMap;

use super::ConvertError;
use super::options::ConvertOptions;
use crate::container::Container;
use crate::container::resolve::{Dense, MatrixPlace, Place, Span};
use crate::container::safetensors::Dtype;
use crate::container::tensors::{Part, expert_name, parse_expert_name};
use crate::container::write::{TensorHeader, header_json};
use crate::experts::{ExpertId, ExpertMatrix, ExpertSpec, MatrixSpec};
use crate::io::BLOCK_BYTES;
use crate::quant::Format;

/// The kinds of output files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Main,
    Indexer,
    Mtp,
}

impl Kind {
    fn file_name(self, number: u32) -> String {
        let infix = match self {
            Self::Main => "",
            Self::Indexer => "idx-",
            Self::Mtp => "mtp-",
        };
        format!("out-{infix}{number:05}.safetensors")
    }
}

/// A byte range of an output file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Region {
    pub offset: u64,
    pub bytes: u64,
}

/// One tensor to be converted. Vectors are matrices of one row.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub name: String,
    pub source: MatrixSpec,
    pub source_weights: Span,
    pub source_scales: Option<Span>,
    pub format: Format,
    pub weights: Region,
    /// Empty for float formats.
    pub scales: Region,
    /// A vector keeps its one-dimensional shape.
    is_vector: bool,
}

impl Tensor {
    /// Format, rows and columns as written.
    pub(super) fn target(&self) -> MatrixSpec {
        MatrixSpec { format: self.format, ..self.source }
    }

    fn shape(&self) -> Vec<u64> {
        let MatrixSpec { rows, cols, .. } = self.source;
        match self.format {
            Format::F32 | Format::Bf16 if self.is_vector => vec![cols as u64],
            Format::F32 | Format::Bf16 => vec![rows as u64, cols as u64],
            _ => vec![self.target().weight_bytes() as u64],
        }
    }
}

/// One output file.
#[derive(Clone, Debug)]
pub(super) struct OutputFile {
    pub name: String,
    /// Length field and JSON, padded.
    pub head: Vec<u8>,
    pub bytes: u64,
    /// In the order of the source, so that reading is sequential.
    pub tensors: Vec<Tensor>,
    /// File name of the source shard.
    pub source: String,
}

/// All output files, in the order they are written.
///
/// # Errors
/// When the source is quantised already.
pub(super) fn plan(source: &Container, options: &ConvertOptions) -> Result<Vec<OutputFile>, ConvertError> {
    let resolved = source.resolved();
    let mut files: BTreeMap<(u32, Kind), Vec<Tensor>> = BTreeMap::new();
    for (name, dense) in &resolved.dense {
        let (kind, tensor) = dense_tensor(name, dense, options);
        files.entry((tensor.source_weights.shard, kind)).or_default().push(tensor);
    }
    for (&layer, experts) in &resolved.experts {
        let (kind, format) = if resolved.mtp_layer == Some(layer) {
            (Kind::Mtp, options.mtp.format())
        } else {
            (Kind::Main, options.experts.format())
        };
        for (expert, places) in experts.iter().enumerate() {
            for (matrix, place) in ExpertMatrix::ALL.into_iter().zip(places) {
                let tensor = matrix_tensor(expert_name(layer, expert, matrix), place, format);
                files.entry((tensor.source_weights.shard, kind)).or_default().push(tensor);
            }
        }
    }
    if let Some(tensor) = files.values().flatten().find(|tensor| tensor.source.format.is_integer()) {
        let Tensor { name, source: MatrixSpec { format, .. }, .. } = tensor;
        return Err(ConvertError::Source(format!(
            "{name} is stored as {format}: rounding twice would lose quality, so convert from the original bf16 or fp8 checkpoint"
        )));
    }
    files
        .into_iter()
        .map(|((shard, kind), tensors)| {
            let path = source.shards().get(shard as usize).map(|shard| shard.path());
            let source = path.and_then(|path| path.file_name()).unwrap_or_default();
            lay_out(kind.file_name(shard), source.to_string_lossy().into_owned(), tensors)
        })
        .collect()
}

fn dense_tensor(name: &str, dense: &Dense, options: &ConvertOptions) -> (Kind, Tensor) {
    let kind = match dense.part {
        _ if dense.mtp => Kind::Mtp,
        Part::Indexer => Kind::Indexer,
        _ => Kind::Main,
    };
    let place = match &dense.place {
        Place::Matrix(place) => place,
        Place::Vector(vector) => {
            let source = MatrixSpec { format: vector.format, rows: 1, cols: vector.len };
            let place = MatrixPlace { spec: source, weights: vector.span, scales: None };
            let tensor = Tensor { is_vector: true, ..matrix_tensor(name.to_owned(), &place, Format::F32) };
            return (kind, tensor);
        }
    };
    let format = match dense.part {
        Part::Router => Format::F32,
        Part::Indexer => options.indexer.format(),
        Part::EmbeddingsHead => options.embeddings.format(),
        _ if dense.mtp => options.mtp.format(),
        _ => options.dense.format(),
    };
    (kind, matrix_tensor(name.to_owned(), place, format))
}

fn matrix_tensor(name: String, place: &MatrixPlace, format: Format) -> Tensor {
    Tensor {
        name,
        source: place.spec,
        source_weights: place.weights,
        source_scales: place.scales,
        format,
        weights: Region::default(),
        scales: Region::default(),
        is_vector: false,
    }
}

/// One stored tensor of a file to be laid out.
struct Entry {
    header: TensorHeader,
    /// Which tensor it is (part of).
    tensor: usize,
    is_scales: bool,
    order: Order,
}

/// Where a stored tensor comes in the file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    /// Part of an expert whose six parts are all there and fill a record without gaps; records that are
    /// whole blocks come first, so that all of them start on a block.
    Record { odd: bool, expert: ExpertId, part: usize },
    /// Anything else, whole blocks first.
    Other { odd: bool, class: u8, name: String },
}

/// The experts of which `tensors` holds everything, with their matrices in record order.
fn whole_experts(tensors: &[Tensor]) -> BTreeMap<ExpertId, [MatrixSpec; 3]> {
    let mut found: BTreeMap<ExpertId, [Option<MatrixSpec>; 3]> = BTreeMap::new();
    for tensor in tensors {
        if let Some((id, matrix)) = expert_of(&tensor.name) {
            found.entry(id).or_default()[matrix as usize] = Some(tensor.target());
        }
    }
    let whole = |(id, specs): (ExpertId, [Option<MatrixSpec>; 3])| {
        let [Some(down), Some(gate), Some(up)] = specs else { return None };
        Some((id, [down, gate, up]))
    };
    found.into_iter().filter_map(whole).collect()
}

fn expert_of(name: &str) -> Option<(ExpertId, ExpertMatrix)> {
    let (layer, expert, matrix) = parse_expert_name(name)?;
    Some((ExpertId { layer, index: u16::try_from(expert).ok()? }, matrix))
}

/// Orders by what is known of all tensors of the file.
fn order(
    tensor: &Tensor,
    header: &TensorHeader,
    is_scales: bool,
    experts: &BTreeMap<ExpertId, [MatrixSpec; 3]>,
) -> Order {
    let odd = |bytes: u64| !bytes.is_multiple_of(BLOCK_BYTES as u64);
    if let Some((expert, matrix)) = expert_of(&tensor.name)
        && let Some(&[down, gate, up]) = experts.get(&expert)
    {
        let spec = ExpertSpec { gate, up, down };
        if spec.is_sane() && spec.is_gapless() {
            let part = spec.parts().iter().position(|part| part.matrix == matrix && part.scales == is_scales);
            return Order::Record {
                odd: odd(spec.payload_bytes() as u64),
                expert,
                part: part.unwrap_or(usize::MAX),
            };
        }
    }
    let class = match header.dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        _ => 2,
    };
    Order::Other { odd: header.bytes().is_none_or(odd), class, name: header.name.clone() }
}

/// Fixes the places of all tensors of one file and writes its header.
fn lay_out(name: String, source: String, mut tensors: Vec<Tensor>) -> Result<OutputFile, ConvertError> {
    let experts = whole_experts(&tensors);
    let mut entries = Vec::new();
    for (i, tensor) in tensors.iter().enumerate() {
        let dtype = match tensor.format {
            Format::F32 => Dtype::F32,
            Format::Bf16 => Dtype::Bf16,
            _ => Dtype::U8,
        };
        let mut add = |header: TensorHeader, is_scales: bool| {
            let order = order(tensor, &header, is_scales, &experts);
            entries.push(Entry { header, tensor: i, is_scales, order });
        };
        add(TensorHeader { name: tensor.name.clone(), dtype, shape: tensor.shape() }, false);
        let target = tensor.target();
        let scales = target.format.scale_count(target.rows, target.cols) as u64;
        if scales > 0 {
            let name = format!("{}.qs", tensor.name);
            add(TensorHeader { name, dtype: Dtype::F32, shape: vec![scales] }, true);
        }
    }
    entries.sort_by(|a, b| a.order.cmp(&b.order));
    let headers: Vec<TensorHeader> = entries.iter().map(|entry| entry.header.clone()).collect();
    let unusable = |what: &str| ConvertError::Source(format!("{name} cannot be laid out: {what}"));
    let (json, data_bytes) = header_json(&headers, &[]).map_err(|error| unusable(&error.to_string()))?;
    let head = [&(json.len() as u64).to_le_bytes(), json.as_slice()].concat();
    let mut offset = head.len() as u64;
    let bytes = data_bytes.checked_add(offset).ok_or_else(|| unusable("its size overflows"))?;
    for Entry { header, tensor: i, is_scales, .. } in entries {
        let region = Region { offset, bytes: header.bytes().ok_or_else(|| unusable("its size overflows"))? };
        offset += region.bytes;
        if is_scales { tensors[i].scales = region } else { tensors[i].weights = region }
    }
    tensors.sort_by_key(|tensor| tensor.source_weights.offset);
    Ok(OutputFile { name, bytes, head, tensors, source })
}
