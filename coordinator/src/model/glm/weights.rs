//! The dense part of a `glm_moe_dsa` checkpoint. Field names are the checkpoint's tensor names.

use shimmer_common::container::ContainerError;
use shimmer_common::container::config::{GlmConfig, IndexerMode};
use shimmer_common::quant::Matrix;

use crate::model::weights::{Ffn, FloatRows, Loader};

/// Everything but the routed experts.
pub(super) struct Weights {
    pub embed_tokens: Matrix,
    pub layers: Vec<Layer>,
    pub norm: Vec<f32>,
    /// `None` when tied to `embed_tokens`.
    pub lm_head: Option<Matrix>,
    pub mtp: Option<Mtp>,
}

/// One decoder layer.
pub(super) struct Layer {
    /// Checkpoint layer index, the routed experts' address.
    pub index: u16,
    pub input_layernorm: Vec<f32>,
    pub self_attn: Attention,
    pub post_attention_layernorm: Vec<f32>,
    pub mlp: Mlp,
}

/// Multi-head latent attention.
pub(super) struct Attention {
    pub q_a_proj: Matrix,
    pub q_a_layernorm: Vec<f32>,
    pub q_b_proj: Matrix,
    pub kv_a_proj_with_mqa: Matrix,
    pub kv_a_layernorm: Vec<f32>,
    /// Per head `W_uk` (`qk_nope_head_dim` rows), then `W_uv` (`v_head_dim` rows), over the latent.
    pub kv_b_proj: FloatRows,
    pub o_proj: Matrix,
    /// Present in full layers, unless the model came without indexer.
    pub indexer: Option<Indexer>,
}

/// The DSA indexer of a full layer.
pub(super) struct Indexer {
    pub wq_b: Matrix,
    pub wk: Matrix,
    pub k_norm_weight: Vec<f32>,
    pub k_norm_bias: Vec<f32>,
    pub weights_proj: Matrix,
}

/// The feed-forward half of a layer.
pub(super) enum Mlp {
    /// One SwiGLU network.
    Dense(Ffn),
    /// Router, shared expert, and routed experts behind the expert seam.
    Sparse { gate: Matrix, e_score_correction_bias: Vec<f32>, shared_experts: Ffn },
}

/// The multi-token-prediction layer.
pub(super) struct Mtp {
    pub enorm: Vec<f32>,
    pub hnorm: Vec<f32>,
    pub eh_proj: Matrix,
    pub layer: Layer,
    pub shared_head_norm: Vec<f32>,
    /// Own tables, which published checkpoints do not carry; else the main model's are used.
    pub embed_tokens: Option<Matrix>,
    pub shared_head: Option<Matrix>,
}

impl Weights {
    /// Reads everything; `with_indexer` and `with_mtp` say what the container holds completely.
    pub fn load(
        config: &GlmConfig,
        loader: &mut Loader<'_>,
        with_indexer: bool,
        with_mtp: bool,
    ) -> Result<Self, ContainerError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight")?;
        let layers = (0..config.num_hidden_layers)
            .map(|l| {
                let full = with_indexer && config.indexer_modes[l] == IndexerMode::Full;
                Layer::load(loader, l, config.sparse_layers[l], full)
            })
            .collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight")?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(loader.matrix("lm_head.weight")?) };
        let mtp =
            if with_mtp { Some(Mtp::load(loader, config.num_hidden_layers, with_indexer)?) } else { None };
        Ok(Self { embed_tokens, layers, norm, lm_head, mtp })
    }

    /// The output head.
    pub fn lm_head(&self) -> &Matrix {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }
}

impl Layer {
    fn load(loader: &mut Loader<'_>, index: usize, sparse: bool, full: bool) -> Result<Self, ContainerError> {
        let p = format!("model.layers.{index}");
        let mlp = if sparse {
            Mlp::Sparse {
                gate: loader.matrix(&format!("{p}.mlp.gate.weight"))?,
                e_score_correction_bias: loader.vector(&format!("{p}.mlp.gate.e_score_correction_bias"))?,
                shared_experts: loader.ffn(&format!("{p}.mlp.shared_experts"))?,
            }
        } else {
            Mlp::Dense(loader.ffn(&format!("{p}.mlp"))?)
        };
        Ok(Self {
            index: u16::try_from(index).expect("an opened container addresses its layers with 16 bits"),
            input_layernorm: loader.vector(&format!("{p}.input_layernorm.weight"))?,
            self_attn: Attention::load(loader, &format!("{p}.self_attn"), full)?,
            post_attention_layernorm: loader.vector(&format!("{p}.post_attention_layernorm.weight"))?,
            mlp,
        })
    }
}

impl Attention {
    fn load(loader: &mut Loader<'_>, p: &str, full: bool) -> Result<Self, ContainerError> {
        let indexer = if full { Some(Indexer::load(loader, &format!("{p}.indexer"))?) } else { None };
        Ok(Self {
            q_a_proj: loader.matrix(&format!("{p}.q_a_proj.weight"))?,
            q_a_layernorm: loader.vector(&format!("{p}.q_a_layernorm.weight"))?,
            q_b_proj: loader.matrix(&format!("{p}.q_b_proj.weight"))?,
            kv_a_proj_with_mqa: loader.matrix(&format!("{p}.kv_a_proj_with_mqa.weight"))?,
            kv_a_layernorm: loader.vector(&format!("{p}.kv_a_layernorm.weight"))?,
            kv_b_proj: FloatRows::new(loader.matrix(&format!("{p}.kv_b_proj.weight"))?),
            o_proj: loader.matrix(&format!("{p}.o_proj.weight"))?,
            indexer,
        })
    }
}

impl Indexer {
    fn load(loader: &mut Loader<'_>, p: &str) -> Result<Self, ContainerError> {
        Ok(Self {
            wq_b: loader.matrix(&format!("{p}.wq_b.weight"))?,
            wk: loader.matrix(&format!("{p}.wk.weight"))?,
            k_norm_weight: loader.vector(&format!("{p}.k_norm.weight"))?,
            k_norm_bias: loader.vector(&format!("{p}.k_norm.bias"))?,
            weights_proj: loader.matrix(&format!("{p}.weights_proj.weight"))?,
        })
    }
}

impl Mtp {
    fn load(loader: &mut Loader<'_>, index: usize, with_indexer: bool) -> Result<Self, ContainerError> {
        let p = format!("model.layers.{index}");
        // Converted containers never carry this layer's indexer; it then attends densely.
        let full = with_indexer && loader.has(&format!("{p}.self_attn.indexer.wq_b.weight"));
        let optional = |loader: &mut Loader<'_>, name: String| {
            loader.has(&name).then(|| loader.matrix(&name)).transpose()
        };
        Ok(Self {
            enorm: loader.vector(&format!("{p}.enorm.weight"))?,
            hnorm: loader.vector(&format!("{p}.hnorm.weight"))?,
            eh_proj: loader.matrix(&format!("{p}.eh_proj.weight"))?,
            layer: Layer::load(loader, index, true, full)?,
            shared_head_norm: loader.vector(&format!("{p}.shared_head.norm.weight"))?,
            embed_tokens: optional(loader, format!("{p}.embed_tokens.weight"))?,
            shared_head: optional(loader, format!("{p}.shared_head.head.weight"))?,
        })
    }
}
