//! `config.json`: what is accepted, what is refused, and that the refusal names the key.

use serde_json::{Map, Value, json};
use shimmer_common::container::config::{IndexerMode, ModelConfig};

use crate::support::{copy, data, edit_config, glm_5_2, open};

fn parse(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::parse(config.to_string().as_bytes())
}

fn olmoe() -> Value {
    serde_json::from_slice(&std::fs::read(data("tiny-olmoe").join("config.json")).unwrap()).unwrap()
}

/// The refusal of `base` with `key` set to `value` (removed when it is `null`).
#[track_caller]
fn refused(base: &Value, key: &str, value: &Value) -> String {
    let mut config = base.clone();
    let map: &mut Map<String, Value> = config.as_object_mut().unwrap();
    if value.is_null() {
        map.remove(key);
    } else {
        map.insert(key.into(), value.clone());
    }
    match parse(&config) {
        Err(message) => {
            assert!(message.contains(key), "{key} = {value}: {message}");
            assert!(!message.contains('\n') && message.len() < 400, "{message}");
            message
        }
        Ok(_) => panic!("{key} = {value} was accepted"),
    }
}

#[test]
fn glm_5_2_is_read_as_it_is() {
    let Ok(ModelConfig::Glm(c)) = parse(&glm_5_2()) else { panic!("not read") };
    assert_eq!((c.hidden_size, c.num_hidden_layers, c.n_routed_experts), (6144, 78, 256));
    assert_eq!((c.rms_norm_eps, c.rope_theta, c.routed_scaling_factor), (1e-5, 8e6, 2.5));
    assert_eq!(c.sparse_layers.iter().filter(|&&s| s).count(), 75);
    let full: Vec<usize> = (0..78).filter(|&i| c.indexer_modes[i] == IndexerMode::Full).collect();
    assert_eq!(full[..5], [0, 1, 2, 6, 10]);
    assert_eq!((full.len(), full.last()), (21, Some(&74)));
    assert_eq!(c.eos_token_ids, [154_820, 154_827, 154_829]);
    assert_eq!((c.num_nextn_predict_layers, c.max_position_embeddings), (1, 1_048_576));
}

#[test]
fn required_keys_are_named_when_missing() {
    for key in [
        "model_type",
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "num_experts_per_tok",
        "index_topk",
        "index_n_heads",
        "index_head_dim",
        "first_k_dense_replace",
        "max_position_embeddings",
    ] {
        refused(&glm_5_2(), key, &Value::Null);
    }
    for key in
        ["hidden_size", "num_experts", "num_experts_per_tok", "intermediate_size", "rope_theta", "vocab_size"]
    {
        refused(&olmoe(), key, &Value::Null);
    }
}

#[test]
fn dimensions_out_of_range_are_refused() {
    for key in
        ["hidden_size", "vocab_size", "num_hidden_layers", "n_routed_experts", "kv_lora_rank", "index_topk"]
    {
        for value in [
            json!(-1),
            json!(0),
            json!(64.5),
            json!("64"),
            json!(1e30),
            json!(u64::MAX),
            json!([1]),
            json!(true),
        ] {
            refused(&glm_5_2(), key, &value);
        }
    }
    let huge = refused(&glm_5_2(), "num_attention_heads", &json!(1 << 24));
    assert!(huge.contains("num_key_value_heads") || huge.contains("matrix"), "{huge}");
    let mut config = glm_5_2();
    config["num_key_value_heads"] = Value::Null;
    refused(&config, "num_attention_heads", &json!(1 << 24));
    refused(&config, "n_shared_experts", &json!(1 << 20));
}

#[test]
fn unsupported_values_are_refused_by_name() {
    for (key, value) in [
        ("model_type", json!("llama")),
        ("architectures", json!(["LlamaForCausalLM"])),
        ("qk_rope_head_dim", json!(63)),
        ("qk_rope_head_dim", json!(0)),
        ("qk_head_dim", json!(192)),
        ("num_key_value_heads", json!(8)),
        ("num_experts", json!(128)),
        ("num_experts_per_tok", json!(257)),
        ("n_shared_experts", json!(0)),
        ("n_group", json!(3)),
        ("n_group", json!(256)),
        ("topk_group", json!(2)),
        ("mlp_layer_types", json!(["dense"])),
        ("moe_layer_freq", json!(2)),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("moe_router_dtype", json!("bfloat16")),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("rope_scaling", json!({"type": "yarn", "factor": 4})),
        ("rope_interleave", json!(false)),
        ("indexer_rope_interleave", json!(false)),
        ("index_head_dim", json!(32)),
        ("indexer_types", json!(["full"])),
        ("index_topk_pattern", json!("FS")),
        ("num_nextn_predict_layers", json!(2)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("eos_token_id", json!("stop")),
        ("eos_token_id", json!(-1)),
        ("norm_topk_prob", json!(1)),
        ("routed_scaling_factor", json!("2.5")),
        ("index_kpool", json!(4)),
        ("mhc", json!({})),
        ("linear_attn_config", json!({})),
        ("layer_types", json!(["full_attention"])),
        ("rope_parameters", json!(5)),
    ] {
        refused(&glm_5_2(), key, &value);
    }
    for (key, value) in [
        ("architectures", json!(["GlmMoeDsaForCausalLM"])),
        ("num_attention_heads", json!(5)),
        ("num_key_value_heads", json!(3)),
        ("num_experts_per_tok", json!(17)),
        ("clip_qkv", json!(-2)),
        ("attention_bias", json!(true)),
        ("rope_scaling", json!({"factor": 2})),
        ("hidden_act", json!("gelu")),
        ("head_dim", json!(32)),
    ] {
        refused(&olmoe(), key, &value);
    }
    let nested = |rope: Value| refused(&glm_5_2(), "rope_parameters", &rope);
    assert!(
        nested(json!({"rope_type": "yarn", "rope_theta": 1e6}))
            .contains("rope_parameters.rope_type is \"yarn\"")
    );
    assert!(nested(json!({"rope_theta": -1})).contains("rope_parameters.rope_theta"));
}

#[test]
fn schedules_of_layers_are_read_from_any_of_their_keys() {
    let mut config = glm_5_2();
    config["num_hidden_layers"] = 4.into();
    let modes = |config: &Value| match parse(config) {
        Ok(ModelConfig::Glm(c)) => {
            c.indexer_modes.iter().map(|m| *m == IndexerMode::Full).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    config["index_topk_pattern"] = "FSSF".into();
    assert_eq!(modes(&config), [true, false, false, true]);
    config["index_topk_pattern"] = json!(["F", "S", "F", "S"]);
    assert_eq!(modes(&config), [true, false, true, false]);
    config["indexer_types"] = json!(["full", "full", "shared", "shared"]);
    assert_eq!(modes(&config), [true, true, false, false], "the list wins");
    assert!(
        refused(&config, "indexer_types", &json!(["shared", "full", "full", "full"])).contains("layer 0")
    );
    assert!(
        refused(&config, "indexer_types", &json!(["full", "none", "full", "full"]))
            .contains("indexer_types[1]")
    );
    config["mlp_layer_types"] = json!(["sparse", "dense", "sparse", "dense"]);
    let Ok(ModelConfig::Glm(c)) = parse(&config) else { panic!("not read") };
    assert_eq!(c.sparse_layers, [true, false, true, false], "the list wins over first_k_dense_replace");
    refused(&config, "mlp_layer_types", &json!(["sparse", "dense", "linear", "dense"]));
}

#[test]
fn aliases_defaults_and_unknown_keys_are_accepted() {
    let mut config = glm_5_2();
    let map = config.as_object_mut().unwrap();
    let experts = map.remove("n_routed_experts").unwrap();
    map.insert("num_local_experts".into(), experts);
    for key in [
        "n_shared_experts",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
        "scoring_func",
        "topk_method",
        "num_nextn_predict_layers",
        "eos_token_id",
    ] {
        map.remove(key);
    }
    map.insert("rope_parameters".into(), Value::Null);
    map.insert("rope_theta".into(), json!(10_000));
    map.insert("eos_token_id".into(), json!(7));
    map.insert("something_new".into(), json!({"a": [1, 2]}));
    let Ok(ModelConfig::Glm(c)) = parse(&config) else { panic!("not read") };
    assert_eq!((c.n_routed_experts, c.n_shared_experts, c.n_group, c.topk_group), (256, 1, 1, 1));
    assert_eq!((c.norm_topk_prob, c.routed_scaling_factor, c.rms_norm_eps), (true, 2.5, 1e-5));
    assert_eq!((c.num_nextn_predict_layers, c.rope_theta, c.eos_token_ids), (0, 1e4, vec![7]));
}

#[test]
fn text_that_is_no_configuration_is_refused() {
    for text in ["", "{", "[]", "null", "{\"model_type\": 5}", "{}", "{\"vocab_size\": 1e999}"] {
        assert!(ModelConfig::parse(text.as_bytes()).is_err(), "{text}");
    }
    assert!(ModelConfig::parse(&[0xff, 0xfe, 0]).is_err());
    let deep = "[".repeat(100_000);
    assert!(ModelConfig::parse(deep.as_bytes()).is_err());
}

#[test]
fn quantisation_matters_for_checkpoints_and_not_for_containers() {
    let quantised = |model: &str, q: Value| {
        let dir = copy(model);
        edit_config(dir.path(), |c| {
            c.insert("quantization_config".into(), q);
        });
        open(dir.path()).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(quantised("colibri-container", json!({"quant_method": "gptq"})), Ok(()));
    assert_eq!(quantised("tiny-mtp", Value::Null), Ok(()));
    let good = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    assert_eq!(quantised("tiny-mtp-fp8", good), Ok(()));
    for (q, key) in [
        (json!({"quant_method": "awq", "weight_block_size": [128, 128]}), "quant_method is \"awq\""),
        (json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}), "fmt is \"e5m2\""),
        (json!({"quant_method": "fp8", "weight_block_size": [64, 64]}), "weight_block_size is [64,64]"),
        (json!({"quant_method": "fp8"}), "weight_block_size is missing"),
    ] {
        let message = quantised("tiny-mtp-fp8", q).unwrap_err();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
}
