//! `shimmer usage simulate`: cache policies replayed on routing traces; no model runs.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use shimmer_common::experts::usage::simulate::{
    Budget, PhaseKind, PhaseResult, PolicyKind, Replay, Tally, simulate,
};
use shimmer_common::experts::usage::{Synthetic, TRACE_MAGIC, TraceError, TraceReader};
use shimmer_common::size::Size;

use super::super::error::CliError;
use super::super::output;
use super::learning::refuse_foreign;

/// Arguments of `shimmer usage simulate`.
#[derive(Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("routes").required(true).multiple(true)))]
#[command(after_help = "Examples:
  shimmer run --model DIR --prompt '…' --trace-routes a.routes
  shimmer usage simulate --trace a.routes --trace b.routes --fraction 0.25
  shimmer usage simulate --synthetic zipf:1.23,5,64,8,4000,1 --policy learned --policy lru --policy fixed

Every trace is a session: caches begin empty, only what policies keep in a file is remembered. Policies: lru, fifo,
lfu-da, arc, s3-fifo, w-tinylfu, lfu, decayed:TOKENS (half-life), learned[:FAST,SLOW,WEIGHT] (what the store uses),
pinned@SHARE, fixed and fixed-per-layer (best choice with hindsight that never changes), belady (optimum with
foreknowledge). Shown is the share of experts found in memory; an access is one expert in one step.")]
pub struct SimulateArgs {
    /// Routing trace written with --trace-routes; repeat it for several sessions in this order
    #[arg(long, value_name = "FILE", group = "routes")]
    trace: Vec<PathBuf>,

    /// Trace that goes on in the last session with another topic
    #[arg(long, value_name = "FILE", requires = "trace")]
    topic: Vec<PathBuf>,

    /// Made-up trace zipf:SKEW,LAYERS,EXPERTS,TOPK,TOKENS,SEED[,LOCALITY]: two sessions, then a change of topic
    #[arg(long, value_name = "SPEC", group = "routes", conflicts_with = "trace")]
    synthetic: Option<Synthetic>,

    /// Room for resident experts
    #[arg(long, value_name = "SIZE", conflicts_with = "fraction")]
    ram: Option<Size>,

    /// Room as a share of all experts
    #[arg(long, value_name = "SHARE", default_value = "0.25")]
    fraction: f64,

    /// Policy to replay; repeat it for several [default: all]
    #[arg(long, value_name = "NAME")]
    policy: Vec<PolicyKind>,

    /// Steps of at most this many rows count as decoding, others as prefill
    #[arg(long, value_name = "ROWS", default_value = "8")]
    decode_rows: u32,

    /// Also show decode hit rates per so many tokens
    #[arg(long, value_name = "TOKENS")]
    window: Option<u64>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `shimmer usage synth-trace`.
#[derive(Args, Clone, Debug)]
pub struct SynthTraceArgs {
    /// zipf:SKEW,LAYERS,EXPERTS,TOPK,TOKENS,SEED[,LOCALITY]
    #[arg(long, value_name = "SPEC")]
    synthetic: Synthetic,

    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Writes a made-up trace.
///
/// # Errors
/// [`CliError`].
pub fn synth_trace(args: &SynthTraceArgs) -> Result<(), CliError> {
    let failed =
        |e: &dyn std::fmt::Display| CliError::Failed(format!("cannot write {}: {e}", args.out.display()));
    refuse_foreign(&args.out, &TRACE_MAGIC, "--out", "a routing trace")?;
    let out = BufWriter::new(File::create(&args.out).map_err(|e| failed(&e))?);
    args.synthetic.write(out).map_err(|e| failed(&e))?;
    output::emit(&format!("{}\n", args.out.display()))
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &SimulateArgs) -> Result<(), CliError> {
    if !(args.fraction > 0.0 && args.fraction <= 1.0) {
        return Err(CliError::Usage("--fraction is a share above 0 and up to 1".into()));
    }
    let mut replay = read(args)?;
    replay.decode_rows = args.decode_rows;
    replay.window_tokens = args.window.unwrap_or(500).max(1);
    let budget = args.ram.map_or(Budget::Fraction(args.fraction), |size| Budget::Bytes(size.0));
    let policies = if args.policy.is_empty() { PolicyKind::all() } else { args.policy.clone() };
    let results = policies.into_iter().map(|kind| (kind, simulate(&replay, kind, budget)));
    if args.json {
        let results: Vec<Value> = results.map(|(kind, phases)| policy_json(kind, &phases)).collect();
        return output::emit_json(&json!({
            "room_bytes": budget.bytes(&replay),
            "all_experts_bytes": replay.total_bytes(),
            "window_tokens": replay.window_tokens,
            "phases": phases_json(&replay),
            "policies": results,
        }));
    }
    output::emit(&head(&replay, budget))?;
    for (kind, phases) in results {
        output::emit(&line(kind, &phases, args.window.is_some()))?;
    }
    Ok(())
}

fn read(args: &SimulateArgs) -> Result<Replay, CliError> {
    if let Some(synthetic) = &args.synthetic {
        let mut replay = Replay::new(synthetic.shape());
        let pushed: Result<(), std::convert::Infallible> = synthetic.events(&mut |event| {
            replay.push(&event);
            Ok(())
        });
        let Ok(()) = pushed;
        return Ok(replay);
    }
    let mut replay: Option<Replay> = None;
    let sessions = args.trace.iter().map(|path| (path, PhaseKind::Session));
    let topics = args.topic.iter().map(|path| (path, PhaseKind::Topic));
    for (path, kind) in sessions.chain(topics) {
        let failed = |e: TraceError| match e {
            TraceError::Io(_) => CliError::Failed(format!("{}: {e}", path.display())),
            _ => CliError::Data(format!("{}: {e}", path.display())),
        };
        let file = File::open(path).map_err(|e| failed(e.into()))?;
        let mut reader = TraceReader::new(BufReader::new(file)).map_err(failed)?;
        let replay = replay.get_or_insert_with(|| Replay::new(reader.shape().clone()));
        let before = tokens(replay);
        replay.append(&name(path), kind, &mut reader).map_err(failed)?;
        if tokens(replay) == before {
            let path = path.display();
            return Err(CliError::Data(format!(
                "{path} holds no routes; record them with --trace-routes again"
            )));
        }
        if !reader.is_complete() {
            output::note(&format!("warning: {} was cut short; what is whole is replayed", path.display()));
        }
    }
    replay.ok_or_else(|| CliError::Usage("give --trace FILE or --synthetic SPEC".into()))
}

/// Tokens of all phases.
fn tokens(replay: &Replay) -> u64 {
    replay.phases.iter().map(|phase| replay.tokens(phase)).sum()
}

fn name(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn head(replay: &Replay, budget: Budget) -> String {
    let experts = replay.experts();
    let (room, all) = (Size(budget.bytes(replay)), Size(replay.total_bytes()));
    let mut text = format!("{experts} experts, {all}; room for {room}\n");
    for (i, phase) in replay.phases.iter().enumerate() {
        let kind = if phase.kind == PhaseKind::Session { "session" } else { "topic" };
        text += &format!("phase {}: {kind} {:?}, {} tokens\n", i + 1, phase.name, replay.tokens(phase));
    }
    text += &format!("{:<24}", "hit rate, %");
    for i in 1..=replay.phases.len() {
        text += &format!(" {:>9} {:>9}", format!("decode {i}"), format!("prefill {i}"));
    }
    text + "\n"
}

fn line(kind: PolicyKind, phases: &[PhaseResult], windows: bool) -> String {
    let rate = |tally: &Tally| match tally.uses {
        0 => "-".to_owned(),
        _ => format!("{:.2}", 100.0 * tally.rate()),
    };
    let mut text = format!("{:<24}", kind.to_string());
    for phase in phases {
        text += &format!(" {:>9} {:>9}", rate(&phase.decode), rate(&phase.prefill));
    }
    text.push('\n');
    if windows {
        for (i, phase) in phases.iter().enumerate() {
            let rates: Vec<String> = phase.windows.iter().map(rate).collect();
            text += &format!("    decode {}: {}\n", i + 1, rates.join(" "));
        }
    }
    text
}

fn phases_json(replay: &Replay) -> Vec<Value> {
    let phase = |phase| json!({ "name": phase_name(phase), "tokens": replay.tokens(phase) });
    replay.phases.iter().map(phase).collect()
}

fn phase_name(phase: &shimmer_common::experts::usage::simulate::Phase) -> &str {
    &phase.name
}

fn policy_json(kind: PolicyKind, phases: &[PhaseResult]) -> Value {
    let tally = |t: &Tally| json!({ "uses": t.uses, "hits": t.hits, "rate": t.rate() });
    let phase = |p: &PhaseResult| {
        json!({
            "decode": tally(&p.decode),
            "prefill": tally(&p.prefill),
            "windows": p.windows.iter().map(tally).collect::<Vec<_>>(),
        })
    };
    json!({ "policy": kind.to_string(), "phases": phases.iter().map(phase).collect::<Vec<_>>() })
}
