//! `glm_moe_dsa`: the rules of docs/model.md §11.

use serde_json::Value;

use super::fields::{Fields, MAX_DIM, check_matrix};
use super::{GlmConfig, IndexerMode};

/// Far beyond any model; layers and experts are addressed by 16-bit numbers.
const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: usize = u16::MAX as usize;
/// Positions are 32-bit in every cache.
const MAX_POSITIONS: usize = i32::MAX as usize;

struct Experts {
    n_routed: usize,
    per_tok: usize,
    n_group: usize,
    topk_group: usize,
}

pub(super) fn parse(f: &Fields<'_>) -> Result<GlmConfig, String> {
    refuse_other_architectures(f)?;
    refuse_unsupported(f)?;
    let num_hidden_layers = f.int("num_hidden_layers", 1, MAX_LAYERS)?;
    let experts = experts(f)?;
    let config = GlmConfig {
        vocab_size: f.dim("vocab_size")?,
        hidden_size: f.dim("hidden_size")?,
        intermediate_size: f.dim("intermediate_size")?,
        moe_intermediate_size: f.dim("moe_intermediate_size")?,
        num_hidden_layers,
        num_attention_heads: f.dim("num_attention_heads")?,
        q_lora_rank: f.dim("q_lora_rank")?,
        kv_lora_rank: f.dim("kv_lora_rank")?,
        qk_nope_head_dim: f.dim("qk_nope_head_dim")?,
        qk_rope_head_dim: f.dim("qk_rope_head_dim")?,
        v_head_dim: f.dim("v_head_dim")?,
        n_routed_experts: experts.n_routed,
        num_experts_per_tok: experts.per_tok,
        n_shared_experts: f.int_or("n_shared_experts", 1, 1, MAX_EXPERTS)?,
        n_group: experts.n_group,
        topk_group: experts.topk_group,
        norm_topk_prob: f.flag_or("norm_topk_prob", true)?,
        routed_scaling_factor: f.positive_or("routed_scaling_factor", 2.5)? as f32,
        sparse_layers: sparse_layers(f, num_hidden_layers)?,
        rms_norm_eps: f.positive_or("rms_norm_eps", 1e-5)? as f32,
        rope_theta: f.rope_theta()?,
        index_topk: f.int("index_topk", 1, MAX_POSITIONS)?,
        index_n_heads: f.dim("index_n_heads")?,
        index_head_dim: f.dim("index_head_dim")?,
        indexer_modes: indexer_modes(f, num_hidden_layers)?,
        index_share_for_mtp_iteration: f.flag_or("index_share_for_mtp_iteration", false)?,
        num_nextn_predict_layers: f.int_or("num_nextn_predict_layers", 0, 0, 1)?,
        max_position_embeddings: f.int("max_position_embeddings", 1, MAX_POSITIONS)?,
        tie_word_embeddings: f.flag_or("tie_word_embeddings", false)?,
        eos_token_ids: f.token_ids("eos_token_id")?,
    };
    check_heads(f, &config)?;
    check_sizes(&config)?;
    Ok(config)
}

/// Keys of GLM-5.3-Flash: another attention, not an option of this one.
fn refuse_other_architectures(f: &Fields<'_>) -> Result<(), String> {
    let flash = |key: &str| {
        key == "mhc"
            || key.starts_with("mhc_")
            || key.starts_with("index_kpool")
            || key == "linear_attn_config"
    };
    if let Some(key) = f.keys().find(|key| flash(key)) {
        return Err(format!("{key} is set: this is a different architecture (GLM-5.3-Flash), not supported"));
    }
    if f.get("qk_rope_head_dim").and_then(Value::as_u64) == Some(0) {
        return Err(
            "qk_rope_head_dim is 0: this is a different architecture (GLM-5.3-Flash), not supported".into()
        );
    }
    let named = f.get("architectures").and_then(Value::as_array);
    if !named.is_some_and(|list| list.iter().any(|a| a == "GlmMoeDsaForCausalLM")) {
        return Err(f.refuse("architectures", "[\"GlmMoeDsaForCausalLM\"]"));
    }
    Ok(())
}

fn refuse_unsupported(f: &Fields<'_>) -> Result<(), String> {
    f.only("moe_layer_freq", &1.into())?;
    f.only("scoring_func", &"sigmoid".into())?;
    f.only("topk_method", &"noaux_tc".into())?;
    f.only("moe_router_dtype", &"float32".into())?;
    f.only("rope_interleave", &true.into())?;
    f.only("indexer_rope_interleave", &true.into())?;
    f.only("attention_bias", &false.into())?;
    f.only("mlp_bias", &false.into())?;
    f.only("hidden_act", &"silu".into())?;
    let known = |t: &Value| t == "deepseek_sparse_attention" || t == "indexed_attention";
    match f.get("layer_types") {
        None => Ok(()),
        Some(Value::Array(types)) if types.iter().all(known) => Ok(()),
        Some(_) => Err(f.refuse("layer_types", "absent or all \"deepseek_sparse_attention\"")),
    }
}

fn experts(f: &Fields<'_>) -> Result<Experts, String> {
    let aliases = ["n_routed_experts", "num_experts", "num_local_experts"];
    let mut present = aliases.iter().filter(|key| f.get(key).is_some());
    let key = present.next().unwrap_or(&aliases[0]);
    let n_routed = f.int(key, 1, MAX_EXPERTS)?;
    for other in present {
        if f.int(other, 1, MAX_EXPERTS)? != n_routed {
            return Err(f.refuse(other, &format!("equal to {key} ({n_routed})")));
        }
    }
    let per_tok = f.int("num_experts_per_tok", 1, n_routed)?;
    let n_group = f.int_or("n_group", 1, 1, n_routed)?;
    if !n_routed.is_multiple_of(n_group) {
        return Err(f.refuse("n_group", &format!("a divisor of {key} ({n_routed})")));
    }
    let group_size = n_routed / n_group;
    if n_group > 1 && group_size < 2 {
        return Err(f.refuse("n_group", &format!("at most {} so that a group has two experts", n_routed / 2)));
    }
    let topk_group = f.int_or("topk_group", 1, 1, n_group)?;
    if per_tok > topk_group * group_size {
        let limit = format!("at most topk_group × {key} / n_group = {}", topk_group * group_size);
        return Err(f.refuse("num_experts_per_tok", &limit));
    }
    Ok(Experts { n_routed, per_tok, n_group, topk_group })
}

/// `mlp_layer_types` when present, else dense below `first_k_dense_replace`.
fn sparse_layers(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>, String> {
    let Some(types) = f.strings("mlp_layer_types", layers)? else {
        let dense = f.int("first_k_dense_replace", 0, MAX_DIM)?;
        return Ok((0..layers).map(|i| i >= dense).collect());
    };
    let sparse = |(i, &t): (usize, &&str)| match t {
        "sparse" => Ok(true),
        "dense" => Ok(false),
        _ => Err(format!("mlp_layer_types[{i}] is {t:?}; supported are \"dense\" and \"sparse\"")),
    };
    types.iter().enumerate().map(sparse).collect()
}

/// `indexer_types`, else `index_topk_pattern`, else the schedule of frequency and offset
/// (docs/model.md §5).
fn indexer_modes(f: &Fields<'_>, layers: usize) -> Result<Vec<IndexerMode>, String> {
    let (key, modes) = if let Some(types) = f.strings("indexer_types", layers)? {
        let modes: Result<Vec<_>, _> =
            types.iter().enumerate().map(|(i, t)| mode("indexer_types", i, t)).collect();
        ("indexer_types", modes?)
    } else if let Some(Value::String(pattern)) = f.get("index_topk_pattern") {
        if pattern.chars().count() != layers {
            let want = format!("one letter per layer (num_hidden_layers is {layers})");
            return Err(f.refuse("index_topk_pattern", &want));
        }
        let letter = |(i, c): (usize, char)| mode("index_topk_pattern", i, c.encode_utf8(&mut [0; 4]));
        ("index_topk_pattern", pattern.chars().enumerate().map(letter).collect::<Result<Vec<_>, _>>()?)
    } else if let Some(list) = f.strings("index_topk_pattern", layers)? {
        let modes: Result<Vec<_>, _> =
            list.iter().enumerate().map(|(i, t)| mode("index_topk_pattern", i, t)).collect();
        ("index_topk_pattern", modes?)
    } else {
        let freq = f.int_or("index_topk_freq", 1, 0, MAX_DIM)?.max(1);
        let offset = f.int_or("index_skip_topk_offset", 2, 0, MAX_DIM)?;
        let full = |i: usize| (i + 1).saturating_sub(offset).is_multiple_of(freq);
        let schedule = |i| if full(i) { IndexerMode::Full } else { IndexerMode::Shared };
        ("index_skip_topk_offset", (0..layers).map(schedule).collect())
    };
    match modes.first() {
        Some(IndexerMode::Full) => Ok(modes),
        _ => Err(f.refuse(key, "such that layer 0 is \"full\" (a shared layer needs one below it)")),
    }
}

fn mode(key: &str, layer: usize, text: &str) -> Result<IndexerMode, String> {
    match text {
        "full" | "F" => Ok(IndexerMode::Full),
        "shared" | "S" => Ok(IndexerMode::Shared),
        _ => Err(format!("{key}[{layer}] is {text:?}; supported are \"full\" and \"shared\"")),
    }
}

fn check_heads(f: &Fields<'_>, c: &GlmConfig) -> Result<(), String> {
    if !c.qk_rope_head_dim.is_multiple_of(2) {
        return Err(f.refuse("qk_rope_head_dim", "even (RoPE rotates pairs)"));
    }
    let qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
    if f.get("qk_head_dim").is_some_and(|v| v.as_u64() != Some(qk_head_dim as u64)) {
        let want = format!("qk_nope_head_dim + qk_rope_head_dim = {qk_head_dim}");
        return Err(f.refuse("qk_head_dim", &want));
    }
    let heads = c.num_attention_heads;
    if f.get("num_key_value_heads").is_some_and(|v| v.as_u64() != Some(heads as u64)) {
        return Err(f.refuse("num_key_value_heads", &format!("num_attention_heads = {heads}")));
    }
    if c.index_head_dim < c.qk_rope_head_dim {
        let want = format!("at least qk_rope_head_dim = {}", c.qk_rope_head_dim);
        return Err(f.refuse("index_head_dim", &want));
    }
    Ok(())
}

/// Bounds every product of dimensions that names a matrix.
fn check_sizes(c: &GlmConfig) -> Result<(), String> {
    let qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
    let kv_head_dim = c.qk_nope_head_dim + c.v_head_dim;
    let (heads, hidden) = (c.num_attention_heads, c.hidden_size);
    check_matrix("vocab_size and hidden_size", &[c.vocab_size], &[hidden])?;
    check_matrix("intermediate_size and hidden_size", &[c.intermediate_size], &[hidden])?;
    check_matrix(
        "moe_intermediate_size, n_shared_experts and hidden_size",
        &[c.moe_intermediate_size, c.n_shared_experts],
        &[hidden],
    )?;
    check_matrix("q_lora_rank and hidden_size", &[c.q_lora_rank], &[hidden])?;
    check_matrix(
        "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim and q_lora_rank",
        &[heads, qk_head_dim],
        &[c.q_lora_rank],
    )?;
    check_matrix(
        "kv_lora_rank, qk_rope_head_dim and hidden_size",
        &[c.kv_lora_rank + c.qk_rope_head_dim],
        &[hidden],
    )?;
    check_matrix(
        "num_attention_heads, qk_nope_head_dim, v_head_dim and kv_lora_rank",
        &[heads, kv_head_dim],
        &[c.kv_lora_rank],
    )?;
    check_matrix("hidden_size, num_attention_heads and v_head_dim", &[hidden], &[heads, c.v_head_dim])?;
    check_matrix(
        "index_n_heads, index_head_dim and q_lora_rank",
        &[c.index_n_heads, c.index_head_dim],
        &[c.q_lora_rank],
    )?;
    check_matrix("index_head_dim and hidden_size", &[c.index_head_dim.max(c.index_n_heads)], &[hidden])?;
    check_matrix("hidden_size", &[hidden], &[2, hidden])?;
    check_matrix("n_routed_experts and hidden_size", &[c.n_routed_experts], &[hidden])
}
