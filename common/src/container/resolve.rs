//! Matching what the configuration requires with what the shards hold (docs/formats.md §3, §4 and §8).
//!
//! Everything missing or odd is collected; the result is either a complete model or the whole list.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;

use super::config::ModelConfig;
use super::error::Problem;
use super::format::{self, Evidence, Verdict};
use super::index::{Index, Located};
use super::missing;
use super::safetensors::Dtype;
use super::tensors::{self, ExpertLayer, Need, Part, TensorShape, Want};
use crate::experts::{ExpertLayout, ExpertMatrix, ExpertSpec, MatrixSpec};
use crate::quant::Format;

/// Collecting stops here: a config that asks for millions of tensors must not fill the memory with
/// complaints.
const MAX_PROBLEMS: usize = 10_000;

/// A byte range of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Index of the shard.
    pub shard: u32,
    /// First byte within the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// A matrix and where its payload and scales are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixPlace {
    pub spec: MatrixSpec,
    pub weights: Span,
    /// `None` for float formats.
    pub scales: Option<Span>,
}

/// A float vector and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VectorPlace {
    /// F32, F16 or Bf16.
    pub format: Format,
    pub len: usize,
    pub span: Span,
}

/// What a dense tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Matrix(MatrixPlace),
    Vector(VectorPlace),
}

/// One resolved dense tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense {
    pub part: Part,
    /// Whether it belongs to the MTP layer.
    pub mtp: bool,
    pub place: Place,
}

impl Dense {
    /// Stored bytes, scales included.
    pub fn bytes(&self) -> u64 {
        match &self.place {
            Place::Matrix(m) => m.weights.bytes + m.scales.map_or(0, |s| s.bytes),
            Place::Vector(v) => v.span.bytes,
        }
    }
}

/// The three matrices of one expert, in record order.
pub(crate) type ExpertPlaces = [MatrixPlace; 3];

/// A complete model.
#[derive(Debug, Default)]
pub(crate) struct Resolved {
    pub dense: BTreeMap<String, Dense>,
    pub experts: BTreeMap<u16, Vec<ExpertPlaces>>,
    pub layout: ExpertLayout,
    /// Checkpoint index of the MTP layer, when it is usable.
    pub mtp_layer: Option<u16>,
    pub has_indexer: bool,
    pub has_mtp_indexer: bool,
    /// First tensor missing from the MTP layer, when the config promises one.
    pub mtp_lacks: Option<String>,
    /// First tensor missing from the indexers, and how many of them are there.
    pub indexer_lacks: Option<(String, usize)>,
}

/// Resolves every tensor `config` requires and marks the used ones in `index`.
///
/// # Errors
/// Everything that is missing or odd, the damage found while scanning included.
pub(crate) fn resolve(
    config: &ModelConfig,
    index: &mut Index,
    dirs: &[PathBuf],
) -> Result<Resolved, Vec<Problem>> {
    let (wants, layers) = tensors::required(config);
    let mut resolver = Resolver::new(index, None);
    let mut resolved = resolver.run(&wants, &layers);
    // One more pass when a group size could not be told alone but all other matrices agree on one.
    if resolver.ambiguous
        && let [group] = resolver.groups_seen.iter().copied().collect::<Vec<_>>()[..]
    {
        resolver = Resolver::new(index, Some(group));
        resolved = resolver.run(&wants, &layers);
    }
    let (found, missing) = (resolver.problems, resolver.missing);
    let mut problems = std::mem::take(&mut index.problems);
    problems.extend(found);
    problems.extend(missing::problems(missing, index, dirs));
    resolved.layout.hidden_size = config.hidden_size();
    if problems.is_empty()
        && let Err(what) = collect_layout(&mut resolved)
    {
        problems.push(Problem { file: dirs.first().cloned(), tensor: None, what });
    }
    if problems.is_empty() { Ok(resolved) } else { Err(problems) }
}

/// Fills [`Resolved::layout`] from the experts' places.
fn collect_layout(resolved: &mut Resolved) -> Result<(), String> {
    let mut specs: Vec<ExpertSpec> = Vec::new();
    for (&layer, experts) in &resolved.experts {
        let mut indices = Vec::with_capacity(experts.len());
        for [down, gate, up] in experts {
            let spec = ExpertSpec { gate: gate.spec, up: up.spec, down: down.spec };
            let known = specs.iter().position(|s| *s == spec);
            let index = known.unwrap_or_else(|| {
                specs.push(spec);
                specs.len() - 1
            });
            let index = u8::try_from(index).map_err(|_| {
                "the routed experts use more than 256 different combinations of formats, which is not supported"
            })?;
            indices.push(index);
        }
        resolved.layout.layers.insert(layer, indices);
    }
    resolved.layout.specs = specs;
    Ok(())
}

/// One pass over all requirements.
struct Resolver<'a> {
    index: &'a mut Index,
    agreed_group: Option<u32>,
    /// Names already reported as damaged by the header check: not reported as missing once more.
    flawed: HashSet<String>,
    problems: Vec<Problem>,
    missing: Vec<String>,
    groups_seen: BTreeSet<u32>,
    ambiguous: bool,
}

impl<'a> Resolver<'a> {
    fn new(index: &'a mut Index, agreed_group: Option<u32>) -> Self {
        let flawed = index.problems.iter().filter_map(|p| p.tensor.clone()).collect();
        Self {
            index,
            agreed_group,
            flawed,
            problems: Vec::new(),
            missing: Vec::new(),
            groups_seen: BTreeSet::new(),
            ambiguous: false,
        }
    }

    fn run(&mut self, wants: &[Want], layers: &[ExpertLayer]) -> Resolved {
        let mut resolved = Resolved {
            indexer_lacks: self.indexer_gap(wants),
            mtp_lacks: self.mtp_gap(wants, layers),
            ..Resolved::default()
        };
        let wanted = |need: Need| wants.iter().filter(move |w| w.need == need);
        let promises_mtp = wanted(Need::Mtp).next().is_some();
        let mtp = promises_mtp && resolved.mtp_lacks.is_none();
        resolved.has_indexer = wanted(Need::Indexer).next().is_some() && resolved.indexer_lacks.is_none();
        resolved.has_mtp_indexer = mtp && wanted(Need::MtpIndexer).all(|w| self.has(&w.name));
        for want in wants {
            let usable = match want.need {
                Need::Always => true,
                Need::Indexer => resolved.has_indexer,
                Need::Mtp => mtp,
                Need::MtpIndexer => resolved.has_mtp_indexer,
                Need::MtpOwn => mtp && self.has(&want.name),
            };
            if usable && let Some(place) = self.dense(want) {
                let mtp = !matches!(want.need, Need::Always | Need::Indexer);
                resolved.dense.insert(want.name.clone(), Dense { part: want.part, mtp, place });
            }
        }
        for layer in layers.iter().filter(|l| l.need == Need::Always || mtp) {
            if layer.need == Need::Mtp {
                resolved.mtp_layer = Some(layer.layer);
            }
            resolved.experts.insert(layer.layer, self.experts(layer));
            if self.problems.len() + self.missing.len() >= MAX_PROBLEMS {
                break;
            }
        }
        resolved
    }

    fn has(&self, name: &str) -> bool {
        self.index.get(name).is_some() || self.flawed.contains(name)
    }

    /// First indexer tensor that is missing, and how many are present.
    fn indexer_gap(&self, wants: &[Want]) -> Option<(String, usize)> {
        let names: Vec<&str> =
            wants.iter().filter(|w| w.need == Need::Indexer).map(|w| w.name.as_str()).collect();
        let first = names.iter().find(|name| !self.has(name))?;
        Some(((*first).to_owned(), names.iter().filter(|name| self.has(name)).count()))
    }

    /// First tensor of the MTP layer that is missing.
    fn mtp_gap(&self, wants: &[Want], layers: &[ExpertLayer]) -> Option<String> {
        let dense = wants.iter().filter(|w| w.need == Need::Mtp).map(|w| w.name.clone());
        let experts = layers.iter().filter(|l| l.need == Need::Mtp).flat_map(|l| {
            (0..l.experts).flat_map(|e| ExpertMatrix::ALL.map(|m| tensors::expert_name(l.layer, e, m)))
        });
        dense.chain(experts).find(|name| !self.has(name))
    }

    fn experts(&mut self, layer: &ExpertLayer) -> Vec<ExpertPlaces> {
        let mut places = Vec::with_capacity(layer.experts.min(self.index.tensors.len()));
        for expert in 0..layer.experts {
            if self.problems.len() + self.missing.len() >= MAX_PROBLEMS {
                break;
            }
            let matrix = |m: ExpertMatrix| {
                let (rows, cols) = layer.shape(m);
                self.matrix(&tensors::expert_name(layer.layer, expert, m), rows, cols, layer.need)
            };
            if let [Some(down), Some(gate), Some(up)] = ExpertMatrix::ALL.map(matrix) {
                places.push([down, gate, up]);
            }
        }
        places
    }

    fn dense(&mut self, want: &Want) -> Option<Place> {
        match want.shape {
            TensorShape::Matrix { rows, cols } => {
                self.matrix(&want.name, rows, cols, want.need).map(Place::Matrix)
            }
            TensorShape::Vector { len } => self.vector(&want.name, len).map(Place::Vector),
        }
    }

    fn vector(&mut self, name: &str, len: usize) -> Option<VectorPlace> {
        let located = self.take(name)?;
        let Some(format) = float_format(&located.info.dtype) else {
            let dtype = located.info.dtype.name();
            return self.odd(
                &located,
                name,
                format!("its dtype is {dtype}; supported are F32, BF16 and F16"),
            );
        };
        if *located.info.shape != [len as u64] {
            let shape = &located.info.shape;
            return self.odd(&located, name, format!("its shape is {shape:?}; config.json asks for [{len}]"));
        }
        Some(VectorPlace { format, len, span: span(&located) })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, need: Need) -> Option<MatrixPlace> {
        let located = self.take(name)?;
        match &located.info.dtype {
            Dtype::U8 | Dtype::I8 => self.quantised(name, &located, rows, cols, need),
            Dtype::F8E4M3 => self.fp8(name, &located, rows, cols),
            dtype => match float_format(dtype) {
                Some(format) => self.float(name, &located, MatrixSpec { format, rows, cols }),
                None => {
                    let what = format!(
                        "its dtype is {}; supported are BF16, F16, F32, F8_E4M3 and U8 with .qs scales",
                        dtype.name()
                    );
                    self.odd(&located, name, what)
                }
            },
        }
    }

    /// A plain float matrix.
    fn float(&mut self, name: &str, located: &Located, spec: MatrixSpec) -> Option<MatrixPlace> {
        self.check_shape(name, located, spec.rows, spec.cols)?;
        for scales in [format!("{name}.qs"), format!("{name}_scale_inv")] {
            if self.index.get(&scales).is_some() {
                let dtype = located.info.dtype.name();
                return self.odd(
                    located,
                    name,
                    format!(
                        "it is plain {dtype}, yet {scales} gives it scales; the shards do not belong together"
                    ),
                );
            }
        }
        Some(MatrixPlace { spec, weights: span(located), scales: None })
    }

    /// A Hugging Face FP8 matrix with 128×128 block scales.
    fn fp8(&mut self, name: &str, located: &Located, rows: usize, cols: usize) -> Option<MatrixPlace> {
        self.check_shape(name, located, rows, cols)?;
        let own = format!("{name}.qs");
        let scale_name = if self.index.get(&own).is_some() { own } else { format!("{name}_scale_inv") };
        let scales = self.take_scales(name, &scale_name)?;
        let spec = MatrixSpec { format: Format::Fp8Block, rows, cols };
        let blocks = [rows.div_ceil(128) as u64, cols.div_ceil(128) as u64];
        let [down, across] = blocks;
        if *scales.info.shape != blocks && *scales.info.shape != [down * across] {
            let shape = &scales.info.shape;
            let what =
                format!("its shape is {shape:?}; [{rows}, {cols}] in blocks of 128×128 needs {blocks:?}");
            return self.odd(&scales, &scale_name, what);
        }
        Some(MatrixPlace { spec, weights: span(located), scales: Some(span(&scales)) })
    }

    /// A colibrì payload with its `.qs` scales: the byte counts say which format.
    fn quantised(
        &mut self,
        name: &str,
        located: &Located,
        rows: usize,
        cols: usize,
        need: Need,
    ) -> Option<MatrixPlace> {
        let scale_name = format!("{name}.qs");
        let scales = self.take_scales(name, &scale_name)?;
        let hints = self.index.group_hints;
        let evidence = Evidence {
            rows,
            cols,
            weight_bytes: located.info.bytes(),
            scale_bytes: scales.info.bytes(),
            stamp: self.index.stamps.get(name).map(String::as_str),
            group_hint: match need {
                Need::Always => hints.main,
                Need::Indexer => hints.indexer.or(hints.main),
                Need::Mtp | Need::MtpIndexer | Need::MtpOwn => hints.mtp.or(hints.main),
            },
            agreed_group: self.agreed_group,
        };
        match format::resolve(&evidence) {
            Ok(Verdict::Is(format)) => {
                if let Format::Int4Grouped { group } = format {
                    self.groups_seen.insert(group);
                }
                let spec = MatrixSpec { format, rows, cols };
                Some(MatrixPlace { spec, weights: span(located), scales: Some(span(&scales)) })
            }
            Ok(Verdict::Ambiguous(groups)) => {
                self.ambiguous = true;
                let what = format!(
                    "its group size cannot be told ({groups:?} all fit [{rows}, {cols}]); put the converter's .out-params.json with group_size beside the shards"
                );
                self.odd(located, name, what)
            }
            Err(what) => self.odd(located, name, what),
        }
    }

    /// The located tensor, marked as used; reports it missing otherwise.
    fn take(&mut self, name: &str) -> Option<Located> {
        match self.index.tensors.get_mut(name) {
            Some(located) => {
                located.used = true;
                Some(located.clone())
            }
            None => {
                if !self.flawed.contains(name) {
                    self.missing.push(name.to_owned());
                }
                None
            }
        }
    }

    /// The F32 scales of `name`.
    fn take_scales(&mut self, name: &str, scale_name: &str) -> Option<Located> {
        if self.index.get(scale_name).is_none() && !self.flawed.contains(scale_name) {
            let owner = self.index.get(name).and_then(|l| self.index.path(l));
            let what = format!("missing; {name} is quantised and cannot be read without its scales");
            self.problem(owner, scale_name, what);
            return None;
        }
        let scales = self.take(scale_name)?;
        match scales.info.dtype {
            Dtype::F32 => Some(scales),
            Dtype::F8E8M0 => self.odd(
                &scales,
                scale_name,
                "E8M0 block scales are not supported; convert the model with F32 scales".into(),
            ),
            _ => {
                let what = format!("its dtype is {}; scales must be F32", scales.info.dtype.name());
                self.odd(&scales, scale_name, what)
            }
        }
    }

    fn check_shape(&mut self, name: &str, located: &Located, rows: usize, cols: usize) -> Option<()> {
        let shape = &located.info.shape;
        if **shape == [rows as u64, cols as u64] {
            return Some(());
        }
        self.odd(located, name, format!("its shape is {shape:?}; config.json asks for [{rows}, {cols}]"))
    }

    /// Records a problem of a tensor that exists; always `None`, for `return`.
    fn odd<T>(&mut self, located: &Located, name: &str, what: String) -> Option<T> {
        let file = self.index.path(located);
        self.problem(file, name, what);
        None
    }

    fn problem(&mut self, file: Option<PathBuf>, name: &str, what: String) {
        self.problems.push(Problem { file, tensor: Some(name.to_owned()), what });
    }
}

fn span(located: &Located) -> Span {
    Span { shard: located.shard, offset: located.info.begin, bytes: located.info.bytes() }
}

fn float_format(dtype: &Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::F16 => Some(Format::F16),
        Dtype::Bf16 => Some(Format::Bf16),
        _ => None,
    }
}
