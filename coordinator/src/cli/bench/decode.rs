//! `shimmer bench decode`: tokens per second of a model, against what memory and disk allow.
//!
//! Token ids are random, so no tokenizer is needed and routers meet their whole distribution. With an MTP
//! layer and drafts the generation loop runs as in `run`; otherwise every step is one token of the given ids.

use std::time::Instant;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use shimmer_common::container::TokenBytes;
use shimmer_common::experts::StoreStats;
use shimmer_common::size::Size;

use super::session::{self, Limits, RunArgs, Subject};
use super::stats::{Spread, percent};
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{ModelArgs, parse_positive};
use crate::cli::output;
use crate::decode::{Engine, GenerateRequest, SamplingParams, Session, TimeReport};

/// Arguments of `shimmer bench decode`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench decode --model /tmp/uniform
  shimmer bench decode --model /tmp/zipf --expert-ram 1620MiB --cold --tokens 64 --json

`of the limit` compares the time per token with the larger of its bytes / memory reads and its missed bytes / disk
reads, both measured between the runs. With --cold every run loads the model anew and the page cache is asked to
forget its files; otherwise the first run warms up and does not count.")]
pub struct DecodeArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Random tokens before the measured ones
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse_positive)]
    prompt_tokens: usize,

    /// Measured tokens per run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_positive)]
    tokens: usize,

    #[command(flatten)]
    repeats: RunArgs,
}

/// Prompt of the warm-up where every expert fits: enough that nearly all of them are asked for.
const WARM_UP_TOKENS: usize = 256;

/// One measured run.
#[derive(Clone, Debug, Serialize)]
struct Run {
    load_s: f64,
    prompt_s: f64,
    seconds: f64,
    tokens: usize,
    /// Per token (per round with drafts).
    step_ms: Vec<f64>,
    drafted: usize,
    accepted: usize,
    limits: Limits,
    /// What the store did during the measured tokens.
    computed: u64,
    hits: u64,
    misses: u64,
    bytes_read: u64,
    wait_ms: f64,
    disk_busy_ms: f64,
    prefetch_issued_bytes: u64,
    prefetch_used_bytes: u64,
    prefetch_wasted_bytes: u64,
    /// Where the measured seconds went; with drafts those of the prompt, too.
    time: TimeReport,
}

impl Run {
    fn ms_per_token(&self) -> f64 {
        self.seconds * 1e3 / self.tokens.max(1) as f64
    }

    fn per_token(&self, value: f64) -> f64 {
        value / self.tokens.max(1) as f64
    }

    fn hit_rate(&self) -> Option<f64> {
        let asked = self.hits + self.misses;
        (asked > 0).then(|| self.hits as f64 / asked as f64)
    }

    /// Milliseconds per token that memory and disk would take on their own.
    fn limits_ms(&self, token: TokenBytes) -> (Option<f64>, Option<f64>) {
        let missed = self.per_token(self.bytes_read as f64);
        (
            self.limits.memory_bytes_per_s.map(|rate| token.total() as f64 / rate * 1e3),
            self.limits.disk_bytes_per_s.map(|rate| missed / rate * 1e3),
        )
    }

    /// Time per token over the larger of both.
    fn over_limit(&self, token: TokenBytes) -> Option<f64> {
        let (memory, disk) = self.limits_ms(token);
        let limit = memory?.max(disk.unwrap_or(0.0));
        (limit > 0.0).then(|| self.ms_per_token() / limit)
    }

    /// Time per token over the larger of the disk's time and the time in which the engine did not wait.
    fn over_disk_or_compute(&self, token: TokenBytes) -> Option<f64> {
        let disk = self.limits_ms(token).1?;
        let compute = self.ms_per_token() - self.per_token(self.wait_ms);
        Some(self.ms_per_token() / disk.max(compute))
    }
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &DecodeArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let bench = Bench { args, interrupt: &interrupt };
    let (dirs, repeats) = (&args.model.model, &args.repeats);
    let measure = |subject: &Subject, run: usize| {
        let limits = Limits::measure(subject, run as u64)?;
        if repeats.cold {
            session::forget(dirs);
        }
        let measured = bench.run(subject, run as u64, limits)?;
        let ms = measured.ms_per_token();
        output::note(&format!("run {} of {}: {ms:.1} ms per token", run + 1, repeats.runs));
        Ok(measured)
    };
    let (runs, subject) =
        repeats.repeat(dirs, &interrupt, || bench.load(), |subject| bench.warm_up(subject), measure)?;
    report(args, &Facts::of(&subject), &runs)
}

/// What does not change from run to run.
struct Facts {
    token: TokenBytes,
    threads: usize,
    isa: String,
    expert_ram_bytes: u64,
    all_experts_bytes: u64,
}

impl Facts {
    fn of(subject: &Subject) -> Self {
        Self {
            token: subject.container.token_bytes(),
            threads: subject.pool.current_num_threads(),
            isa: subject.isa.to_string(),
            expert_ram_bytes: subject.memory.expert_bytes,
            all_experts_bytes: subject.memory.all_experts_bytes,
        }
    }
}

struct Bench<'a> {
    args: &'a DecodeArgs,
    interrupt: &'a Interrupt,
}

/// Time and drafts of some steps.
#[derive(Default)]
struct Steps {
    seconds: f64,
    tokens: usize,
    step_ms: Vec<f64>,
    drafted: usize,
    accepted: usize,
    prompt_s: f64,
    stats: (StoreStats, StoreStats),
    time: TimeReport,
}

impl Bench<'_> {
    fn load(&self) -> Result<Subject, CliError> {
        let tokens = self.args.prompt_tokens.max(WARM_UP_TOKENS) + self.args.tokens;
        let known = shimmer_common::container::Container::open(&self.args.model.model)?;
        let limit = known.config().max_position_embeddings();
        session::load(&self.args.model, tokens.min(limit.max(self.args.prompt_tokens + self.args.tokens)))
    }

    /// Brings every expert into memory where all fit; otherwise one run like the measured ones.
    fn warm_up(&self, subject: &Subject) -> Result<(), CliError> {
        if session::all_resident(subject) {
            let limit = subject.model.info().max_positions;
            let ids = self.args.repeats.ids(subject.model.info().vocab_size, WARM_UP_TOKENS.min(limit), 0);
            let chunk = subject.memory.step_rows;
            subject.pool.install(|| {
                let mut seq = subject.model.new_sequence(false);
                ids.chunks(chunk).try_for_each(|ids| subject.model.forward(&mut seq, ids, None).map(drop))
            })?;
        }
        self.steps(subject, u64::MAX).map(drop)
    }

    fn run(&self, subject: &Subject, run: u64, limits: Limits) -> Result<Run, CliError> {
        let steps = self.steps(subject, run)?;
        let (before, after) = steps.stats;
        let ms = |us: u64| us as f64 / 1e3;
        Ok(Run {
            load_s: subject.load_s,
            prompt_s: steps.prompt_s,
            seconds: steps.seconds,
            tokens: steps.tokens,
            step_ms: steps.step_ms,
            drafted: steps.drafted,
            accepted: steps.accepted,
            limits,
            computed: after.computed - before.computed,
            hits: after.hits - before.hits,
            misses: after.misses - before.misses,
            bytes_read: after.bytes_read - before.bytes_read,
            wait_ms: ms(after.wait_us - before.wait_us),
            disk_busy_ms: ms(after.disk_busy_us - before.disk_busy_us),
            prefetch_issued_bytes: after.prefetch_issued_bytes - before.prefetch_issued_bytes,
            prefetch_used_bytes: after.prefetch_used_bytes - before.prefetch_used_bytes,
            prefetch_wasted_bytes: after.prefetch_wasted_bytes - before.prefetch_wasted_bytes,
            time: steps.time,
        })
    }

    /// The prompt and the measured tokens; every run has its own ids.
    fn steps(&self, subject: &Subject, run: u64) -> Result<Steps, CliError> {
        let (prompt, tokens) = (self.args.prompt_tokens, self.args.tokens);
        let ids = self.args.repeats.ids(subject.model.info().vocab_size, prompt + tokens, run);
        let (prompt, ids) = ids.split_at(prompt);
        subject.pool.install(|| match &subject.text {
            Some(text) => {
                let engine = Engine { model: subject.model.clone(), text: text.clone() };
                self.generate(subject, &engine, prompt)
            }
            None => self.forced(subject, prompt, ids),
        })
    }

    /// One token after the other, whatever the model would say.
    fn forced(&self, subject: &Subject, prompt: &[u32], ids: &[u32]) -> Result<Steps, CliError> {
        let model = subject.model.as_ref();
        let mut seq = model.new_sequence(false);
        let mut steps = Steps::default();
        let started = Instant::now();
        for chunk in prompt.chunks(subject.memory.step_rows) {
            model.forward(&mut seq, chunk, None)?;
        }
        steps.prompt_s = started.elapsed().as_secs_f64();
        steps.stats.0 = session::counters(subject);
        let before = model.expert_times();
        let all = Instant::now();
        session::force(model, &mut seq, ids, self.interrupt, |ms| steps.step_ms.push(ms))?;
        steps.seconds = all.elapsed().as_secs_f64();
        steps.time = TimeReport::new(steps.seconds, model.expert_times().since(&before));
        steps.tokens = ids.len();
        steps.stats.1 = session::counters(subject);
        Ok(steps)
    }

    /// As `run` generates, with drafts.
    fn generate(&self, subject: &Subject, engine: &Engine, prompt: &[u32]) -> Result<Steps, CliError> {
        use crate::decode::Event;
        let limits = &self.args.model.limits;
        let request = GenerateRequest {
            prompt: prompt.to_vec(),
            sampling: SamplingParams::greedy(),
            max_tokens: self.args.tokens,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            drafts: limits.draft.0,
            prefill_chunk: subject.memory.step_rows,
        };
        let mut before = session::counters(subject);
        let mut last = Instant::now();
        let mut step_ms = Vec::new();
        let generation = Session::new().generate(engine, &request, &mut |event| {
            let now = Instant::now();
            match event {
                Event::Prefill { .. } => before = session::counters(subject),
                _ => step_ms.push(now.duration_since(last).as_secs_f64() * 1e3),
            }
            last = now;
            if self.interrupt.requested() {
                std::ops::ControlFlow::Break(())
            } else {
                std::ops::ControlFlow::Continue(())
            }
        })?;
        if self.interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        let stats = generation.stats;
        Ok(Steps {
            seconds: stats.decode_s,
            tokens: stats.generated_tokens,
            step_ms,
            drafted: stats.drafted,
            accepted: stats.accepted,
            prompt_s: stats.prefill_s,
            time: *stats.time,
            stats: (before, session::counters(subject)),
        })
    }
}

/// The spread of what some runs know.
fn spread(runs: &[Run], value: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
    let values: Vec<f64> = runs.iter().filter_map(value).collect();
    (!values.is_empty()).then(|| Spread::of(values))
}

fn report(args: &DecodeArgs, facts: &Facts, runs: &[Run]) -> Result<(), CliError> {
    let token = facts.token;
    let all = |value: &dyn Fn(&Run) -> Option<f64>| spread(runs, value);
    let ms = all(&|r| Some(r.ms_per_token())).unwrap_or_default();
    let missed = all(&|r| Some(r.per_token(r.bytes_read as f64))).unwrap_or_default();
    let wait = all(&|r| Some(r.per_token(r.wait_ms))).unwrap_or_default();
    let busy = all(&|r| Some(r.disk_busy_ms / (r.seconds * 1e3))).unwrap_or_default();
    let hit_rate = all(&Run::hit_rate);
    let memory = all(&|r| r.limits.memory_bytes_per_s);
    let disk = all(&|r| r.limits.disk_bytes_per_s);
    let memory_share =
        all(&|r| Some(token.total() as f64 / (r.ms_per_token() / 1e3) / r.limits.memory_bytes_per_s?));
    let disk_share = all(&|r| Some(r.bytes_read as f64 / r.seconds / r.limits.disk_bytes_per_s?));
    let over_limit = all(&|r| r.over_limit(token));
    let over_disk_or_compute = all(&|r| r.over_disk_or_compute(token));
    if args.repeats.json {
        return output::emit_json(&json!({
            "isa": facts.isa,
            "threads": facts.threads,
            "cold": args.repeats.cold,
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
            "expert_ram_bytes": facts.expert_ram_bytes,
            "all_experts_bytes": facts.all_experts_bytes,
            "token_dense_bytes": token.dense,
            "token_expert_bytes": token.routed,
            "tokens_per_s": all(&|r| Some(1e3 / r.ms_per_token())),
            "ms_per_token": ms,
            "missed_bytes_per_token": missed,
            "hit_rate": hit_rate,
            "wait_ms_per_token": wait,
            "disk_busy_share": busy,
            "memory_read_bytes_per_s": memory,
            "disk_read_bytes_per_s": disk,
            "share_of_memory_read": memory_share,
            "share_of_disk_read": disk_share,
            "memory_ms_per_token": all(&|r| r.limits_ms(token).0),
            "disk_ms_per_token": all(&|r| r.limits_ms(token).1),
            "time_over_limit": over_limit,
            "time_over_disk_or_compute": over_disk_or_compute,
            "runs": runs,
        }));
    }
    let mut text = format!(
        "{}, {} threads, experts in RAM {} of {}, median of {} [smallest..largest]\n",
        facts.isa,
        facts.threads,
        Size(facts.expert_ram_bytes),
        Size(facts.all_experts_bytes),
        runs.len()
    );
    text += &format!("time per token       {} ms ({:.2} tokens/s)\n", ms.text(1.0), 1e3 / ms.median);
    text +=
        &format!("bytes per token      dense part {}, experts {}\n", Size(token.dense), Size(token.routed));
    if let (Some(memory), Some(share)) = (memory, memory_share) {
        text += &format!(
            "memory               {} GB/s read by `bench mem`; the engine takes {} of it\n",
            memory.text(1e9),
            percent(share.median)
        );
    }
    if let Some(hits) = hit_rate {
        text += &format!(
            "experts              {} from RAM, {:.1} MB per token from disk, {:.1} ms per token waited\n",
            percent(hits.median),
            missed.median / 1e6,
            wait.median
        );
    }
    if let (Some(disk), Some(share)) = (disk, disk_share) {
        text += &format!(
            "disk                 {} MB/s at best; the engine takes {} of it, busy {} of the time\n",
            disk.text(1e6),
            percent(share.median),
            percent(busy.median)
        );
    }
    if let Some(over) = over_limit {
        text +=
            &format!("of the limit         {:.2} times the larger of memory and disk time\n", over.median);
    }
    if let Some(over) = over_disk_or_compute {
        text +=
            &format!("overlap              {:.2} times the larger of disk and compute time\n", over.median);
    }
    let (drafted, accepted): (usize, usize) =
        runs.iter().fold((0, 0), |(d, a), r| (d + r.drafted, a + r.accepted));
    if drafted > 0 {
        text += &format!("drafts               {accepted} of {drafted} accepted\n");
    }
    output::emit(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_larger_of_memory_and_disk() {
        let run = Run {
            load_s: 0.0,
            prompt_s: 0.0,
            seconds: 1.0,
            tokens: 10,
            step_ms: Vec::new(),
            drafted: 0,
            accepted: 0,
            limits: Limits { memory_bytes_per_s: Some(1e9), disk_bytes_per_s: Some(1e8) },
            computed: 0,
            hits: 3,
            misses: 1,
            bytes_read: 50_000_000,
            wait_ms: 600.0,
            disk_busy_ms: 700.0,
            prefetch_issued_bytes: 0,
            prefetch_used_bytes: 0,
            prefetch_wasted_bytes: 0,
            time: TimeReport::default(),
        };
        let token = TokenBytes { dense: 10_000_000, routed: 10_000_000 };
        assert_eq!(run.ms_per_token(), 100.0);
        assert_eq!(run.limits_ms(token), (Some(20.0), Some(50.0)));
        assert_eq!(run.over_limit(token), Some(2.0));
        assert_eq!(run.over_disk_or_compute(token), Some(2.0));
        assert_eq!(run.hit_rate(), Some(0.75));
        let resident = Run { limits: Limits { disk_bytes_per_s: None, ..run.limits }, ..run };
        assert_eq!(resident.over_limit(token), Some(5.0));
        assert_eq!(resident.over_disk_or_compute(token), None);
    }
}
