//! Drafting: chains from given prefixes, and the whole greedy speculative loop.

use super::*;
use crate::model::trace::{Recorder, Scope, Trace, TraceLevel, TraceTensor};

const CASES: [&str; 2] = ["tiny-mtp", "tiny-mtp-fp8"];

#[test]
fn chained_drafts_match_the_reference_with_shared_and_with_recomputed_selections() {
    for case in CASES {
        let meta = json(&data(case).join("expected/meta.json"));
        let want = expected(&data(case).join("expected/expected.safetensors"));
        let tokens = [ids(&meta["prompt_ids"]), ids(&meta["greedy_ids"])].concat();
        let mut errors = Errors::default();
        for (mode, share) in [("union", true), ("recompute", false)] {
            let mut model = load_glm(case, None);
            model.config.index_share_for_mtp_iteration = share;
            for chain in meta["mtp_chains"].as_array().unwrap() {
                let (n, k) =
                    (chain["n_processed"].as_u64().unwrap() as usize, chain["k"].as_u64().unwrap() as usize);
                let mut seq = model.new_sequence(true);
                model.forward(&mut seq, &tokens[..n], None).unwrap();
                let mut trace = Trace::new(TraceLevel::Full);
                let mut recorder = Recorder::new(Some(&mut trace), Scope::Mtp);
                let drafts = model.mtp_draft(&mut seq, tokens[n], k, &mut recorder).unwrap();
                assert_eq!(drafts, ids(&chain[mode]["tokens"]), "{case} {mode} after {n} tokens");

                let mtp = seq.mtp.as_ref().unwrap();
                assert_eq!((mtp.cache.len(), mtp.cache.indexer_keys.rows()), (n, n), "scratch rows are gone");
                let selected = mtp.newest.as_ref().unwrap().selected.as_ref().unwrap();
                assert_eq!(*selected, ids(&chain[mode]["selected"][0]));
                let TraceTensor::I32 { rows } = &trace.tensors["mtp_index_topk"] else { panic!("kind") };
                assert_eq!(rows.len(), n + k - 1);
                for (j, row) in rows[n..].iter().enumerate() {
                    let row: Vec<u32> = row.iter().map(|&p| p as u32).collect();
                    assert_eq!(row, ids(&chain[mode]["selected"][j + 1]), "{case} {mode} step {j}");
                }
                if let Some(want) = want.get(&format!("mtp.chain{n}.{mode}.logits")) {
                    let TraceTensor::F32 { width, data } = &trace.tensors["mtp_logits"] else {
                        panic!("kind")
                    };
                    errors.close("chain", mode, &data[(n - 1) * width..], &want.f32s);
                }
            }
        }
        assert!(!errors.0.is_empty());
        errors.report(case);
    }
}

/// Draft, verify, keep what was right, roll back the rest; compares every round.
fn check_speculation(model: &dyn LanguageModel, prompt: &[u32], want: &[u32], k: usize, rounds: &[Value]) {
    let mut seq = model.new_sequence(true);
    let hidden = model.forward(&mut seq, prompt, None).unwrap();
    let mut emitted = vec![argmax_rows(&model.logits(&hidden))[prompt.len() - 1]];
    for round in rounds {
        let n = seq.len();
        assert_eq!(n as u64, round["n_processed"].as_u64().unwrap());
        let next = emitted[emitted.len() - 1];
        let drafts = model.draft(&mut seq, next, k).unwrap();
        assert_eq!(drafts, ids(&round["drafts"]), "drafts after {n} tokens");

        let hidden = model.forward(&mut seq, &[&[next], &drafts[..]].concat(), None).unwrap();
        let target = argmax_rows(&model.logits(&hidden));
        let accepted = drafts.iter().zip(&target).take_while(|(draft, token)| draft == token).count();
        assert_eq!(accepted as u64, round["accepted"].as_u64().unwrap(), "accepted after {n} tokens");
        assert_eq!(target[..=accepted], ids(&round["emitted"]), "emitted after {n} tokens");
        emitted.extend(&target[..=accepted]);
        model.truncate(&mut seq, n + 1 + accepted);
    }
    assert_eq!(emitted[..want.len()], *want);
}

#[test]
fn every_round_of_the_speculative_loop_matches_the_reference() {
    for case in CASES {
        let model = load(case);
        let meta = json(&data(case).join("expected/meta.json"));
        for k in 1..=4 {
            let rounds = meta["spec_greedy"][k.to_string()]["rounds"].as_array().unwrap();
            let (prompt, want) = (ids(&meta["prompt_ids"]), ids(&meta["greedy_ids"]));
            check_speculation(&*model, &prompt, &want, k, rounds);
        }
    }
}

#[test]
fn drafts_depend_on_the_tokens_and_not_on_how_the_rows_were_fed() {
    let model = load("tiny-mtp");
    let meta = json(&data("tiny-mtp").join("expected/meta.json"));
    let (prompt, next) = (ids(&meta["prompt_ids"]), ids(&meta["greedy_ids"])[0]);
    let fresh = |next: u32| {
        let mut seq = model.new_sequence(true);
        model.forward(&mut seq, &prompt, None).unwrap();
        model.draft(&mut seq, next, 3).unwrap()
    };
    let other = (next + 1) % 700;

    let mut seq = model.new_sequence(true);
    for tokens in prompt.chunks(7) {
        model.forward(&mut seq, tokens, None).unwrap();
        model.extend_mtp(&mut seq, None, None).unwrap();
    }
    assert_eq!(model.draft(&mut seq, next, 3).unwrap(), fresh(next), "chunked prompt");
    assert_eq!(model.draft(&mut seq, next, 3).unwrap(), fresh(next), "drafting twice");
    assert_eq!(model.draft(&mut seq, other, 3).unwrap(), fresh(other), "another successor");
    assert_eq!(model.draft(&mut seq, next, 1).unwrap(), fresh(next)[..1], "a shorter draft");

    // The sequence goes on with another token than the one the newest row consumed.
    model.forward(&mut seq, &[other], None).unwrap();
    let mut plain = model.new_sequence(true);
    model.forward(&mut plain, &[&prompt[..], &[other]].concat(), None).unwrap();
    assert_eq!(model.draft(&mut seq, next, 3).unwrap(), model.draft(&mut plain, next, 3).unwrap());
}

#[test]
fn nothing_is_drafted_without_mtp_or_right_after_a_cut() {
    let model = load("tiny-mtp");
    let mut without = model.new_sequence(false);
    model.forward(&mut without, &[1, 2, 3], None).unwrap();
    assert!(model.draft(&mut without, 4, 3).unwrap().is_empty());
    model.extend_mtp(&mut without, None, None).unwrap();

    let mut seq = model.new_sequence(true);
    assert!(model.draft(&mut seq, 4, 3).unwrap().is_empty(), "an empty sequence");
    model.forward(&mut seq, &[1, 2, 3, 4], None).unwrap();
    model.draft(&mut seq, 5, 2).unwrap();
    model.truncate(&mut seq, 2);
    assert!(model.draft(&mut seq, 3, 2).unwrap().is_empty());
    model.forward(&mut seq, &[3], None).unwrap();
    assert_eq!(model.draft(&mut seq, 4, 2).unwrap().len(), 2);
}

#[test]
fn a_long_time_without_drafts_leaves_a_short_backlog_and_drafts_go_on() {
    let model = load("tiny-mtp");
    let vocab = model.info().vocab_size as u32;
    let tokens: Vec<u32> = (0..100).map(|i| i * 7 % vocab).collect();
    let mut seq = model.new_sequence(true);
    model.forward(&mut seq, &tokens[..5], None).unwrap();
    assert_eq!(model.draft(&mut seq, tokens[5], 2).unwrap().len(), 2);
    for token in &tokens[5..] {
        model.forward(&mut seq, &[*token], None).unwrap();
        model.skip_mtp(&mut seq);
    }
    assert_eq!(seq.len(), tokens.len());
    let mtp = seq.mtp.as_ref().unwrap();
    assert!(mtp.base > 0 && mtp.pending.rows() <= 64, "{} rows wait from {}", mtp.pending.rows(), mtp.base);
    assert_eq!(mtp.base + mtp.cache.len() + mtp.pending.rows(), seq.len());
    assert_eq!(model.draft(&mut seq, 1, 2).unwrap().len(), 2);
    assert_eq!(seq.mtp.as_ref().unwrap().pending.rows(), 0);

    // Cut to before the rows that are kept: drafting starts anew from there.
    model.truncate(&mut seq, 10);
    assert!(model.draft(&mut seq, 1, 2).unwrap().is_empty());
    model.forward(&mut seq, &[1], None).unwrap();
    assert_eq!(model.draft(&mut seq, 2, 2).unwrap().len(), 2);
    let mut plain = model.new_sequence(false);
    model.forward(&mut plain, &[&tokens[..10], &[1]].concat(), None).unwrap();
    assert!(model.forward(&mut seq, &[2], None).unwrap() == model.forward(&mut plain, &[2], None).unwrap());
}
