//! `config.json`: parsed, checked, refused by name (docs/model.md §11 and §14).
//!
//! Unknown keys are accepted, a JSON `null` counts as absent, and every dimension is bounded so that no
//! later product of dimensions can overflow. One submodule per model family.

mod fields;
mod glm;
mod olmoe;
mod quantization;

use fields::Fields;
pub(crate) use quantization::check_quantization;
use serde_json::Value;

/// Configuration of any supported family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// `glm_moe_dsa` (GLM-5.2).
    Glm(GlmConfig),
    /// `olmoe`.
    Olmoe(OlmoeConfig),
}

/// Whether a layer runs its own indexer or shares the selection of the nearest full layer below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerMode {
    /// Own indexer.
    Full,
    /// Shares the selection of the full layer below.
    Shared,
}

/// Configuration of `glm_moe_dsa`. Field names follow `config.json`.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct GlmConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub moe_intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub n_shared_experts: usize,
    pub n_group: usize,
    pub topk_group: usize,
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f32,
    /// Per layer `0..num_hidden_layers`: true = mixture of experts.
    pub sparse_layers: Vec<bool>,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub index_topk: usize,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    /// Per layer `0..num_hidden_layers`; the MTP layer is always full.
    pub indexer_modes: Vec<IndexerMode>,
    pub index_share_for_mtp_iteration: bool,
    /// 0 or 1.
    pub num_nextn_predict_layers: usize,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub eos_token_ids: Vec<u32>,
}

/// Configuration of `olmoe`.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct OlmoeConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Inner size of one expert.
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub num_experts: usize,
    pub num_experts_per_tok: usize,
    pub norm_topk_prob: bool,
    pub clip_qkv: Option<f32>,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Parses and checks `config.json` text.
    ///
    /// `quantization_config` is not looked at here: a colibrì container keeps the one of the checkpoint it
    /// was made from.
    ///
    /// # Errors
    /// One sentence naming the key, its value and what is supported.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let root: Value = serde_json::from_slice(json).map_err(|e| format!("not valid JSON: {e}"))?;
        let Value::Object(map) = &root else {
            return Err("not a JSON object; copy the config.json of the checkpoint".into());
        };
        let fields = Fields::new(map);
        match fields.required_str("model_type")? {
            "glm_moe_dsa" => glm::parse(&fields).map(Self::Glm),
            "olmoe" => olmoe::parse(&fields).map(Self::Olmoe),
            other => Err(format!("model_type is {other:?}; supported are \"glm_moe_dsa\" and \"olmoe\"")),
        }
    }

    /// The family's `model_type`.
    pub fn model_type(&self) -> &'static str {
        match self {
            Self::Glm(_) => "glm_moe_dsa",
            Self::Olmoe(_) => "olmoe",
        }
    }

    /// Vocabulary size.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Glm(c) => c.vocab_size,
            Self::Olmoe(c) => c.vocab_size,
        }
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Glm(c) => c.hidden_size,
            Self::Olmoe(c) => c.hidden_size,
        }
    }

    /// Layers of the main model (the MTP layer not included).
    pub fn num_hidden_layers(&self) -> usize {
        match self {
            Self::Glm(c) => c.num_hidden_layers,
            Self::Olmoe(c) => c.num_hidden_layers,
        }
    }

    /// Routed experts a token uses in a layer.
    pub fn experts_per_token(&self) -> usize {
        match self {
            Self::Glm(c) => c.num_experts_per_tok,
            Self::Olmoe(c) => c.num_experts_per_tok,
        }
    }

    /// Longest context in tokens.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            Self::Glm(c) => c.max_position_embeddings,
            Self::Olmoe(c) => c.max_position_embeddings,
        }
    }

    /// Stop ids of `config.json` (the union with `generation_config.json` is taken by the text layer).
    pub fn eos_token_ids(&self) -> &[u32] {
        match self {
            Self::Glm(c) => &c.eos_token_ids,
            Self::Olmoe(c) => &c.eos_token_ids,
        }
    }
}
