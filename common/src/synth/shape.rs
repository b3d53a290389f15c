//! The shape of a random model and its `config.json`.

use serde_json::{Value, json};

/// Dimensions of a `glm_moe_dsa` model. Field names follow `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SynthShape {
    pub num_hidden_layers: usize,
    /// The first layers, which have a dense MLP.
    pub first_k_dense_replace: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub n_shared_experts: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub moe_intermediate_size: usize,
    pub vocab_size: usize,
    pub num_attention_heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub max_position_embeddings: usize,
}

impl SynthShape {
    /// The matrix shapes of GLM-5.2 in six layers (one dense, five with 64 experts) and with a small
    /// vocabulary: what a token touches per layer is real, what lies on disk fits a test machine.
    pub fn glm_slice() -> Self {
        Self {
            num_hidden_layers: 6,
            first_k_dense_replace: 1,
            n_routed_experts: 64,
            vocab_size: 2048,
            ..Self::glm()
        }
    }

    /// GLM-5.2 as published: 78 layers, 256 experts (hundreds of gigabytes).
    pub fn glm() -> Self {
        Self {
            num_hidden_layers: 78,
            first_k_dense_replace: 3,
            n_routed_experts: 256,
            num_experts_per_tok: 8,
            n_shared_experts: 1,
            hidden_size: 6144,
            intermediate_size: 12288,
            moe_intermediate_size: 2048,
            vocab_size: 154_880,
            num_attention_heads: 64,
            q_lora_rank: 2048,
            kv_lora_rank: 512,
            qk_nope_head_dim: 192,
            qk_rope_head_dim: 64,
            v_head_dim: 256,
            index_n_heads: 32,
            index_head_dim: 128,
            index_topk: 2048,
            max_position_embeddings: 1 << 20,
        }
    }

    /// A model of under a million parameters.
    pub fn tiny() -> Self {
        Self {
            num_hidden_layers: 3,
            first_k_dense_replace: 1,
            n_routed_experts: 16,
            num_experts_per_tok: 4,
            n_shared_experts: 1,
            hidden_size: 128,
            intermediate_size: 192,
            moe_intermediate_size: 64,
            vocab_size: 512,
            num_attention_heads: 4,
            q_lora_rank: 64,
            kv_lora_rank: 64,
            qk_nope_head_dim: 24,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
            index_n_heads: 4,
            index_head_dim: 32,
            index_topk: 64,
            max_position_embeddings: 4096,
        }
    }

    /// `config.json`; the schedule of indexers is GLM-5.2's (every fourth layer after the first three).
    /// No stop ids: random weights answer until they are told to stop.
    pub(super) fn config(&self, mtp: bool) -> Value {
        json!({
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": self.num_hidden_layers,
            "first_k_dense_replace": self.first_k_dense_replace,
            "moe_layer_freq": 1,
            "n_routed_experts": self.n_routed_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_shared_experts": self.n_shared_experts,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": true,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_router_dtype": "float32",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": false,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "attention_bias": false,
            "rope_interleave": true,
            "rope_parameters": { "rope_theta": 8_000_000, "rope_type": "default" },
            "rms_norm_eps": 1e-5,
            "index_n_heads": self.index_n_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "indexer_rope_interleave": true,
            "index_share_for_mtp_iteration": true,
            "num_nextn_predict_layers": u8::from(mtp),
            "max_position_embeddings": self.max_position_embeddings,
        })
    }
}
