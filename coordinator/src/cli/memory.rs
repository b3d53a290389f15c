//! How a RAM budget is divided: dense part, KV cache, reserve, and what is left for expert records.

use serde::Serialize;
use shimmer_common::container::Container;
use shimmer_common::container::config::{IndexerMode, ModelConfig};
use shimmer_common::experts::ExpertLayout;
use shimmer_common::machine;

use super::error::CliError;
use super::model_args::LimitArgs;
use shimmer_common::size::Size;

/// Context used when nobody asks for one.
const DEFAULT_CONTEXT_TOKENS: usize = 8192;

/// Most memory left to the operating system and to buffers.
const RESERVE_BYTES: u64 = 512 << 20;

/// Cached values are f32.
const CACHE_VALUE_BYTES: u64 = 4;

/// Where the RAM goes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// The whole budget.
    pub budget_bytes: u64,
    /// Embeddings, attention, shared experts, norms, head, MTP.
    pub dense_bytes: u64,
    /// Tokens the KV cache is planned for.
    pub context_tokens: usize,
    /// KV and indexer-key caches for that many tokens.
    pub kv_bytes: u64,
    /// Left to the operating system and to buffers.
    pub reserve_bytes: u64,
    /// Expert records kept in RAM.
    pub expert_bytes: u64,
    /// All expert records of the model.
    pub all_experts_bytes: u64,
}

/// Facts of a model that decide its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of the dense part.
    pub dense_bytes: u64,
    /// Bytes of cache per token.
    pub cache_bytes_per_token: u64,
    /// Longest sequence the model supports.
    pub max_positions: usize,
    /// Bytes of all expert records.
    pub all_experts_bytes: u64,
    /// Largest record.
    pub largest_expert_bytes: u64,
}

impl Needs {
    /// Reads the facts from an opened container's headers; no tensor data is read.
    pub fn of(container: &Container, layout: &ExpertLayout) -> Self {
        let config = container.config();
        Self {
            dense_bytes: container.dense_bytes(),
            cache_bytes_per_token: cache_bytes_per_token(container),
            max_positions: config.max_position_embeddings(),
            all_experts_bytes: layout.ids().filter_map(|id| layout.record_bytes(id)).map(|n| n as u64).sum(),
            largest_expert_bytes: layout.max_record_bytes() as u64,
        }
    }
}

/// Bytes of latent KV and indexer keys per token (docs/model.md §8): what a loaded model caches, from headers.
fn cache_bytes_per_token(container: &Container) -> u64 {
    let values = match container.config() {
        ModelConfig::Glm(c) => {
            let latent = c.kv_lora_rank + c.qk_rope_head_dim;
            let full = c.indexer_modes.iter().filter(|m| **m == IndexerMode::Full).count();
            let mtp = usize::from(container.has_mtp());
            let mtp_indexer = usize::from(container.has_mtp_indexer());
            let indexers = if container.has_indexer() { full + mtp_indexer } else { 0 };
            (c.num_hidden_layers + mtp) * latent + indexers * c.index_head_dim
        }
        ModelConfig::Olmoe(c) => {
            let head_dim = c.hidden_size / c.num_attention_heads.max(1);
            c.num_hidden_layers * 2 * c.num_key_value_heads * head_dim
        }
    };
    values as u64 * CACHE_VALUE_BYTES
}

/// Context in tokens: the wish, else the default, within the model's limit.
///
/// # Errors
/// [`CliError::Usage`] when the wish is beyond the model.
pub fn context_tokens(wish: Option<usize>, max_positions: usize) -> Result<usize, CliError> {
    match wish {
        Some(n) if n > max_positions => Err(CliError::Usage(format!(
            "--context {n} is beyond the {max_positions} tokens this model supports; lower it"
        ))),
        Some(n) => Ok(n),
        None => Ok(DEFAULT_CONTEXT_TOKENS.min(max_positions)),
    }
}

/// Divides the budget of `limits` (or what this machine can spare).
///
/// # Errors
/// [`CliError::Usage`] when nothing useful fits; the message says how much does.
pub fn divide(limits: &LimitArgs, needs: &Needs) -> Result<MemoryPlan, CliError> {
    let available = machine::memory().available_bytes;
    divide_budget(limits.ram.map(|s| s.0), limits.expert_ram.map(|s| s.0), limits.context, available, needs)
}

fn divide_budget(
    ram: Option<u64>,
    expert_ram: Option<u64>,
    context: Option<usize>,
    available: u64,
    needs: &Needs,
) -> Result<MemoryPlan, CliError> {
    let context_tokens = context_tokens(context, needs.max_positions)?;
    let kv_bytes = needs.cache_bytes_per_token.saturating_mul(context_tokens as u64);
    let budget_bytes = ram.unwrap_or(available);
    // A small budget keeps a small reserve: a sixteenth, at most half a gibibyte.
    let reserve_bytes = RESERVE_BYTES.min(budget_bytes / 16);
    let fixed = needs.dense_bytes.saturating_add(kv_bytes).saturating_add(reserve_bytes);
    let expert_bytes = match expert_ram {
        Some(bytes) => bytes,
        None => budget_bytes.saturating_sub(fixed),
    }
    .min(needs.all_experts_bytes);
    if expert_bytes < needs.largest_expert_bytes {
        return Err(too_small(expert_ram, budget_bytes, context_tokens, kv_bytes, reserve_bytes, needs));
    }
    Ok(MemoryPlan {
        budget_bytes,
        dense_bytes: needs.dense_bytes,
        context_tokens,
        kv_bytes,
        reserve_bytes,
        expert_bytes,
        all_experts_bytes: needs.all_experts_bytes,
    })
}

fn too_small(
    expert_ram: Option<u64>,
    budget: u64,
    context: usize,
    kv: u64,
    reserve: u64,
    needs: &Needs,
) -> CliError {
    let one = Size(needs.largest_expert_bytes);
    if let Some(bytes) = expert_ram {
        return CliError::Usage(format!(
            "--expert-ram {} cannot hold one expert; give at least {one}",
            Size(bytes)
        ));
    }
    let least = needs.dense_bytes + kv + needs.largest_expert_bytes;
    // The reserve is a sixteenth of the budget, so the budget is 16/15 of the rest; rounded up to whole MiB.
    let least = (least + (least / 15).min(RESERVE_BYTES)).div_ceil(1 << 20) << 20;
    CliError::Usage(format!(
        "a RAM budget of {} is too small: dense part {}, KV for {context} tokens {}, reserve {}, one expert {one}; \
         give --ram {} or more, or lower --context",
        Size(budget),
        Size(needs.dense_bytes),
        Size(kv),
        Size(reserve),
        Size(least),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        dense_bytes: 1000 << 20,
        cache_bytes_per_token: 1 << 10,
        max_positions: 4096,
        all_experts_bytes: 8000 << 20,
        largest_expert_bytes: 10 << 20,
    };

    #[test]
    fn the_plan_counts_what_a_loaded_model_caches() {
        use std::sync::Arc;

        use shimmer_common::experts::LocalStore;
        use shimmer_common::kernels::Kernels;
        use shimmer_common::profile::NumericProfile;

        // With and without MTP layer, indexer, and indexer of the MTP layer; and the second family.
        for case in ["colibri-container", "tiny-mtp", "tiny-sparse", "demo-model", "tiny-olmoe"] {
            let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(case);
            let container = Container::open(&[dir]).unwrap();
            let (source, kernels) = (container.experts(), Kernels::best());
            let needs = Needs::of(&container, source.layout());
            let store = LocalStore::new(source, kernels, NumericProfile::default(), 64 << 20).unwrap();
            let model = crate::model::load(&container, kernels, Arc::new(store), &mut |_, _| {}).unwrap();
            assert_eq!(needs.cache_bytes_per_token, model.info().cache_bytes_per_token as u64, "{case}");
        }
    }

    #[test]
    fn experts_get_what_is_left() {
        let plan = divide_budget(Some(2048 << 20), None, None, 0, &NEEDS).unwrap();
        assert_eq!(plan.context_tokens, 4096);
        assert_eq!(plan.kv_bytes, 4 << 20);
        assert_eq!(plan.reserve_bytes, 128 << 20);
        assert_eq!(plan.expert_bytes, (2048 - 1000 - 4 - 128) << 20);
    }

    #[test]
    fn never_more_than_all_experts_and_the_reserve_is_bounded() {
        let plan = divide_budget(None, None, Some(100), 64 << 30, &NEEDS).unwrap();
        assert_eq!(plan.expert_bytes, NEEDS.all_experts_bytes);
        assert_eq!(plan.reserve_bytes, RESERVE_BYTES);
    }

    #[test]
    fn the_suggested_budget_is_enough() {
        let error = divide_budget(Some(900 << 20), None, None, 0, &NEEDS).unwrap_err().to_string();
        let suggested = error.split("--ram ").nth(1).unwrap().split(' ').next().unwrap();
        let suggested: Size = suggested.parse().unwrap();
        let plan = divide_budget(Some(suggested.0 + (12 << 20)), None, None, 0, &NEEDS).unwrap();
        assert!(plan.expert_bytes >= NEEDS.largest_expert_bytes);
    }

    #[test]
    fn explicit_expert_budgets_are_taken_literally() {
        let plan = divide_budget(None, Some(10 << 20), None, 1 << 20, &NEEDS).unwrap();
        assert_eq!(plan.expert_bytes, 10 << 20);
        let error = divide_budget(None, Some(9 << 20), None, 64 << 30, &NEEDS).unwrap_err();
        assert!(error.to_string().contains("10MiB"), "{error}");
    }

    #[test]
    fn contexts_beyond_the_model_are_refused() {
        assert!(context_tokens(Some(4097), 4096).is_err());
        assert_eq!(context_tokens(None, 1 << 20).unwrap(), DEFAULT_CONTEXT_TOKENS);
    }
}
