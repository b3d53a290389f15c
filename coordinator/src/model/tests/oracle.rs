//! Every oracle case: all recorded vectors, teacher-forced and greedy tokens.

use super::*;
use crate::model::trace::{Trace, TraceLevel, TraceTensor};

/// Our name of an expected tensor; `None` for what is compared elsewhere or is an input.
fn trace_name(expected: &str) -> Option<String> {
    if let Some(what) = expected.strip_prefix("mtp.") {
        return (!what.starts_with("chain")).then(|| format!("mtp_{what}"));
    }
    match expected.split_once('.') {
        Some((layer, what)) => Some(format!("{what}.{}", layer.strip_prefix('l')?)),
        None => matches!(expected, "embed" | "final_norm").then(|| expected.to_owned()),
    }
}

/// The reference pads positions that a row does not see with -1e30.
fn visible(want: &Expected) -> Vec<f32> {
    want.f32s.iter().copied().filter(|&score| score > -1e29).collect()
}

/// `[kv heads, positions, head_dim]` as one row per position.
fn by_position(want: &Expected) -> Vec<f32> {
    let [heads, positions, head_dim] = want.shape[..] else { panic!("a cache has three dimensions") };
    let value = |p: usize, h: usize| &want.f32s[(h * positions + p) * head_dim..][..head_dim];
    (0..positions).flat_map(|p| (0..heads).flat_map(move |h| value(p, h).iter().copied())).collect()
}

fn check_case(case: &str) {
    let model = load(case);
    let meta = json(&data(case).join("expected/meta.json"));
    let want = expected(&data(case).join("expected/expected.safetensors"));
    let tokens = ids(&meta["input_ids"]);
    let mut errors = Errors::default();

    let mut trace = Trace::new(TraceLevel::Full);
    let mut seq = model.new_sequence(true);
    let hidden = model.forward(&mut seq, &tokens, Some(&mut trace)).unwrap();
    model.extend_mtp(&mut seq, None, Some(&mut trace)).unwrap();
    let logits = model.logits(&hidden);
    errors.close("logits", "logits", &logits.data, &want["logits"].f32s);
    assert_eq!(argmax_rows(&logits), ids(&meta["teacher_forced_argmax"]), "teacher-forced argmax");

    for (name, want) in &want {
        let Some(ours) = trace_name(name) else { continue };
        let got = trace.tensors.get(&ours).unwrap_or_else(|| panic!("{ours} was not recorded"));
        let group = if name.starts_with("mtp.") { "mtp" } else { "layers" };
        match got {
            TraceTensor::F32 { data, .. } if want.shape.len() == 3 => {
                errors.close(group, name, data, &by_position(want));
            }
            TraceTensor::F32 { data, .. } => errors.close(group, name, data, &want.f32s),
            TraceTensor::F32Causal { rows } => errors.close(group, name, &rows.concat(), &visible(want)),
            TraceTensor::I32 { rows } => {
                let width = want.shape[1];
                let padded = |mut row: Vec<i32>| {
                    row.resize(width, -1);
                    row
                };
                let got: Vec<i32> = rows.iter().cloned().flat_map(padded).collect();
                assert_eq!(got, want.i32s, "{name}");
            }
        }
    }
    if let Some(argmax) = meta.get("mtp_teacher_forced_argmax") {
        let TraceTensor::F32 { width, data } = &trace.tensors["mtp_logits"] else { panic!("kind") };
        assert_eq!(argmax_rows(&Rows { data: data.clone(), width: *width }), ids(argmax), "MTP argmax");
    }

    let (continuation, logits) = greedy(&*model, &ids(&meta["prompt_ids"]), want["greedy_ids"].i32s.len());
    assert_eq!(continuation, ids(&meta["greedy_ids"]), "greedy continuation");
    errors.close("greedy", "greedy_logits", &logits.data, &want["greedy_logits"].f32s);
    errors.report(case);
}

#[test]
fn tiny_dense_index_matches_the_reference() {
    check_case("tiny-dense-index");
}

#[test]
fn tiny_sparse_matches_the_reference() {
    check_case("tiny-sparse");
}

#[test]
fn tiny_groups_matches_the_reference() {
    check_case("tiny-groups");
}

#[test]
fn tiny_mtp_matches_the_reference() {
    check_case("tiny-mtp");
}

#[test]
fn tiny_mtp_fp8_matches_the_reference() {
    check_case("tiny-mtp-fp8");
}

#[test]
fn tiny_olmoe_matches_the_reference() {
    check_case("tiny-olmoe");
}
