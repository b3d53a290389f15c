//! `shimmer bench cluster`: decoding over nodes, against what the cost model says of these machines.

use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use shimmer_common::experts::ExpertTimes;
use shimmer_common::size::Size;

use super::session::{self, RunArgs, Subject};
use super::stats::{Spread, percent};
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{ModelArgs, parse_positive};
use crate::cli::output;
use crate::cluster::PlanReport;
use crate::decode::TimeReport;

/// Arguments of `shimmer bench cluster`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench cluster --model /models/glm --cluster ~/.shimmer/cluster --nodes 4
  shimmer bench cluster --model /tmp/synth --cluster /tmp/c --nodes 2 --warm-tokens 256 --json
  shimmer bench cluster --model /tmp/synth --nodes 0 --ram 4GiB

Token ids are random; every run has its own. `predicted` is the measured dense part and, per layer, the slowest machine
by the planner's measured rates (docs/performance.md). With --nodes 0 this machine computes alone, for comparison.")]
pub struct ClusterArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Nodes to wait for
    #[arg(long, value_name = "N")]
    nodes: usize,

    /// How long to wait for them and for their records, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,

    /// Random tokens before the first run: caches fill, rates are learned
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_positive)]
    warm_tokens: usize,

    /// Measured tokens per run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_positive)]
    tokens: usize,

    #[command(flatten)]
    repeats: RunArgs,
}

/// One measured run.
#[derive(Clone, Debug, Serialize)]
struct Run {
    seconds: f64,
    tokens: usize,
    time: TimeReport,
    /// Of this machine's store.
    hits: u64,
    misses: u64,
    bytes_read: u64,
}

impl Run {
    fn per_token(&self, value: f64) -> f64 {
        value / self.tokens.max(1) as f64
    }

    fn ms(&self) -> f64 {
        self.per_token(self.seconds * 1e3)
    }
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ClusterArgs) -> Result<(), CliError> {
    if args.nodes > 0 && args.model.limits.cluster.is_none() {
        return Err(CliError::Usage(
            "--nodes needs --cluster DIR; use --nodes 0 for this machine alone".into(),
        ));
    }
    let interrupt = Interrupt::install();
    let load = || {
        let subject = session::load(&args.model, args.warm_tokens + args.tokens)?;
        wait_for_nodes(args, &subject, &interrupt)?;
        Ok(subject)
    };
    let warm_up = |subject: &Subject| steps(args, subject, u64::MAX, args.warm_tokens, &interrupt).map(drop);
    let measure = |subject: &Subject, run: usize| {
        if args.repeats.cold {
            session::forget(&args.model.model);
        }
        let measured = steps(args, subject, run as u64, args.tokens, &interrupt)?;
        output::note(&format!("run {} of {}: {:.1} ms per token", run + 1, args.repeats.runs, measured.ms()));
        Ok(measured)
    };
    let (runs, subject) = args.repeats.repeat(&args.model.model, &interrupt, load, warm_up, measure)?;
    let plan = subject.cluster.as_ref().and_then(|cluster| cluster.report().plan);
    report(args, &subject, &runs, plan.as_ref())
}

fn wait_for_nodes(args: &ClusterArgs, subject: &Subject, interrupt: &Interrupt) -> Result<(), CliError> {
    let Some(cluster) = &subject.cluster else { return Ok(()) };
    let until = Instant::now() + Duration::from_secs(args.wait);
    loop {
        match cluster.wait_ready(args.nodes, Duration::from_millis(500)) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() >= until => return Err(error.into()),
            Err(_) if interrupt.requested() => return Err(CliError::Interrupted),
            Err(_) => {}
        }
    }
}

/// One token after the other, whatever the model would say.
fn steps(
    args: &ClusterArgs,
    subject: &Subject,
    run: u64,
    tokens: usize,
    interrupt: &Interrupt,
) -> Result<Run, CliError> {
    let model = subject.model.as_ref();
    let ids = args.repeats.ids(model.info().vocab_size, tokens, run);
    let (times, store) = (model.expert_times(), session::counters(subject));
    let started = Instant::now();
    subject
        .pool
        .install(|| session::force(model, &mut model.new_sequence(false), &ids, interrupt, |_| {}))?;
    let seconds = started.elapsed().as_secs_f64();
    let after = session::counters(subject);
    Ok(Run {
        seconds,
        tokens,
        time: TimeReport::new(seconds, model.expert_times().since(&times)),
        hits: after.hits - store.hits,
        misses: after.misses - store.misses,
        bytes_read: after.bytes_read - store.bytes_read,
    })
}

/// What one token costs by the cost model, in milliseconds.
fn predicted_ms(run: &Run, plan: &PlanReport) -> f64 {
    run.per_token(run.time.dense_s * 1e3) + plan.layers as f64 * plan.ms_per_layer
}

fn report(
    args: &ClusterArgs,
    subject: &Subject,
    runs: &[Run],
    plan: Option<&PlanReport>,
) -> Result<(), CliError> {
    let all = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value));
    let experts = |r: &Run| -> ExpertTimes { r.time.experts.clone() };
    let ms = all(&Run::ms);
    let messages = all(&|r| r.per_token(experts(r).messages as f64));
    let predicted = plan.map(|plan| all(&|r| predicted_ms(r, plan)));
    let of_predicted = predicted.map(|p| p.median / ms.median);
    let part = |value: fn(&ExpertTimes) -> f64| all(&|r| r.per_token(value(&r.time.experts) * 1e3));
    let dense = all(&|r| r.per_token(r.time.dense_s * 1e3));
    let (wait, local) = (part(|e| e.wait_s), part(|e| e.local_s));
    if args.repeats.json {
        return output::emit_json(&json!({
            "nodes": args.nodes,
            "tokens": args.tokens,
            "expert_ram_bytes": subject.memory.expert_bytes,
            "all_experts_bytes": subject.memory.all_experts_bytes,
            "tokens_per_s": all(&|r| 1e3 / r.ms()),
            "ms_per_token": ms,
            "dense_ms": dense,
            "wait_ms": wait,
            "local_ms": local,
            "messages_per_token": messages,
            "predicted_ms": predicted,
            "share_of_predicted": of_predicted,
            "plan": plan,
            "runs": runs,
        }));
    }
    let mut text = format!(
        "{} nodes, experts in RAM here {} of {}, median of {} [smallest..largest]\n\
         time per token       {} ms ({:.2} tokens/s)\n\
         of that              dense part {} ms, waiting for nodes {} ms, experts here {} ms\n",
        args.nodes,
        Size(subject.memory.expert_bytes),
        Size(subject.memory.all_experts_bytes),
        runs.len(),
        ms.text(1.0),
        1e3 / ms.median,
        dense.text(1.0),
        wait.text(1.0),
        local.text(1.0),
    );
    if let (Some(predicted), Some(share)) = (predicted, of_predicted) {
        text += &format!("predicted            {} ms; reached {}\n", predicted.text(1.0), percent(share));
    }
    text += &format!("messages per token   {}\n", messages.text(1.0));
    text += &nodes_table(runs);
    output::emit(&text)
}

/// What every machine did, per token.
fn nodes_table(runs: &[Run]) -> String {
    let tokens: usize = runs.iter().map(|r| r.tokens).sum();
    let mut sum = ExpertTimes::default();
    runs.iter().for_each(|run| sum.add(&run.time.experts));
    let per = |value: f64| value / tokens.max(1) as f64;
    let mut text = format!(
        "per token            experts  in memory   read MB  queue ms   wire ms   disk ms  compute ms  waited for\n{:<20} {:>7.1} {:>10.1}\n",
        "this machine",
        per((sum.local_experts + sum.fallback_experts) as f64),
        per(sum.tiers.local_memory as f64),
    );
    for node in sum.nodes.values() {
        text += &format!(
            "{:<20} {:>7.1} {:>10.1} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>11.2} {:>11.1}\n",
            node.name,
            per(node.experts as f64),
            per(node.hits as f64),
            per(node.read_bytes as f64 / 1e6),
            per(node.queue_s * 1e3),
            per(node.wire_s * 1e3),
            per(node.disk_s * 1e3),
            per(node.compute_s * 1e3),
            per(node.straggled as f64),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_the_dense_part_and_the_slowest_machine_of_each_layer() {
        let time = TimeReport { dense_s: 0.2, ..TimeReport::default() };
        let run = Run { seconds: 1.0, tokens: 10, time, hits: 0, misses: 0, bytes_read: 0 };
        let plan = PlanReport {
            workers: Vec::new(),
            ms_per_layer: 2.0,
            equal_split_ms_per_layer: 3.0,
            layers: 5,
            homeless: 0,
            upgrade: None,
        };
        assert_eq!(predicted_ms(&run, &plan), 30.0);
        assert_eq!(run.ms(), 100.0);
        assert!(nodes_table(&[run]).contains("this machine"));
    }
}
