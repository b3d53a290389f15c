//! Multi-head latent attention over the latent cache, with absorbed weights (docs/model.md §4).
//!
//! One algebra for prefill and decode (rule N7): the key half of `kv_b_proj` is folded into the query,
//! so that a cached row `[latent ; rotated key]` is used as it lies there, once as key and once, its
//! latent part, as value; the value half is applied to the weighted latent. Sums over positions run in
//! ascending order, sums over the latent as the kernels define them.

use rayon::prelude::*;
use shimmer_common::kernels::{RowsMut, RowsRef};

use super::Glm;
use super::weights::{Attention, Indexer};
use crate::model::rows::{PARALLEL_WORK, Rows, activations, for_each_chunk, project};
use crate::model::sequence::LayerCache;
use crate::model::step::Step;
use crate::model::trace::Recorder;

/// `q_a_layernorm`, `kv_a_layernorm` and the indexer's `k_norm` use the reference's default epsilon,
/// not `rms_norm_eps` (docs/model.md §4).
pub(super) const LATENT_EPS: f32 = 1e-6;

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
        let (width, values) = (q.width, q.data.len());
        for_each_chunk(&mut q.data, width, values, |r, row| {
            for head in row.chunks_mut(c.qk_nope_head_dim + c.qk_rope_head_dim) {
                step.angles[r].rotate_interleaved(&mut head[c.qk_nope_head_dim..]);
            }
        });
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
        let rows_per_task = rows.min(ROWS_PER_TASK_MAX);
        let heads_per_task = heads_per_task(heads, rows, rayon::current_num_threads());
        let mut out = Rows::zeroed(rows, heads * v_len);
        let mut tasks = Vec::new();
        for (block, out) in out.data.chunks_mut(rows_per_task * heads * v_len).enumerate() {
            let mut parts: Vec<Vec<&mut [f32]>> = Vec::new();
            parts.resize_with(heads.div_ceil(heads_per_task), Vec::new);
            for row in out.chunks_mut(heads * v_len) {
                for (part, out) in parts.iter_mut().zip(row.chunks_mut(heads_per_task * v_len)) {
                    part.push(out);
                }
            }
            tasks.extend(parts.into_iter().enumerate().map(|(part, out)| {
                let first_head = part * heads_per_task;
                let count = heads_per_task.min(heads - first_head);
                (
                    Heads { glm: self, w, q, step, kv, first_head, count, first_row: block * rows_per_task },
                    out,
                )
            }));
        }
        let per_head =
            step.visible_total() * 2 * kv.width + rows * q.width / heads * self.config.kv_lora_rank;
        if heads * per_head < PARALLEL_WORK {
            tasks.into_iter().for_each(|(task, out)| task.attend(out));
        } else {
            tasks.into_par_iter().for_each(|(task, out)| task.attend(out));
        }
        out
    }
}

/// Most rows of one task: they share each decoded weight row, and what the task keeps of them fits the
/// core's second cache.
const ROWS_PER_TASK_MAX: usize = 64;

/// Heads of one task in a prefill: they share each cached row, and their queries fit the core's first cache.
const HEADS_PER_TASK: usize = 8;

/// Heads that share the registers of the kernels.
const HEADS_PER_TILE: usize = 4;

/// Heads one task computes: few rows are split so that every thread gets two tasks, whole tiles each.
fn heads_per_task(heads: usize, rows: usize, threads: usize) -> usize {
    if rows > HEADS_PER_TASK {
        return HEADS_PER_TASK.min(heads);
    }
    let per_task = heads.div_ceil(2 * threads);
    per_task.next_multiple_of(HEADS_PER_TILE).min(heads)
}

/// Some heads over some rows of a step: the work of one task.
struct Heads<'a> {
    glm: &'a Glm,
    w: &'a Attention,
    q: &'a Rows,
    step: &'a Step,
    kv: &'a Rows,
    /// First head.
    first_head: usize,
    /// Number of heads.
    count: usize,
    /// First row.
    first_row: usize,
}

impl Heads<'_> {
    /// Attention outputs of the heads, per row of the task `[heads · v_head_dim]`.
    fn attend(&self, mut out: Vec<&mut [f32]>) {
        let rows = out.len();
        let mut queries = self.fold_key_weights(rows);
        for r in 0..rows {
            self.weigh_latents(self.first_row + r, &mut queries[r * self.stride()..][..self.stride()]);
        }
        self.unfold_value_weights(&queries, &mut out);
    }

    /// Values between the same head's queries of neighbouring rows.
    fn stride(&self) -> usize {
        self.count * self.kv.width
    }

    /// Queries against cached rows, `[rows, heads]` of `[q_lat ; q_rope]`: `q_lat = Σ_d q_nope[d] ·
    /// W_uk[d]`, d ascending. Each weight row is decoded once for all rows of the task.
    fn fold_key_weights(&self, rows: usize) -> Vec<f32> {
        let c = &self.glm.config;
        let (nope, latent_len) = (c.qk_nope_head_dim, c.kv_lora_rank);
        let head_len = nope + c.qk_rope_head_dim;
        let mut queries = vec![0.0; rows * self.stride()];
        for h in 0..self.count {
            let head = self.first_head + h;
            let q = &self.q.data[self.first_row * self.q.width + head * head_len..];
            let folded = &mut queries[h * self.kv.width..];
            self.w.kv_b_proj.accumulate(
                self.glm.kernels,
                RowsRef::new(q, self.q.width, nope, rows),
                head * (nope + c.v_head_dim),
                RowsMut::new(folded, self.stride()),
            );
            for r in 0..rows {
                folded[r * self.stride()..][latent_len..self.kv.width]
                    .copy_from_slice(&q[r * self.q.width..][nope..head_len]);
            }
        }
        queries
    }

    /// Replaces the latent part of the queries of `row`, `[heads]`, by the latents weighted with the softmax
    /// over the visible rows.
    fn weigh_latents(&self, row: usize, queries: &mut [f32]) {
        let (kernels, width) = (self.glm.kernels, self.kv.width);
        let latent_len = self.glm.config.kv_lora_rank;
        let visible = self.step.visible(row);
        let cached = |len| RowsRef::select(&self.kv.data, width, len, visible);
        let mut scores = vec![0.0; self.count * visible.len()];
        kernels.dots(
            RowsRef::new(queries, width, width, self.count),
            cached(width),
            self.glm.scale,
            RowsMut::new(&mut scores, visible.len()),
        );
        scores.chunks_mut(visible.len()).for_each(|head| kernels.softmax(head));
        queries.chunks_mut(width).for_each(|head| head[..latent_len].fill(0.0));
        kernels.accumulate(
            RowsRef::new(&scores, visible.len(), visible.len(), self.count),
            cached(latent_len),
            RowsMut::new(queries, width),
        );
    }

    /// `out[j] = W_uv[j] · weighted`, once per head and row.
    fn unfold_value_weights(&self, weighted: &[f32], out: &mut [&mut [f32]]) {
        let c = &self.glm.config;
        let (nope, v_len, rows) = (c.qk_nope_head_dim, c.v_head_dim, out.len());
        let mut values = vec![0.0; rows * v_len];
        for h in 0..self.count {
            let weighted = &weighted[h * self.kv.width..];
            self.w.kv_b_proj.dots(
                self.glm.kernels,
                RowsRef::new(weighted, self.stride(), c.kv_lora_rank, rows),
                (self.first_head + h) * (nope + v_len) + nope,
                v_len,
                RowsMut::new(&mut values, v_len),
            );
            for (out, values) in out.iter_mut().zip(values.chunks(v_len)) {
                out[h * v_len..][..v_len].copy_from_slice(values);
            }
        }
    }
}

/// A rotated part as the reference stores it: first members of all pairs, then the second members.
pub(super) fn reference_layout(rotated: &[f32]) -> Vec<f32> {
    let members = |m: usize| rotated.chunks(2).map(move |pair| pair[m]);
    members(0).chain(members(1)).collect()
}
