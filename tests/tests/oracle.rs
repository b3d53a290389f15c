//! `shimmer score --trace` against the reference vectors: ids, positions and tokens exact, floats
//! within `1e-4 · max(1, max|b|)` (tests/data/README.md, "How to compare").

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use shimmer_tests::data;
use shimmer_tests::process::Program;
use shimmer_tests::tensors::{self, Tensor, assert_close};

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

fn meta(case: &str) -> Value {
    let text = std::fs::read(data(case).join("expected/meta.json")).expect("meta.json");
    serde_json::from_slice(&text).expect("JSON")
}

fn score(model: &Path, ids: &Value, extra: &[&str]) -> BTreeMap<String, Tensor> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (ids_file, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    std::fs::write(&ids_file, ids.to_string()).expect("ids.json");
    let mut command = program().command(["score", "--model"]);
    command.arg(model).arg("--ids").arg(&ids_file).arg("--out").arg(&out).args(extra);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tensors::read(&out)
}

/// Compares everything `--trace` writes with the recorded tensors of one case.
fn check_case(case: &str) {
    let got = score(&data(case), &meta(case)["input_ids"], &["--trace"]);
    let expected = tensors::read(&data(case).join("expected/expected.safetensors"));
    let mut compared = 0;
    for (name, want) in &expected {
        let Some(traced) = traced_name(name) else { continue };
        let have = got.get(&traced).unwrap_or_else(|| panic!("{case}: score wrote no {traced}"));
        if traced.starts_with("router_ids") || traced.starts_with("index_topk") {
            assert_eq!(have.shape, want.shape, "{case} {traced}");
            assert_eq!(have.ints(), want.ints(), "{case} {traced}");
        } else {
            assert_close(&format!("{case} {traced}"), have, want);
        }
        compared += 1;
    }
    let argmax: Vec<usize> =
        serde_json::from_value(meta(case)["teacher_forced_argmax"].clone()).expect("ids");
    assert_eq!(got["logits"].argmax_rows(), argmax, "{case}");
    assert!(compared > 4, "{case}: only {compared} tensors were compared");
}

/// `l3.hidden` → `hidden.3`; tensors that `--trace` does not write → `None`.
fn traced_name(expected: &str) -> Option<String> {
    match expected {
        "logits" => return Some("logits".to_owned()),
        "mtp.logits" => return Some("mtp_logits".to_owned()),
        _ => {}
    }
    let (layer, what) = expected.strip_prefix('l')?.split_once('.')?;
    let known = ["hidden", "router_ids", "router_weights", "index_topk"].contains(&what);
    (known && layer.parse::<usize>().is_ok()).then(|| format!("{what}.{layer}"))
}

#[test]
fn dense_index() {
    check_case("tiny-dense-index");
}

#[test]
fn sparse_with_index_share() {
    check_case("tiny-sparse");
}

#[test]
fn router_groups() {
    check_case("tiny-groups");
}

#[test]
fn mtp() {
    check_case("tiny-mtp");
}

#[test]
fn fp8() {
    check_case("tiny-mtp-fp8");
}

#[test]
fn olmoe() {
    check_case("tiny-olmoe");
}

#[test]
fn demo_model_vectors() {
    let expected = tensors::read(&data("demo-model/expected/logits.safetensors"));
    let prompts: Value = serde_json::from_slice(
        &std::fs::read(data("demo-model/expected/prompts.json")).expect("prompts.json"),
    )
    .expect("JSON");
    for (name, prompt) in prompts.as_object().expect("prompts") {
        let got = score(&data("demo-model"), &prompt["prompt_ids"], &["--trace"]);
        assert_close(&format!("{name} logits"), &got["logits"], &expected[&format!("{name}.logits")]);
        assert_close(&format!("{name} mtp"), &got["mtp_logits"], &expected[&format!("{name}.mtp_logits")]);
    }
}

#[test]
fn sample_container_argmax() {
    let expected: Value = serde_json::from_slice(
        &std::fs::read(data("colibri-container/expected.json")).expect("expected.json"),
    )
    .expect("JSON");
    let oracle = &expected["hf_oracle"];
    let got = score(&data("colibri-container"), &oracle["input_ids"], &[]);
    let argmax: Vec<usize> = serde_json::from_value(oracle["argmax_per_position"].clone()).expect("ids");
    assert_eq!(got["logits"].argmax_rows(), argmax);
}
