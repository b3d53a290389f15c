//! The DSA indexer: which cached positions a row attends to (docs/model.md §5).

use rayon::prelude::*;
use shimmer_common::kernels::{Activations, RowsRef};
use shimmer_common::math;

use super::Glm;
use super::attention::{LATENT_EPS, reference_layout};
use super::weights::Indexer;
use crate::model::rows::{Rows, for_each_chunk, inverse_sqrt, project};
use crate::model::sequence::LayerCache;
use crate::model::step::Step;
use crate::model::trace::Recorder;

/// Positions scored by one task.
const POSITIONS_PER_TASK: usize = 256;

impl Glm {
    /// Appends the rows' indexer keys to the cache and selects each row's `index_topk` best positions.
    ///
    /// While a row sees no more than `index_topk` positions it keeps them all and nothing is scored;
    /// its key is cached all the same, later rows need it.
    pub(super) fn select(
        &self,
        w: &Indexer,
        x: &Activations,
        q_res: &Activations,
        step: &mut Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) {
        self.append_indexer_keys(w, x, step, cache, recorder);
        let (topk, heads) = (self.config.index_topk, self.config.index_n_heads);
        let record_scores = recorder.wants("index_scores");
        let keeps_all = |r: usize| step.start + r < topk;
        let rows = step.rows();
        let mut selected = vec![None; rows];
        if record_scores || !keeps_all(rows - 1) {
            let mut queries = project(self.kernels, &w.wq_b, q_res);
            let mut weights = project(self.kernels, &w.weights_proj, x);
            weights.data.iter_mut().for_each(|w| *w *= inverse_sqrt(heads));
            // Many rows are scored side by side; one row's positions are spread where there are few.
            let spread = rows < rayon::current_num_threads();
            let score = |(r, query): (usize, &mut [f32])| {
                if !record_scores && keeps_all(r) {
                    return (Vec::new(), None);
                }
                for head in query.chunks_mut(self.config.index_head_dim) {
                    step.angles[r].rotate_interleaved(&mut head[..self.config.qk_rope_head_dim]);
                }
                let mut scores = vec![0.0; step.start + r + 1];
                self.index_scores(query, weights.row(r), &cache.indexer_keys, spread, &mut scores);
                let best = (!keeps_all(r)).then(|| math::largest(&scores, topk));
                (if record_scores { scores } else { Vec::new() }, best)
            };
            let width = queries.width;
            let scored: Vec<_> = if spread {
                queries.data.chunks_mut(width).enumerate().map(score).collect()
            } else {
                queries.data.par_chunks_mut(width).enumerate().map(score).collect()
            };
            for (selected, (scores, best)) in selected.iter_mut().zip(scored) {
                if record_scores {
                    recorder.causal_row("index_scores", &scores);
                }
                *selected = best;
            }
        }
        step.selection.rows = selected;
        (0..rows).for_each(|r| recorder.positions("index_topk", step.visible(r)));
    }

    /// `ik = rope(layernorm(x @ wk))`, one row per position.
    fn append_indexer_keys(
        &self,
        w: &Indexer,
        x: &Activations,
        step: &Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) {
        let rope_len = self.config.qk_rope_head_dim;
        let unnormed = project(self.kernels, &w.wk, x);
        let mut key = vec![0.0; unnormed.width];
        for (r, angles) in step.angles.iter().enumerate() {
            self.kernels.layer_norm(unnormed.row(r), &w.k_norm_weight, &w.k_norm_bias, LATENT_EPS, &mut key);
            angles.rotate_interleaved(&mut key[..rope_len]);
            cache.indexer_keys.append(&key);
            if recorder.wants("indexer_keys") {
                let (rotated, rest) = key.split_at(rope_len);
                recorder.f32("indexer_keys", key.len(), &[&reference_layout(rotated), rest].concat());
            }
        }
    }

    /// `I[t] = Σ_j weights[j] · relu(query[j] · key[t] · index_head_dim^-½)`, heads in ascending order.
    /// With `spread` positions are divided among threads.
    fn index_scores(&self, query: &[f32], weights: &[f32], keys: &Rows, spread: bool, scores: &mut [f32]) {
        let scale = inverse_sqrt(self.config.index_head_dim);
        let work = if spread { scores.len() * query.len() } else { 0 };
        let queries = RowsRef::new(query, keys.width, keys.width, query.len() / keys.width);
        for_each_chunk(scores, POSITIONS_PER_TASK, work, |task, scores| {
            let first = task * POSITIONS_PER_TASK;
            self.kernels.index_scores(queries, weights, keys.part(first, scores.len()), scale, scores);
        });
    }
}
