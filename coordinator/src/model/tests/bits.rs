//! Bit equality: chunking, roll-back, instruction sets (architecture.md, rules N1–N7).

use shimmer_common::kernels::Isa;

use super::*;
use crate::model::trace::{Trace, TraceTensor};

const CASES: [&str; 6] =
    ["tiny-dense-index", "tiny-sparse", "tiny-groups", "tiny-mtp-fp8", "tiny-olmoe", "colibri-container"];

/// Some 48 tokens of the case's vocabulary.
fn some_tokens(model: &dyn LanguageModel) -> Vec<u32> {
    (0..48u32).map(|i| (i * i * 31 + 7 * i + 3) % model.info().vocab_size as u32).collect()
}

/// Logits and MTP logits of `tokens`, processed in chunks.
fn run(model: &dyn LanguageModel, tokens: &[u32], chunk: usize) -> (Vec<f32>, Option<TraceTensor>) {
    let mut trace = Trace::default();
    let mut seq = model.new_sequence(true);
    let mut logits = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let hidden = model.forward(&mut seq, tokens, Some(&mut trace)).unwrap();
        model.extend_mtp(&mut seq, None, Some(&mut trace)).unwrap();
        logits.extend(model.logits(&hidden).data);
    }
    (logits, trace.tensors.remove("mtp_logits"))
}

#[test]
fn chunks_of_any_size_give_the_same_bits() {
    for case in CASES {
        let model = load(case);
        let tokens = some_tokens(&*model);
        let whole = run(&*model, &tokens, usize::MAX);
        assert_eq!(whole.1.is_some(), model.info().has_mtp);
        for chunk in [1, 7, 64] {
            assert!(run(&*model, &tokens, chunk) == whole, "{case}: chunks of {chunk}");
        }
    }
}

#[test]
fn a_truncated_sequence_goes_on_as_if_nothing_had_followed() {
    for case in CASES {
        let model = load(case);
        let tokens = some_tokens(&*model);
        let mut straight = model.new_sequence(true);
        model.forward(&mut straight, &tokens, None).unwrap();

        let mut cut = model.new_sequence(true);
        model.forward(&mut cut, &tokens[..20], None).unwrap();
        let wrong: Vec<u32> = tokens[..12].iter().rev().copied().collect();
        model.forward(&mut cut, &wrong, None).unwrap();
        model.truncate(&mut cut, 20);
        model.forward(&mut cut, &tokens[20..], None).unwrap();
        assert_eq!(cut.tokens(), tokens);
        assert!(cut.layers.iter().zip(&straight.layers).all(|(a, b)| a.kv == b.kv), "{case}: caches");
        assert!(cut.layers.iter().zip(&straight.layers).all(|(a, b)| a.indexer_keys == b.indexer_keys));
        let next = |seq: &mut Sequence| model.logits(&model.forward(seq, &tokens[..1], None).unwrap());
        assert!(next(&mut cut) == next(&mut straight), "{case}");
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let reference = Kernels::new(Isa::Portable).unwrap();
    for case in ["tiny-mtp", "tiny-mtp-fp8", "tiny-olmoe", "colibri-container"] {
        let portable = load_with(case, reference);
        let tokens = some_tokens(&*portable);
        let want = run(&*portable, &tokens, usize::MAX);
        for isa in Isa::available() {
            let model = load_with(case, Kernels::new(isa).unwrap());
            assert!(run(&*model, &tokens, 9) == want, "{case}: {isa:?}");
        }
    }
}

#[test]
fn one_thread_gives_the_same_bits_as_many() {
    let model = load("demo-model");
    let tokens = some_tokens(&*model);
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let run_on = |threads| pool(threads).install(|| run(&*model, &tokens, usize::MAX));
    assert!(run_on(1) == run_on(3));
}
