//! Model identity: cheap for a 430 GB model, independent of how tensors are spread over files.
//!
//! BLAKE3 over the configuration, the sorted (name, dtype, bytes, shape) of every used tensor, the
//! whole content of vectors (norms, biases), and the first [`SAMPLE_BYTES`] of every dense matrix and
//! of the first and last routed expert of each layer. It tells models apart; it does not detect a flipped
//! bit deep inside a matrix, which is what the checksums of expert packs are for.

use std::fmt::Write;

use super::config::{GlmConfig, IndexerMode, ModelConfig, OlmoeConfig};
use super::error::ContainerError;
use super::file::Shard;
use super::index::Index;
use super::load::read_start;
use super::resolve::{Dense, MatrixPlace, Place, Resolved};

/// Vectors are hashed whole up to this size; a 7168-wide f32 norm has 28 KiB.
const VECTOR_BYTES: u64 = 1 << 20;
/// How much of a matrix is hashed.
const SAMPLE_BYTES: u64 = 4096;
/// Changing anything below changes every fingerprint: count up.
const DOMAIN: &str = "shimmer model fingerprint 1\n";

/// Hash of configuration and tensor table; the content is added by [`finish`].
pub(super) fn start(config: &ModelConfig, index: &Index) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.update(DOMAIN.as_bytes());
    hasher.update(canonical(config).as_bytes());
    let mut used: Vec<_> = index.tensors.iter().filter(|(_, t)| t.used).collect();
    used.sort_unstable_by_key(|(name, _)| &***name);
    for (name, tensor) in used {
        let info = &tensor.info;
        feed(&mut hasher, name.as_bytes());
        feed(&mut hasher, info.dtype.name().as_bytes());
        hasher.update(&info.bytes().to_le_bytes());
        hasher.update(&(info.shape.len() as u64).to_le_bytes());
        for dim in &info.shape {
            hasher.update(&dim.to_le_bytes());
        }
    }
    hasher
}

/// Adds the content and returns the digest.
pub(super) fn finish(
    mut hasher: blake3::Hasher,
    resolved: &Resolved,
    shards: &[Shard],
) -> Result<[u8; 32], ContainerError> {
    for (name, Dense { place, .. }) in &resolved.dense {
        feed(&mut hasher, name.as_bytes());
        match place {
            Place::Vector(v) => feed(&mut hasher, &read_start(shards, &v.span, VECTOR_BYTES)?),
            Place::Matrix(m) => feed_matrix(&mut hasher, shards, m)?,
        }
    }
    for (layer, experts) in &resolved.experts {
        hasher.update(&layer.to_le_bytes());
        for matrix in experts.first().into_iter().chain(experts.last()).flatten() {
            feed_matrix(&mut hasher, shards, matrix)?;
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

fn feed_matrix(hasher: &mut blake3::Hasher, shards: &[Shard], m: &MatrixPlace) -> Result<(), ContainerError> {
    for span in [Some(m.weights), m.scales].iter().flatten() {
        feed(hasher, &read_start(shards, span, SAMPLE_BYTES)?);
    }
    Ok(())
}

/// Length first, so that no two sequences of fields give the same bytes.
fn feed(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// The fields that change what is computed, one per line. Context length and stop ids do not.
fn canonical(config: &ModelConfig) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{key}={value}");
    };
    line("model_type", &config.model_type());
    match config {
        ModelConfig::Glm(c) => glm(c, &mut line),
        ModelConfig::Olmoe(c) => olmoe(c, &mut line),
    }
    text
}

fn glm(c: &GlmConfig, line: &mut dyn FnMut(&str, &dyn std::fmt::Display)) {
    line("vocab_size", &c.vocab_size);
    line("hidden_size", &c.hidden_size);
    line("intermediate_size", &c.intermediate_size);
    line("moe_intermediate_size", &c.moe_intermediate_size);
    line("num_hidden_layers", &c.num_hidden_layers);
    line("num_attention_heads", &c.num_attention_heads);
    line("q_lora_rank", &c.q_lora_rank);
    line("kv_lora_rank", &c.kv_lora_rank);
    line("qk_nope_head_dim", &c.qk_nope_head_dim);
    line("qk_rope_head_dim", &c.qk_rope_head_dim);
    line("v_head_dim", &c.v_head_dim);
    line("n_routed_experts", &c.n_routed_experts);
    line("num_experts_per_tok", &c.num_experts_per_tok);
    line("n_shared_experts", &c.n_shared_experts);
    line("n_group", &c.n_group);
    line("topk_group", &c.topk_group);
    line("norm_topk_prob", &c.norm_topk_prob);
    line("routed_scaling_factor", &c.routed_scaling_factor.to_bits());
    let sparse: String = c.sparse_layers.iter().map(|&s| if s { 'S' } else { 'D' }).collect();
    line("mlp_layer_types", &sparse);
    line("rms_norm_eps", &c.rms_norm_eps.to_bits());
    line("rope_theta", &c.rope_theta.to_bits());
    line("index_topk", &c.index_topk);
    line("index_n_heads", &c.index_n_heads);
    line("index_head_dim", &c.index_head_dim);
    let letter = |m: &IndexerMode| if *m == IndexerMode::Full { 'F' } else { 'S' };
    let modes: String = c.indexer_modes.iter().map(letter).collect();
    line("indexer_types", &modes);
    line("index_share_for_mtp_iteration", &c.index_share_for_mtp_iteration);
    line("num_nextn_predict_layers", &c.num_nextn_predict_layers);
    line("tie_word_embeddings", &c.tie_word_embeddings);
}

fn olmoe(c: &OlmoeConfig, line: &mut dyn FnMut(&str, &dyn std::fmt::Display)) {
    line("vocab_size", &c.vocab_size);
    line("hidden_size", &c.hidden_size);
    line("intermediate_size", &c.intermediate_size);
    line("num_hidden_layers", &c.num_hidden_layers);
    line("num_attention_heads", &c.num_attention_heads);
    line("num_key_value_heads", &c.num_key_value_heads);
    line("num_experts", &c.num_experts);
    line("num_experts_per_tok", &c.num_experts_per_tok);
    line("norm_topk_prob", &c.norm_topk_prob);
    let clip = c.clip_qkv.map_or("none".to_owned(), |clip| clip.to_bits().to_string());
    line("clip_qkv", &clip);
    line("rms_norm_eps", &c.rms_norm_eps.to_bits());
    line("rope_theta", &c.rope_theta.to_bits());
    line("tie_word_embeddings", &c.tie_word_embeddings);
}
