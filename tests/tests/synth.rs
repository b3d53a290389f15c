//! Random models: every command opens them, nothing overflows at any depth, routers choose as announced.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use shimmer_tests::process::Program;
use shimmer_tests::tensors::{self, Tensor};

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

/// Writes a model with these flags and returns its directory and the command's report.
fn synth(dir: &Path, extra: &[&str]) -> (PathBuf, Value) {
    let to = dir.join("model");
    let mut args = vec!["synth", "--json", "--to", to.to_str().expect("UTF-8")];
    args.extend(extra);
    let report = serde_json::from_str(&program().ok(args)).expect("a JSON report");
    (to, report)
}

/// Scores `count` pseudo-random ids with a trace.
fn score(dir: &Path, model: &Path, vocab: u64, count: usize) -> BTreeMap<String, Tensor> {
    let ids: Vec<u64> =
        (0..count as u64).map(|i| (i * i * 2_654_435_761 + i * 40_503 + 17) % vocab).collect();
    let (ids_file, out) = (dir.join("ids.json"), dir.join("out.safetensors"));
    std::fs::write(&ids_file, format!("{ids:?}")).expect("ids");
    let mut command = program().command(["score", "--trace", "--model"]);
    command.arg(model).arg("--ids").arg(&ids_file).arg("--out").arg(&out);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tensors::read(&out)
}

/// Root of the mean square.
fn size(tensor: &Tensor) -> f64 {
    let values = tensor.floats();
    (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

#[test]
fn every_command_that_reads_a_model_takes_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (model, report) = synth(dir.path(), &["--preset", "tiny", "--mtp", "--expert-format", "int8"]);
    assert_eq!(report["tokenizer"], true);
    let model = model.to_str().expect("UTF-8");
    let answer = program().ok(["run", "--model", model, "--prompt", "hello", "--max-tokens", "5", "--json"]);
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["ids"].as_array().expect("ids").len(), 5);
    program().ok(["run", "--model", model, "--raw", "--prompt", "hello", "--max-tokens", "5"]);
    program().ok(["plan", "--model", model]);
    program().ok(["doctor", "--deep", "--model", model]);
    let pack = dir.path().join("pack");
    program().ok(["pack", "--model", model, "--to", pack.to_str().expect("UTF-8")]);
    let again = program().output(["synth", "--preset", "tiny", "--to", model]);
    assert_eq!(again.status.code(), Some(2), "an existing directory is never written to");
}

#[test]
fn activations_keep_their_size_through_many_layers() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let flags = ["--preset", "tiny", "--layers", "60", "--vocab", "200", "--expert-format", "int2"];
    let (model, report) = synth(dir.path(), &flags);
    assert_eq!(report["tokenizer"], false, "200 tokens are fewer than there are bytes");
    let trace = score(dir.path(), &model, 200, 48);
    for (name, tensor) in &trace {
        if let tensors::Values::F32(values) = &tensor.values {
            assert!(values.iter().all(|v| v.is_finite()), "{name}");
        }
    }
    let (first, last) = (size(&trace["hidden.0"]), size(&trace["hidden.59"]));
    assert!((0.3..4.0).contains(&first), "{first}");
    assert!((0.3..20.0).contains(&last), "{last}");
    assert!((0.3..3.0).contains(&size(&trace["logits"])));
    // Rows stay different from one another: their mean is far smaller than they are.
    let hidden = &trace["hidden.59"];
    let width = hidden.shape[1];
    let rows = hidden.floats().chunks(width);
    let count = rows.len() as f64;
    let mean: Vec<f64> =
        (0..width).map(|c| rows.clone().map(|row| f64::from(row[c])).sum::<f64>() / count).collect();
    let common = (mean.iter().map(|m| m * m).sum::<f64>() / width as f64).sqrt();
    assert!(common < 0.5 * last, "{common} of {last} is common to all rows");
}

/// How often every expert of one layer was chosen, per token, descending.
fn frequencies(ids: &Tensor, experts: usize) -> Vec<(f64, usize)> {
    let mut counts: Vec<(f64, usize)> = (0..experts).map(|e| (0.0, e)).collect();
    let rows = ids.shape[0] as f64;
    ids.ints().iter().for_each(|&e| counts[e as usize].0 += 1.0 / rows);
    counts.sort_by(|a, b| b.0.total_cmp(&a.0));
    counts
}

#[test]
fn routers_choose_by_zipfs_law_or_uniformly() {
    const EXPERTS: usize = 64;
    let flags = ["--preset", "tiny", "--layers", "5", "--experts", "64", "--top-k", "8", "--vocab", "4096"];
    for router in ["zipf", "uniform"] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (model, report) = synth(dir.path(), &[&flags[..], &["--router", router]].concat());
        let skew: shimmer_common::synth::RouterSkew =
            report["router"].as_str().expect("a router").parse().expect("a skew");
        let want = skew.frequencies(EXPERTS, 8);
        let trace = score(dir.path(), &model, 4096, 1500);
        let mut favourites = Vec::new();
        for layer in 1..5 {
            let got = frequencies(&trace[&format!("router_ids.{layer}")], EXPERTS);
            favourites.push(got[0].1);
            let share = |f: &mut dyn Iterator<Item = f64>| f.take(EXPERTS / 4).sum::<f64>() / 8.0;
            let (best, expected) = (share(&mut got.iter().map(|g| g.0)), share(&mut want.iter().copied()));
            // Sorting sampled frequencies finds a better quarter than there is: 0.25 becomes about 0.29.
            let tolerance = if router == "zipf" { 0.04 } else { 0.07 };
            assert!((best - expected).abs() < tolerance, "{router} layer {layer}: {best}, not {expected}");
            let worst = got.last().expect("experts").0;
            assert!(worst > 0.0, "{router} layer {layer}: an expert is never chosen");
        }
        favourites.dedup();
        assert!(favourites.len() > 1, "{router}: every layer has its own order of experts");
    }
}
