//! `olmoe`: a second family behind the same seams (docs/model.md §14).

mod attention;
mod weights;

use std::sync::Arc;

use shimmer_common::container::ContainerError;
use shimmer_common::container::config::OlmoeConfig;
use shimmer_common::experts::{ExpertCompute, ExpertError, ExpertTimes};
use shimmer_common::kernels::Kernels;
use shimmer_common::math::{self, Rope};

use self::weights::{Layer, Weights};
use super::routed::{Routes, routed_sum};
use super::rows::{Rows, activations, inverse_sqrt, project};
use super::sequence::{LayerCache, Sequence};
use super::step::Step;
use super::trace::{Recorder, Scope, Trace};
use super::weights::{Loader, embed};
use super::{LanguageModel, ModelError, ModelInfo, check_step};

/// A loaded model; its experts are behind the expert seam.
pub(super) struct Olmoe {
    info: ModelInfo,
    config: OlmoeConfig,
    kernels: Kernels,
    experts: Arc<dyn ExpertCompute>,
    weights: Weights,
    rope: Rope,
    head_dim: usize,
    /// Of the attention scores: `head_dim^-½`.
    scale: f32,
}

impl Olmoe {
    /// Reads the dense part.
    pub(super) fn load(
        config: &OlmoeConfig,
        loader: &mut Loader<'_>,
        kernels: Kernels,
        experts: Arc<dyn ExpertCompute>,
    ) -> Result<Self, ContainerError> {
        let head_dim = config.hidden_size / config.num_attention_heads;
        let kv_width = 2 * config.num_key_value_heads * head_dim;
        Ok(Self {
            info: ModelInfo {
                family: "olmoe",
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                num_layers: config.num_hidden_layers,
                max_positions: config.max_position_embeddings,
                has_mtp: false,
                cache_bytes_per_token: config.num_hidden_layers * kv_width * size_of::<f32>(),
            },
            config: config.clone(),
            kernels,
            experts,
            weights: Weights::load(config, loader)?,
            rope: Rope::new(head_dim, config.rope_theta),
            head_dim,
            scale: inverse_sqrt(head_dim),
        })
    }

    fn run_layers(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        recorder: &mut Recorder<'_>,
    ) -> Result<Rows, ExpertError> {
        let eps = self.config.rms_norm_eps;
        let step = Step::new(&self.rope, seq.len(), tokens.len());
        let mut x = embed(&self.weights.embed_tokens, tokens);
        recorder.rows("embed", &x);
        for (l, (layer, cache)) in self.weights.layers.iter().zip(&mut seq.layers).enumerate() {
            recorder.enter(Scope::Layer(l));
            let attn_out = self.attention(
                layer,
                x.rms_norm(self.kernels, &layer.input_layernorm, eps),
                &step,
                cache,
                recorder,
            );
            recorder.rows("attn_out", &attn_out);
            x.add(&attn_out);
            let mlp_out =
                self.moe(layer, x.rms_norm(self.kernels, &layer.post_attention_layernorm, eps), recorder)?;
            recorder.rows("mlp_out", &mlp_out);
            x.add(&mlp_out);
            recorder.rows("hidden", &x);
        }
        recorder.enter(Scope::Model);
        let h = x.rms_norm(self.kernels, &self.weights.norm, eps);
        recorder.rows("final_norm", &h);
        Ok(h)
    }

    fn moe(&self, layer: &Layer, x: Rows, recorder: &mut Recorder<'_>) -> Result<Rows, ExpertError> {
        let x = activations(x, &[&layer.gate]);
        let logits = project(self.kernels, &layer.gate, &x);
        let routes = self.route(&logits);
        let k = self.config.num_experts_per_tok;
        recorder.rows("router_logits", &logits);
        routes.record(k, recorder);
        routed_sum(&*self.experts, layer.index, &x, &routes, k, &mut || {})
    }

    /// Softmax over all experts, then the most probable ones.
    fn route(&self, logits: &Rows) -> Routes {
        let mut routes = Routes::default();
        for r in 0..logits.rows() {
            let mut probabilities = logits.row(r).to_vec();
            self.kernels.softmax(&mut probabilities);
            let mut ids = math::top_k(&probabilities, self.config.num_experts_per_tok);
            ids.sort_unstable();
            let mut gates: Vec<f32> = ids.iter().map(|&id| probabilities[id]).collect();
            if self.config.norm_topk_prob {
                let sum = gates.iter().sum::<f32>();
                gates.iter_mut().for_each(|g| *g /= sum);
            }
            routes.push(&ids, &gates);
        }
        routes
    }
}

impl LanguageModel for Olmoe {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_sequence(&self, _with_mtp: bool) -> Sequence {
        let kv_width = 2 * self.config.num_key_value_heads * self.head_dim;
        Sequence::new(vec![LayerCache::new(kv_width, 0); self.config.num_hidden_layers], None)
    }

    fn forward(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        trace: Option<&mut Trace>,
    ) -> Result<Rows, ModelError> {
        if tokens.is_empty() {
            return Ok(Rows::empty(self.info.hidden_size));
        }
        check_step(&self.info, seq, tokens)?;
        let start = seq.len();
        match self.run_layers(seq, tokens, &mut Recorder::new(trace, Scope::Model)) {
            Ok(hidden) => {
                seq.push_tokens(tokens);
                Ok(hidden)
            }
            Err(error) => {
                seq.truncate(start);
                Err(error.into())
            }
        }
    }

    fn logits(&self, hidden: &Rows) -> Rows {
        let head = self.weights.lm_head();
        project(self.kernels, head, &activations(hidden.clone(), &[head]))
    }

    fn extend_mtp(
        &self,
        _seq: &mut Sequence,
        _next: Option<u32>,
        _trace: Option<&mut Trace>,
    ) -> Result<(), ModelError> {
        Ok(())
    }

    fn draft(&self, _seq: &mut Sequence, _next: u32, _k: usize) -> Result<Vec<u32>, ModelError> {
        Ok(Vec::new())
    }

    fn truncate(&self, seq: &mut Sequence, len: usize) {
        seq.truncate(len);
    }

    fn expert_times(&self) -> ExpertTimes {
        self.experts.times()
    }
}
