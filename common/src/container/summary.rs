//! What was found in a model directory, in one line and some warnings (docs/formats.md §8.3 and §6.3).

use std::collections::BTreeMap;

use super::config::ModelConfig;
use super::index::Index;
use super::resolve::{Dense, Place, Resolved};
use super::tensors::Part;
use crate::experts::MatrixSpec;
use crate::quant::Format;

/// What was found in a model directory, for people.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// One line: formats of experts, embeddings, MTP, indexer.
    pub line: String,
    /// Things worth a warning (int4 MTP head, indexer missing, conversion lock file, unknown tensors).
    pub warnings: Vec<String>,
}

/// Stored bytes of the tensors the model uses, scales included, headers and unused tensors excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteSums {
    /// Embedding table and output head.
    pub embeddings_head: u64,
    /// Attention projections of the main layers.
    pub attention: u64,
    /// Norm vectors of the main layers and the final norm.
    pub norms: u64,
    /// MLPs of the dense layers.
    pub dense_mlp: u64,
    /// Shared experts of the main layers.
    pub shared_experts: u64,
    /// Routers and correction biases of the main layers.
    pub router: u64,
    /// Indexers of the main layers.
    pub indexer: u64,
    /// Everything of the MTP layer but its routed experts.
    pub mtp_dense: u64,
    /// Routed experts of the main layers.
    pub routed_main: u64,
    /// Routed experts of the MTP layer.
    pub routed_mtp: u64,
}

impl ByteSums {
    /// What the coordinator holds in RAM without the MTP layer.
    pub fn resident_main(&self) -> u64 {
        self.embeddings_head
            + self.attention
            + self.norms
            + self.dense_mlp
            + self.shared_experts
            + self.router
            + self.indexer
    }

    /// What the coordinator holds in RAM, the MTP layer included.
    pub fn resident(&self) -> u64 {
        self.resident_main() + self.mtp_dense
    }

    /// All routed experts.
    pub fn routed(&self) -> u64 {
        self.routed_main + self.routed_mtp
    }

    /// Everything.
    pub fn total(&self) -> u64 {
        self.resident() + self.routed()
    }
}

/// Stored bytes one token reads, scales included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenBytes {
    /// Dense part: all of it but the embedding table (of which a token reads one row), the MTP layer and the
    /// parts of the indexer that are idle while the context is below `index_topk`.
    pub dense: u64,
    /// Routed experts chosen in all main layers.
    pub routed: u64,
}

impl TokenBytes {
    /// Both together.
    pub fn total(&self) -> u64 {
        self.dense + self.routed
    }
}

/// What one token reads.
pub(super) fn token_bytes(config: &ModelConfig, resolved: &Resolved) -> TokenBytes {
    let (tied, per_token) = match config {
        ModelConfig::Glm(c) => (c.tie_word_embeddings, c.num_experts_per_tok),
        ModelConfig::Olmoe(c) => (c.tie_word_embeddings, c.num_experts_per_tok),
    };
    let idle = |name: &str, dense: &Dense| match dense.part {
        _ if dense.mtp => true,
        Part::EmbeddingsHead => name == "model.embed_tokens.weight" && !tied,
        Part::Indexer => !name.contains(".indexer.k_norm.") && !name.ends_with(".indexer.wk.weight"),
        _ => false,
    };
    let read = resolved.dense.iter().filter(|(name, dense)| !idle(name, dense));
    let mut sum = TokenBytes { dense: read.map(|(_, dense)| dense.bytes()).sum(), routed: 0 };
    for experts in resolved.experts.iter().filter(|(layer, _)| resolved.mtp_layer != Some(**layer)) {
        let bytes: u64 = experts.1.iter().flatten().map(|m| m.spec.bytes() as u64).sum();
        // The mean over the layer's experts, in case their formats differ.
        sum.routed += bytes * per_token as u64 / experts.1.len().max(1) as u64;
    }
    sum
}

/// Adds up the stored bytes by part.
pub(super) fn byte_sums(resolved: &Resolved) -> ByteSums {
    let mut sums = ByteSums::default();
    for dense in resolved.dense.values() {
        let sum = match dense.part {
            _ if dense.mtp => &mut sums.mtp_dense,
            Part::EmbeddingsHead => &mut sums.embeddings_head,
            Part::Attention => &mut sums.attention,
            Part::Norms => &mut sums.norms,
            Part::DenseMlp => &mut sums.dense_mlp,
            Part::SharedExperts => &mut sums.shared_experts,
            Part::Router => &mut sums.router,
            Part::Indexer => &mut sums.indexer,
            Part::MtpProjection => &mut sums.mtp_dense,
        };
        *sum += dense.bytes();
    }
    for (&layer, experts) in &resolved.experts {
        let bytes: u64 = experts.iter().flatten().map(|m| m.spec.bytes() as u64).sum();
        let is_mtp = resolved.mtp_layer == Some(layer);
        *(if is_mtp { &mut sums.routed_mtp } else { &mut sums.routed_main }) += bytes;
    }
    sums
}

/// A row up to this wide is one group of the usual size: grouped or not is the same bytes.
const ONE_GROUP_COLS: usize = 64;

/// Bytes by format of some matrices.
#[derive(Default)]
struct Formats {
    bytes: BTreeMap<String, u64>,
    /// Whether there are int4 matrices that are per-row and grouped at once.
    one_group: bool,
}

impl Formats {
    fn of_dense<'a>(dense: impl Iterator<Item = &'a Dense>) -> Self {
        let mut formats = Self::default();
        for d in dense {
            if let Place::Matrix(m) = &d.place {
                formats.add(&m.spec);
            }
        }
        formats
    }

    fn add(&mut self, spec: &MatrixSpec) {
        if spec.format == Format::Int4Row && spec.cols <= ONE_GROUP_COLS {
            self.one_group = true;
        } else {
            *self.bytes.entry(label(spec.format)).or_default() += spec.bytes() as u64;
        }
    }

    /// The format, or "mixed A/B" with the larger share first.
    fn text(&self) -> String {
        let mut shares: Vec<_> = self.bytes.iter().collect();
        shares.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let names: Vec<&str> = shares.iter().map(|(name, _)| name.as_str()).collect();
        match names[..] {
            [] if self.one_group => "int4".into(),
            [] => "no".into(),
            [one] => one.into(),
            _ => format!("mixed {}", names.join("/")),
        }
    }

    fn any(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.bytes.keys().any(|name| wanted(name))
    }
}

fn label(format: Format) -> String {
    match format {
        Format::Int4Row => "int4 per-row".into(),
        Format::Int4Grouped { group } => format!("int4 gs{group}"),
        Format::Int8Row => "int8".into(),
        Format::Int3G64 => "int3 gs64".into(),
        Format::Int2Row => "int2 per-row".into(),
        Format::Fp8Block => "fp8".into(),
        Format::F32 => "f32".into(),
        Format::F16 => "f16".into(),
        Format::Bf16 => "bf16".into(),
    }
}

/// Describes a resolved model.
pub(super) fn summarise(config: &ModelConfig, resolved: &Resolved, index: &Index) -> Summary {
    let dense = |mtp: bool, parts: &'static [Part]| {
        Formats::of_dense(resolved.dense.values().filter(move |d| d.mtp == mtp && parts.contains(&d.part)))
    };
    let mut experts = Formats::default();
    let mut mtp = dense(true, &[Part::Attention, Part::SharedExperts, Part::MtpProjection]);
    for (layer, places) in &resolved.experts {
        let formats = if resolved.mtp_layer == Some(*layer) { &mut mtp } else { &mut experts };
        for matrix in places.iter().flatten() {
            formats.add(&matrix.spec);
        }
    }
    let attention = dense(false, &[Part::Attention]);
    let embeddings = dense(false, &[Part::EmbeddingsHead]);
    let mut line = format!(
        "{} experts, {} attention, {} embeddings",
        experts.text(),
        attention.text(),
        embeddings.text()
    );
    let mut warnings = index.warnings.clone();

    if experts.any(|f| f == "int4 per-row") || attention.any(|f| f == "int4 per-row") {
        warnings.push(
            "the body is int4 with one scale per row, which loses two to three times the quality of int4 gs64; convert again for better answers"
                .into(),
        );
    }
    if let ModelConfig::Glm(c) = config {
        line.push_str(&mtp_text(resolved, &mtp, c.num_nextn_predict_layers, &mut warnings));
        line.push_str(&indexer_text(resolved, c.index_topk, &mut warnings));
    }
    warnings.extend(bias_warning(resolved));
    warnings.extend(unused_warning(index));
    Summary { line, warnings }
}

fn mtp_text(resolved: &Resolved, formats: &Formats, promised: usize, warnings: &mut Vec<String>) -> String {
    if promised == 0 {
        return ", no MTP".into();
    }
    if let Some(name) = &resolved.mtp_lacks {
        warnings.push(format!("MTP is off (no drafts): {name} is missing"));
        return ", MTP off".into();
    }
    if formats.any(|f| f.starts_with("int4")) {
        warnings.push(
            "the MTP layer is int4: its drafts are hardly ever accepted, so it gives no speed-up; use an int8 MTP set"
                .into(),
        );
    }
    format!(", MTP {} (usable)", formats.text())
}

fn indexer_text(resolved: &Resolved, index_topk: usize, warnings: &mut Vec<String>) -> String {
    let Some((name, present)) = &resolved.indexer_lacks else { return ", indexer".into() };
    let text = format!("no indexer: attention is dense beyond {index_topk} tokens");
    if *present > 0 {
        warnings.push(format!(
            "{text}, because {name} is missing although {present} other indexer tensors are there"
        ));
    }
    format!(", {text}")
}

/// The router's correction bias needs f32 (docs/model.md §6).
fn bias_warning(resolved: &Resolved) -> Option<String> {
    let rounded =
        |d: &Dense| matches!(&d.place, Place::Vector(v) if d.part == Part::Router && v.format != Format::F32);
    let (name, _) = resolved.dense.iter().find(|(_, d)| rounded(d))?;
    Some(format!(
        "{name} is not stored as F32: 16-bit correction biases are too coarse and change the routing"
    ))
}

fn unused_warning(index: &Index) -> Option<String> {
    let mut unused = index.tensors.iter().filter(|(_, t)| !t.used).map(|(name, _)| &**name);
    let first = unused.next()?;
    let (count, first) = unused.fold((1usize, first), |(n, first), name| (n + 1, first.min(name)));
    Some(format!("{count} tensors of the files are not part of this model and are ignored ({first} first)"))
}
