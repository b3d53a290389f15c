//! Every model of the test data opens, its content is said correctly, and its weights are the recorded
//! ones.

use serde_json::Value;
use sha2::{Digest, Sha256};
use shimmer_common::container::{Container, TensorShape};
use shimmer_common::quant::Format;

use crate::support::{
    RawFile, Width, copy, data, edit, edit_config, glm_5_2, glm_container, open, write_container,
};

#[test]
fn every_recorded_model_opens() {
    let bf16 = "bf16 experts, bf16 attention, bf16 embeddings";
    for (name, mtp, line) in [
        ("tiny-dense-index", false, format!("{bf16}, no MTP, indexer")),
        ("tiny-sparse", false, format!("{bf16}, no MTP, indexer")),
        ("tiny-groups", false, format!("{bf16}, no MTP, indexer")),
        ("tiny-mtp", true, format!("{bf16}, MTP bf16 (usable), indexer")),
        (
            "tiny-mtp-fp8",
            true,
            "fp8 experts, fp8 attention, bf16 embeddings, MTP mixed fp8/bf16 (usable), indexer".into(),
        ),
        ("tiny-olmoe", false, bf16.into()),
        ("demo-model", true, format!("{bf16}, MTP bf16 (usable), indexer")),
        (
            "colibri-container",
            true,
            "int4 gs64 experts, int4 gs64 attention, int8 embeddings, MTP int8 (usable), indexer".into(),
        ),
    ] {
        let container = open(&data(name)).unwrap();
        assert_eq!(container.summary().line, line, "{name}");
        assert_eq!(container.summary().warnings, Vec::<String>::new(), "{name}");
        assert_eq!(container.has_mtp(), mtp, "{name}");
        assert_eq!(container.has_indexer(), name != "tiny-olmoe", "{name}");
        assert_eq!(container.has_mtp_indexer(), mtp && name != "colibri-container", "{name}");
    }
}

/// SHA-256 of the dequantised matrix as little-endian f32.
fn digest(container: &Container, name: &str) -> (Format, String) {
    let matrix = container.load_matrix(name).unwrap();
    let mut row = vec![0f32; matrix.cols];
    let mut hash = Sha256::new();
    for r in 0..matrix.rows {
        matrix.view().decode_row(r, &mut row);
        row.iter().for_each(|v| hash.update(v.to_le_bytes()));
    }
    (matrix.format, hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

#[test]
fn every_matrix_of_the_sample_container_has_the_recorded_digest() {
    let dir = data("colibri-container");
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let container = open(&dir).unwrap();
    let tensors = expected["tensors"].as_object().unwrap();
    assert!(tensors.len() > 10);
    for (name, tensor) in tensors {
        let (format, sha256) = digest(&container, name);
        assert_eq!(sha256, tensor["sha256_f32le"].as_str().unwrap(), "{name}");
        let spec = container.matrix_spec(name).unwrap();
        assert_eq!(format, spec.format);
        assert_eq!(serde_json::json!([spec.rows, spec.cols]), tensor["shape"], "{name}");
    }
}

#[test]
fn all_used_tensors_load_with_their_stated_size() {
    for name in ["colibri-container", "tiny-mtp", "tiny-mtp-fp8", "tiny-olmoe"] {
        let container = open(&data(name)).unwrap();
        let mut bytes = 0;
        for tensor in container.dense_tensors() {
            bytes += tensor.bytes;
            assert!(container.has(&tensor.name));
            match tensor.shape {
                TensorShape::Matrix { rows, cols } => {
                    let matrix = container.load_matrix(&tensor.name).unwrap();
                    assert_eq!((matrix.rows, matrix.cols), (rows, cols), "{}", tensor.name);
                    assert_eq!(matrix.bytes() as u64, tensor.bytes, "{}", tensor.name);
                    assert!(container.load_vector(&tensor.name).is_err());
                }
                TensorShape::Vector { len } => {
                    assert_eq!(container.load_vector(&tensor.name).unwrap().len(), len, "{}", tensor.name);
                    assert!(container.matrix_spec(&tensor.name).is_none());
                    assert!(container.load_matrix(&tensor.name).is_err());
                }
            }
        }
        assert_eq!(container.dense_bytes(), bytes, "{name}");
        // Scales of zero are legal, everything else of the file is counted exactly once.
        assert!(container.bytes().total() > bytes);
        assert!(!container.has("model.layers.0.self_attn.rotary.inv_freq"));
        let error = container.load_matrix("model.layers.999.eh_proj.weight").unwrap_err().to_string();
        assert!(error.contains("model.layers.999.eh_proj.weight: is not a tensor of this model"), "{error}");
    }
}

#[test]
fn float_vectors_are_the_bytes_of_the_file() {
    let container = open(&data("tiny-mtp")).unwrap();
    let file = RawFile::read(&data("tiny-mtp").join("model.safetensors"));
    let name = "model.layers.1.self_attn.indexer.k_norm.bias";
    let expected: Vec<f32> = file
        .bytes(name)
        .chunks_exact(2)
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
        .collect();
    assert_eq!(container.load_vector(name).unwrap(), expected);
}

#[test]
fn shard_names_and_directories_do_not_matter() {
    let original = open(&data("colibri-container")).unwrap().fingerprint().unwrap();
    let dir = copy("colibri-container");
    std::fs::rename(dir.path().join("out-00001.safetensors"), dir.path().join("zz renamed ü.safetensors"))
        .unwrap();
    let renamed = open(dir.path()).unwrap();
    assert_eq!(renamed.fingerprint().unwrap(), original);
    assert_eq!(renamed.fingerprint().unwrap().to_string().len(), 64);

    // The MTP layer on a second drive; a file of the same name there does not count.
    let second = tempfile::tempdir().unwrap();
    let mtp = "out-mtp-00000.safetensors";
    std::fs::rename(dir.path().join(mtp), second.path().join(mtp)).unwrap();
    assert!(!open(dir.path()).unwrap().has_mtp());
    std::fs::write(second.path().join("out-00000.safetensors"), b"not the first of this name").unwrap();
    let dirs = [dir.path().to_owned(), second.path().to_owned()];
    let split = Container::open(&dirs).unwrap();
    assert!(split.has_mtp());
    assert_eq!(split.fingerprint().unwrap(), original);
}

#[test]
fn fingerprints_tell_models_apart() {
    let original = open(&data("colibri-container")).unwrap().fingerprint().unwrap();
    let fingerprint = |change: &dyn Fn(&std::path::Path)| {
        let dir = copy("colibri-container");
        change(dir.path());
        open(dir.path()).unwrap().fingerprint().unwrap()
    };
    assert_eq!(fingerprint(&|_| {}), original);
    let longer_context = fingerprint(&|dir| {
        edit_config(dir, |c| {
            c["max_position_embeddings"] = 8192.into();
        });
    });
    assert_eq!(longer_context, original, "the context length changes no weight");
    let scaled = fingerprint(&|dir| {
        edit_config(dir, |c| {
            c["routed_scaling_factor"] = 1.5.into();
        });
    });
    assert_ne!(scaled, original);
    for name in ["model.layers.1.mlp.gate.e_score_correction_bias", "model.embed_tokens.weight"] {
        let changed = fingerprint(&|dir| {
            edit(&dir.join("out-00000.safetensors"), |file| {
                let at = file.range(name).start;
                file.data[at] ^= 1;
            });
        });
        assert_ne!(changed, original, "{name}");
    }
}

#[test]
fn trailing_bytes_and_unknown_tensors_are_tolerated() {
    let dir = copy("colibri-container");
    edit(&dir.path().join("out-00001.safetensors"), |file| {
        let begin = file.data.len();
        file.data.extend([0; 6]);
        let entry = serde_json::json!({"dtype": "F4_NEW", "shape": [12], "data_offsets": [begin, begin + 6]});
        file.header.insert("model.extra.weight".into(), entry);
        file.data.extend([9; 100]);
    });
    let container = open(dir.path()).unwrap();
    let [warning] = &container.summary().warnings[..] else { panic!("one line") };
    assert_eq!(
        warning,
        "1 tensors of the files are not part of this model and are ignored (model.extra.weight first)"
    );
}

#[test]
fn a_running_conversion_is_a_warning() {
    let dir = copy("colibri-container");
    std::fs::write(dir.path().join(".convert.lock"), b"").unwrap();
    let warnings = open(dir.path()).unwrap().summary().warnings.join("\n");
    assert!(warnings.contains("may be incomplete"), "{warnings}");
}

#[test]
fn tied_embeddings_are_the_head() {
    let dir = copy("tiny-olmoe");
    edit_config(dir.path(), |c| {
        c["tie_word_embeddings"] = true.into();
    });
    edit(&dir.path().join("model.safetensors"), |file| {
        file.header.remove("lm_head.weight");
    });
    let container = open(dir.path()).unwrap();
    let head = container.load_matrix("lm_head.weight").unwrap();
    let embeddings = container.load_matrix("model.embed_tokens.weight").unwrap();
    assert_eq!(head.weights[..], embeddings.weights[..]);
    assert_eq!(container.dense_tensors().filter(|t| t.name == "lm_head.weight").count(), 0);
}

#[test]
fn an_mtp_layer_may_bring_its_own_embedding_and_head() {
    let dir = copy("tiny-mtp");
    edit(&dir.path().join("model.safetensors"), |file| {
        let entry = file.header["lm_head.weight"].clone();
        let bytes = file.bytes("lm_head.weight").to_vec();
        let begin = file.data.len();
        file.data.extend(&bytes);
        let offsets = serde_json::json!([begin, begin + bytes.len()]);
        let own =
            serde_json::json!({"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets});
        file.header.insert("model.layers.4.shared_head.head.weight".into(), own);
    });
    let container = open(dir.path()).unwrap();
    assert!(container.has("model.layers.4.shared_head.head.weight"));
    assert!(!container.has("model.layers.4.embed_tokens.weight"));
}

/// A model whose every grouped matrix has three groups of 131 columns: 48 and 64 both fit.
fn ambiguous(dir: &std::path::Path) {
    let mut config = glm_5_2();
    for (key, value) in [
        ("vocab_size", 32),
        ("hidden_size", 131),
        ("intermediate_size", 131),
        ("moe_intermediate_size", 131),
        ("num_hidden_layers", 2),
        ("num_nextn_predict_layers", 0),
        ("first_k_dense_replace", 1),
        ("num_attention_heads", 1),
        ("num_key_value_heads", 1),
        ("n_routed_experts", 2),
        ("num_experts_per_tok", 1),
        ("q_lora_rank", 131),
        ("kv_lora_rank", 131),
        ("qk_nope_head_dim", 24),
        ("qk_rope_head_dim", 8),
        ("qk_head_dim", 32),
        ("v_head_dim", 131),
    ] {
        config[key] = value.into();
    }
    let groups = glm_container(&config, Width::Int4Group(64), Width::Int8);
    write_container(dir, &config, groups);
}

#[test]
fn an_ambiguous_group_size_needs_the_converters_word() {
    let dir = tempfile::tempdir().unwrap();
    ambiguous(dir.path());
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("[48, 64] all fit") && error.contains("out-00001.safetensors"), "{error}");
    for (file, group) in [(".out-params.json", 48), (".out-progress.json", 64)] {
        let params = serde_json::json!({"params": {"group_size": group}});
        std::fs::write(dir.path().join(file), params.to_string()).unwrap();
        let container = open(dir.path()).unwrap();
        let spec = container.matrix_spec("model.layers.1.mlp.experts.1.up_proj.weight").unwrap();
        assert_eq!(spec.format, Format::Int4Grouped { group });
    }
}

#[test]
fn one_clear_matrix_settles_the_ambiguous_ones() {
    let dir = tempfile::tempdir().unwrap();
    ambiguous(dir.path());
    edit_config(dir.path(), |c| {
        c["kv_lora_rank"] = 192.into();
    });
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    write_container(dir.path(), &config, glm_container(&config, Width::Int4Group(64), Width::Int8));
    let container = open(dir.path()).unwrap();
    let spec = container.matrix_spec("model.layers.1.mlp.experts.1.up_proj.weight").unwrap();
    assert_eq!(spec.format, Format::Int4Grouped { group: 64 });
}

#[cfg(unix)]
#[test]
fn a_read_only_directory_of_links_works() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(data("colibri-container")).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o555)).unwrap();
    let opened = open(dir.path()).map(|c| c.load_matrix("lm_head.weight").unwrap().rows);
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(opened.unwrap(), 96);
}

#[test]
fn a_copy_in_a_second_directory_is_read_when_the_first_fails() {
    let (first, second) = (copy("colibri-container"), copy("colibri-container"));
    let both = [first.path().to_owned(), second.path().to_owned()];
    let intact = open(&data("colibri-container")).unwrap();
    let container = Container::open(&both).unwrap();
    assert_eq!(container.summary().warnings, intact.summary().warnings);
    for entry in std::fs::read_dir(first.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            // As after a crash of the file system: the file is there, its end is not.
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        }
    }
    let (source, wanted) = (container.experts(), intact.experts());
    for id in wanted.layout().ids() {
        let bytes = wanted.layout().record_bytes(id).unwrap();
        let (mut found, mut expected) = (vec![0; bytes], vec![0; bytes]);
        source.read(id, &mut found).unwrap();
        wanted.read(id, &mut expected).unwrap();
        assert!(found == expected, "{id}");
    }
    let name = "model.layers.0.self_attn.o_proj.weight";
    assert_eq!(
        container.load_matrix(name).unwrap().weights[..],
        intact.load_matrix(name).unwrap().weights[..]
    );
    container.finish_loading();
    assert_eq!(container.fingerprint().unwrap(), intact.fingerprint().unwrap());
}

#[test]
fn a_file_of_the_same_name_that_is_no_copy_is_left_alone() {
    let (first, second) = (copy("colibri-container"), copy("colibri-container"));
    let shard = |dir: &tempfile::TempDir| dir.path().join("out-00000.safetensors");
    // Same size, another header.
    let bytes = std::fs::read(shard(&second)).unwrap();
    let at = bytes.windows(7).position(|w| w == b"lm_head").unwrap();
    let mut other = bytes.clone();
    other[at..at + 7].copy_from_slice(b"lm_tail");
    std::fs::write(shard(&second), &other).unwrap();
    let both = [first.path().to_owned(), second.path().to_owned()];
    let warnings = Container::open(&both).unwrap().summary().warnings.clone();
    let warning = warnings.iter().find(|w| w.contains("is no copy of")).unwrap();
    assert!(warning.contains("another header") && warning.contains("out-00000"), "{warning}");
    std::fs::write(shard(&second), &bytes[..bytes.len() - 1]).unwrap();
    let warnings = Container::open(&both).unwrap().summary().warnings.clone();
    assert!(warnings.iter().any(|w| w.contains("bytes instead of")), "{warnings:?}");
}
