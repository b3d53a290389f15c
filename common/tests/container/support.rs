//! Helpers of the container tests: copies of the test data that can be damaged, and models made of
//! headers only. They know the file format independently of the reader.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use shimmer_common::container::Container;
use shimmer_common::container::ContainerError;

/// A directory of the test data.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

/// Opens one directory.
pub fn open(dir: &Path) -> Result<Container, ContainerError> {
    Container::open(&[dir.to_owned()])
}

/// A copy of the model files of a test directory, to be changed.
pub fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(data(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if file == "config.json" || path.extension().is_some_and(|e| e == "safetensors") {
            std::fs::copy(&path, dir.path().join(file)).unwrap();
        }
    }
    dir
}

/// A safetensors file taken apart.
pub struct RawFile {
    pub header: Map<String, Value>,
    pub data: Vec<u8>,
}

impl RawFile {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        Self { header, data: bytes[8 + len..].to_vec() }
    }

    pub fn write(&self, path: &Path) {
        let json = serde_json::to_vec(&self.header).unwrap();
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes.extend(&self.data);
        std::fs::write(path, bytes).unwrap();
    }

    /// Byte range of a tensor within the data.
    pub fn range(&self, name: &str) -> std::ops::Range<usize> {
        let offsets = self.header[name]["data_offsets"].as_array().unwrap();
        offsets[0].as_u64().unwrap() as usize..offsets[1].as_u64().unwrap() as usize
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        &self.data[self.range(name)]
    }
}

/// Changes a safetensors file in place.
pub fn edit(path: &Path, change: impl FnOnce(&mut RawFile)) {
    let mut file = RawFile::read(path);
    change(&mut file);
    file.write(path);
}

/// Changes the config.json of a directory in place.
pub fn edit_config(dir: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = dir.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path, serde_json::to_vec(&config).unwrap()).unwrap();
}

/// One stored tensor of a model made by a test.
#[derive(Clone)]
pub struct Stored {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
}

impl Stored {
    pub fn bytes(&self) -> u64 {
        let element = match self.dtype {
            "U8" => 1,
            "BF16" => 2,
            _ => 4,
        };
        self.shape.iter().product::<u64>() * element
    }
}

/// How a test stores quantised matrices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Width {
    Int8,
    Int4Row,
    Int4Group(u64),
}

/// The stored tensors of one `[rows, cols]` matrix.
pub fn quantised(name: String, rows: u64, cols: u64, width: Width) -> [Stored; 2] {
    let (bytes, scales) = match width {
        Width::Int8 => (rows * cols, rows),
        Width::Int4Row => (rows * cols.div_ceil(2), rows),
        Width::Int4Group(group) => (rows * cols.div_ceil(2), rows * cols.div_ceil(group)),
    };
    let qs = format!("{name}.qs");
    [Stored { name, dtype: "U8", shape: vec![bytes] }, Stored { name: qs, dtype: "F32", shape: vec![scales] }]
}

/// The tensors of a `glm_moe_dsa` container, by layer: globals first, then layer 0, ….
/// Written from the tables of docs/formats.md §3, not from the reader.
pub fn glm_container(config: &Value, body: Width, mtp: Width) -> Vec<Vec<Stored>> {
    let n = |key: &str| config[key].as_u64().unwrap();
    let hidden = n("hidden_size");
    let f32s = |name: String, shape: Vec<u64>| Stored { name, dtype: "F32", shape };
    let mut globals = Vec::new();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        globals.extend(quantised(name.into(), n("vocab_size"), hidden, Width::Int8));
    }
    globals.push(f32s("model.norm.weight".into(), vec![hidden]));
    let mut groups = vec![globals];
    let layers = n("num_hidden_layers");
    for layer in 0..layers + n("num_nextn_predict_layers") {
        let is_mtp = layer == layers;
        let width = if is_mtp { mtp } else { body };
        let mut group = Vec::new();
        let p = format!("model.layers.{layer}");
        for (norm, len) in [
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_a_layernorm", n("q_lora_rank")),
            ("self_attn.kv_a_layernorm", n("kv_lora_rank")),
        ] {
            group.push(f32s(format!("{p}.{norm}.weight"), vec![len]));
        }
        let (heads, nope, rope, v) =
            (n("num_attention_heads"), n("qk_nope_head_dim"), n("qk_rope_head_dim"), n("v_head_dim"));
        let mut matrices = vec![
            ("self_attn.q_a_proj".to_owned(), n("q_lora_rank"), hidden),
            ("self_attn.q_b_proj".into(), heads * (nope + rope), n("q_lora_rank")),
            ("self_attn.kv_a_proj_with_mqa".into(), n("kv_lora_rank") + rope, hidden),
            ("self_attn.kv_b_proj".into(), heads * (nope + v), n("kv_lora_rank")),
            ("self_attn.o_proj".into(), hidden, heads * v),
        ];
        let mut swiglu = |module: String, inner: u64| {
            matrices.push((format!("{module}.gate_proj"), inner, hidden));
            matrices.push((format!("{module}.up_proj"), inner, hidden));
            matrices.push((format!("{module}.down_proj"), hidden, inner));
        };
        if layer < n("first_k_dense_replace") {
            swiglu("mlp".into(), n("intermediate_size"));
        } else {
            let inner = n("moe_intermediate_size");
            swiglu("mlp.shared_experts".into(), inner * n("n_shared_experts"));
            for e in 0..n("n_routed_experts") {
                swiglu(format!("mlp.experts.{e}"), inner);
            }
            group.push(f32s(format!("{p}.mlp.gate.weight"), vec![n("n_routed_experts"), hidden]));
            group.push(f32s(format!("{p}.mlp.gate.e_score_correction_bias"), vec![n("n_routed_experts")]));
        }
        if is_mtp {
            matrices.push(("eh_proj".into(), hidden, 2 * hidden));
            for norm in ["enorm", "hnorm", "shared_head.norm"] {
                group.push(f32s(format!("{p}.{norm}.weight"), vec![hidden]));
            }
        }
        for (name, rows, cols) in matrices {
            group.extend(quantised(format!("{p}.{name}.weight"), rows, cols, width));
        }
        groups.push(group);
    }
    groups
}

/// Writes a shard whose data is a hole: floats first, then payloads, each sorted by name, as the
/// converter does.
pub fn write_hollow(path: &Path, mut tensors: Vec<Stored>) {
    tensors.sort_by(|a, b| (a.dtype != "F32", &a.name).cmp(&(b.dtype != "F32", &b.name)));
    let mut header = Map::new();
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += tensor.bytes();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]});
        assert!(header.insert(tensor.name, entry).is_none());
    }
    RawFile { header, data: Vec::new() }.write(path);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len + end).unwrap();
}

/// Writes a whole hollow container: `config.json` and one shard per group.
pub fn write_container(dir: &Path, config: &Value, groups: Vec<Vec<Stored>>) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for (i, group) in groups.into_iter().enumerate() {
        write_hollow(&dir.join(format!("out-{i:05}.safetensors")), group);
    }
}

/// GLM-5.2's configuration (docs/model.md §1).
pub fn glm_5_2() -> Value {
    // A container keeps the quantisation of the checkpoint it was made from, whatever it was.
    let text = r#"{
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 78, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
        "head_dim": 192, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk_freq": 4, "index_skip_topk_offset": 3, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
        "tie_word_embeddings": false, "attention_bias": false, "max_position_embeddings": 1048576,
        "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820,
        "quantization_config": {"quant_method": "unknown"}
    }"#;
    serde_json::from_str(text).unwrap()
}
