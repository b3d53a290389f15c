//! Running the routers of coming layers ahead (docs/architecture.md §3).

use shimmer_common::experts::Lookahead;

use super::weights::{Layer, Mlp};
use super::{Glm, router};
use crate::model::lookahead::{Guesses, LOOKAHEAD_DEPTH, by_weight, sampled_rows};
use crate::model::rows::{Rows, activations, project};

impl Glm {
    /// Hints at the experts of at most `depth` layers after `layer`, guessed from the residual stream `x`
    /// inside it.
    pub(super) fn look_ahead(&self, layer: &Layer, x: &Rows, depth: usize, guesses: &mut Guesses) {
        if depth == 0 {
            return;
        }
        let depth = depth.min(LOOKAHEAD_DEPTH);
        let coming = self.weights.layers.iter().skip(usize::from(layer.index) + 1).take(depth);
        let mut sampled = Rows::empty(x.width);
        sampled_rows(x.rows()).for_each(|r| sampled.data.extend_from_slice(x.row(r)));
        for (distance, layer) in (1..).zip(coming) {
            let Mlp::Sparse { gate, e_score_correction_bias, .. } = &layer.mlp else { continue };
            let normed =
                sampled.rms_norm(self.kernels, &layer.post_attention_layernorm, self.config.rms_norm_eps);
            let logits = project(self.kernels, gate, &activations(normed, &[gate]));
            let routes = router::route(self.kernels, &self.config, &logits, e_score_correction_bias);
            let experts = by_weight(&routes);
            guesses.remember(layer.index, distance, experts.clone());
            self.experts.prefetch(&Lookahead { layer: layer.index, experts });
        }
    }
}
