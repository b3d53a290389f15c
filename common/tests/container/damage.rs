//! Damaged models: each gives one clear sentence that names file and tensor, and nothing panics.

use std::path::Path;

use serde_json::json;
use shimmer_common::container::{ContainerError, Problem};
use shimmer_common::experts::{ExpertError, ExpertId};

use crate::support::{RawFile, copy, edit, edit_config, open};

const MAIN: &str = "out-00000.safetensors";
const SECOND: &str = "out-00001.safetensors";
const MTP: &str = "out-mtp-00000.safetensors";
const INDEXER: &str = "out-idx-00000.safetensors";

/// The problems of the sample container after `change`.
fn problems(change: impl FnOnce(&Path)) -> Vec<Problem> {
    problems_of("colibri-container", change)
}

fn problems_of(model: &str, change: impl FnOnce(&Path)) -> Vec<Problem> {
    let dir = copy(model);
    change(dir.path());
    match open(dir.path()) {
        Err(ContainerError::Damaged(problems)) => problems,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("the damage was not noticed"),
    }
}

/// Checks that there is exactly one problem, with this file, tensor and text.
#[track_caller]
fn one(problems: &[Problem], file: &str, tensor: Option<&str>, text: &str) {
    let [problem] = problems else { panic!("not one problem: {problems:#?}") };
    let name = problem.file.as_ref().and_then(|f| f.file_name()).unwrap_or_default();
    if !file.is_empty() {
        assert_eq!(name, file, "{problem}");
    }
    assert_eq!(problem.tensor.as_deref(), tensor, "{problem}");
    assert!(problem.what.contains(text), "{problem}");
    assert!(!problem.to_string().contains('\n'), "one line: {problem}");
}

#[test]
fn a_shard_truncated_by_one_byte() {
    let found = problems(|dir| {
        let path = dir.join(MAIN);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    });
    one(&found, MAIN, Some("model.layers.1.self_attn.q_b_proj.weight"), "the download is incomplete");
}

#[test]
fn a_shard_cut_in_half_names_the_first_tensor_and_counts_the_others() {
    let found = problems(|dir| {
        let path = dir.join(SECOND);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    });
    one(&found, SECOND, found[0].tensor.as_deref(), "more tensors)");
}

#[test]
fn files_that_are_no_safetensors() {
    for (bytes, text) in [
        (&b""[..], "it has 0 bytes"),
        (b"<html>rate limited</html>", "it claims a header of"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is not readable"),
        (b"\x01\0\0\0\0\0\0\0{", "its header is not readable"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "it claims a header of 18446744073709551615 bytes"),
    ] {
        let found = problems(|dir| std::fs::write(dir.join("extra.safetensors"), bytes).unwrap());
        one(&found, "extra.safetensors", None, text);
    }
}

#[test]
fn an_unreadable_header_does_not_drown_the_report() {
    let found = problems(|dir| {
        let path = dir.join(MAIN);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
    });
    let [header, missing] = &found[..] else { panic!("{found:#?}") };
    assert!(header.to_string().contains("out-00000.safetensors: it claims a header of"), "{header}");
    assert!(
        missing.what.contains("tensors are missing") && missing.what.contains("unreadable files"),
        "{missing}"
    );
}

#[test]
fn offsets_that_overlap_run_backwards_or_do_not_fit_the_shape() {
    let name = "model.layers.1.mlp.experts.0.up_proj.weight";
    let change = |offsets: fn(u64, u64) -> [u64; 2]| {
        problems(|dir| {
            edit(&dir.join(MAIN), |file| {
                let range = file.range(name);
                let offsets = offsets(range.start as u64, range.end as u64);
                file.header[name]["data_offsets"] = json!(offsets);
            });
        })
    };
    one(&change(|a, b| [b, a]), MAIN, Some(name), "run backwards");
    one(&change(|a, b| [a, b + 1]), MAIN, Some(name), "does not fit shape [8192] of U8");
    one(&change(|_, _| [u64::MAX - 8192, u64::MAX]), MAIN, Some(name), "beyond any file");
    let found = change(|a, b| [a - 64, b - 64]);
    one(&found, MAIN, Some(name), "it overlaps model.layers.1.mlp.experts.0.gate_proj.weight");
}

#[test]
fn an_overflowing_shape() {
    let name = "model.norm.weight";
    let found = problems(|dir| {
        edit(&dir.join(SECOND), |file| file.header[name]["shape"] = json!([1u64 << 40, 1u64 << 40]));
    });
    one(&found, SECOND, Some(name), "does not fit shape");
}

#[test]
fn a_name_twice_in_one_header() {
    let found = problems(|dir| {
        let path = dir.join(SECOND);
        let file = RawFile::read(&path);
        let json = serde_json::to_string(&file.header).unwrap();
        let entry = file.header["model.norm.weight"].to_string();
        let json = format!("{{\"model.norm.weight\":{entry},{}", &json[1..]);
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend(&file.data);
        std::fs::write(path, bytes).unwrap();
    });
    assert!(found.iter().any(|p| p.what.contains("twice in the header")), "{found:#?}");
    assert!(found.iter().all(|p| p.tensor.as_deref() == Some("model.norm.weight")), "{found:#?}");
}

#[test]
fn a_tensor_in_two_shards_names_both() {
    let name = "model.norm.weight";
    let found = problems(|dir| {
        let mut file = RawFile::read(&dir.join(SECOND));
        file.header.retain(|key, _| key == name);
        file.write(&dir.join("out-00002.safetensors"));
    });
    one(&found, "out-00002.safetensors", Some(name), SECOND);
}

#[test]
fn two_mtp_sets_get_a_friendlier_text() {
    let found = problems(|dir| {
        std::fs::copy(dir.join(MTP), dir.join("out-mtp-00001.safetensors")).unwrap();
    });
    let first = "model.layers.2.eh_proj.weight";
    one(&found, "out-mtp-00001.safetensors", Some(first), "two sets of MTP files");
    assert!(
        found[0].what.contains("(and 44 more tensors) is also in") && found[0].what.contains(MTP),
        "{}",
        found[0]
    );
}

#[test]
fn missing_and_short_scales() {
    let name = "model.layers.1.self_attn.o_proj.weight";
    let scales = format!("{name}.qs");
    let found = problems(|dir| {
        edit(&dir.join(MAIN), |file| {
            file.header.remove(&scales);
        });
    });
    one(&found, MAIN, Some(&scales), "cannot be read without its scales");
    let found = problems(|dir| {
        edit(&dir.join(MAIN), |file| {
            let range = file.range(&scales);
            file.header[&scales] =
                json!({"dtype": "F32", "shape": [127], "data_offsets": [range.start, range.end - 4]});
        });
    });
    one(&found, MAIN, Some(name), "[128, 64] with 4096 bytes and 508 bytes of scales");
}

#[test]
fn missing_expert_matrices_and_norms_are_all_listed() {
    let gone = ["model.layers.1.mlp.experts.2.gate_proj.weight", "model.layers.0.input_layernorm.weight"];
    let found = problems(|dir| {
        for shard in [MAIN, SECOND] {
            edit(&dir.join(shard), |file| file.header.retain(|key, _| !gone.contains(&key.as_str())));
        }
    });
    let mut names: Vec<_> = found.iter().filter_map(|p| p.tensor.as_deref()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["model.layers.0.input_layernorm.weight", "model.layers.1.mlp.experts.2.gate_proj.weight"]
    );
    assert!(found.iter().all(|p| p.what.contains("missing from every shard")), "{found:#?}");
    let text = ContainerError::Damaged(found).to_string();
    assert!(text.starts_with("the model has 2 problems:\n"), "{text}");
}

#[test]
fn a_missing_shard_is_named_once_when_the_index_tells() {
    let found = problems(|dir| {
        let file = RawFile::read(&dir.join(SECOND));
        let map: serde_json::Map<_, _> =
            file.header.keys().map(|name| (name.clone(), json!(SECOND))).collect();
        std::fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
            .unwrap();
        std::fs::remove_file(dir.join(SECOND)).unwrap();
    });
    let first = found[0].tensor.clone();
    one(&found, SECOND, first.as_deref(), "the file is missing and 6 tensors of the model with it");
}

#[test]
fn wrong_dtypes_and_shapes() {
    let cases: [(&str, serde_json::Value, &str); 5] = [
        ("model.norm.weight", json!({"dtype": "I32", "shape": [128]}), "its dtype is I32"),
        (
            "model.norm.weight",
            json!({"dtype": "F32", "shape": [64, 2]}),
            "its shape is [64, 2]; config.json asks for [128]",
        ),
        ("model.norm.weight", json!({"dtype": "BF16", "shape": [256]}), "its shape is [256]"),
        (
            "model.layers.1.mlp.experts.1.up_proj.weight",
            json!({"dtype": "BF16", "shape": [4096]}),
            "its shape is [4096]; config.json asks for [128, 128]",
        ),
        (
            "model.layers.1.mlp.experts.1.up_proj.weight.qs",
            json!({"dtype": "I32", "shape": [256]}),
            "scales must be F32",
        ),
    ];
    for (name, entry, text) in cases {
        let found = problems(|dir| {
            edit(&dir.join(SECOND), |file| {
                let range = file.range(name);
                file.header[name] = entry.clone();
                file.header[name]["data_offsets"] = json!([range.start, range.end]);
            });
        });
        one(&found, SECOND, Some(name), text);
    }
}

#[test]
fn a_config_that_does_not_fit_the_shards() {
    let found = problems(|dir| {
        edit_config(dir, |c| {
            c["kv_lora_rank"] = 60.into();
        });
    });
    assert!(found.len() >= 6, "every layer is named: {found:#?}");
    assert!(found.iter().all(|p| p.file.is_some() && p.tensor.is_some()));
    let found = problems(|dir| {
        edit_config(dir, |c| {
            c["n_routed_experts"] = 4.into();
            c["num_nextn_predict_layers"] = 0.into();
        });
    });
    assert!(found.iter().any(|p| p.tensor.as_deref() == Some("model.layers.1.mlp.experts.3.up_proj.weight")));
}

#[test]
fn a_config_that_asks_for_millions_of_tensors_is_answered_quickly() {
    let found = problems(|dir| {
        edit_config(dir, |c| {
            c["n_routed_experts"] = 65_535.into();
            c["num_hidden_layers"] = 4096.into();
            c.remove("indexer_types");
        });
    });
    assert!(found.len() > 1000 && found.len() < 200_000, "{}", found.len());
    let text = ContainerError::Damaged(found).to_string();
    assert!(text.len() < 100_000 && text.contains("more"), "the text is bounded: {} bytes", text.len());
}

#[test]
fn an_incomplete_mtp_layer_or_indexer_is_off_by_name() {
    let dir = copy("colibri-container");
    let name = "model.layers.2.mlp.experts.2.down_proj.weight";
    edit(&dir.path().join(MTP), |file| {
        file.header.remove(name);
    });
    let norm = "model.layers.0.self_attn.indexer.k_norm.bias";
    edit(&dir.path().join(INDEXER), |file| {
        file.header.remove(norm);
    });
    let container = open(dir.path()).unwrap();
    assert!(!container.has_mtp() && !container.has_indexer());
    assert!(!container.has("model.layers.2.eh_proj.weight"));
    let summary = container.summary();
    assert!(
        summary.line.ends_with("MTP off, no indexer: attention is dense beyond 4096 tokens"),
        "{}",
        summary.line
    );
    let warnings = summary.warnings.join("\n");
    assert!(warnings.contains(&format!("MTP is off (no drafts): {name} is missing")), "{warnings}");
    assert!(warnings.contains(norm), "{warnings}");
    assert!(!container.experts().contains(ExpertId { layer: 2, index: 0 }));
}

#[test]
fn bad_scales_and_fp8_nans_are_found_when_read() {
    for (bits, text) in
        [(f32::NAN, "scale 1 is NaN"), (f32::INFINITY, "scale 1 is inf"), (-0.5, "scale 1 is -0.5")]
    {
        let dir = copy("colibri-container");
        let (dense, expert) =
            ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight");
        edit(&dir.path().join(MAIN), |file| {
            for name in [dense, expert] {
                let at = file.range(&format!("{name}.qs")).start + 4;
                file.data[at..at + 4].copy_from_slice(&bits.to_le_bytes());
            }
        });
        let container = open(dir.path()).unwrap();
        for name in [dense, expert] {
            let error = container.load_matrix(name).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(name) && error.contains(MAIN), "{error}");
        }
        let id = ExpertId { layer: 1, index: 0 };
        let error = read(&container, id).unwrap_err();
        assert!(matches!(error, ExpertError::Damaged { .. }));
        let error = error.to_string();
        assert!(error.contains(text) && error.contains(expert) && error.contains(MAIN), "{error}");
        assert!(read(&container, ExpertId { layer: 1, index: 1 }).is_ok());
    }
    let dir = copy("tiny-mtp-fp8");
    let (dense, expert) =
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight");
    edit(&dir.path().join("model.safetensors"), |file| {
        for name in [dense, expert] {
            let at = file.range(name).start + 7;
            file.data[at] = 0xff;
        }
    });
    let container = open(dir.path()).unwrap();
    let error = container.load_matrix(dense).unwrap_err().to_string();
    assert!(error.contains("element 7 is NaN") && error.contains(dense), "{error}");
    let error = read(&container, ExpertId { layer: 1, index: 0 }).unwrap_err().to_string();
    assert!(error.contains("element 7 is NaN") && error.contains(expert), "{error}");
}

#[test]
fn float_weights_that_are_not_finite_are_refused() {
    let names = [
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
    ];
    let dir = copy("tiny-mtp");
    edit(&dir.path().join("model.safetensors"), |file| {
        for name in names {
            let at = file.range(name).start + 6;
            file.data[at..at + 2].copy_from_slice(&[0x80, 0xff]);
        }
    });
    let container = open(dir.path()).unwrap();
    for name in names {
        let error = container.load_matrix(name).unwrap_err().to_string();
        assert!(error.contains("element 3 is NaN or infinite") && error.contains(name), "{error}");
    }
    let error = read(&container, ExpertId { layer: 1, index: 0 }).unwrap_err();
    assert!(matches!(error, ExpertError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains(names[3]), "{error}");
}

fn read(container: &shimmer_common::container::Container, id: ExpertId) -> Result<Vec<u8>, ExpertError> {
    let source = container.experts();
    let mut record = vec![0; source.layout().record_bytes(id).unwrap()];
    source.read(id, &mut record).map(|()| record)
}

#[test]
fn fp8_scales_that_are_missing_or_of_the_wrong_size() {
    let name = "model.layers.1.self_attn.q_a_proj.weight";
    let scales = format!("{name}_scale_inv");
    let file = "model.safetensors";
    let found = problems_of("tiny-mtp-fp8", |dir| {
        edit(&dir.join(file), |f| {
            f.header.remove(&scales);
        });
    });
    one(&found, file, Some(&scales), "cannot be read without its scales");
    let found = problems_of("tiny-mtp-fp8", |dir| {
        edit(&dir.join(file), |f| {
            let at = f.range(&scales).start;
            f.header[&scales] = json!({"dtype": "F32", "shape": [3, 1], "data_offsets": [at, at + 12]});
        });
    });
    one(&found, file, Some(&scales), "its shape is [3, 1]");
    let found = problems_of("tiny-mtp-fp8", |dir| {
        let scales = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv";
        edit(&dir.join(file), |f| f.header[scales]["shape"] = json!([2, 1]));
    });
    assert!(
        found[0].what.contains("its shape is [2, 1]; [24, 144] in blocks of 128×128 needs [1, 2]"),
        "{}",
        found[0]
    );
}

#[test]
fn a_file_that_shrinks_while_open_is_an_error_not_garbage() {
    let dir = copy("colibri-container");
    let container = open(dir.path()).unwrap();
    let path = dir.path().join(SECOND);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20_000).unwrap();
    let error = container.load_matrix("model.layers.1.mlp.experts.2.up_proj.weight").unwrap_err().to_string();
    assert!(error.contains(SECOND), "{error}");
    let error = read(&container, ExpertId { layer: 1, index: 2 }).unwrap_err();
    assert!(matches!(error, ExpertError::Damaged { .. }), "{error}");
}

#[test]
fn a_non_finite_norm_is_refused() {
    let dir = copy("colibri-container");
    edit(&dir.path().join(SECOND), |file| {
        let at = file.range("model.norm.weight").start;
        file.data[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let error = open(dir.path()).unwrap().load_vector("model.norm.weight").unwrap_err().to_string();
    assert!(error.contains("model.norm.weight: element 0 is NaN"), "{error}");
}

#[test]
fn stamps_must_agree_and_refused_formats_are_named() {
    let name = "model.layers.1.mlp.experts.1.up_proj.weight";
    let stamped = |format: &str| {
        let dir = copy("colibri-container");
        edit(&dir.path().join(SECOND), |file| {
            let stamp = json!({name: format}).to_string();
            file.header.insert("__metadata__".into(), json!({"colibri.fmt": stamp}));
        });
        open(dir.path()).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(stamped("int4-grouped"), Ok(()));
    assert!(stamped("int8-row").unwrap_err().contains("stamped int8-row, but its sizes say int4-grouped"));
    let error = stamped("int4-rans256-g0").unwrap_err();
    assert!(error.contains("int4-rans256-g0, which is not supported") && error.contains(name), "{error}");
    let lattice = problems(|dir| {
        edit(&dir.join(SECOND), |file| {
            let begin = file.data.len();
            file.data.extend(vec![0; 128 * 98 + 4]);
            let (mid, end) = (begin + 128 * 98, begin + 128 * 98 + 4);
            file.header[name] = json!({"dtype": "U8", "shape": [128 * 98], "data_offsets": [begin, mid]});
            file.header[&format!("{name}.qs")] =
                json!({"dtype": "F32", "shape": [1], "data_offsets": [mid, end]});
        });
    });
    one(&lattice, SECOND, Some(name), "e8-iq3-lattice, which is not supported");
}

#[test]
fn directories_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    assert!(open(dir.path()).unwrap_err().to_string().contains("config.json"));
    assert!(open(&dir.path().join("nowhere")).is_err());
    assert!(shimmer_common::container::Container::open(&[]).is_err());
    let dir = copy("colibri-container");
    for shard in [MAIN, SECOND, MTP, INDEXER] {
        std::fs::remove_file(dir.path().join(shard)).unwrap();
    }
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("holds no *.safetensors file"), "{error}");
}
