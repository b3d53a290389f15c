//! Grouped-query attention over a key and value cache (docs/model.md §14).

use shimmer_common::kernels::{RowsMut, RowsRef};

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
        let (kv_heads, head_dim) = (self.config.num_key_value_heads, self.head_dim);
        let heads_per_key = self.config.num_attention_heads / kv_heads;
        let work = step.visible_total() * 2 * q.width;
        for_each_chunk(&mut out.data, heads_per_key * head_dim, work, |i, out| {
            let (r, kv_head) = (i / kv_heads, i % kv_heads);
            let visible = step.visible(r);
            let cached = |at| RowsRef::select(&kv.data[at..], kv.width, head_dim, visible);
            let mut scores = vec![0.0; heads_per_key * visible.len()];
            self.kernels.dots(
                RowsRef::new(
                    &q.row(r)[kv_head * heads_per_key * head_dim..],
                    head_dim,
                    head_dim,
                    heads_per_key,
                ),
                cached(kv_head * head_dim),
                self.scale,
                RowsMut::new(&mut scores, visible.len()),
            );
            scores.chunks_mut(visible.len()).for_each(|head| self.kernels.softmax(head));
            self.kernels.accumulate(
                RowsRef::new(&scores, visible.len(), visible.len(), heads_per_key),
                cached(kv.width / 2 + kv_head * head_dim),
                RowsMut::new(out, head_dim),
            );
        });
        out
    }
}
