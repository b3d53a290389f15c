//! Teacher-forced scoring: the logits of every position of given ids.
//!
//! With drafts, the ids go through the same draft-and-verify rounds as a generation whose every token is known:
//! the MTP layer drafts, the target processes the drafts in one batch, rows after the first draft that differs from
//! the given ids are rejected and truncated. The logits are those of the accepted rows, so comparing the files of
//! runs with and without drafts checks rules N6 and N7 together with every cache's truncation.

use std::ops::ControlFlow;

use super::DecodeError;
use crate::model::{LanguageModel, ModelError, Rows, Sequence, Trace, TraceLevel, TraceTensor};

/// How to score. Nothing here changes a bit of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScoreOptions {
    /// Rows per step (0 = all at once); without effect when drafting.
    pub prefill_chunk: usize,
    /// Drafts per round; 0, or a model without MTP layer, processes plain chunks.
    pub drafts: usize,
    /// Records intermediate values.
    pub trace: Option<TraceLevel>,
}

/// Counters and results of one scored sequence.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// Rows of logits: the number of ids.
    pub rows: usize,
    /// Tokens whose probability was looked up: all ids but the first.
    pub scored: usize,
    /// Sum of the negative log-likelihoods of the scored tokens, in nats.
    pub nll_sum: f64,
    /// Drafted tokens.
    pub drafted: usize,
    /// Accepted drafts.
    pub accepted: usize,
    /// What was recorded, if asked for.
    pub trace: Option<Trace>,
}

impl Score {
    /// Mean negative log-likelihood in nats; `None` if nothing was scored.
    pub fn mean_nll(&self) -> Option<f64> {
        (self.scored > 0).then(|| self.nll_sum / self.scored as f64)
    }

    /// `exp` of the mean negative log-likelihood.
    pub fn perplexity(&self) -> Option<f64> {
        // For printing only: the platform's exp is good enough.
        self.mean_nll().map(f64::exp)
    }

    /// Adds the counters of another sequence (its trace is not taken over).
    pub fn add(&mut self, other: &Score) {
        self.rows += other.rows;
        self.scored += other.scored;
        self.nll_sum += other.nll_sum;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

/// Scores one sequence; `on_logits` gets the logits `[rows, vocab_size]` in order of position, batch by batch, and
/// may stop the run: then [`Score::rows`] is below the number of ids.
///
/// # Errors
/// [`DecodeError::EmptyPrompt`] for no ids; [`DecodeError::NotFinite`]; the model's own.
pub fn score(
    model: &dyn LanguageModel,
    ids: &[u32],
    options: ScoreOptions,
    on_logits: &mut dyn FnMut(&Rows) -> ControlFlow<()>,
) -> Result<Score, DecodeError> {
    if ids.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    let limit = model.info().max_positions;
    if ids.len() > limit {
        return Err(ModelError::ContextExceeded { wanted: ids.len(), limit }.into());
    }
    let vocab_size = model.info().vocab_size;
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(ModelError::UnknownToken { id, vocab_size }.into());
    }
    let drafting = options.drafts > 0 && model.info().has_mtp;
    let with_mtp = model.info().has_mtp && (drafting || options.trace.is_some());
    let mut scoring = Scoring {
        model,
        ids,
        seq: model.new_sequence(with_mtp),
        with_mtp,
        level: options.trace,
        score: Score { trace: options.trace.map(Trace::new), ..Score::default() },
        on_logits,
    };
    let chunk = if options.prefill_chunk == 0 { ids.len() } else { options.prefill_chunk };
    while scoring.seq.len() < ids.len() {
        let done = scoring.seq.len();
        let flow = if drafting {
            scoring.round(options.drafts)?
        } else {
            scoring.step(&ids[done..ids.len().min(done.saturating_add(chunk))])?
        };
        if flow.is_break() {
            break;
        }
    }
    Ok(scoring.score)
}

struct Scoring<'a> {
    model: &'a dyn LanguageModel,
    ids: &'a [u32],
    seq: Sequence,
    with_mtp: bool,
    level: Option<TraceLevel>,
    score: Score,
    on_logits: &'a mut dyn FnMut(&Rows) -> ControlFlow<()>,
}

impl Scoring<'_> {
    /// One draft-and-verify round from the next given id on.
    fn round(&mut self, drafts: usize) -> Result<ControlFlow<()>, DecodeError> {
        let done = self.seq.len();
        let next = self.ids[done];
        // Before the first token there is nothing to draft from.
        let room = if done == 0 { 0 } else { self.model.info().max_positions - done - 1 };
        let drafted =
            if room > 0 { self.model.draft(&mut self.seq, next, drafts.min(room))? } else { Vec::new() };
        let given = &self.ids[done + 1..];
        let accepted = drafted.iter().zip(given).take_while(|(draft, id)| draft == id).count();
        self.score.drafted += drafted.len();
        self.score.accepted += accepted;
        self.step(&[&[next], drafted.as_slice()].concat())
    }

    /// Processes `tokens` at the next positions and keeps the rows that agree with the given ids.
    fn step(&mut self, tokens: &[u32]) -> Result<ControlFlow<()>, DecodeError> {
        let done = self.seq.len();
        let mut trace = self.level.map(Trace::new);
        let hidden = self.model.forward(&mut self.seq, tokens, trace.as_mut())?;
        let mut logits = self.model.logits(&hidden);
        let kept = tokens.iter().zip(&self.ids[done..]).take_while(|(token, id)| token == id).count();
        if kept < tokens.len() {
            self.model.truncate(&mut self.seq, done + kept);
            logits.truncate(kept);
        }
        if let (Some(all), Some(step)) = (&mut self.score.trace, trace) {
            append(all, step, kept);
        }
        if self.with_mtp {
            // Traced, so that the draft rows of the given ids are recorded in order.
            let next = self.ids.get(done + kept).copied();
            self.model.extend_mtp(&mut self.seq, next, self.score.trace.as_mut())?;
        }
        self.add_likelihoods(done, &logits)?;
        Ok((self.on_logits)(&logits))
    }

    fn add_likelihoods(&mut self, done: usize, logits: &Rows) -> Result<(), DecodeError> {
        self.score.rows += logits.rows();
        for j in 0..logits.rows() {
            let position = done + j + 1;
            let target = self.ids.get(position).copied();
            let nll =
                negative_log_likelihood(logits.row(j), target).ok_or(DecodeError::NotFinite { position })?;
            self.score.nll_sum += nll;
            self.score.scored += usize::from(target.is_some());
        }
        Ok(())
    }
}

/// `-log softmax(logits)[target]` in f64, 0 without a target; `None` if a logit is NaN or infinite.
fn negative_log_likelihood(logits: &[f32], target: Option<u32>) -> Option<f64> {
    if !logits.iter().all(|x| x.is_finite()) {
        return None;
    }
    let Some(target) = target else { return Some(0.0) };
    let target = f64::from(*logits.get(target as usize)?);
    let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    // For printing only: the platform's exp and ln are good enough.
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    Some(sum.ln() + largest - target)
}

/// Appends the first `rows` rows of every tensor of `step`.
fn append(all: &mut Trace, step: Trace, rows: usize) {
    for (name, tensor) in step.tensors {
        let part = match tensor {
            TraceTensor::F32 { width, mut data } => {
                data.truncate(rows * width);
                TraceTensor::F32 { width, data }
            }
            TraceTensor::I32 { rows: mut values } => {
                values.truncate(rows);
                TraceTensor::I32 { rows: values }
            }
            TraceTensor::F32Causal { rows: mut values } => {
                values.truncate(rows);
                TraceTensor::F32Causal { rows: values }
            }
        };
        match (all.tensors.get_mut(&name), part) {
            (Some(TraceTensor::F32 { data, .. }), TraceTensor::F32 { data: more, .. }) => data.extend(more),
            (Some(TraceTensor::I32 { rows }), TraceTensor::I32 { rows: more }) => rows.extend(more),
            (Some(TraceTensor::F32Causal { rows }), TraceTensor::F32Causal { rows: more }) => {
                rows.extend(more)
            }
            (_, part) => drop(all.tensors.insert(name, part)),
        }
    }
}
