//! Which tensors a configuration requires, with their shapes (docs/formats.md §3, docs/model.md §10, §14).

use super::config::{GlmConfig, IndexerMode, ModelConfig, OlmoeConfig};
use crate::experts::ExpertMatrix;

/// The part of the model a tensor belongs to, for byte sums and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Embedding table and output head.
    EmbeddingsHead,
    /// Attention projections.
    Attention,
    /// All norm vectors.
    Norms,
    /// The MLP of dense layers.
    DenseMlp,
    /// Shared experts.
    SharedExperts,
    /// Router matrix and correction bias.
    Router,
    /// DSA indexer.
    Indexer,
    /// `eh_proj` of the MTP layer.
    MtpProjection,
}

/// Logical shape of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorShape {
    /// `[rows, cols]`.
    Matrix {
        /// Output rows.
        rows: usize,
        /// Input columns.
        cols: usize,
    },
    /// `[len]`.
    Vector {
        /// Elements.
        len: usize,
    },
}

/// What happens when a tensor is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Need {
    /// The model cannot be used.
    Always,
    /// Attention becomes dense everywhere.
    Indexer,
    /// The MTP layer is off.
    Mtp,
    /// The MTP layer attends densely.
    MtpIndexer,
    /// The MTP layer uses the main model's.
    MtpOwn,
}

/// One dense tensor the configuration asks for.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    pub name: String,
    pub shape: TensorShape,
    pub part: Part,
    pub need: Need,
}

/// One layer of routed experts the configuration asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayer {
    pub layer: u16,
    pub experts: usize,
    pub inner: usize,
    pub hidden: usize,
    pub need: Need,
}

impl ExpertLayer {
    /// Rows and columns of one matrix.
    pub fn shape(&self, matrix: ExpertMatrix) -> (usize, usize) {
        match matrix {
            ExpertMatrix::Down => (self.hidden, self.inner),
            ExpertMatrix::Gate | ExpertMatrix::Up => (self.inner, self.hidden),
        }
    }
}

/// Name of one routed expert's matrix.
pub(crate) fn expert_name(layer: u16, expert: usize, matrix: ExpertMatrix) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{}.weight", matrix.name())
}

/// Reverses [`expert_name`].
pub(crate) fn parse_expert_name(name: &str) -> Option<(u16, usize, ExpertMatrix)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
    let (expert, rest) = rest.split_once('.')?;
    let projection = rest.strip_suffix(".weight")?;
    let matrix = ExpertMatrix::ALL.into_iter().find(|m| m.name() == projection)?;
    let (layer, expert) = (layer.parse().ok()?, expert.parse().ok()?);
    // Spellings such as `+1` or `01` parse as numbers but are not names of tensors.
    (expert_name(layer, expert, matrix) == name).then_some((layer, expert, matrix))
}

/// Every dense tensor and every layer of routed experts `config` asks for.
pub(crate) fn required(config: &ModelConfig) -> (Vec<Want>, Vec<ExpertLayer>) {
    match config {
        ModelConfig::Glm(c) => glm(c),
        ModelConfig::Olmoe(c) => olmoe(c),
    }
}

/// Collects the tensors of one layer (or of the model's top level).
struct Wants {
    list: Vec<Want>,
    prefix: String,
    need: Need,
}

impl Wants {
    fn matrix(&mut self, part: Part, name: &str, rows: usize, cols: usize) {
        self.push(part, name, TensorShape::Matrix { rows, cols });
    }

    fn vector(&mut self, part: Part, name: &str, len: usize) {
        self.push(part, name, TensorShape::Vector { len });
    }

    fn push(&mut self, part: Part, name: &str, shape: TensorShape) {
        let name = format!("{}{name}", self.prefix);
        self.list.push(Want { name, shape, part, need: self.need });
    }

    fn global(&mut self, vocab_size: usize, hidden_size: usize, tied: bool) {
        self.matrix(Part::EmbeddingsHead, "model.embed_tokens.weight", vocab_size, hidden_size);
        if !tied {
            self.matrix(Part::EmbeddingsHead, "lm_head.weight", vocab_size, hidden_size);
        }
        self.vector(Part::Norms, "model.norm.weight", hidden_size);
    }

    fn swiglu(&mut self, part: Part, module: &str, inner: usize, hidden: usize) {
        self.matrix(part, &format!("{module}.gate_proj.weight"), inner, hidden);
        self.matrix(part, &format!("{module}.up_proj.weight"), inner, hidden);
        self.matrix(part, &format!("{module}.down_proj.weight"), hidden, inner);
    }
}

fn glm(c: &GlmConfig) -> (Vec<Want>, Vec<ExpertLayer>) {
    let mut wants = Wants { list: Vec::new(), prefix: String::new(), need: Need::Always };
    let mut layers = Vec::new();
    let experts = |layer: usize, need| ExpertLayer {
        layer: layer as u16,
        experts: c.n_routed_experts,
        inner: c.moe_intermediate_size,
        hidden: c.hidden_size,
        need,
    };
    wants.global(c.vocab_size, c.hidden_size, c.tie_word_embeddings);
    for (i, (&sparse, &indexer)) in c.sparse_layers.iter().zip(&c.indexer_modes).enumerate() {
        wants.prefix = format!("model.layers.{i}.");
        wants.need = Need::Always;
        glm_attention(&mut wants, c);
        if sparse {
            glm_moe(&mut wants, c);
            layers.push(experts(i, Need::Always));
        } else {
            wants.swiglu(Part::DenseMlp, "mlp", c.intermediate_size, c.hidden_size);
        }
        if indexer == IndexerMode::Full {
            wants.need = Need::Indexer;
            glm_indexer(&mut wants, c);
        }
    }
    if c.num_nextn_predict_layers == 1 {
        wants.prefix = format!("model.layers.{}.", c.num_hidden_layers);
        glm_mtp(&mut wants, c);
        layers.push(experts(c.num_hidden_layers, Need::Mtp));
    }
    (wants.list, layers)
}

fn glm_attention(w: &mut Wants, c: &GlmConfig) {
    let (hidden, heads) = (c.hidden_size, c.num_attention_heads);
    let (nope, rope, v) = (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim);
    w.vector(Part::Norms, "input_layernorm.weight", hidden);
    w.vector(Part::Norms, "post_attention_layernorm.weight", hidden);
    w.matrix(Part::Attention, "self_attn.q_a_proj.weight", c.q_lora_rank, hidden);
    w.vector(Part::Norms, "self_attn.q_a_layernorm.weight", c.q_lora_rank);
    w.matrix(Part::Attention, "self_attn.q_b_proj.weight", heads * (nope + rope), c.q_lora_rank);
    w.matrix(Part::Attention, "self_attn.kv_a_proj_with_mqa.weight", c.kv_lora_rank + rope, hidden);
    w.vector(Part::Norms, "self_attn.kv_a_layernorm.weight", c.kv_lora_rank);
    w.matrix(Part::Attention, "self_attn.kv_b_proj.weight", heads * (nope + v), c.kv_lora_rank);
    w.matrix(Part::Attention, "self_attn.o_proj.weight", hidden, heads * v);
}

fn glm_moe(w: &mut Wants, c: &GlmConfig) {
    w.matrix(Part::Router, "mlp.gate.weight", c.n_routed_experts, c.hidden_size);
    w.vector(Part::Router, "mlp.gate.e_score_correction_bias", c.n_routed_experts);
    let inner = c.n_shared_experts * c.moe_intermediate_size;
    w.swiglu(Part::SharedExperts, "mlp.shared_experts", inner, c.hidden_size);
}

fn glm_indexer(w: &mut Wants, c: &GlmConfig) {
    let (heads, dim) = (c.index_n_heads, c.index_head_dim);
    w.matrix(Part::Indexer, "self_attn.indexer.wq_b.weight", heads * dim, c.q_lora_rank);
    w.matrix(Part::Indexer, "self_attn.indexer.wk.weight", dim, c.hidden_size);
    w.vector(Part::Indexer, "self_attn.indexer.k_norm.weight", dim);
    w.vector(Part::Indexer, "self_attn.indexer.k_norm.bias", dim);
    w.matrix(Part::Indexer, "self_attn.indexer.weights_proj.weight", heads, c.hidden_size);
}

fn glm_mtp(w: &mut Wants, c: &GlmConfig) {
    let hidden = c.hidden_size;
    w.need = Need::Mtp;
    glm_attention(w, c);
    glm_moe(w, c);
    w.matrix(Part::MtpProjection, "eh_proj.weight", hidden, 2 * hidden);
    w.vector(Part::Norms, "enorm.weight", hidden);
    w.vector(Part::Norms, "hnorm.weight", hidden);
    w.vector(Part::Norms, "shared_head.norm.weight", hidden);
    w.need = Need::MtpIndexer;
    glm_indexer(w, c);
    w.need = Need::MtpOwn;
    w.matrix(Part::EmbeddingsHead, "embed_tokens.weight", c.vocab_size, hidden);
    w.matrix(Part::EmbeddingsHead, "shared_head.head.weight", c.vocab_size, hidden);
}

fn olmoe(c: &OlmoeConfig) -> (Vec<Want>, Vec<ExpertLayer>) {
    let mut w = Wants { list: Vec::new(), prefix: String::new(), need: Need::Always };
    let mut layers = Vec::new();
    let hidden = c.hidden_size;
    let kv_width = hidden / c.num_attention_heads * c.num_key_value_heads;
    w.global(c.vocab_size, hidden, c.tie_word_embeddings);
    for i in 0..c.num_hidden_layers {
        w.prefix = format!("model.layers.{i}.");
        w.vector(Part::Norms, "input_layernorm.weight", hidden);
        w.vector(Part::Norms, "post_attention_layernorm.weight", hidden);
        w.matrix(Part::Attention, "self_attn.q_proj.weight", hidden, hidden);
        w.matrix(Part::Attention, "self_attn.k_proj.weight", kv_width, hidden);
        w.matrix(Part::Attention, "self_attn.v_proj.weight", kv_width, hidden);
        w.matrix(Part::Attention, "self_attn.o_proj.weight", hidden, hidden);
        w.vector(Part::Norms, "self_attn.q_norm.weight", hidden);
        w.vector(Part::Norms, "self_attn.k_norm.weight", kv_width);
        w.matrix(Part::Router, "mlp.gate.weight", c.num_experts, hidden);
        layers.push(ExpertLayer {
            layer: i as u16,
            experts: c.num_experts,
            inner: c.intermediate_size,
            hidden,
            need: Need::Always,
        });
    }
    (w.list, layers)
}
