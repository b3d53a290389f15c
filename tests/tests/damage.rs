//! Damaged and mismatched files: one clear sentence that names file and tensor, the right exit code,
//! no panic, nothing written.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shimmer_tests::data;
use shimmer_tests::process::{Program, copy_model};
use shimmer_tests::tensors::{edit_data, edit_header};

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

/// Exit code for data that is damaged or unsupported.
const DAMAGED: i32 = 3;

/// A tensor of the first shard, its scales, and one of the experts that lies in the second.
const MATRIX: &str = "model.layers.0.self_attn.o_proj.weight";
const SCALES: &str = "model.layers.0.self_attn.o_proj.weight.qs";
const EXPERT: &str = "model.layers.1.mlp.experts.2.up_proj.weight";

/// A copy of the sample container that a test may damage.
struct Patient {
    dir: tempfile::TempDir,
}

impl Patient {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        copy_model(&data("colibri-container"), &dir.path().join("model"));
        std::fs::write(dir.path().join("ids.json"), "[1, 2, 3]").expect("ids.json");
        Self { dir }
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    /// The shard that holds `tensor`.
    fn shard_of(&self, tensor: &str) -> PathBuf {
        let entries = std::fs::read_dir(self.model()).expect("the model");
        let holds = |path: &Path| {
            let bytes = std::fs::read(path).expect("readable");
            let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
            let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("JSON");
            header.get(tensor).is_some()
        };
        let mut shards = entries.map(|e| e.expect("an entry").path());
        shards
            .find(|path| path.extension().is_some_and(|e| e == "safetensors") && holds(path))
            .unwrap_or_else(|| panic!("no shard holds {tensor}"))
    }

    fn edit_config(&self, key: &str, value: Value) {
        let path = self.model().join("config.json");
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(&path).expect("config.json")).expect("JSON");
        config[key] = value;
        std::fs::write(path, config.to_string()).expect("writable");
    }

    /// `score` must refuse with `code`, mention everything in `mentions` and write nothing.
    fn refused(&self, code: i32, mentions: &[&str]) {
        let out = self.dir.path().join("out.safetensors");
        let dir = |name: &str| self.dir.path().join(name).into_os_string();
        let flag = |text: &str| std::ffi::OsString::from(text);
        let args = [
            flag("score"),
            flag("--model"),
            self.model().into_os_string(),
            flag("--ids"),
            dir("ids.json"),
            flag("--out"),
            out.clone().into_os_string(),
        ];
        let before = listing(self.dir.path());
        program().refused(code, mentions, args);
        assert_eq!(listing(self.dir.path()), before, "something was written");
    }
}

fn listing(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            all.extend(listing(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).expect("a UTF-8 name")
}

#[test]
fn truncated_shard() {
    let patient = Patient::new();
    let shard = patient.shard_of(EXPERT);
    let len = std::fs::metadata(&shard).expect("a shard").len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&shard)
        .expect("writable")
        .set_len(len - 1)
        .expect("shorter");
    patient.refused(DAMAGED, &[name(&shard), EXPERT, "incomplete"]);
}

#[test]
fn header_longer_than_the_file() {
    let patient = Patient::new();
    let shard = patient.shard_of(MATRIX);
    let mut bytes = std::fs::read(&shard).expect("readable");
    bytes[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    std::fs::write(&shard, bytes).expect("writable");
    patient.refused(DAMAGED, &[name(&shard), "header"]);
}

#[test]
fn overlapping_offsets() {
    let patient = Patient::new();
    let shard = patient.shard_of(MATRIX);
    edit_header(&shard, |header| {
        let shifted = |v: &Value| json!(v.as_u64().expect("an offset") - 4);
        let offsets = header[MATRIX]["data_offsets"].clone();
        header[MATRIX]["data_offsets"] = json!([shifted(&offsets[0]), shifted(&offsets[1])]);
    });
    patient.refused(DAMAGED, &[name(&shard), "overlap"]);
}

#[test]
fn swapped_offsets() {
    let patient = Patient::new();
    let shard = patient.shard_of(MATRIX);
    edit_header(&shard, |header| {
        header[MATRIX]["data_offsets"].as_array_mut().expect("offsets").reverse();
    });
    patient.refused(DAMAGED, &[name(&shard), MATRIX]);
}

#[test]
fn duplicate_tensor() {
    let patient = Patient::new();
    let shard = patient.shard_of(MATRIX);
    let copy = patient.model().join("zz-copy.safetensors");
    std::fs::copy(&shard, &copy).expect("a copy");
    patient.refused(DAMAGED, &[name(&shard), "zz-copy.safetensors", "also in"]);
}

#[test]
fn missing_scales() {
    let patient = Patient::new();
    let shard = patient.shard_of(SCALES);
    edit_header(&shard, |header| {
        header.remove(SCALES);
    });
    patient.refused(DAMAGED, &[MATRIX, ".qs"]);
}

#[test]
fn short_scales() {
    let patient = Patient::new();
    let shard = patient.shard_of(SCALES);
    edit_header(&shard, |header| {
        let end = header[SCALES]["data_offsets"][1].as_u64().expect("an offset") - 4;
        let count = header[SCALES]["shape"][0].as_u64().expect("a length") - 1;
        header[SCALES]["data_offsets"][1] = json!(end);
        header[SCALES]["shape"] = json!([count]);
    });
    patient.refused(DAMAGED, &[name(&shard), MATRIX]);
}

#[test]
fn nan_scale() {
    let patient = Patient::new();
    let shard = patient.shard_of(SCALES);
    edit_data(&shard, SCALES, |bytes| bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes()));
    patient.refused(DAMAGED, &[name(&shard), MATRIX]);
}

#[test]
fn nan_scale_of_an_expert() {
    let patient = Patient::new();
    let scales = format!("{EXPERT}.qs");
    let shard = patient.shard_of(&scales);
    edit_data(&shard, &scales, |bytes| bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes()));
    // Every expert is used by some of these rows.
    std::fs::write(patient.dir.path().join("ids.json"), format!("{:?}", (0..90).collect::<Vec<u32>>()))
        .expect("ids.json");
    patient.refused(DAMAGED, &[name(&shard), "expert"]);
}

#[test]
fn missing_expert_matrix() {
    let patient = Patient::new();
    edit_header(&patient.shard_of(EXPERT), |header| {
        header.remove(EXPERT);
    });
    patient.refused(DAMAGED, &[EXPERT, "missing"]);
}

#[test]
fn an_interrupted_conversion_is_named_first() {
    let patient = Patient::new();
    edit_header(&patient.shard_of(EXPERT), |header| {
        header.remove(EXPERT);
    });
    std::fs::write(patient.model().join(".convert.lock"), "").expect("writable");
    patient.refused(DAMAGED, &["interrupted", "shimmer convert", EXPERT]);
}

#[test]
fn wrong_dtype() {
    let patient = Patient::new();
    let shard = patient.shard_of("model.norm.weight");
    edit_header(&shard, |header| header["model.norm.weight"]["dtype"] = json!("I32"));
    patient.refused(DAMAGED, &[name(&shard), "model.norm.weight", "I32"]);
}

#[test]
fn every_problem_is_reported_at_once() {
    let patient = Patient::new();
    edit_header(&patient.shard_of(EXPERT), |header| {
        header.remove(EXPERT);
    });
    edit_header(&patient.shard_of("model.norm.weight"), |header| {
        header.remove("model.norm.weight");
    });
    patient.refused(DAMAGED, &[EXPERT, "model.norm.weight"]);
}

#[test]
fn config_out_of_range() {
    for (key, value) in [
        ("hidden_size", json!(-128)),
        ("hidden_size", json!(1u64 << 60)),
        ("num_hidden_layers", json!(0)),
        ("n_routed_experts", json!(1.5)),
        ("qk_rope_head_dim", json!(7)),
        ("scoring_func", json!("softmax")),
        ("rope_scaling", json!({"type": "yarn"})),
        ("model_type", json!("llama")),
    ] {
        let patient = Patient::new();
        patient.edit_config(key, value);
        patient.refused(DAMAGED, &["config.json", key]);
    }
}

#[test]
fn a_renamed_shard_is_no_damage() {
    let patient = Patient::new();
    let shard = patient.shard_of(EXPERT);
    std::fs::rename(&shard, patient.model().join("experts of mine.safetensors")).expect("renamed");
    let model = patient.model();
    let json = program().json([
        "score".as_ref(),
        "--json".as_ref(),
        "--model".as_ref(),
        model.as_os_str(),
        "--ids".as_ref(),
        patient.dir.path().join("ids.json").as_os_str(),
        "--out".as_ref(),
        patient.dir.path().join("out.safetensors").as_os_str(),
    ]);
    assert_eq!(json["tokens"], 3);
}

#[test]
fn missing_tokenizer_and_missing_model() {
    let patient = Patient::new();
    let model = patient.model();
    let args = |model: &Path| {
        ["run".into(), "--model".into(), model.as_os_str().to_owned(), "--prompt".into(), "hi".into()]
    };
    program().refused(DAMAGED, &["tokenizer.json"], args(&model));
    program().refused(DAMAGED, &["no-such-model"], args(&patient.dir.path().join("no-such-model")));
}

#[test]
fn a_flipped_bit_in_a_pack() {
    let patient = Patient::new();
    let pack = patient.dir.path().join("pack");
    let model = patient.model();
    program().ok(["pack".as_ref(), "--model".as_ref(), model.as_os_str(), "--to".as_ref(), pack.as_os_str()]);
    let is_data = |path: &PathBuf| path.extension().is_some_and(|e| e == "pack");
    let file = listing(&pack).into_iter().find(is_data).expect("a data file");
    let whole = std::fs::read(&file).expect("readable");
    let out = patient.dir.path().join("out.safetensors");
    // The last record belongs to the draft layer, which this command does not compute.
    for at in [100, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&file, bytes).expect("writable");
        program().refused(
            DAMAGED,
            &[name(&file), "expert"],
            [
                "score".as_ref(),
                "--model".as_ref(),
                model.as_os_str(),
                "--pack".as_ref(),
                pack.as_os_str(),
                "--ids".as_ref(),
                patient.dir.path().join("ids.json").as_os_str(),
                "--out".as_ref(),
                out.as_os_str(),
            ],
        );
        assert!(!out.exists());
    }
}

#[test]
fn numbers_that_are_not_finite() {
    for tensor in [
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight.qs",
        "model.layers.2.mlp.experts.0.down_proj.weight.qs",
    ] {
        let patient = Patient::new();
        let shard = patient.shard_of(tensor);
        edit_data(&shard, tensor, |data| data[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
        patient.refused(DAMAGED, &[name(&shard), tensor.trim_end_matches(".qs"), "NaN"]);
    }
}

#[test]
fn a_result_is_never_written_into_the_model() {
    let patient = Patient::new();
    let before = listing(&patient.model());
    let out = patient.model().join("logits.safetensors");
    program().refused(
        2,
        &["logits.safetensors", "model directory"],
        [
            "score".as_ref(),
            "--model".as_ref(),
            patient.model().as_os_str(),
            "--ids".as_ref(),
            patient.dir.path().join("ids.json").as_os_str(),
            "--out".as_ref(),
            out.as_os_str(),
        ],
    );
    assert_eq!(listing(&patient.model()), before);
}

#[cfg(unix)]
#[test]
fn a_device_or_pipe_in_place_of_a_file_is_refused() {
    let patient = Patient::new();
    let path = patient.model().join("config.json");
    std::fs::remove_file(&path).expect("removed");
    std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
    patient.refused(DAMAGED, &["config.json", "not a regular file"]);
}
