//! Multi-head latent attention over the latent cache, with absorbed weights (docs/model.md §4).
//!
//! One algebra for prefill and decode (rule N7): the key half of `kv_b_proj` is folded into the query,
//! so that a cached row `[latent ; rotated key]` is used as it lies there, once as key and once, its
//! latent part, as value; the value half is applied to the weighted latent. Sums over positions run in
//! ascending order, sums over the latent as the kernels define them.

use shimmer_common::math;

use super::Glm;
use super::weights::{Attention, Indexer};
use crate::model::rows::{Rows, activations, for_each_chunk, project};
use crate::model::sequence::LayerCache;
use crate::model::step::Step;
use crate::model::trace::Recorder;

/// `q_a_layernorm`, `kv_a_layernorm` and the indexer's `k_norm` use the reference's default epsilon,
/// not `rms_norm_eps` (docs/model.md §4).
pub(super) const LATENT_EPS: f32 = 1e-6;

/// Most heads one task computes: they share each cached row while it is in the core's first cache.
const HEADS_PER_TASK_MAX: usize = 8;

impl Glm {
    /// Attention of one layer over normed rows `x`: appends to `cache`, updates the step's selection
    /// when `indexer` is given (a full layer), and returns `[rows, hidden_size]`.
    pub(super) fn attention(
        &self,
        w: &Attention,
        indexer: Option<&Indexer>,
        x: Rows,
        step: &mut Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) -> Rows {
        let mut inputs = vec![&w.q_a_proj, &w.kv_a_proj_with_mqa];
        inputs.extend(indexer.iter().flat_map(|i| [&i.wk, &i.weights_proj]));
        let x = activations(x, &inputs);

        let q_res = project(self.kernels, &w.q_a_proj, &x).rms_norm(&w.q_a_layernorm, LATENT_EPS);
        let mut inputs = vec![&w.q_b_proj];
        inputs.extend(indexer.map(|i| &i.wq_b));
        let q_res = activations(q_res, &inputs);

        let mut q = project(self.kernels, &w.q_b_proj, &q_res);
        self.rotate_queries(&mut q, step);
        self.append_latents(w, project(self.kernels, &w.kv_a_proj_with_mqa, &x), step, cache, recorder);
        if let Some(indexer) = indexer {
            self.select(indexer, &x, &q_res, step, cache, recorder);
        }

        let heads = self.attend(w, &q, step, &cache.kv);
        project(self.kernels, &w.o_proj, &activations(heads, &[&w.o_proj]))
    }

    /// Rotates the last `qk_rope_head_dim` values of every head.
    fn rotate_queries(&self, q: &mut Rows, step: &Step) {
        let c = &self.config;
        for (r, angles) in step.angles.iter().enumerate() {
            for head in q.row_mut(r).chunks_mut(c.qk_nope_head_dim + c.qk_rope_head_dim) {
                angles.rotate_interleaved(&mut head[c.qk_nope_head_dim..]);
            }
        }
    }

    /// Norms the latents, rotates the shared key parts and appends the rows to the cache.
    fn append_latents(
        &self,
        w: &Attention,
        mut ckv: Rows,
        step: &Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) {
        let latent_len = self.config.kv_lora_rank;
        let mut latent = vec![0.0; latent_len];
        for (r, angles) in step.angles.iter().enumerate() {
            let row = ckv.row_mut(r);
            math::rms_norm(&row[..latent_len], &w.kv_a_layernorm, LATENT_EPS, &mut latent);
            row[..latent_len].copy_from_slice(&latent);
            angles.rotate_interleaved(&mut row[latent_len..]);
        }
        if recorder.wants("kv_cache") {
            for r in 0..ckv.rows() {
                let (latent, key) = ckv.row(r).split_at(latent_len);
                recorder.f32("kv_cache", ckv.width, &[latent, &reference_layout(key)].concat());
            }
        }
        cache.kv.data.extend_from_slice(&ckv.data);
    }

    /// Attention outputs of all heads, `[rows, num_attention_heads · v_head_dim]`.
    fn attend(&self, w: &Attention, q: &Rows, step: &Step, kv: &Rows) -> Rows {
        let (rows, heads, v_len) = (q.rows(), self.config.num_attention_heads, self.config.v_head_dim);
        let heads_per_task = (heads / rayon::current_num_threads()).clamp(1, HEADS_PER_TASK_MAX);
        let per_head =
            step.visible_total() * 2 * kv.width + rows * q.width / heads * self.config.kv_lora_rank;
        let mut by_head = vec![0.0; heads * rows * v_len];
        for_each_chunk(&mut by_head, heads_per_task * rows * v_len, heads * per_head, |task, out| {
            self.attend_heads(w, q, step, kv, task * heads_per_task, out);
        });
        // [heads, rows, v] → [rows, heads · v]
        let mut out = Rows::zeroed(rows, heads * v_len);
        for (i, value) in by_head.chunks(v_len).enumerate() {
            let (head, row) = (i / rows, i % rows);
            out.row_mut(row)[head * v_len..][..v_len].copy_from_slice(value);
        }
        out
    }

    /// The heads from `first_head` on, as many as `out` (`[heads, rows, v_head_dim]`) has room for.
    fn attend_heads(
        &self,
        w: &Attention,
        q: &Rows,
        step: &Step,
        kv: &Rows,
        first_head: usize,
        out: &mut [f32],
    ) {
        let (k, c, rows) = (self.kernels, &self.config, q.rows());
        let (nope, latent_len, v_len) = (c.qk_nope_head_dim, c.kv_lora_rank, c.v_head_dim);
        let heads = out.len() / (rows * v_len);
        let mut scratch = vec![0.0; latent_len];

        // Fold W_uk into the queries: [heads, rows] of [q_lat ; q_rope].
        let mut queries = Rows::zeroed(heads * rows, kv.width);
        for h in 0..heads {
            let head = first_head + h;
            let q_head =
                |r: usize| &q.row(r)[head * (nope + c.qk_rope_head_dim)..][..nope + c.qk_rope_head_dim];
            for d in 0..nope {
                let w_uk = w.kv_b_proj.row(head * (nope + v_len) + d, &mut scratch);
                for r in 0..rows {
                    k.axpy(q_head(r)[d], w_uk, &mut queries.row_mut(h * rows + r)[..latent_len]);
                }
            }
            for r in 0..rows {
                queries.row_mut(h * rows + r)[latent_len..].copy_from_slice(&q_head(r)[nope..]);
            }
        }

        // Softmax over the visible rows, and the weighted latent: [heads, rows].
        let mut weighted = Rows::zeroed(heads * rows, latent_len);
        let mut scores = Vec::new();
        for r in 0..rows {
            let visible = step.visible(r);
            scores.clear();
            scores.resize(heads * visible.len(), 0.0);
            for (s, &t) in visible.iter().enumerate() {
                let cached = kv.row(t as usize);
                for h in 0..heads {
                    scores[h * visible.len() + s] = k.dot(queries.row(h * rows + r), cached) * self.scale;
                }
            }
            scores.chunks_mut(visible.len()).for_each(|head| k.softmax(head));
            for (s, &t) in visible.iter().enumerate() {
                let latent = &kv.row(t as usize)[..latent_len];
                for h in 0..heads {
                    k.axpy(scores[h * visible.len() + s], latent, weighted.row_mut(h * rows + r));
                }
            }
        }

        // Unfold W_uv once per head and row.
        for h in 0..heads {
            for j in 0..v_len {
                let w_uv = w.kv_b_proj.row((first_head + h) * (nope + v_len) + nope + j, &mut scratch);
                for r in 0..rows {
                    out[(h * rows + r) * v_len + j] = k.dot(w_uv, weighted.row(h * rows + r));
                }
            }
        }
    }
}

/// A rotated part as the reference stores it: first members of all pairs, then the second members.
pub(super) fn reference_layout(rotated: &[f32]) -> Vec<f32> {
    let members = |m: usize| rotated.chunks(2).map(move |pair| pair[m]);
    members(0).chain(members(1)).collect()
}
