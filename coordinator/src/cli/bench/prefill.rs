//! `shimmer bench prefill`: prompt tokens per second of a model, against what the processor allows.

use std::time::Instant;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use shimmer_common::container::config::ModelConfig;
use shimmer_common::container::{Container, Part, TensorShape};
use shimmer_common::kernels::Probe;
use shimmer_common::size::Size;

use super::rates;
use super::session::{self, RunArgs, Subject};
use super::stats::{Spread, percent};
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{ModelArgs, parse_positive};
use crate::cli::output;
use crate::decode::DraftPolicy;

/// Arguments of `shimmer bench prefill`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench prefill --model /tmp/uniform --tokens 512
  shimmer bench prefill --model /tmp/zipf --tokens 512 --expert-ram 1620MiB --cold --json

Counts the multiply-adds of all weight matrices (attention over the cache and the output head are extra work) and
compares them with the int8 multiply-adds the same threads do in registers, measured between the runs.")]
pub struct PrefillArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = parse_positive)]
    tokens: usize,

    #[command(flatten)]
    repeats: RunArgs,
}

/// One measured run.
#[derive(Clone, Copy, Debug, Serialize)]
struct Run {
    /// Steps the prompt was cut into.
    chunks: usize,
    load_s: f64,
    seconds: f64,
    bytes_read: u64,
    misses: u64,
    wait_ms: f64,
    int8_peak_macs_per_s: f64,
}

/// Multiply-adds of one prompt token in all weight matrices but the output head.
fn macs_per_token(container: &Container) -> u64 {
    let size = |shape: &TensorShape| match *shape {
        TensorShape::Matrix { rows, cols } => rows as u64 * cols as u64,
        TensorShape::Vector { .. } => 0,
    };
    let (per_token, inner, hidden) = match container.config() {
        ModelConfig::Glm(c) => (c.num_experts_per_tok, c.moe_intermediate_size, c.hidden_size),
        ModelConfig::Olmoe(c) => (c.num_experts_per_tok, c.intermediate_size, c.hidden_size),
    };
    let used = |part: Part| !matches!(part, Part::EmbeddingsHead | Part::MtpProjection | Part::Indexer);
    let dense = container.dense_tensors().filter(|t| !t.mtp && used(t.part));
    let dense: u64 = dense.map(|t| size(&t.shape)).sum();
    let sparse_layers = match container.config() {
        ModelConfig::Glm(c) => c.sparse_layers.iter().filter(|sparse| **sparse).count(),
        ModelConfig::Olmoe(c) => c.num_hidden_layers,
    };
    dense + sparse_layers as u64 * per_token as u64 * 3 * inner as u64 * hidden as u64
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &PrefillArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let mut model_args = args.model.clone();
    // Drafting is no part of this.
    model_args.limits.draft.0 = DraftPolicy::Off;
    let (dirs, repeats) = (&args.model.model, &args.repeats);
    let measure = |subject: &Subject, number: usize| {
        if repeats.cold {
            session::forget(dirs);
        }
        let run = prompt(args, subject, number as u64)?;
        output::note(&format!("run {} of {}: {:.2} s", number + 1, repeats.runs, run.seconds));
        Ok(run)
    };
    let load = || session::load(&model_args, args.tokens);
    let warm_up = |subject: &Subject| prompt(args, subject, u64::MAX).map(drop);
    let (runs, subject) = repeats.repeat(dirs, &interrupt, load, warm_up, measure)?;
    let threads = subject.pool.current_num_threads();
    report(args, &runs, macs_per_token(&subject.container), threads, &subject.isa.to_string())
}

/// Processes one prompt in a fresh sequence.
fn prompt(args: &PrefillArgs, subject: &Subject, run: u64) -> Result<Run, CliError> {
    let threads = subject.pool.current_num_threads();
    let int8 = Probe::new(subject.isa).map_or(0.0, |probe| rates::int8(probe, threads));
    let ids = args.repeats.ids(subject.model.info().vocab_size, args.tokens, run);
    let before = session::counters(subject);
    let seconds = subject.pool.install(|| {
        let mut seq = subject.model.new_sequence(false);
        let started = Instant::now();
        for chunk in ids.chunks(subject.memory.step_rows) {
            subject.model.forward(&mut seq, chunk, None)?;
        }
        Ok::<_, CliError>(started.elapsed().as_secs_f64())
    })?;
    let after = session::counters(subject);
    Ok(Run {
        chunks: args.tokens.div_ceil(subject.memory.step_rows),
        load_s: subject.load_s,
        seconds,
        bytes_read: after.bytes_read - before.bytes_read,
        misses: after.misses - before.misses,
        wait_ms: (after.wait_us - before.wait_us) as f64 / 1e3,
        int8_peak_macs_per_s: int8,
    })
}

fn report(args: &PrefillArgs, runs: &[Run], macs: u64, threads: usize, isa: &str) -> Result<(), CliError> {
    let total_macs = macs as f64 * args.tokens as f64;
    let chunks = runs.iter().map(|run| run.chunks).max().unwrap_or(1);
    let all = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value));
    let rate = all(&|r| args.tokens as f64 / r.seconds);
    let macs_rate = all(&|r| total_macs / r.seconds);
    let share = all(&|r| total_macs / r.seconds / r.int8_peak_macs_per_s);
    let bytes = all(&|r| r.bytes_read as f64 / chunks as f64);
    let peak = all(&|r| r.int8_peak_macs_per_s);
    let wait = all(&|r| r.wait_ms);
    if args.repeats.json {
        return output::emit_json(&json!({
            "isa": isa,
            "threads": threads,
            "cold": args.repeats.cold,
            "tokens": args.tokens,
            "chunks": chunks,
            "macs_per_token": macs,
            "tokens_per_s": rate,
            "seconds": all(&|r| r.seconds),
            "macs_per_s": macs_rate,
            "int8_peak_macs_per_s": peak,
            "share_of_int8_peak": share,
            "bytes_read_per_chunk": bytes,
            "wait_ms": wait,
            "runs": runs,
        }));
    }
    output::emit(&format!(
        "{isa}, {threads} threads, {} tokens in {chunks} chunks, median of {} [smallest..largest]\n\
         speed                {} tokens/s\n\
         matrix work          {} GMAC/s of {} in registers: {}\n\
         experts              {} read per chunk, {:.0} ms waited\n",
        args.tokens,
        runs.len(),
        rate.text(1.0),
        macs_rate.text(1e9),
        peak.text(1e9),
        percent(share.median),
        Size(bytes.median as u64),
        wait.median,
    ))
}
