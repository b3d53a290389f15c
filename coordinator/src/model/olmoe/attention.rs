//! Grouped-query attention over a key and value cache (docs/model.md §14).

use super::Olmoe;
use super::weights::Layer;
use crate::model::rows::{Rows, activations, for_each_chunk, project};
use crate::model::sequence::LayerCache;
use crate::model::step::Step;
use crate::model::trace::Recorder;

impl Olmoe {
    /// Attention of one layer over normed rows `x`: appends to `cache`, returns `[rows, hidden_size]`.
    pub(super) fn attention(
        &self,
        w: &Layer,
        x: Rows,
        step: &Step,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) -> Rows {
        let eps = self.config.rms_norm_eps;
        let x = activations(x, &[&w.q_proj, &w.k_proj, &w.v_proj]);
        // The norms see the whole row, before it is split into heads.
        let mut q = project(self.kernels, &w.q_proj, &x).rms_norm(self.kernels, &w.q_norm, eps);
        let mut k = project(self.kernels, &w.k_proj, &x).rms_norm(self.kernels, &w.k_norm, eps);
        let mut v = project(self.kernels, &w.v_proj, &x);
        if let Some(limit) = self.config.clip_qkv {
            for value in [&mut q, &mut k, &mut v].into_iter().flat_map(|rows| &mut rows.data) {
                *value = value.max(-limit).min(limit);
            }
        }
        for (r, angles) in step.angles.iter().enumerate() {
            q.row_mut(r).chunks_mut(self.head_dim).for_each(|head| angles.rotate_half(head));
            k.row_mut(r).chunks_mut(self.head_dim).for_each(|head| angles.rotate_half(head));
            cache.kv.append(k.row(r));
            cache.kv.append(v.row(r));
        }
        recorder.rows("k_cache", &k);
        recorder.rows("v_cache", &v);
        let heads = self.attend(&q, step, &cache.kv);
        project(self.kernels, &w.o_proj, &activations(heads, &[&w.o_proj]))
    }

    /// Attention outputs of all heads, `[rows, hidden_size]`.
    fn attend(&self, q: &Rows, step: &Step, kv: &Rows) -> Rows {
        let mut out = Rows::zeroed(q.rows(), q.width);
        let work = step.visible_total() * 2 * q.width;
        for_each_chunk(&mut out.data, q.width, work, |r, out| {
            let heads_per_key = self.config.num_attention_heads / self.config.num_key_value_heads;
            let visible = step.visible(r);
            let mut scores = vec![0.0; visible.len()];
            let heads = q.row(r).chunks(self.head_dim).zip(out.chunks_mut(self.head_dim));
            for (h, (query, out)) in heads.enumerate() {
                let key_at = h / heads_per_key * self.head_dim;
                let value_at = kv.width / 2 + key_at;
                for (score, &t) in scores.iter_mut().zip(visible) {
                    let key = &kv.row(t as usize)[key_at..][..self.head_dim];
                    *score = self.kernels.dot(query, key) * self.scale;
                }
                self.kernels.softmax(&mut scores);
                for (&weight, &t) in scores.iter().zip(visible) {
                    let value = &kv.row(t as usize)[value_at..][..self.head_dim];
                    self.kernels.axpy(weight, value, out);
                }
            }
        });
        out
    }
}
