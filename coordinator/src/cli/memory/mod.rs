//! The RAM ledger: how a budget is divided, down to the last buffer.
//!
//! One piece of code for `plan`, which prints it, and for loading, which allocates it. What is needed is
//! computed from headers (`needs`); what is left is the arena of expert records. The *reserve* is what
//! cannot be computed: fragments of the allocator, page tables, what the estimates miss.

mod needs;

pub use needs::Needs;

use serde::Serialize;
use shimmer_common::machine;

use super::error::CliError;
use super::model_args::LimitArgs;
use shimmer_common::size::Size;

/// Context used when nobody asks for one.
const DEFAULT_CONTEXT_TOKENS: usize = 8192;

/// The part of what is available that is taken when nobody says how much: the rest is room for others, and
/// keeps the memory watch (`common::experts::MemoryWatch`) quiet.
const SPARE_PART: (u64, u64) = (15, 16);

/// The reserve is this part of the budget,
const RESERVE_PART: u64 = 32;
/// but at least
const RESERVE_MIN_BYTES: u64 = 4 << 20;
/// and at most this.
const RESERVE_MAX_BYTES: u64 = 512 << 20;

/// Rows of a step while the experts do not all fit: its buffers may take this part of what is left.
const STEP_PART: u64 = 8;

/// Rows of a step at the least, if that many are in the context: fewer make prefill crawl.
const MIN_STEP_ROWS: usize = 16;

/// Rows of a step where all experts are in RAM: more would not be faster, only slower to cancel.
const RESIDENT_STEP_ROWS: usize = 512;

/// Budgets are suggested in whole MiB.
const SUGGESTED_UNIT_BYTES: u64 = 1 << 20;

/// Where the RAM goes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// The whole budget.
    pub budget_bytes: u64,
    /// Program, headers and tokenizer.
    pub program_bytes: u64,
    /// Embeddings, attention, shared experts, norms, head, MTP.
    pub dense_bytes: u64,
    /// Tokens the KV cache is planned for.
    pub context_tokens: usize,
    /// KV and indexer-key caches for that many tokens.
    pub kv_bytes: u64,
    /// Prompt rows processed at once, at most.
    pub step_rows: usize,
    /// Intermediate values of a step of that many rows, logits, sums of experts.
    pub step_bytes: u64,
    /// Rows of such a step when each of them gets logits.
    pub score_rows: usize,
    /// Buffers of reads under way.
    pub io_bytes: u64,
    /// Fragments, page tables, what estimates miss.
    pub reserve_bytes: u64,
    /// Expert records kept in RAM.
    pub expert_bytes: u64,
    /// All expert records of the model.
    pub all_experts_bytes: u64,
}

impl MemoryPlan {
    /// The parts by name, in the order they are shown; they add up to no more than the budget.
    pub fn parts(&self) -> [(String, u64); 7] {
        [
            ("program, tokenizer".into(), self.program_bytes),
            ("dense part".into(), self.dense_bytes),
            (format!("KV, {} tokens", self.context_tokens), self.kv_bytes),
            (format!("step of {} rows", self.step_rows), self.step_bytes),
            ("read buffers".into(), self.io_bytes),
            ("reserve".into(), self.reserve_bytes),
            ("expert cache".into(), self.expert_bytes),
        ]
    }
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
    // What this process holds already is part of the budget, not of what others left over.
    let held = machine::resident_bytes().unwrap_or(0);
    let available = machine::memory().available_bytes / SPARE_PART.1 * SPARE_PART.0 + held;
    let wish = Wish {
        ram: limits.ram.map(|s| s.0),
        expert_ram: limits.expert_ram.map(|s| s.0),
        context: limits.context,
        step_rows: limits.prefill_chunk,
    };
    divide_budget(&wish, available, needs)
}

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default)]
struct Wish {
    ram: Option<u64>,
    expert_ram: Option<u64>,
    context: Option<usize>,
    /// Prompt rows per step; `None` = as many as pay.
    step_rows: Option<usize>,
}

fn divide_budget(wish: &Wish, available: u64, needs: &Needs) -> Result<MemoryPlan, CliError> {
    let context_tokens = context_tokens(wish.context, needs.max_positions)?;
    let budget_bytes = wish.ram.unwrap_or(available);
    let step_min = wish.step_rows.unwrap_or(MIN_STEP_ROWS).clamp(1, context_tokens);
    let fixed = Fixed::new(needs, context_tokens, step_min);
    let reserve_bytes = reserve(budget_bytes);
    let left = budget_bytes.saturating_sub(fixed.bytes() + reserve_bytes);
    if let Some(bytes) = wish.expert_ram
        && bytes < needs.largest_expert_bytes
    {
        let one = Size(needs.largest_expert_bytes);
        return Err(CliError::Usage(format!(
            "--expert-ram {} cannot hold one expert; give at least {one}",
            Size(bytes)
        )));
    }
    if left < needs.largest_expert_bytes && wish.expert_ram.is_none() {
        return Err(too_small(budget_bytes, reserve_bytes, &fixed, needs));
    }
    let more_rows = wish.step_rows.map_or_else(|| extra_rows(left, step_min, context_tokens, needs), |_| 0);
    let step_rows = step_min + more_rows;
    let step_bytes = fixed.step_bytes + more_rows as u64 * needs.step_bytes_per_row;
    let expert_bytes = wish.expert_ram.unwrap_or(left + fixed.step_bytes - step_bytes);
    let per_scored_row = (needs.step_bytes_per_row + 2 * needs.logits_bytes_per_row).max(1);
    Ok(MemoryPlan {
        budget_bytes,
        program_bytes: needs.program_bytes,
        dense_bytes: needs.dense_bytes,
        context_tokens,
        kv_bytes: fixed.kv_bytes,
        step_rows,
        step_bytes,
        score_rows: usize::try_from(step_bytes / per_scored_row).unwrap_or(1).clamp(1, step_rows),
        io_bytes: needs.io_bytes,
        reserve_bytes,
        expert_bytes: expert_bytes.min(needs.all_experts_bytes),
        all_experts_bytes: needs.all_experts_bytes,
    })
}

/// What no budget can do without.
struct Fixed {
    needs: Needs,
    context_tokens: usize,
    kv_bytes: u64,
    step_bytes: u64,
}

impl Fixed {
    fn new(needs: &Needs, context_tokens: usize, step_rows: usize) -> Self {
        let kv_bytes = needs.cache_bytes_per_token.saturating_mul(context_tokens as u64);
        let step_bytes = needs.step_bytes + needs.step_bytes_per_row.saturating_mul(step_rows as u64);
        Self { needs: *needs, context_tokens, kv_bytes, step_bytes }
    }

    fn bytes(&self) -> u64 {
        let Needs { program_bytes, dense_bytes, io_bytes, .. } = self.needs;
        [program_bytes, dense_bytes, self.kv_bytes, self.step_bytes, io_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

fn reserve(budget_bytes: u64) -> u64 {
    (budget_bytes / RESERVE_PART).clamp(RESERVE_MIN_BYTES, RESERVE_MAX_BYTES)
}

/// Rows a step gets beyond the least: a few hundred where the experts fit beside them, else up to the whole
/// context as far as a part of the rest pays for, because every expert is read once per step.
fn extra_rows(left: u64, step_min: usize, context_tokens: usize, needs: &Needs) -> usize {
    let rows = |bytes: u64| usize::try_from(bytes / needs.step_bytes_per_row.max(1)).unwrap_or(usize::MAX);
    let resident = rows(left.saturating_sub(needs.all_experts_bytes));
    let most = if left >= needs.all_experts_bytes && step_min + resident >= RESIDENT_STEP_ROWS {
        RESIDENT_STEP_ROWS.min(context_tokens)
    } else {
        context_tokens
    };
    let spare = (left / STEP_PART).min(left.saturating_sub(needs.largest_expert_bytes));
    rows(spare).max(resident).min(most.saturating_sub(step_min))
}

/// The least budget that works, in whole MiB.
fn least_budget(fixed: &Fixed, needs: &Needs) -> u64 {
    let rest = fixed.bytes() + needs.largest_expert_bytes;
    let mut budget = (rest + RESERVE_MIN_BYTES).next_multiple_of(SUGGESTED_UNIT_BYTES);
    while budget - reserve(budget) < rest {
        let short = rest + reserve(budget) - budget;
        budget = (budget + short).next_multiple_of(SUGGESTED_UNIT_BYTES);
    }
    budget
}

fn too_small(budget: u64, reserve: u64, fixed: &Fixed, needs: &Needs) -> CliError {
    CliError::Usage(format!(
        "a RAM budget of {} is too small: program and tokenizer {}, dense part {}, KV for {} tokens {}, buffers {}, \
         reserve {}, one expert {}; give --ram {}MiB or more, or lower --context",
        Size(budget),
        Size(needs.program_bytes),
        Size(needs.dense_bytes),
        fixed.context_tokens,
        Size(fixed.kv_bytes),
        Size(fixed.step_bytes + needs.io_bytes),
        Size(reserve),
        Size(needs.largest_expert_bytes),
        least_budget(fixed, needs) / SUGGESTED_UNIT_BYTES,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        program_bytes: 40 << 20,
        dense_bytes: 1000 << 20,
        cache_bytes_per_token: 1 << 10,
        step_bytes_per_row: 100 << 10,
        step_bytes: 3 << 20,
        logits_bytes_per_row: 600 << 10,
        io_bytes: 8 << 20,
        max_positions: 4096,
        all_experts_bytes: 8000 << 20,
        largest_expert_bytes: 10 << 20,
    };

    fn limits() -> LimitArgs {
        use clap::Parser;

        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            limits: LimitArgs,
        }
        Flags::parse_from(["test"]).limits
    }

    fn ram(bytes: u64) -> Wish {
        Wish { ram: Some(bytes), ..Wish::default() }
    }

    #[test]
    fn the_plan_counts_what_a_loaded_model_caches() {
        use std::sync::Arc;

        use shimmer_common::container::Container;
        use shimmer_common::experts::LocalStore;
        use shimmer_common::kernels::Kernels;
        use shimmer_common::profile::NumericProfile;

        // With and without MTP layer, indexer, and indexer of the MTP layer; and the second family.
        for case in ["colibri-container", "tiny-mtp", "tiny-sparse", "demo-model", "tiny-olmoe"] {
            let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(case);
            let container = Container::open(&[dir]).unwrap();
            let (source, kernels) = (container.experts(), Kernels::best());
            let needs = Needs::of(&container, source.layout(), &limits());
            let store = LocalStore::new(source, kernels, NumericProfile::default(), 64 << 20).unwrap();
            let model = crate::model::load(&container, kernels, Arc::new(store), &mut |_, _| {}).unwrap();
            assert_eq!(needs.cache_bytes_per_token, model.info().cache_bytes_per_token as u64, "{case}");
        }
    }

    #[test]
    fn the_parts_add_up_to_the_budget() {
        for budget in [1110 << 20, 2048 << 20, 5000 << 20] {
            let plan = divide_budget(&ram(budget), 0, &NEEDS).unwrap();
            assert_eq!(plan.context_tokens, 4096);
            assert_eq!(plan.kv_bytes, 4 << 20);
            assert_eq!(plan.reserve_bytes, budget / 32);
            assert_eq!(plan.parts().iter().map(|(_, bytes)| bytes).sum::<u64>(), budget);
        }
    }

    #[test]
    fn never_more_than_all_experts_and_then_steps_that_can_be_cancelled() {
        let plan = divide_budget(&Wish::default(), 64 << 30, &NEEDS).unwrap();
        assert_eq!((plan.expert_bytes, plan.step_rows), (NEEDS.all_experts_bytes, RESIDENT_STEP_ROWS));
        assert_eq!(plan.reserve_bytes, RESERVE_MAX_BYTES);
        // Logits of every row are six times as large as the row's other values, twice.
        assert_eq!(plan.score_rows, (512 * 100 + 3072) / 1300);
    }

    #[test]
    fn a_step_gets_a_part_of_what_is_left_or_what_was_asked_for() {
        let plan = divide_budget(&ram(2048 << 20), 0, &NEEDS).unwrap();
        let left = plan.expert_bytes + plan.step_bytes;
        assert!(plan.step_rows > 1000 && plan.step_bytes < left / 7, "{} rows", plan.step_rows);
        let wish = Wish { step_rows: Some(100), ..ram(2048 << 20) };
        assert_eq!(divide_budget(&wish, 0, &NEEDS).unwrap().step_rows, 100);
        let least = divide_budget(&ram(1110 << 20), 0, &NEEDS).unwrap();
        assert!(least.step_rows >= MIN_STEP_ROWS && least.expert_bytes >= NEEDS.largest_expert_bytes);
    }

    #[test]
    fn the_suggested_budget_is_enough_and_a_mebibyte_less_is_not() {
        for (program, largest) in [(40 << 20, 10 << 20), (4 << 30, 300 << 20), (50 << 30, 1 << 30)] {
            let needs = Needs { program_bytes: program, largest_expert_bytes: largest, ..NEEDS };
            let error = divide_budget(&ram(900 << 20), 0, &needs).unwrap_err().to_string();
            let suggested = error.split("--ram ").nth(1).unwrap().split(' ').next().unwrap();
            let suggested: Size = suggested.parse().unwrap();
            let least = least_budget(&Fixed::new(&needs, 4096, MIN_STEP_ROWS), &needs);
            assert_eq!(suggested.0, least);
            let plan = divide_budget(&ram(least), 0, &needs).unwrap();
            assert!(plan.expert_bytes >= largest);
            assert!(divide_budget(&ram(least - (1 << 20)), 0, &needs).is_err());
        }
    }

    #[test]
    fn explicit_expert_budgets_are_taken_literally() {
        let wish = |bytes| Wish { expert_ram: Some(bytes), ..Wish::default() };
        let plan = divide_budget(&wish(10 << 20), 1 << 20, &NEEDS).unwrap();
        assert_eq!(plan.expert_bytes, 10 << 20);
        let error = divide_budget(&wish(9 << 20), 64 << 30, &NEEDS).unwrap_err();
        assert!(error.to_string().contains("10MiB"), "{error}");
    }

    #[test]
    fn contexts_beyond_the_model_are_refused() {
        assert!(context_tokens(Some(4097), 4096).is_err());
        assert_eq!(context_tokens(None, 1 << 20).unwrap(), DEFAULT_CONTEXT_TOKENS);
    }
}
