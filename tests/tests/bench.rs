//! `bench` counts what it claims to count; how fast anything is, is no test's business.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shimmer_tests::process::Program;

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&program().ok(args)).expect("one JSON document")
}

fn model(dir: &Path) -> PathBuf {
    let to = dir.join("model");
    program().ok(["synth", "--preset", "tiny", "--router", "zipf", "--to", to.to_str().expect("UTF-8")]);
    to
}

fn positive(value: &Value) -> f64 {
    let number = value["median"].as_f64().or(value.as_f64()).unwrap_or_else(|| panic!("no number: {value}"));
    assert!(number.is_finite() && number > 0.0, "{value}");
    number
}

#[test]
fn decoding_counts_hits_misses_and_bytes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let model = model(dir.path());
    let container =
        shimmer_common::container::Container::open(std::slice::from_ref(&model)).expect("a model");
    let record = container.experts().layout().max_record_bytes() as u64;
    let model = model.to_str().expect("UTF-8");
    let flags = ["bench", "decode", "--model", model, "--json", "--runs", "2", "--tokens", "20"];

    let resident = json(&flags);
    assert_eq!(resident["hit_rate"]["median"], 1.0, "everything fits and was read while warming up");
    assert_eq!(resident["missed_bytes_per_token"]["max"], 0.0);
    assert!(resident["disk_read_bytes_per_s"].is_null());
    assert_eq!(resident["token_dense_bytes"], container.token_bytes().dense);
    positive(&resident["tokens_per_s"]);
    positive(&resident["time_over_limit"]);

    // Room for 8 of 32 experts.
    let budget = format!("{}B", 8 * record);
    let cold = json(&[&flags[..], &["--cold", "--expert-ram", &budget]].concat());
    for run in cold["runs"].as_array().expect("runs") {
        let count = |name: &str| run[name].as_u64().expect("a count");
        // Two layers of four experts per token.
        assert_eq!(count("computed"), 20 * 2 * 4);
        assert_eq!(count("hits") + count("misses"), count("computed"));
        assert!(count("misses") > 0);
    }
    let hit_rate = cold["hit_rate"]["median"].as_f64().expect("a rate");
    assert!(hit_rate > 0.0 && hit_rate < 1.0);
    positive(&cold["disk_read_bytes_per_s"]);
    positive(&cold["time_over_disk_or_compute"]);
}

#[test]
fn prefill_reads_every_expert_at_most_once_per_chunk() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let model = model(dir.path());
    let model = model.to_str().expect("UTF-8");
    let args = ["bench", "prefill", "--model", model, "--tokens", "96", "--prefill-chunk", "48", "--json"];
    let cold = json(&[&args[..], &["--cold", "--runs", "2", "--expert-ram", "100KiB"]].concat());
    assert_eq!(cold["chunks"], 2);
    for run in cold["runs"].as_array().expect("runs") {
        let misses = run["misses"].as_u64().expect("a count");
        assert!(misses > 0 && misses <= 2 * 2 * 16, "{misses} reads of 32 experts in two chunks");
    }
    positive(&cold["share_of_int8_peak"]);
}

/// Bytes to measure memory with: 256 MiB, or what the program asks for where the caches are larger.
fn beyond_the_caches() -> String {
    let usual = "256MiB";
    let out = program().output(["bench", "mem", "--json", "--runs", "1", "--size", usual, "--threads", "1"]);
    let said = String::from_utf8_lossy(&out.stderr);
    let asked = said.split_once("give at least ").and_then(|(_, rest)| rest.split_whitespace().next());
    asked.unwrap_or(usual).to_owned()
}

#[test]
fn machine_limits_and_kernels_are_measured() {
    let size = beyond_the_caches();
    let limits = json(&["bench", "mem", "--json", "--runs", "1", "--size", &size, "--threads", "1"]);
    let limits = &limits["limits"][0];
    for name in ["read_bytes_per_s", "int8_macs_per_s", "f32_macs_per_s"] {
        positive(&limits[name]);
    }
    let gemv = ["bench", "gemv", "--json", "--runs", "1", "--size", &size, "--rows", "1,2", "--threads", "1"];
    let gemv = json(&[&gemv[..], &["--shape", "512x1024", "--formats", "int8"]].concat());
    let lines = gemv["lines"].as_array().expect("lines");
    assert_eq!(lines.len(), 2);
    for line in lines {
        positive(&line["share_of_read"]);
        // Multiply-adds and bytes describe the same time: one byte and a scale per row.
        let per_byte = positive(&line["macs_per_s"]) / positive(&line["weight_bytes_per_s"]);
        let rows = line["activation_rows"].as_f64().expect("rows");
        assert!((per_byte / rows - 1.0).abs() < 0.01, "{per_byte} for {rows} rows");
    }
}

#[test]
fn disks_are_read_every_way_and_nothing_stays() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let place = dir.path().to_str().expect("UTF-8");
    let args = ["bench", "disk", "--dir", place, "--size", "8MiB", "--read-size", "1MiB", "--bytes", "4MiB"];
    let disk = json(&[&args[..], &["--runs", "1", "--depths", "2", "--json"]].concat());
    let lines = disk["lines"].as_array().expect("lines");
    assert_eq!(lines.len(), 6, "two engines, two ways through the page cache, and two sequential ones");
    for line in lines {
        positive(&line["read_bytes_per_s"]);
    }
    positive(&disk["best"]["read_bytes_per_s"]);
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
    for (args, word) in [
        (&["bench", "disk"][..], "--dir"),
        (&["bench", "mem", "--size", "1MiB"], "cache"),
        (&["bench", "gemv", "--shape", "5"], "2048x6144"),
        (&["bench", "disk", "--dir", place, "--size", "1MiB"], "four reads"),
    ] {
        let output = program().output(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(word), "{args:?}");
    }
}
