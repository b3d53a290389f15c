//! The generation loop on a scripted model: whatever is drafted, chunked, cached or cut, the answer is the same.

use std::ops::ControlFlow;

use super::fake::{self, FakeModel, NAN, VOCAB};
use super::philox::philox4x32;
use super::score::{ScoreOptions, score};
use super::*;
use crate::model::{ModelError, TraceLevel, TraceTensor};

const POLICIES: [DraftPolicy; 6] = [
    DraftPolicy::Off,
    DraftPolicy::Fixed(0),
    DraftPolicy::Fixed(1),
    DraftPolicy::Fixed(3),
    DraftPolicy::Fixed(8),
    DraftPolicy::Auto,
];

struct Random(u32);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 += 1;
        philox4x32([self.0, 0, 0, 0], [1, 2])[0] as usize % n
    }

    fn ids(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(700) as u32).collect()
    }
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 0.8, top_k: 0, top_p: 0.95, min_p: 0.0, seed }
}

/// What must not depend on drafts, chunks and sessions.
#[derive(Debug, PartialEq)]
struct Outcome {
    ids: Vec<u32>,
    text: String,
    finish: FinishReason,
}

/// Runs a request and checks its events against its result.
fn run(session: &mut Session, engine: &Engine, request: &GenerateRequest) -> (Outcome, GenerateStats) {
    let (mut ids, mut text, mut prefilled) = (Vec::new(), String::new(), None);
    let generation = session
        .generate(engine, request, &mut |event| {
            match event {
                Event::Prefill { done, total } => {
                    assert!(prefilled < Some(done) && done <= total && total == request.prompt.len());
                    prefilled = Some(done);
                }
                Event::Token { id, text: piece } => {
                    ids.push(id);
                    text += &piece;
                }
                Event::Tail { text: piece } => {
                    assert!(!piece.is_empty());
                    text += &piece;
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((&generation.ids, &generation.text), (&ids, &text));
    let stats = generation.stats;
    assert_eq!(stats.generated_tokens, ids.len());
    assert_eq!(stats.prompt_tokens, request.prompt.len());
    let kept = [request.prompt.as_slice(), &ids[..ids.len().saturating_sub(1)]].concat();
    if !ids.is_empty() {
        assert_eq!(session.tokens(), kept);
    }
    (Outcome { ids, text, finish: generation.finish }, stats)
}

/// Runs a request under every draft policy and several chunks, and checks that the outcome is always the same.
fn run_all_ways(engine: &Engine, request: &GenerateRequest) -> Outcome {
    let (expected, plain) = run(&mut Session::new(), engine, request);
    assert_eq!((plain.drafted, plain.rounds), (0, expected.ids.len().saturating_sub(1)));
    for drafts in POLICIES {
        for prefill_chunk in [1, 3, 64] {
            let request = GenerateRequest { drafts, prefill_chunk, ..request.clone() };
            let (outcome, stats) = run(&mut Session::new(), engine, &request);
            assert_eq!(outcome, expected, "{drafts:?}, chunks of {prefill_chunk}");
            assert!(stats.accepted <= stats.drafted && stats.rounds <= plain.rounds);
        }
    }
    expected
}

#[test]
fn drafts_and_chunks_do_not_change_the_answer() {
    let mut random = Random(0);
    let (mut drafted, mut accepted) = (0, 0);
    for seed in 0..6 {
        let engine = fake::engine(FakeModel::new(seed, 500, true));
        let request = fake::request(&random.ids(1 + seed as usize * 5), 40);
        let greedy = run_all_ways(&engine, &request);
        assert_eq!((greedy.ids.len(), &greedy.finish), (40, &FinishReason::Length));
        let request = GenerateRequest { sampling: sampled(seed), ..request };
        assert_ne!(run_all_ways(&engine, &request).ids, greedy.ids);

        let request = GenerateRequest { drafts: DraftPolicy::Fixed(2), ..request };
        let stats = run(&mut Session::new(), &engine, &request).1;
        drafted += stats.drafted;
        accepted += stats.accepted;
    }
    assert!(accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
}

#[test]
fn a_model_without_mtp_never_drafts() {
    let engine = fake::engine(FakeModel::new(1, 500, false));
    for drafts in POLICIES {
        let request = GenerateRequest { drafts, ..fake::request(&[1, 2, 3], 10) };
        assert_eq!(run(&mut Session::new(), &engine, &request).1.drafted, 0);
    }
}

#[test]
fn stop_ids_end_the_answer_and_are_not_text() {
    let engine = fake::engine(FakeModel::new(3, 500, true));
    for sampling in [SamplingParams::greedy(), sampled(4)] {
        let request = GenerateRequest { sampling, ..fake::request(&[5, 6], 30) };
        let whole = run_all_ways(&engine, &request);
        for &id in whole.ids.iter().step_by(4) {
            let first = whole.ids.iter().position(|&other| other == id).unwrap();
            let outcome =
                run_all_ways(&engine, &GenerateRequest { stop_ids: vec![9999, id], ..request.clone() });
            assert_eq!(outcome.ids, whole.ids[..=first]);
            assert_eq!(outcome.finish, FinishReason::StopId(id));
            assert_eq!(outcome.text, engine.text.decode(&whole.ids[..first], true));
        }
    }
}

#[test]
fn stop_strings_are_exact_across_tokens() {
    let mut random = Random(100);
    let mut hits = 0;
    for seed in 0..12 {
        let engine = fake::engine(FakeModel::new(seed, 500, true));
        let sampling = if seed % 2 == 0 { SamplingParams::greedy() } else { sampled(seed) };
        let request = GenerateRequest { sampling, ..fake::request(&random.ids(4), 30) };
        let (whole, _) = run(&mut Session::new(), &engine, &request);
        let characters: Vec<char> = whole.text.chars().collect();
        for _ in 0..4 {
            let mut piece = || {
                let start = random.below(characters.len());
                characters.iter().skip(start).take(1 + random.below(9)).collect::<String>()
            };
            let stop_strings = vec![piece(), piece(), "never in the text".into(), String::new()];
            let outcome = run_all_ways(
                &engine,
                &GenerateRequest { stop_strings: stop_strings.clone(), ..request.clone() },
            );

            // The definition: read the text character by character; the longest string complete first wins.
            let end = (0..=whole.text.len())
                .filter(|&end| whole.text.is_char_boundary(end))
                .find(|&end| stop_strings[..2].iter().any(|stop| whole.text[..end].ends_with(stop.as_str())))
                .unwrap();
            let stop = stop_strings[..2].iter().filter(|stop| whole.text[..end].ends_with(stop.as_str()));
            let stop = stop.max_by_key(|stop| stop.len()).unwrap();
            assert_eq!(outcome.finish, FinishReason::StopString(stop.clone()));
            assert_eq!(outcome.text, whole.text[..end - stop.len()]);
            assert_eq!(outcome.ids, whole.ids[..outcome.ids.len()]);
            hits += usize::from(outcome.ids.len() < whole.ids.len());
        }
    }
    assert!(hits > 20, "{hits}");
}

#[test]
fn held_back_text_is_emitted_at_the_end() {
    let engine = fake::engine(FakeModel::new(3, 500, true));
    let whole = run_all_ways(&engine, &fake::request(&[5, 6], 20));
    // The text's end is the beginning of this stop string, so it is held back until the answer is over.
    let tail: String = whole.text.chars().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect();
    let stop_strings = vec![tail + "never"];
    let outcome = run_all_ways(&engine, &GenerateRequest { stop_strings, ..fake::request(&[5, 6], 20) });
    assert_eq!(outcome, whole);
}

#[test]
fn the_context_ends_the_answer() {
    let engine = fake::engine(FakeModel::new(2, 20, true));
    let prompt = [1; 14];
    let outcome = run_all_ways(&engine, &fake::request(&prompt, 100));
    assert_eq!((outcome.ids.len(), outcome.finish), (6, FinishReason::Length));
    let nothing = run_all_ways(&engine, &fake::request(&[1; 20], 100));
    assert_eq!((nothing.ids.len(), nothing.finish), (0, FinishReason::Length));
    assert_eq!(run_all_ways(&engine, &fake::request(&prompt, 0)).ids, [0; 0]);

    let too_long = engine.generate(&fake::request(&[1; 21], 1), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(
        too_long,
        Err(DecodeError::Model(ModelError::ContextExceeded { wanted: 21, limit: 20 }))
    ));
}

#[test]
fn a_session_reuses_the_common_prefix() {
    let mut random = Random(7);
    let engine = fake::engine(FakeModel::new(11, 500, true));
    let mut session = Session::new();
    let mut history = random.ids(12);
    let mut reused = 0;
    for turn in 0..8 {
        let mut request = fake::request(&history, 10);
        request.drafts = POLICIES[turn % POLICIES.len()];
        request.sampling = sampled(turn as u64);
        let (outcome, stats) = run(&mut session, &engine, &request);
        assert_eq!(outcome, run(&mut Session::new(), &engine, &request).0, "turn {turn}");
        reused += stats.reused_tokens;
        match turn {
            // The same prompt again: all but its last token is there.
            3 => {}
            // An edited earlier message.
            5 => history[4] ^= 1,
            _ => history.extend(outcome.ids),
        }
        history.extend(random.ids(if turn == 3 { 0 } else { 3 }));
    }
    assert!(reused > 100, "{reused}");
}

#[test]
fn the_receiver_may_stop_anywhere() {
    let engine = fake::engine(FakeModel::new(5, 500, true));
    let whole = run_all_ways(&engine, &fake::request(&[1, 2, 3, 4], 12));
    for drafts in POLICIES {
        let request = GenerateRequest { drafts, prefill_chunk: 2, ..fake::request(&[1, 2, 3, 4], 12) };
        // Before, between and after two prefill steps, and after each of twelve tokens.
        for last in 1..=14 {
            let mut session = Session::new();
            let mut events = 0;
            let generation = session.generate(&engine, &request, &mut |event| {
                events += usize::from(!matches!(event, Event::Tail { .. }));
                if events < last { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            let generation = generation.unwrap();
            assert_eq!(generation.finish, FinishReason::Cancelled);
            assert_eq!(events, last);
            assert_eq!(generation.ids, whole.ids[..last.saturating_sub(3)]);
            // The session goes on as if nothing had happened.
            assert_eq!(run(&mut session, &engine, &request).0, whole);
        }
    }
}

#[test]
fn bad_requests_and_damaged_models_are_errors() {
    let engine = fake::engine(FakeModel::new(5, 500, true));
    let fails =
        |request: GenerateRequest| engine.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(fails(fake::request(&[], 5)), DecodeError::EmptyPrompt));
    let mut request = fake::request(&[1], 5);
    request.sampling.temperature = f64::NAN;
    assert!(fails(request.clone()).to_string().contains("temperature"));
    request.sampling = SamplingParams { top_p: 1.5, ..SamplingParams::greedy() };
    assert!(fails(request.clone()).to_string().contains("top_p is 1.5"));
    request.sampling = SamplingParams { min_p: -0.1, ..SamplingParams::greedy() };
    assert!(fails(request).to_string().contains("min_p"));
    for sampling in [SamplingParams::greedy(), sampled(1)] {
        let request = GenerateRequest { sampling, ..fake::request(&[2, NAN[0], NAN[1]], 5) };
        assert!(matches!(fails(request), DecodeError::NotFinite { position: 3 }));
    }
}

#[test]
fn scoring_gives_the_same_bits_with_drafts_and_chunks() {
    let model = FakeModel::new(9, 500, true);
    let engine = fake::engine(FakeModel::new(9, 500, true));
    // A greedy continuation, so that drafts are accepted, with a few disturbed ids.
    let request = fake::request(&[3, 1, 4], 60);
    let mut ids = [request.prompt.clone(), run(&mut Session::new(), &engine, &request).0.ids].concat();
    ids[20] = 77;
    ids[41] = 78;
    let mut outcomes = Vec::new();
    let mut accepted = 0;
    for (prefill_chunk, drafts) in [(0, 0), (1, 0), (7, 0), (0, 1), (5, 3), (0, 8)] {
        let options = ScoreOptions { prefill_chunk, drafts, trace: Some(TraceLevel::Score) };
        let mut logits = Vec::new();
        let scored = score(&model, &ids, options, &mut |rows| {
            logits.extend(rows.data.iter().map(|x| x.to_bits()));
            ControlFlow::Continue(())
        });
        let scored = scored.unwrap();
        assert_eq!((scored.rows, scored.scored, logits.len()), (63, 62, 63 * VOCAB));
        let trace = scored.trace.unwrap();
        let TraceTensor::F32 { data, .. } = &trace.tensors["hidden.0"] else { panic!("kind") };
        outcomes.push((logits, data.clone(), scored.nll_sum.to_bits()));
        assert!(scored.accepted <= scored.drafted);
        accepted += scored.accepted;
    }
    assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]));
    assert!(accepted > 0);
}

#[test]
fn likelihoods_are_those_of_the_softmax() {
    let model = FakeModel::new(9, 500, false);
    let mut probabilities = Vec::new();
    let ids = [1, 2, 3];
    let scored = score(&model, &ids, ScoreOptions::default(), &mut |rows| {
        let one = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
        for (i, &id) in ids.iter().enumerate().skip(1) {
            let p = sampling::process(rows.row(i - 1), &one).unwrap().probabilities(VOCAB);
            probabilities.push(p[id as usize]);
        }
        ControlFlow::Continue(())
    });
    let scored = scored.unwrap();
    let expected: f64 = probabilities.iter().map(|p| -p.ln()).sum();
    assert!((scored.nll_sum - expected).abs() < 1e-9);
    assert!((scored.perplexity().unwrap() - (expected / 2.0).exp()).abs() < 1e-6);
    let alone = score(&model, &[1], ScoreOptions::default(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((alone.rows, alone.mean_nll()), (1, None));

    let damaged =
        score(&model, &[NAN[0], NAN[1], 2], ScoreOptions::default(), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(damaged, Err(DecodeError::NotFinite { position: 2 })));
    assert!(score(&model, &[], ScoreOptions::default(), &mut |_| ControlFlow::Continue(())).is_err());
    let unknown = score(&model, &[1, 768], ScoreOptions::default(), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(
        unknown,
        Err(DecodeError::Model(ModelError::UnknownToken { id: 768, vocab_size: VOCAB }))
    ));
}
