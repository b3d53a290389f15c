//! Containers and configurations the recorded cases do not have.

use tempfile::TempDir;

use super::*;
use crate::model::trace::{Trace, TraceLevel, TraceTensor};

/// A copy of `case` without `left_out`, its config changed by the JSON object `changes`.
fn variant(case: &str, left_out: &str, changes: Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(data(case)).unwrap().map(Result::unwrap) {
        let name = file.file_name().into_string().unwrap();
        if name.ends_with(".safetensors") && name != left_out {
            std::fs::copy(file.path(), dir.path().join(name)).unwrap();
        }
    }
    let mut config = json(&data(case).join("config.json"));
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn f32s<'a>(trace: &'a Trace, name: &str) -> (usize, &'a [f32]) {
    match &trace.tensors[name] {
        TraceTensor::F32 { width, data } => (*width, data),
        other => panic!("{name} is {other:?}"),
    }
}

#[test]
fn without_an_indexer_attention_is_dense_in_every_layer() {
    let run = |dir: &Path| {
        let model = load_dir(dir, Kernels::best());
        let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 90).collect();
        let mut seq = model.new_sequence(true);
        let hidden = model.forward(&mut seq, &tokens, None).unwrap();
        let drafts = model.draft(&mut seq, 5, 3).unwrap();
        (model.info().cache_bytes_per_token, hidden, drafts)
    };
    let (with_bytes, with, with_drafts) = run(&data("colibri-container"));
    let dense = variant("colibri-container", "out-idx-00000.safetensors", serde_json::json!({}));
    let (bytes, hidden, drafts) = run(dense.path());
    // 40 tokens are fewer than index_topk: the selection keeps everything.
    assert!(hidden == with);
    assert_eq!(drafts, with_drafts);
    assert_eq!(with_bytes - bytes, 16 * 4, "no indexer keys are cached");

    // Beyond index_topk the selection does matter.
    let narrow = variant("colibri-container", "", serde_json::json!({"index_topk": 8}));
    assert!(run(narrow.path()).1 != with);
}

#[test]
fn tied_embeddings_are_the_output_head() {
    let dir = variant("tiny-sparse", "", serde_json::json!({"tie_word_embeddings": true}));
    let model = load_dir(dir.path(), Kernels::best());
    let embed = container("tiny-sparse").load_matrix("model.embed_tokens.weight").unwrap();
    let mut hidden = Rows::zeroed(1, model.info().hidden_size);
    hidden.data[3] = 1.0;
    let mut row = vec![0.0; embed.cols];
    let logits = model.logits(&hidden);
    for id in [0, 5, 767] {
        embed.view().decode_row(id, &mut row);
        assert_eq!(logits.data[id], row[3]);
    }
}

#[test]
fn an_mtp_head_of_its_own_is_used() {
    let dir = variant("tiny-mtp", "", serde_json::json!({}));
    let model = load_dir(dir.path(), Kernels::best());
    let draft = |model: &dyn LanguageModel| {
        let mut seq = model.new_sequence(true);
        model.forward(&mut seq, &[1, 2, 3, 4], None).unwrap();
        model.draft(&mut seq, 5, 3).unwrap()
    };
    assert_ne!(draft(&*model), [0, 0, 0]);

    let bytes = 768 * 144 * 4;
    let header = serde_json::json!({"model.layers.4.shared_head.head.weight":
        {"dtype": "F32", "shape": [768, 144], "data_offsets": [0, bytes]}});
    let header = header.to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; bytes]].concat();
    std::fs::write(dir.path().join("own-head.safetensors"), file).unwrap();
    let model = load_dir(dir.path(), Kernels::best());
    assert_eq!(draft(&*model), [0, 0, 0], "all logits are 0, ties go to the lowest id");
}

#[test]
fn olmoe_clips_and_normalises_when_the_config_says_so() {
    let changes = serde_json::json!({"clip_qkv": 0.25, "norm_topk_prob": true});
    let dir = variant("tiny-olmoe", "", changes);
    let model = load_dir(dir.path(), Kernels::best());
    let mut trace = Trace::new(TraceLevel::Full);
    model.forward(&mut model.new_sequence(false), &[1, 2, 3], Some(&mut trace)).unwrap();
    let (_, values) = f32s(&trace, "v_cache.0");
    assert!(values.iter().all(|v| v.abs() <= 0.25) && values.iter().any(|v| v.abs() == 0.25));
    let (k, weights) = f32s(&trace, "router_weights.0");
    assert!(weights.chunks(k).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));
}
