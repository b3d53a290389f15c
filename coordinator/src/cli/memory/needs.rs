//! What a model needs besides its expert records, from headers alone.
//!
//! Everything here is an upper bound of what the loaded program takes, a few per cent above it: the test
//! under a memory limit (`tests/tests/ram.rs`) holds the sums against the kernel's own count.

use shimmer_common::container::Container;
use shimmer_common::container::config::{GlmConfig, IndexerMode, ModelConfig, OlmoeConfig};
use shimmer_common::experts::ExpertLayout;
use shimmer_common::machine;

use crate::cli::model_args::LimitArgs;
use crate::model;

/// The program itself: code that runs, libraries, thread stacks, the allocator's own (an estimate from one
/// run of a small model that took 40 MiB in all).
const PROGRAM_BYTES: u64 = 28 << 20;

/// Each compute thread's stack and the allocator's arena of it.
const THREAD_BYTES: u64 = 1 << 20;

/// Parsed headers, per expert: its place and format, and what reading the headers leaves behind.
const HEADER_BYTES_PER_EXPERT: u64 = 1 << 10;

/// A loaded tokenizer, per byte of `tokenizer.json` (vocabulary and merges in hash maps).
const TOKENIZER_FACTOR: u64 = 14;

/// Cached values and activations are f32.
const F32_BYTES: u64 = 4;

/// Rows whose logits are computed at once while generating: the next token and its drafts, with a copy
/// of a row for drawing.
const LOGIT_ROWS: u64 = 10;

/// Facts of a model that decide its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Program, headers and tokenizer.
    pub program_bytes: u64,
    /// The dense part as it is held.
    pub dense_bytes: u64,
    /// Bytes of cache per token.
    pub cache_bytes_per_token: u64,
    /// Bytes of intermediate values per row of a step.
    pub step_bytes_per_row: u64,
    /// Bytes of intermediate values whatever the rows: logits, the work of each thread.
    pub step_bytes: u64,
    /// Bytes of one row of logits.
    pub logits_bytes_per_row: u64,
    /// Buffers of reads under way.
    pub io_bytes: u64,
    /// Longest sequence the model supports.
    pub max_positions: usize,
    /// Bytes of all expert records.
    pub all_experts_bytes: u64,
    /// Largest record.
    pub largest_expert_bytes: u64,
}

impl Needs {
    /// Reads the facts from an opened container's headers; no tensor data is read.
    pub fn of(container: &Container, layout: &ExpertLayout, limits: &LimitArgs) -> Self {
        let config = container.config();
        let threads = limits.threads.unwrap_or_else(machine::physical_cores) as u64;
        let (rows, fixed) = match config {
            ModelConfig::Glm(c) => glm_step(c, threads),
            ModelConfig::Olmoe(c) => olmoe_step(c, threads),
        };
        let logits = config.vocab_size() as u64 * F32_BYTES;
        let io = limits.io_options();
        // One block more at either end of a piece (`common::io`), for every read under way.
        let io_bytes = (io.depth * (io.piece_bytes + 8192) + (4 << 20)) as u64;
        let size = |name: &str| std::fs::metadata(container.dir().join(name)).map_or(0, |meta| meta.len());
        Self {
            program_bytes: PROGRAM_BYTES
                + threads * THREAD_BYTES
                + layout.ids().count() as u64 * HEADER_BYTES_PER_EXPERT
                + size("tokenizer.json") * TOKENIZER_FACTOR,
            dense_bytes: container.dense_bytes() + decoded_bytes(container),
            cache_bytes_per_token: cache_bytes_per_token(container),
            step_bytes_per_row: rows,
            step_bytes: fixed + LOGIT_ROWS * logits,
            logits_bytes_per_row: logits,
            io_bytes,
            max_positions: config.max_position_embeddings(),
            all_experts_bytes: layout.ids().filter_map(|id| layout.record_bytes(id)).map(|n| n as u64).sum(),
            largest_expert_bytes: layout.max_record_bytes() as u64,
        }
    }

    /// The program as it is now, where it is larger than what was expected of it: at the time of the
    /// division headers and tokenizer are in memory, the dense part is not.
    pub fn with_program_now(self) -> Self {
        let now = machine::resident_bytes().unwrap_or(0);
        Self { program_bytes: self.program_bytes.max(now), ..self }
    }
}

/// What decoding `kv_b_proj` once adds to the stored form.
fn decoded_bytes(container: &Container) -> u64 {
    let ModelConfig::Glm(c) = container.config() else { return 0 };
    let rows = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim);
    let layers = (c.num_hidden_layers + usize::from(container.has_mtp())) as u64;
    match model::decoded_bytes(rows, c.kv_lora_rank) {
        Some(bytes) => layers * bytes as u64,
        None => 0,
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
    values as u64 * F32_BYTES
}

/// Values per f32 row that also has its int8 form with a scale per 64.
fn both_forms(values: u64) -> u64 {
    values * F32_BYTES + values + values / 16
}

/// Bytes of intermediate values of a GLM step: per row, and per thread of attention tasks. A layer's parts
/// come one after another, so the largest counts.
fn glm_step(c: &GlmConfig, threads: u64) -> (u64, u64) {
    let n = |values: usize| values as u64;
    let hidden = n(c.hidden_size);
    let heads = n(c.num_attention_heads);
    let (head, value) = (n(c.qk_nope_head_dim + c.qk_rope_head_dim), n(c.v_head_dim));
    let latent = n(c.kv_lora_rank + c.qk_rope_head_dim);
    let indexer = n(c.index_n_heads * c.index_head_dim) + n(c.index_topk) + n(c.index_head_dim);
    let attention = both_forms(hidden)
        + 2 * both_forms(n(c.q_lora_rank))
        + (heads * head + latent + indexer) * F32_BYTES
        + both_forms(heads * value)
        + hidden * F32_BYTES;
    let dense =
        both_forms(hidden) + 2 * n(c.intermediate_size) * F32_BYTES + both_forms(n(c.intermediate_size));
    let inner = n(c.moe_intermediate_size);
    let shared = 2 * inner * n(c.n_shared_experts) * F32_BYTES + both_forms(inner * n(c.n_shared_experts));
    let moe = 2 * both_forms(hidden)
        + routed_sums(hidden, inner, threads)
        + shared
        + 2 * hidden * F32_BYTES
        + n(c.n_routed_experts) * 2 * F32_BYTES;
    // The residual stream, the final hidden rows, those that wait for the MTP layer and its doubled input.
    let kept = (1 + 2 + if c.num_nextn_predict_layers > 0 { 4 } else { 0 }) * hidden * F32_BYTES;
    let rope = n(c.qk_rope_head_dim) * F32_BYTES;
    // Tasks of attention take up to 64 rows of 8 heads against the latents.
    let per_thread = 64 * 8 * latent * F32_BYTES + 64 * value * F32_BYTES;
    (kept + rope + attention.max(dense).max(moe), threads * per_thread)
}

/// As [`glm_step`], for OLMoE.
fn olmoe_step(c: &OlmoeConfig, threads: u64) -> (u64, u64) {
    let hidden = c.hidden_size as u64;
    let attention = 2 * both_forms(hidden) + 4 * hidden * F32_BYTES;
    let moe = 2 * both_forms(hidden)
        + routed_sums(hidden, c.intermediate_size as u64, threads)
        + 2 * hidden * F32_BYTES
        + c.num_experts as u64 * 2 * F32_BYTES;
    (3 * hidden * F32_BYTES + attention.max(moe), threads << 16)
}

/// Per row: each thread's fixed-point sums and their total, and the rows of the experts under way if every
/// row asks for the same ones.
fn routed_sums(hidden: u64, inner: u64, threads: u64) -> u64 {
    (threads + 1) * hidden * 8 + threads * (2 * inner * F32_BYTES + both_forms(inner) + hidden * F32_BYTES)
}
