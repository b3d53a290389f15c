//! `olmoe`: the rules of docs/model.md §14.

use serde_json::Value;

use super::OlmoeConfig;
use super::fields::{Fields, check_matrix};

const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: usize = u16::MAX as usize;
const MAX_POSITIONS: usize = i32::MAX as usize;

pub(super) fn parse(f: &Fields<'_>) -> Result<OlmoeConfig, String> {
    let named = f.get("architectures").and_then(Value::as_array);
    if !named.is_some_and(|list| list.iter().any(|a| a == "OlmoeForCausalLM")) {
        return Err(f.refuse("architectures", "[\"OlmoeForCausalLM\"]"));
    }
    f.only("attention_bias", &false.into())?;
    f.only("mlp_bias", &false.into())?;
    f.only("hidden_act", &"silu".into())?;

    let hidden_size = f.dim("hidden_size")?;
    let num_attention_heads = f.int("num_attention_heads", 1, hidden_size)?;
    check_heads(f, hidden_size, num_attention_heads)?;
    let num_key_value_heads = f.int_or("num_key_value_heads", num_attention_heads, 1, num_attention_heads)?;
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let want = format!("a divisor of num_attention_heads ({num_attention_heads})");
        return Err(f.refuse("num_key_value_heads", &want));
    }
    let num_experts = f.int("num_experts", 1, MAX_EXPERTS)?;
    let clip_qkv = if f.get("clip_qkv").is_some() { Some(f.positive("clip_qkv")? as f32) } else { None };
    let config = OlmoeConfig {
        vocab_size: f.dim("vocab_size")?,
        hidden_size,
        intermediate_size: f.dim("intermediate_size")?,
        num_hidden_layers: f.int("num_hidden_layers", 1, MAX_LAYERS)?,
        num_attention_heads,
        num_key_value_heads,
        num_experts,
        num_experts_per_tok: f.int("num_experts_per_tok", 1, num_experts)?,
        norm_topk_prob: f.flag_or("norm_topk_prob", false)?,
        clip_qkv,
        rms_norm_eps: f.positive_or("rms_norm_eps", 1e-5)? as f32,
        rope_theta: f.rope_theta()?,
        max_position_embeddings: f.int("max_position_embeddings", 1, MAX_POSITIONS)?,
        tie_word_embeddings: f.flag_or("tie_word_embeddings", false)?,
        eos_token_ids: f.token_ids("eos_token_id")?,
    };
    check_matrix("vocab_size and hidden_size", &[config.vocab_size], &[hidden_size])?;
    check_matrix("hidden_size", &[hidden_size], &[hidden_size])?;
    check_matrix("intermediate_size and hidden_size", &[config.intermediate_size], &[hidden_size])?;
    check_matrix("num_experts and hidden_size", &[num_experts], &[hidden_size])?;
    Ok(config)
}

fn check_heads(f: &Fields<'_>, hidden_size: usize, heads: usize) -> Result<(), String> {
    let head_dim = hidden_size / heads;
    if !hidden_size.is_multiple_of(heads) || !head_dim.is_multiple_of(2) {
        let want = format!("such that hidden_size ({hidden_size}) splits into heads of an even size");
        return Err(f.refuse("num_attention_heads", &want));
    }
    if f.get("head_dim").is_some_and(|v| v.as_u64() != Some(head_dim as u64)) {
        return Err(f.refuse("head_dim", &format!("hidden_size / num_attention_heads = {head_dim}")));
    }
    Ok(())
}
