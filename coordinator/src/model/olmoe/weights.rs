//! The dense part of an `olmoe` checkpoint. Field names are the checkpoint's tensor names.

use shimmer_common::container::ContainerError;
use shimmer_common::container::config::OlmoeConfig;
use shimmer_common::quant::Matrix;

use crate::model::weights::Loader;

/// Everything but the experts.
pub(super) struct Weights {
    pub embed_tokens: Matrix,
    pub layers: Vec<Layer>,
    pub norm: Vec<f32>,
    /// `None` when tied to `embed_tokens`.
    pub lm_head: Option<Matrix>,
}

/// One decoder layer.
pub(super) struct Layer {
    /// Layer index, the experts' address.
    pub index: u16,
    pub input_layernorm: Vec<f32>,
    pub q_proj: Matrix,
    pub k_proj: Matrix,
    pub v_proj: Matrix,
    pub o_proj: Matrix,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub post_attention_layernorm: Vec<f32>,
    /// The router.
    pub gate: Matrix,
}

impl Weights {
    /// Reads everything.
    pub fn load(config: &OlmoeConfig, loader: &mut Loader<'_>) -> Result<Self, ContainerError> {
        Ok(Self {
            embed_tokens: loader.matrix("model.embed_tokens.weight")?,
            layers: (0..config.num_hidden_layers)
                .map(|l| Layer::load(loader, l))
                .collect::<Result<_, _>>()?,
            norm: loader.vector("model.norm.weight")?,
            lm_head: if config.tie_word_embeddings { None } else { Some(loader.matrix("lm_head.weight")?) },
        })
    }

    /// The output head.
    pub fn lm_head(&self) -> &Matrix {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }
}

impl Layer {
    fn load(loader: &mut Loader<'_>, index: usize) -> Result<Self, ContainerError> {
        let p = format!("model.layers.{index}");
        Ok(Self {
            index: u16::try_from(index).expect("an opened container addresses its layers with 16 bits"),
            input_layernorm: loader.vector(&format!("{p}.input_layernorm.weight"))?,
            q_proj: loader.matrix(&format!("{p}.self_attn.q_proj.weight"))?,
            k_proj: loader.matrix(&format!("{p}.self_attn.k_proj.weight"))?,
            v_proj: loader.matrix(&format!("{p}.self_attn.v_proj.weight"))?,
            o_proj: loader.matrix(&format!("{p}.self_attn.o_proj.weight"))?,
            q_norm: loader.vector(&format!("{p}.self_attn.q_norm.weight"))?,
            k_norm: loader.vector(&format!("{p}.self_attn.k_norm.weight"))?,
            post_attention_layernorm: loader.vector(&format!("{p}.post_attention_layernorm.weight"))?,
            gate: loader.matrix(&format!("{p}.mlp.gate.weight"))?,
        })
    }
}
