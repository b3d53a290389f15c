//! Multi-head latent attention over the latent cache, with absorbed weights (docs/model.md §4).
//!
//! One algebra for prefill and decode (rule N7): the key half of `kv_b_proj` is folded into the query,
//! so that a cached row `[latent ; rotated key]` is used as it lies there, once as key and once, its
//! latent part, as value; the value half is applied to the weighted latent. Sums over positions run in
//! ascending order, sums over the latent as the kernels define them.

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

        let q_res =
            project(self.kernels, &w.q_a_proj, &x).rms_norm(self.kernels, &w.q_a_layernorm, LATENT_EPS);
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
            self.kernels.rms_norm(&row[..latent_len], &w.kv_a_layernorm, LATENT_EPS, &mut latent);
            row[..latent_len].copy_from_slice(&latent);
            angles.rotate_interleaved(&mut row[latent_len..]);
        }
        if recorder.wants("kv_cache") {
            for r in 0..ckv.rows() {
                let (latent, key) = ckv.row(r).split_at(latent_len);
                recorder.f32("kv_cache", ckv.width, &[latent, &reference_layout(key)].concat());
            }
        }
        cache.kv.append(&ckv.data);
    }

    /// Attention outputs of all heads, `[rows, num_attention_heads · v_head_dim]`.
    fn attend(&self, w: &Attention, q: &Rows, step: &Step, kv: &Rows) -> Rows {
        let (rows, heads, v_len) = (q.rows(), self.config.num_attention_heads, self.config.v_head_dim);
        let heads_per_task = (heads / rayon::current_num_threads()).clamp(1, HEADS_PER_TASK_MAX);
        let per_head =
            step.visible_total() * 2 * kv.width + rows * q.width / heads * self.config.kv_lora_rank;
        let mut by_head = vec![0.0; heads * rows * v_len];
        for_each_chunk(&mut by_head, heads_per_task * rows * v_len, heads * per_head, |task, out| {
            let (first, count) = (task * heads_per_task, out.len() / (rows * v_len));
            Heads { glm: self, w, q, step, kv, first, count }.attend(out);
        });
        // [heads, rows, v] → [rows, heads · v]
        let mut out = Rows::zeroed(rows, heads * v_len);
        for (i, value) in by_head.chunks(v_len).enumerate() {
            let (head, row) = (i / rows, i % rows);
            out.row_mut(row)[head * v_len..][..v_len].copy_from_slice(value);
        }
        out
    }
}

/// Some heads over all rows of a step: the work of one task.
struct Heads<'a> {
    glm: &'a Glm,
    w: &'a Attention,
    q: &'a Rows,
    step: &'a Step,
    kv: &'a Rows,
    /// First head.
    first: usize,
    /// Number of heads.
    count: usize,
}

impl Heads<'_> {
    /// Attention outputs `[heads, rows, v_head_dim]` of the heads in `out`.
    fn attend(&self, out: &mut [f32]) {
        let queries = self.fold_key_weights();
        let weighted = self.weigh_latents(&queries);
        self.unfold_value_weights(&weighted, out);
    }

    /// Queries against cached rows, `[heads · rows]` of `[q_lat ; q_rope]`: `q_lat = Σ_d q_nope[d] ·
    /// W_uk[d]`, d ascending. Each weight row is decoded once for all rows of the step.
    fn fold_key_weights(&self) -> Rows {
        let c = &self.glm.config;
        let (nope, latent_len, rows) = (c.qk_nope_head_dim, c.kv_lora_rank, self.q.rows());
        let head_len = nope + c.qk_rope_head_dim;
        let mut queries = Rows::zeroed(self.count * rows, self.kv.width);
        let mut scratch = vec![0.0; latent_len];
        for h in 0..self.count {
            let head = self.first + h;
            let q_head = |r: usize| &self.q.row(r)[head * head_len..][..head_len];
            for d in 0..nope {
                let w_uk = self.w.kv_b_proj.row(head * (nope + c.v_head_dim) + d, &mut scratch);
                for r in 0..rows {
                    let q_lat = &mut queries.row_mut(h * rows + r)[..latent_len];
                    self.glm.kernels.axpy(q_head(r)[d], w_uk, q_lat);
                }
            }
            for r in 0..rows {
                queries.row_mut(h * rows + r)[latent_len..].copy_from_slice(&q_head(r)[nope..]);
            }
        }
        queries
    }

    /// The latents weighted by the softmax over the visible rows, `[heads · rows, kv_lora_rank]`.
    fn weigh_latents(&self, queries: &Rows) -> Rows {
        let (kernels, scale) = (self.glm.kernels, self.glm.scale);
        let (latent_len, rows) = (self.glm.config.kv_lora_rank, self.q.rows());
        let mut weighted = Rows::zeroed(self.count * rows, latent_len);
        let mut scores = Vec::new();
        for r in 0..rows {
            let visible = self.step.visible(r);
            let len = visible.len();
            scores.resize(self.count * len, 0.0);
            for (s, &t) in visible.iter().enumerate() {
                let cached = self.kv.row(t as usize);
                for h in 0..self.count {
                    scores[h * len + s] = kernels.dot(queries.row(h * rows + r), cached) * scale;
                }
            }
            scores.chunks_mut(len).for_each(|head| kernels.softmax(head));
            for (s, &t) in visible.iter().enumerate() {
                let latent = &self.kv.row(t as usize)[..latent_len];
                for h in 0..self.count {
                    kernels.axpy(scores[h * len + s], latent, weighted.row_mut(h * rows + r));
                }
            }
        }
        weighted
    }

    /// `out[j] = W_uv[j] · weighted`, once per head and row.
    fn unfold_value_weights(&self, weighted: &Rows, out: &mut [f32]) {
        let c = &self.glm.config;
        let (nope, v_len, rows) = (c.qk_nope_head_dim, c.v_head_dim, self.q.rows());
        let mut scratch = vec![0.0; c.kv_lora_rank];
        for h in 0..self.count {
            let first_row = (self.first + h) * (nope + v_len) + nope;
            for j in 0..v_len {
                let w_uv = self.w.kv_b_proj.row(first_row + j, &mut scratch);
                for r in 0..rows {
                    out[(h * rows + r) * v_len + j] = self.glm.kernels.dot(w_uv, weighted.row(h * rows + r));
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
