//! `glm_moe_dsa` (GLM-5.2): latent attention, sparse selection, mixture of experts, MTP.
//!
//! The formulas and their sources are in docs/model.md; a name here is the name there.

mod attention;
mod indexer;
mod lookahead;
mod mtp;
mod router;
mod weights;

use std::sync::Arc;

use shimmer_common::container::config::GlmConfig;
use shimmer_common::container::{Container, ContainerError};
use shimmer_common::experts::{ExpertCompute, ExpertError, ExpertTimes};
use shimmer_common::kernels::Kernels;
use shimmer_common::math::Rope;
use shimmer_common::quant::Matrix;

use self::weights::{Indexer, Layer, Mlp, Weights};
use super::lookahead::{Guesses, LookaheadCounters, LookaheadStats};
use super::routed::routed_sum;
use super::rows::{Rows, activations, inverse_sqrt, project};
use super::sequence::{LayerCache, MtpState, Sequence};
use super::step::Step;
use super::trace::{Recorder, Scope, Trace};
use super::weights::{Loader, embed};
use super::{LanguageModel, ModelError, ModelInfo, check_step};

/// A loaded model; its routed experts are behind the expert seam.
pub(super) struct Glm {
    info: ModelInfo,
    /// Checked `config.json`.
    pub(super) config: GlmConfig,
    kernels: Kernels,
    experts: Arc<dyn ExpertCompute>,
    weights: Weights,
    rope: Rope,
    lookahead: LookaheadCounters,
    /// Of the attention scores: `(qk_nope_head_dim + qk_rope_head_dim)^-½`.
    scale: f32,
}

impl Glm {
    /// Reads the dense part.
    pub(super) fn load(
        config: &GlmConfig,
        container: &Container,
        loader: &mut Loader<'_>,
        kernels: Kernels,
        experts: Arc<dyn ExpertCompute>,
    ) -> Result<Self, ContainerError> {
        let weights = Weights::load(config, loader, container.has_indexer(), container.has_mtp())?;
        let mut glm = Self {
            info: ModelInfo {
                family: "glm_moe_dsa",
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                num_layers: config.num_hidden_layers,
                max_positions: config.max_position_embeddings,
                has_mtp: weights.mtp.is_some(),
                cache_bytes_per_token: 0,
            },
            config: config.clone(),
            kernels,
            experts,
            lookahead: LookaheadCounters::default(),
            rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
            scale: inverse_sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim),
            weights,
        };
        let layers = glm.weights.layers.iter().chain(glm.weights.mtp.iter().map(|mtp| &mtp.layer));
        let values =
            layers.map(|l| glm.cache_of(l)).map(|c| c.kv.width + c.indexer_keys.width).sum::<usize>();
        glm.info.cache_bytes_per_token = values * size_of::<f32>();
        Ok(glm)
    }

    /// An empty cache for `layer`.
    fn cache_of(&self, layer: &Layer) -> LayerCache {
        let indexer_width = layer.self_attn.indexer.as_ref().map_or(0, |_| self.config.index_head_dim);
        LayerCache::new(self.config.kv_lora_rank + self.config.qk_rope_head_dim, indexer_width)
    }

    /// All main layers and the final norm over the embedded `tokens`.
    fn run_layers(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        recorder: &mut Recorder<'_>,
    ) -> Result<Rows, ExpertError> {
        let mut step = Step::new(&self.rope, seq.len(), tokens.len());
        let mut x = embed(&self.weights.embed_tokens, tokens);
        recorder.rows("embed", &x);
        for (l, (layer, cache)) in self.weights.layers.iter().zip(&mut seq.layers).enumerate() {
            recorder.enter(Scope::Layer(l));
            let indexer = layer.self_attn.indexer.as_ref();
            self.decoder_layer(layer, indexer, &mut x, &mut step, cache, recorder)?;
        }
        recorder.enter(Scope::Model);
        let h = x.rms_norm(self.kernels, &self.weights.norm, self.config.rms_norm_eps);
        recorder.rows("final_norm", &h);
        Ok(h)
    }

    /// One decoder layer over the residual stream `x`. With `indexer` the layer selects its own
    /// positions, without it uses the step's selection as it is.
    fn decoder_layer(
        &self,
        layer: &Layer,
        indexer: Option<&Indexer>,
        x: &mut Rows,
        step: &mut Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) -> Result<(), ExpertError> {
        let eps = self.config.rms_norm_eps;
        let normed = x.rms_norm(self.kernels, &layer.input_layernorm, eps);
        let attn_out = self.attention(&layer.self_attn, indexer, normed, step, cache, recorder);
        recorder.rows("attn_out", &attn_out);
        x.add(&attn_out);

        let normed = x.rms_norm(self.kernels, &layer.post_attention_layernorm, eps);
        let mlp_out = self.mlp(layer, x, normed, &mut step.guesses, recorder)?;
        recorder.rows("mlp_out", &mlp_out);
        x.add(&mlp_out);
        recorder.rows("hidden", x);
        Ok(())
    }

    /// The dense network, or the mixture of experts with the shared expert computed while the routed
    /// ones are under way. `x` is the residual stream, `normed` the layer's input.
    fn mlp(
        &self,
        layer: &Layer,
        x: &Rows,
        normed: Rows,
        guesses: &mut Guesses,
        recorder: &mut Recorder<'_>,
    ) -> Result<Rows, ExpertError> {
        match &layer.mlp {
            Mlp::Dense(ffn) => {
                self.look_ahead(layer, x, self.experts.lookahead().depth, guesses);
                Ok(ffn.run(self.kernels, &activations(normed, &[&ffn.gate, &ffn.up])))
            }
            Mlp::Sparse { gate, e_score_correction_bias, shared_experts } => {
                let input = activations(normed, &[gate, &shared_experts.gate, &shared_experts.up]);
                let logits = project(self.kernels, gate, &input);
                let routes = router::route(self.kernels, &self.config, &logits, e_score_correction_bias);
                guesses.judge(layer.index, &routes, &self.lookahead);
                let k = self.config.num_experts_per_tok;
                recorder.rows("router_logits", &logits);
                routes.record(k, recorder);
                let ahead = self.experts.lookahead();
                // Adding the shared expert to `x` first was measured not to improve the guesses.
                if ahead.before_sending {
                    self.look_ahead(layer, x, ahead.depth, guesses);
                }
                let mut shared = Rows::default();
                let mut meanwhile = || {
                    if !ahead.before_sending {
                        self.look_ahead(layer, x, ahead.depth, guesses);
                    }
                    shared = shared_experts.run(self.kernels, &input);
                };
                let mut y = routed_sum(&*self.experts, layer.index, &input, &routes, k, &mut meanwhile)?;
                y.add(&shared);
                Ok(y)
            }
        }
    }

    /// `hidden @ head` for every row.
    fn head(&self, head: &Matrix, hidden: &Rows) -> Rows {
        project(self.kernels, head, &activations(hidden.clone(), &[head]))
    }
}

impl LanguageModel for Glm {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_sequence(&self, with_mtp: bool) -> Sequence {
        let layers = self.weights.layers.iter().map(|layer| self.cache_of(layer)).collect();
        let mtp = self.weights.mtp.as_ref().filter(|_| with_mtp);
        let mtp = mtp.map(|mtp| MtpState::new(self.cache_of(&mtp.layer), self.config.hidden_size));
        Sequence::new(layers, mtp)
    }

    fn forward(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        trace: Option<&mut Trace>,
    ) -> Result<Rows, ModelError> {
        let Some(&first) = tokens.first() else { return Ok(Rows::empty(self.info.hidden_size)) };
        check_step(&self.info, seq, tokens)?;
        let start = seq.len();
        match self.run_layers(seq, tokens, &mut Recorder::new(trace, Scope::Model)) {
            Ok(hidden) => {
                if let Some(mtp) = &mut seq.mtp {
                    mtp.expect_next(first);
                    mtp.pending.data.extend_from_slice(&hidden.data);
                    mtp.newest = None;
                }
                seq.push_tokens(tokens);
                Ok(hidden)
            }
            Err(error) => {
                seq.layers.iter_mut().for_each(|cache| cache.truncate(start));
                Err(error.into())
            }
        }
    }

    fn logits(&self, hidden: &Rows) -> Rows {
        self.head(self.weights.lm_head(), hidden)
    }

    fn extend_mtp(
        &self,
        seq: &mut Sequence,
        next: Option<u32>,
        trace: Option<&mut Trace>,
    ) -> Result<(), ModelError> {
        self.mtp_extend(seq, next, &mut Recorder::new(trace, Scope::Mtp))
    }

    fn draft(&self, seq: &mut Sequence, next: u32, k: usize) -> Result<Vec<u32>, ModelError> {
        self.mtp_draft(seq, next, k, &mut Recorder::new(None, Scope::Mtp))
    }

    fn skip_mtp(&self, seq: &mut Sequence) {
        if let Some(mtp) = &mut seq.mtp {
            mtp.skip();
        }
    }

    fn truncate(&self, seq: &mut Sequence, len: usize) {
        seq.truncate(len);
    }

    fn lookahead(&self) -> LookaheadStats {
        self.lookahead.stats()
    }

    fn expert_times(&self) -> ExpertTimes {
        self.experts.times()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{container, load_glm};
    use crate::model::weights::FloatRows;

    #[test]
    fn weights_decoded_when_used_give_the_same_bits_as_weights_decoded_once() {
        for case in ["tiny-mtp-fp8", "colibri-container"] {
            let decoded = load_glm(case, None);
            let mut stored = load_glm(case, None);
            for layer in &mut stored.weights.layers {
                let name = format!("model.layers.{}.self_attn.kv_b_proj.weight", layer.index);
                layer.self_attn.kv_b_proj = FloatRows::Stored(container(case).load_matrix(&name).unwrap());
            }
            let run = |model: &Glm| {
                assert_eq!(
                    matches!(model.weights.layers[0].self_attn.kv_b_proj, FloatRows::Stored(_)),
                    std::ptr::eq(model, &stored)
                );
                model.forward(&mut model.new_sequence(false), &[1, 2, 3, 4, 5], None).unwrap()
            };
            assert!(run(&decoded) == run(&stored), "{case}");
        }
    }

    #[test]
    fn not_a_number_ends_in_an_error_and_not_in_a_panic() {
        let mut model = load_glm("tiny-sparse", None);
        model.weights.layers[0].input_layernorm[1] = f32::NAN;
        let mut seq = model.new_sequence(false);
        let error = model.forward(&mut seq, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], None).unwrap_err();
        assert!(error.to_string().contains("not finite"), "{error}");
        assert_eq!((seq.len(), seq.layers[0].len()), (0, 0));
        assert!(model.logits(&Rows { data: vec![f32::NAN; 64], width: 64 }).data[0].is_nan());
    }
}
