//! One conversation's caches and the generation loop.
//!
//! ```text
//! prompt ─▶ common prefix kept, rest in chunks ─▶ draw ─▶ next
//! round:  draft d1..dk after next ─▶ forward [next, d1..dk] ─▶ draw row by row
//!         while the draw equals the draft: accept; the first other draw becomes next, rejected rows are dropped
//! ```
//! The draw for a position depends on its logits, the seed and the position alone (rule N8), and logits do not
//! depend on the batch (rule N6); so drafts, chunks and kept prefixes cannot change an answer.

use std::ops::ControlFlow;
use std::time::Instant;

use super::answer::Answer;
use super::drafts::{DraftControl, Round};
use super::sampling::draw;
use super::{
    DecodeError, DraftPolicy, Engine, Event, FinishReason, GenerateRequest, GenerateStats, Generation,
    TimeReport,
};
use crate::model::{LanguageModel, ModelError, Rows, Sequence};

/// The caches of one conversation; the next prompt reuses the longest common token prefix. Belongs to one model.
#[derive(Default)]
pub struct Session {
    cached: Option<Cached>,
    /// What its rounds taught about drafting.
    drafts: DraftControl,
}

struct Cached {
    seq: Sequence,
    with_mtp: bool,
}

/// What a finished prefill leaves.
enum Prefilled {
    /// The first token of the answer, drawn but not processed.
    Next(u32),
    Cancelled,
}

impl Session {
    /// An empty session.
    pub fn new() -> Self {
        Session::default()
    }

    /// Tokens in the caches: after a generation, the prompt and all generated tokens but the last.
    pub fn tokens(&self) -> &[u32] {
        self.cached.as_ref().map_or(&[], |cached| cached.seq.tokens())
    }

    /// Runs one generation on the calling thread; `on_event` may stop it. Ids, text and finish reason depend on
    /// neither the session's past, nor drafts, nor the prefill chunk.
    ///
    /// # Errors
    /// [`DecodeError`]; the session stays usable.
    pub fn generate(
        &mut self,
        engine: &Engine,
        request: &GenerateRequest,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Generation, DecodeError> {
        let model = engine.model.as_ref();
        request.sampling.validate()?;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(DecodeError::EmptyPrompt);
        }
        let context = model.info().max_positions;
        let Some(context_left) = context.checked_sub(prompt) else {
            return Err(ModelError::ContextExceeded { wanted: prompt, limit: context }.into());
        };
        let limit = request.max_tokens.min(context_left);
        let mut answer = Answer::new(&engine.text, request, limit);
        let mut stats = GenerateStats { prompt_tokens: prompt, ..GenerateStats::default() };
        let finish = if limit == 0 {
            FinishReason::Length
        } else {
            let drafting =
                model.info().has_mtp && !matches!(request.drafts, DraftPolicy::Off | DraftPolicy::Fixed(0));
            let (seq, control) = self.resume(model, &request.prompt, drafting);
            stats.reused_tokens = seq.len();
            let before = model.expert_times();
            let started = Instant::now();
            let drafts_likely =
                drafting && !(request.drafts == DraftPolicy::Auto && control.drafts_nothing());
            let prefilled = prefill(model, seq, request, drafts_likely, on_event)?;
            stats.prefill_s = started.elapsed().as_secs_f64();
            let started = Instant::now();
            let finish = match prefilled {
                Prefilled::Next(next) => {
                    let control = drafting.then_some(control);
                    decode(model, seq, request, control, next, &mut answer, &mut stats, on_event)?
                }
                Prefilled::Cancelled => FinishReason::Cancelled,
            };
            stats.decode_s = started.elapsed().as_secs_f64();
            let experts = model.expert_times().since(&before);
            stats.time = Box::new(TimeReport::new(stats.prefill_s + stats.decode_s, experts));
            // The same caches whatever was drafted: the last token was never needed.
            let kept = prompt + answer.ids.len().saturating_sub(1);
            if seq.len() > kept {
                model.truncate(seq, kept);
            }
            finish
        };
        let choosing = model.info().has_mtp && request.drafts == DraftPolicy::Auto;
        stats.drafting = (choosing && stats.rounds > 0).then(|| self.drafts.report());
        let finish = answer.end(finish, on_event);
        stats.generated_tokens = answer.ids.len();
        Ok(Generation { ids: answer.ids, text: answer.text, finish, stats })
    }

    /// The caches cut to the longest common prefix with `prompt`, short of its last token (whose logits are
    /// needed); fresh ones where the old ones lack what drafting needs.
    fn resume(
        &mut self,
        model: &dyn LanguageModel,
        prompt: &[u32],
        drafting: bool,
    ) -> (&mut Sequence, &mut DraftControl) {
        if self.cached.as_ref().is_some_and(|cached| drafting && !cached.with_mtp) {
            self.cached = None;
        }
        let fresh = || Cached { seq: model.new_sequence(drafting), with_mtp: drafting };
        let seq = &mut self.cached.get_or_insert_with(fresh).seq;
        let shared = seq.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let keep = shared.min(prompt.len().saturating_sub(1));
        if keep < seq.len() {
            model.truncate(seq, keep);
        }
        (seq, &mut self.drafts)
    }
}

/// Processes the rest of the prompt in chunks and draws the first token of the answer.
fn prefill(
    model: &dyn LanguageModel,
    seq: &mut Sequence,
    request: &GenerateRequest,
    drafts_likely: bool,
    on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<Prefilled, DecodeError> {
    let total = request.prompt.len();
    let rest = request.prompt.get(seq.len()..).unwrap_or_default();
    let chunk = if request.prefill_chunk == 0 { total } else { request.prefill_chunk };
    let mut hidden = Rows::default();
    // Also the first chance to cancel, before anything is computed.
    if on_event(Event::Prefill { done: seq.len(), total }).is_break() {
        return Ok(Prefilled::Cancelled);
    }
    for tokens in rest.chunks(chunk) {
        hidden = model.forward(seq, tokens, None)?;
        if drafts_likely {
            model.extend_mtp(seq, None, None)?;
        } else {
            model.skip_mtp(seq);
        }
        if on_event(Event::Prefill { done: seq.len(), total }).is_break() {
            return Ok(Prefilled::Cancelled);
        }
    }
    let last = hidden.row(hidden.rows().saturating_sub(1)).to_vec();
    let logits = model.logits(&Rows { data: last, width: hidden.width });
    Ok(Prefilled::Next(draw(logits.row(0), &request.sampling, total)?))
}

/// Rounds of drafting and verifying until the answer ends.
#[expect(clippy::too_many_arguments, reason = "the parts of one generation, borrowed separately")]
fn decode(
    model: &dyn LanguageModel,
    seq: &mut Sequence,
    request: &GenerateRequest,
    mut control: Option<&mut DraftControl>,
    mut next: u32,
    answer: &mut Answer<'_>,
    stats: &mut GenerateStats,
    on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<FinishReason, DecodeError> {
    loop {
        if let Some(finish) = answer.push(next, on_event) {
            return Ok(finish);
        }
        let context_left = model.info().max_positions.saturating_sub(seq.len() + 1);
        // A round emits one token more than it accepts drafts.
        let wanted = answer.room().saturating_sub(1);
        let started = Instant::now();
        let k = control.as_mut().map_or(0, |control| control.next(request.drafts, context_left, wanted));
        let drafts = if k > 0 { model.draft(seq, next, k)? } else { Vec::new() };
        if k == 0 {
            model.skip_mtp(seq);
        }
        let first_position = seq.len() + 1;
        let logits = model.logits(&model.forward(seq, &[&[next], drafts.as_slice()].concat(), None)?);
        stats.rounds += 1;
        stats.drafted += drafts.len();

        let mut accepted = 0;
        let mut finish = None;
        loop {
            next = match draw(logits.row(accepted), &request.sampling, first_position + accepted) {
                Ok(token) => token,
                // Past the end of the answer only the count of accepted drafts is at stake.
                Err(_) if finish.is_some() => break,
                Err(error) => return Err(error),
            };
            if drafts.get(accepted) != Some(&next) {
                break;
            }
            accepted += 1;
            if finish.is_none() {
                finish = answer.push(next, on_event);
            }
        }
        stats.accepted += accepted;
        if let Some(control) = &mut control {
            let seconds = started.elapsed().as_secs_f64();
            control.observe(Round { drafted: drafts.len(), accepted, seconds });
        }
        if let Some(finish) = finish {
            return Ok(finish);
        }
        if accepted < drafts.len() {
            model.truncate(seq, first_position + accepted);
        }
    }
}
