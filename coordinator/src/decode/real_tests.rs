//! The generation loop and scoring on real models: the oracle's tiny MTP model, the demo model, OLMoE.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use shimmer_common::container::Container;
use shimmer_common::experts::LocalStore;
use shimmer_common::kernels::Kernels;
use shimmer_common::profile::NumericProfile;

use super::score::{ScoreOptions, score};
use super::*;
use crate::model::{TraceLevel, load};

const POLICIES: [DraftPolicy; 4] =
    [DraftPolicy::Off, DraftPolicy::Fixed(1), DraftPolicy::Fixed(3), DraftPolicy::Auto];

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

fn engine(name: &str) -> Engine {
    let container = Container::open(&[data(name)]).unwrap();
    let kernels = Kernels::best();
    let experts = LocalStore::new(container.experts(), kernels, NumericProfile::default(), 64 << 20).unwrap();
    let model = load(&container, kernels, Arc::new(experts), &mut |_, _| {}).unwrap();
    let text = TextModel::open(&data(name), model.info().vocab_size).unwrap();
    Engine { model, text: Arc::new(text) }
}

fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(path)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn request(prompt: Vec<u32>, max_tokens: usize, drafts: DraftPolicy) -> GenerateRequest {
    let sampling = SamplingParams::greedy();
    GenerateRequest {
        prompt,
        sampling,
        max_tokens,
        stop_ids: Vec::new(),
        stop_strings: Vec::new(),
        drafts,
        prefill_chunk: 7,
    }
}

fn generate(engine: &Engine, request: &GenerateRequest) -> Generation {
    engine.generate(request, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn greedy_speculation_counts_like_the_oracle() {
    for case in ["tiny-mtp", "tiny-mtp-fp8"] {
        let engine = engine(case);
        let meta = json(&format!("{case}/expected/meta.json"));
        let expected = ids(&meta["greedy_ids"]);
        for (k, reference) in meta["spec_greedy"].as_object().unwrap() {
            let drafts = DraftPolicy::Fixed(k.parse().unwrap());
            let found = generate(&engine, &request(ids(&meta["prompt_ids"]), expected.len(), drafts));
            assert_eq!(found.ids, expected, "{case}, {k} drafts");
            let count = |key: &str| reference[key].as_u64().unwrap() as usize;
            let rounds = reference["rounds"].as_array().unwrap().len();
            let stats = found.stats;
            assert_eq!(
                (stats.rounds, stats.drafted, stats.accepted),
                (rounds, count("drafted"), count("accepted"))
            );
        }
    }
}

#[test]
fn drafts_and_chunks_do_not_change_a_real_answer() {
    for (case, stop_strings) in
        [("tiny-mtp", vec![]), ("demo-model", vec!["fox".to_owned()]), ("tiny-olmoe", vec![])]
    {
        let engine = engine(case);
        let prompt = if case == "demo-model" {
            engine
                .text
                .encode("[gMASK]<sop><|user|>Tell me a story about a fox.<|assistant|></think>")
                .unwrap()
        } else {
            ids(&json(&format!("{case}/expected/meta.json"))["prompt_ids"])
        };
        let mut seen = Vec::new();
        for temperature in [0.0, 0.8] {
            let sampling = SamplingParams { temperature, top_p: 0.95, seed: 42, ..SamplingParams::greedy() };
            let base = GenerateRequest {
                sampling,
                stop_strings: stop_strings.clone(),
                ..request(prompt.clone(), 48, DraftPolicy::Off)
            };
            let expected = generate(&engine, &base);
            let mut session = Session::new();
            for (drafts, prefill_chunk) in POLICIES.into_iter().zip([1, 64, 5, 0]) {
                let request = GenerateRequest { drafts, prefill_chunk, ..base.clone() };
                let fresh = generate(&engine, &request);
                // The second time the whole prompt but its last token is cached.
                let kept = session.generate(&engine, &request, &mut |_| ControlFlow::Continue(())).unwrap();
                for found in [&fresh, &kept] {
                    assert_eq!(found.ids, expected.ids, "{case} at {temperature}: {drafts:?}");
                    assert_eq!((&found.text, &found.finish), (&expected.text, &expected.finish));
                }
                let may_draft = drafts != DraftPolicy::Off && engine.model.info().has_mtp;
                assert_eq!(
                    fresh.stats.drafted > 0,
                    may_draft && expected.ids.len() > 2,
                    "{case}: {drafts:?}"
                );
            }
            seen.push(expected.ids);
        }
        assert_ne!(seen[0], seen[1], "{case}: sampling must differ from argmax somewhere");
    }
}

#[test]
fn the_demo_model_answers_as_recorded() {
    let engine = engine("demo-model");
    for (name, case) in json("demo-model/expected/prompts.json").as_object().unwrap() {
        let expected = ids(&case["greedy_ids"]);
        let found =
            generate(&engine, &request(ids(&case["prompt_ids"]), expected.len(), DraftPolicy::Fixed(2)));
        assert_eq!(found.ids, expected, "{name}");
        assert!(found.stats.accepted > 0, "{name}: {:?}", found.stats);
    }
}

#[test]
fn a_conversation_continues_in_its_caches() {
    let engine = engine("demo-model");
    let mut session = Session::new();
    let mut prompt =
        engine.text.encode("[gMASK]<sop><|user|>What is the capital of Spain?<|assistant|></think>").unwrap();
    let mut reused = 0;
    for (drafts, turn) in
        [(DraftPolicy::Fixed(3), "And of France?"), (DraftPolicy::Off, "Of Italy?"), (DraftPolicy::Auto, "")]
    {
        let request =
            GenerateRequest { stop_ids: engine.text.stop_ids(&[]), ..request(prompt.clone(), 24, drafts) };
        let kept = session.generate(&engine, &request, &mut |_| ControlFlow::Continue(())).unwrap();
        let fresh = generate(&engine, &request);
        assert_eq!((&kept.ids, &kept.text, &kept.finish), (&fresh.ids, &fresh.text, &fresh.finish));
        reused += kept.stats.reused_tokens;
        prompt.extend(kept.ids);
        prompt.extend(engine.text.encode(&format!("{turn}<|assistant|></think>")).unwrap());
    }
    assert!(reused > 20, "{reused}");
}

#[test]
fn scores_are_the_same_bits_with_drafts_and_chunks() {
    for case in ["tiny-mtp", "tiny-olmoe"] {
        let engine = engine(case);
        let meta = json(&format!("{case}/expected/meta.json"));
        // A greedy continuation, so that some drafts are right.
        let given = [ids(&meta["prompt_ids"]), ids(&meta["greedy_ids"])].concat();
        let mut runs = Vec::new();
        for (prefill_chunk, drafts) in [(0, 0), (1, 0), (7, 0), (0, 1), (0, 3)] {
            let options = ScoreOptions { prefill_chunk, drafts, trace: Some(TraceLevel::Score) };
            let mut bits: Vec<u32> = Vec::new();
            let scored = score(engine.model.as_ref(), &given, options, &mut |rows| {
                bits.extend(rows.data.iter().map(|x| x.to_bits()));
                ControlFlow::Continue(())
            });
            let scored = scored.unwrap();
            assert_eq!(bits.len(), given.len() * engine.model.info().vocab_size);
            assert_eq!(scored.accepted > 0, drafts > 0 && engine.model.info().has_mtp);
            runs.push((bits, scored.trace.unwrap().tensors, scored.nll_sum.to_bits()));
        }
        assert_eq!(runs[0].1.contains_key("mtp_logits"), engine.model.info().has_mtp);
        for run in &runs[1..] {
            assert!(run == &runs[0], "{case}");
        }
    }
}
