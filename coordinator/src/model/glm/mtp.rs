//! The multi-token-prediction layer: its rows and the drafts chained from them (docs/model.md §7).

use shimmer_common::experts::ExpertError;
use shimmer_common::math;

use super::Glm;
use super::weights::Mtp;
use crate::model::rows::{Rows, activations, project};
use crate::model::sequence::{LayerCache, MtpRow, MtpState, Sequence};
use crate::model::step::{Selection, Step};
use crate::model::trace::Recorder;
use crate::model::weights::embed;
use crate::model::{ModelError, check_token};

/// Rows of one pass: bounds the memory a long prompt's pending rows need at once.
const ROWS_PER_PASS: usize = 256;

impl Glm {
    /// Processes every pending row whose successor is known: a token of the sequence, then `next`.
    pub(super) fn mtp_extend(
        &self,
        seq: &mut Sequence,
        next: Option<u32>,
        recorder: &mut Recorder<'_>,
    ) -> Result<(), ModelError> {
        let Some(mtp) = &self.weights.mtp else { return Ok(()) };
        if let Some(next) = next {
            check_token(&self.info, next)?;
        }
        let (tokens, state) = seq.tokens_and_mtp();
        let Some(state) = state else { return Ok(()) };
        if let Some(next) = next {
            state.expect_next(next);
        }
        let waiting = tokens.iter().copied().skip(state.base + state.cache.len() + 1).chain(next);
        let successors: Vec<u32> = waiting.take(state.pending.rows()).collect();
        let mut done = 0;
        let result = self.extend_rows(mtp, state, &successors, &mut done, recorder);
        state.pending.data.drain(..done * state.pending.width);
        Ok(result?)
    }

    /// Processes the first pending rows with their `successors`; `done` counts them, also on error.
    fn extend_rows(
        &self,
        mtp: &Mtp,
        state: &mut MtpState,
        successors: &[u32],
        done: &mut usize,
        recorder: &mut Recorder<'_>,
    ) -> Result<(), ExpertError> {
        let width = state.pending.width;
        for tokens in successors.chunks(ROWS_PER_PASS) {
            let end = *done + tokens.len();
            let hidden = Rows { data: state.pending.data[*done * width..end * width].to_vec(), width };
            let mut step = Step::new(&self.rope, state.cache.len(), tokens.len());
            let x = self.mtp_input(mtp, tokens, &hidden);
            let output = self.mtp_layer(mtp, x, &mut step, true, &mut state.cache, recorder)?;
            *done = end;
            let last = tokens.len() - 1;
            state.newest = (end == state.pending.rows()).then(|| MtpRow {
                hidden: hidden.row(last).to_vec(),
                next: tokens[last],
                output: output.row(last).to_vec(),
                selected: step.selection.rows[last].clone(),
            });
        }
        Ok(())
    }

    /// Drafts up to `k` tokens after `next`: draft-extend, then chained steps whose rows are scratch.
    pub(in crate::model) fn mtp_draft(
        &self,
        seq: &mut Sequence,
        next: u32,
        k: usize,
        recorder: &mut Recorder<'_>,
    ) -> Result<Vec<u32>, ModelError> {
        let Some(mtp) = &self.weights.mtp else { return Ok(Vec::new()) };
        if k == 0 {
            return Ok(Vec::new());
        }
        self.mtp_extend(seq, Some(next), recorder)?;
        // Without the newest row (the sequence was cut and nothing was processed since) there is
        // nothing to draft from.
        let Some(MtpState { cache, newest: Some(newest), .. }) = &mut seq.mtp else { return Ok(Vec::new()) };
        let kept = cache.len();
        let drafts = self.chain(mtp, newest, k, cache, recorder);
        cache.truncate(kept);
        Ok(drafts?)
    }

    /// The draft of `newest` and up to `k - 1` chained ones. Appends scratch rows to `cache`.
    ///
    /// With `index_share_for_mtp_iteration` step j attends to what `newest` selected and to every
    /// scratch row since, its own included; without, each step selects anew.
    fn chain(
        &self,
        mtp: &Mtp,
        newest: &MtpRow,
        k: usize,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) -> Result<Vec<u32>, ExpertError> {
        let mut output = Rows { data: newest.output.clone(), width: newest.output.len() };
        let mut selected = newest.selected.clone();
        let mut drafts = vec![self.draft_token(mtp, &output)];
        while drafts.len() < k && cache.len() < self.info.max_positions {
            let position = cache.len();
            let token = drafts[drafts.len() - 1];
            let mut step = Step::new(&self.rope, position, 1);
            if let Some(selected) = &mut selected {
                selected.push(position as u32);
            }
            step.selection = Selection { rows: vec![selected.clone()] };
            let select = !self.config.index_share_for_mtp_iteration;
            let x = self.mtp_input(mtp, &[token], &output);
            output = self.mtp_layer(mtp, x, &mut step, select, cache, recorder)?;
            drafts.push(self.draft_token(mtp, &output));
        }
        Ok(drafts)
    }

    /// `[rms(embed(token)) ; rms(hidden)] @ eh_proj` for every row.
    fn mtp_input(&self, mtp: &Mtp, tokens: &[u32], hidden: &Rows) -> Rows {
        let eps = self.config.rms_norm_eps;
        let embedded = embed(mtp.embed_tokens.as_ref().unwrap_or(&self.weights.embed_tokens), tokens);
        let embedded = embedded.rms_norm(self.kernels, &mtp.enorm, eps);
        let hidden = hidden.rms_norm(self.kernels, &mtp.hnorm, eps);
        let mut joined = Rows::empty(embedded.width + hidden.width);
        for r in 0..tokens.len() {
            joined.data.extend_from_slice(embedded.row(r));
            joined.data.extend_from_slice(hidden.row(r));
        }
        project(self.kernels, &mtp.eh_proj, &activations(joined, &[&mtp.eh_proj]))
    }

    /// The decoder layer and `shared_head.norm` over input rows `x`. With `select` the layer runs its
    /// own indexer, if it has one. On error the cache is as before.
    fn mtp_layer(
        &self,
        mtp: &Mtp,
        mut x: Rows,
        step: &mut Step,
        select: bool,
        cache: &mut LayerCache,
        recorder: &mut Recorder<'_>,
    ) -> Result<Rows, ExpertError> {
        let indexer = mtp.layer.self_attn.indexer.as_ref().filter(|_| select);
        if indexer.is_none() && recorder.wants("index_topk") {
            (0..step.rows()).for_each(|r| recorder.positions("index_topk", step.visible(r)));
        }
        if let Err(error) = self.decoder_layer(&mtp.layer, indexer, &mut x, step, cache, recorder) {
            cache.truncate(step.start);
            return Err(error);
        }
        let output = x.rms_norm(self.kernels, &mtp.shared_head_norm, self.config.rms_norm_eps);
        if recorder.wants("logits") {
            recorder.rows("logits", &self.mtp_logits(mtp, &output));
        }
        Ok(output)
    }

    fn mtp_logits(&self, mtp: &Mtp, output: &Rows) -> Rows {
        self.head(mtp.shared_head.as_ref().unwrap_or(self.weights.lm_head()), output)
    }

    fn draft_token(&self, mtp: &Mtp, output: &Rows) -> u32 {
        math::argmax(&self.mtp_logits(mtp, output).data) as u32
    }
}
