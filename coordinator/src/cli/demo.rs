//! `shimmer demo`: a real (toy) model whose experts are computed by node processes over mutual TLS.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use shimmer_common::container::Container;
use shimmer_common::machine;

use super::answer::{self, Answer, Limits, Printer, Prompt};
use super::chat_session::{ChatSession, ChatSetup};
use super::demo_model;
use super::demo_nodes::DemoNodes;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::{ExpertsChoice, LimitArgs};
use super::open::{self, Loaded, Served};
use super::output;
use super::sampling_args::{SamplingArgs, ThinkArgs, describe_thinking};
use crate::cluster::{ClusterExperts, ClusterState, LocalShare, Settle};
use crate::decode::EngineHandle;
use crate::text::{ReplyEvent, TextModel};

/// Most nodes of a demo.
const MAX_NODES: i64 = 16;

/// How long the nodes may take to join and fetch their shards.
const JOIN_WAIT: Duration = Duration::from_secs(60);

/// Answers are short; the model wanders off after a few sentences.
const DEFAULT_MAX_TOKENS: usize = 200;

/// Arguments of `shimmer demo`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer demo
  shimmer demo --prompt 'What is the capital of Norway?'
  shimmer demo --nodes 3 --prompt 'Tell me a story about a fox.' --max-tokens 120 --json

The model is a toy of 23 million parameters: it knows capitals and tells short stories, but cannot add or copy.")]
pub struct DemoArgs {
    /// Expert nodes to start on this machine; 0 computes everything in this process
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=MAX_NODES))]
    nodes: u32,

    /// Answer this and exit instead of chatting
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    think: ThinkArgs,

    #[command(flatten)]
    limits: LimitArgs,

    /// One JSON document on stdout (needs --prompt)
    #[arg(long, requires = "prompt")]
    json: bool,
}

/// Runs the demo.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &DemoArgs) -> Result<(), CliError> {
    refuse_foreign_flags(&args.limits)?;
    let interrupt = Interrupt::install();
    let started = Instant::now();
    let dir = tempfile::Builder::new()
        .prefix("shimmer-demo-")
        .tempdir()
        .map_err(|e| CliError::io("cannot make a temporary directory for the demo", &e))?;
    let doomed = dir.path().to_owned();
    interrupt.on_kill(move || {
        // The hard exit does not run destructors; what cannot be removed stays in the system's temporary directory.
        let _ = std::fs::remove_dir_all(doomed);
    });
    // Declared after the directory, so that nodes end before their files go.
    let nodes = DemoNodes::new(&interrupt);
    output::note(
        "The demo model is a toy (23 million parameters): capitals and short stories work, sums and copying do not.",
    );
    let loaded = load(args, dir.path(), &nodes, &interrupt)?;
    let ready_s = started.elapsed().as_secs_f64();
    let engine = loaded.engine()?;
    let before = loaded.served();
    let done = match &args.prompt {
        Some(prompt) => {
            one_answer(args, prompt, &loaded, &engine, &interrupt, (ready_s, nodes.pids()), &before)
        }
        None => chat(args, &loaded, &engine, &interrupt, &before),
    };
    drop(engine);
    done
}

/// The demo brings its own model and cluster.
fn refuse_foreign_flags(limits: &LimitArgs) -> Result<(), CliError> {
    if limits.cluster.is_some() || !limits.expert_nodes.is_empty() {
        return Err(CliError::Usage(
            "the demo makes its own cluster; leave out --cluster and --expert-nodes".into(),
        ));
    }
    Ok(())
}

fn load(args: &DemoArgs, dir: &Path, nodes: &DemoNodes, interrupt: &Interrupt) -> Result<Loaded, CliError> {
    let model_dir = dir.join("model");
    std::fs::create_dir(&model_dir).map_err(|e| CliError::io("cannot make the demo's directory", &e))?;
    demo_model::unpack(&model_dir)?;
    let container = Container::open(&[model_dir])?;
    let text = Arc::new(TextModel::open(container.dir(), container.config().vocab_size())?);
    let source = container.experts();
    let local_only = args.nodes == 0 || args.limits.experts == ExpertsChoice::Local;
    if local_only && args.limits.experts == ExpertsChoice::Cluster {
        return Err(CliError::Usage("--experts cluster needs at least one node".into()));
    }
    let state = match local_only {
        true => None,
        false => Some(ClusterState::init(&dir.join("cluster"), SocketAddr::from(([127, 0, 0, 1], 0)))?),
    };
    let inviter = state.clone();
    let join = |experts: &Arc<ClusterExperts>| match &inviter {
        Some(state) => start_nodes(args.nodes, state, experts, dir, nodes, interrupt),
        None => Ok(()),
    };
    // Nodes are what the demo shows, though the toy would be faster alone.
    let mut limits = args.limits.clone();
    limits.settle = Some(Settle { pause: JOIN_WAIT, nodes: Some(args.nodes as usize) });
    if args.limits.local_share.0 == LocalShare::Planned {
        limits.local_share.0 = LocalShare::Fixed(0.0);
    }
    open::load_parts(container, text, source, &limits, state, join)
}

/// Starts the nodes with a throw-away invitation and waits until they hold their shards.
fn start_nodes(
    count: u32,
    state: &ClusterState,
    experts: &Arc<ClusterExperts>,
    dir: &Path,
    nodes: &DemoNodes,
    interrupt: &Interrupt,
) -> Result<(), CliError> {
    let token = state.invite(&[experts.control_addr()], JOIN_WAIT, count)?;
    let threads = (machine::physical_cores() / count.max(1) as usize).max(1);
    for number in 1..=count {
        let name = format!("node-{number}");
        nodes.start(&name, &token, &dir.join(&name), threads)?;
    }
    let deadline = Instant::now() + JOIN_WAIT;
    let count = count as usize;
    loop {
        match experts.wait_ready(count, Duration::from_millis(200)) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => {}
        }
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        if let Some(status) = nodes.ended() {
            return Err(CliError::Unreachable(format!(
                "a demo node ended with {status}; RUST_LOG=info shows why"
            )));
        }
    }
}

fn limits(args: &DemoArgs, loaded: &Loaded) -> Limits {
    Limits {
        context_tokens: loaded.memory.context_tokens,
        stop_ids: loaded.text.stop_ids(loaded.container.config().eos_token_ids()),
        drafts: args.limits.draft.0,
        prefill_chunk: loaded.memory.step_rows,
    }
}

fn sampling(args: &DemoArgs) -> SamplingArgs {
    SamplingArgs {
        max_tokens: Some(args.sampling.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        ..args.sampling.clone()
    }
}

fn one_answer(
    args: &DemoArgs,
    question: &str,
    loaded: &Loaded,
    engine: &EngineHandle,
    interrupt: &Interrupt,
    (ready_s, node_pids): (f64, Vec<u32>),
    before: &Served,
) -> Result<(), CliError> {
    let messages = vec![json!({ "role": "user", "content": question })];
    let prompt = Prompt::chat(&loaded.text, messages, args.think.choice())?;
    let request = answer::request(&loaded.text, &prompt, &sampling(args), &limits(args, loaded))?;
    let seed = request.sampling.seed;
    output::note(&describe_thinking(&loaded.text, args.think.choice()));
    let mut printer = Printer::default();
    let mut sink = |piece: &ReplyEvent| if args.json { Ok(()) } else { printer.piece(piece) };
    let answer = answer::ask(engine, &prompt, request, interrupt, &mut sink)?;
    printer.end_thinking();
    let served = loaded.served().since(before);
    if args.json {
        let mut document = answer.to_json(seed, loaded.load_s, &served);
        document["thinking"] = prompt.in_thinking.into();
        document["toy_model"] = true.into();
        document["node_pids"] = node_pids.into();
        document["timings"]["ready_s"] = ready_s.into();
        output::emit_json(&document)?;
    } else {
        output::emit("\n")?;
        if let Some(cut) = answer.cut() {
            output::note(&cut);
        }
        summary(&[&answer], &served);
        if let Some(line) = answer.generation.stats.time.line() {
            output::note(&line);
        }
    }
    if interrupt.requested() { Err(CliError::Interrupted) } else { Ok(()) }
}

fn chat(
    args: &DemoArgs,
    loaded: &Loaded,
    engine: &EngineHandle,
    interrupt: &Interrupt,
    before: &Served,
) -> Result<(), CliError> {
    let setup = ChatSetup {
        sampling: sampling(args),
        limits: limits(args, loaded),
        think: args.think.choice(),
        system: None,
        history: None,
    };
    let mut session = ChatSession::local(engine.clone(), loaded.text.clone(), setup, interrupt.clone());
    session.run()?;
    let answers: Vec<&Answer> = session.answers().iter().collect();
    summary(&answers, &loaded.served().since(before));
    Ok(())
}

/// The closing lines: speed, who computed what, drafts.
fn summary(answers: &[&Answer], served: &Served) {
    // An empty sum of floats is -0, which reads badly.
    let sum = |value: fn(&Answer) -> f64| answers.iter().fold(0.0, |sum, a| sum + value(a));
    let (tokens, seconds) =
        (sum(|a| a.generation.stats.generated_tokens as f64), sum(|a| a.generation.stats.decode_s));
    let first = answers.first().map_or(0.0, |a| a.first_token_s);
    let (drafted, accepted) =
        (sum(|a| a.generation.stats.drafted as f64), sum(|a| a.generation.stats.accepted as f64));
    let speed = if seconds > 0.0 { tokens / seconds } else { 0.0 };
    output::note(&format!("\n{tokens} tokens at {speed:.1} tokens/s, first token after {first:.2} s"));
    output::note(&format!("drafts accepted: {accepted} of {drafted}"));
    for node in &served.nodes {
        output::note(&format!("{}: {} experts computed ({})", node.name, node.experts, node.state));
    }
    output::note(&format!(
        "this process: {} experts computed, {} as fall-back",
        served.local, served.fallback
    ));
    output::note("Every answer came from a toy model; do not rely on anything it says.");
}
