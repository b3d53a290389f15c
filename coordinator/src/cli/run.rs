//! `shimmer run`: one answer to stdout.

use std::io::Read;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::answer::{self, Answer, Limits, Printer, Prompt};
use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::ModelArgs;
use super::open::{self, Loaded};
use super::output;
use super::sampling_args::{SamplingArgs, ThinkArgs, describe_thinking};
use crate::model::LanguageModel;
use crate::text::ReplyEvent;

/// Most bytes of a prompt; far above any context, far below what would exhaust memory.
const MAX_PROMPT_BYTES: u64 = 256 << 20;

/// Arguments of `shimmer run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer run --model /models/glm-5.2 --prompt 'Why is the sky blue?'
  shimmer run --model /models/glm-5.2 --prompt-file question.txt --greedy --json
  cat notes.txt | shimmer run --model /models/glm-5.2 --system 'Summarise.' --prompt - --max-tokens 200

The answer goes to stdout; reasoning is shown on stderr (with --raw everything is plain text on stdout).")]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// The question; `-` reads stdin
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// File with the question; `-` reads stdin
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// Continue the prompt as plain text, without the chat template
    #[arg(long)]
    raw: bool,

    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    #[command(flatten)]
    think: ThinkArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Constrain the answer by a grammar (not available yet)
    #[arg(long, value_name = "FILE", hide = true)]
    grammar: Option<PathBuf>,

    /// Constrain the answer by a JSON schema (not available yet)
    #[arg(long, value_name = "FILE", hide = true)]
    json_schema: Option<PathBuf>,

    /// One JSON document on stdout: text, ids, usage, drafts, timings, experts
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    for (flag, value) in [("--grammar", &args.grammar), ("--json-schema", &args.json_schema)] {
        if value.is_some() {
            return Err(CliError::Usage(format!("{flag} is not supported by this version; leave it out")));
        }
    }
    let question = question(args)?;
    let interrupt = Interrupt::install();
    let loaded = open::load(&args.model)?;
    let prompt = if args.raw {
        Prompt::raw(&loaded.text, &question)?
    } else {
        Prompt::chat(&loaded.text, messages(args.system.as_deref(), &question), args.think.choice())?
    };
    let limits = limits(&loaded, &args.model);
    let request = answer::request(&loaded.text, &prompt, &args.sampling, &limits)?;
    let seed = request.sampling.seed;
    if !args.raw {
        output::note(&describe_thinking(&loaded.text, args.think.choice()));
    }
    let engine = loaded.engine()?;
    let mut printer = Printer::default();
    let mut sink = |piece: &ReplyEvent| if args.json { Ok(()) } else { printer.piece(piece) };
    let answer = answer::ask(&engine, &prompt, request, &interrupt, &mut sink)?;
    printer.end_thinking();
    if args.json {
        let mut document = answer.to_json(seed, loaded.load_s, &loaded.served());
        document["thinking"] = prompt.in_thinking.into();
        document["lookahead"] = lookahead(&*loaded.model);
        output::emit_json(&document)?;
    } else {
        output::emit("\n")?;
        if let Some(cut) = answer.cut() {
            output::note(&cut);
        }
        output::note(&summary(&answer, &loaded));
        if let Some(line) = answer.generation.stats.time.line() {
            output::note(&line);
        }
    }
    if interrupt.requested() { Err(CliError::Interrupted) } else { Ok(()) }
}

/// Limits of answers by this model under these flags.
pub fn limits(loaded: &Loaded, args: &ModelArgs) -> Limits {
    Limits {
        context_tokens: loaded.memory.context_tokens,
        stop_ids: loaded.text.stop_ids(loaded.container.config().eos_token_ids()),
        drafts: args.limits.draft.0,
        prefill_chunk: loaded.memory.step_rows,
    }
}

/// How well experts were guessed ahead, by distance in layers; empty where no guesses were wanted.
pub fn lookahead(model: &dyn LanguageModel) -> Value {
    let guessed = (1..).zip(model.lookahead()).filter(|(_, recall)| recall.used > 0);
    let guessed = guessed.map(|(layers, recall)| {
        json!({
            "layers_ahead": layers,
            "guessed": recall.guessed,
            "used": recall.used,
            "hits": recall.hits,
            "recall": recall.ratio(),
        })
    });
    guessed.collect()
}

fn messages(system: Option<&str>, question: &str) -> Vec<Value> {
    let system = system.map(|text| json!({ "role": "system", "content": text }));
    system.into_iter().chain([json!({ "role": "user", "content": question })]).collect()
}

fn question(args: &RunArgs) -> Result<String, CliError> {
    match (&args.prompt, &args.prompt_file) {
        (Some(text), _) if text != "-" => Ok(text.clone()),
        (None, Some(file)) if file.as_os_str() != "-" => {
            let name = file.display();
            let open = std::fs::File::open(file)
                .map_err(|e| CliError::Usage(format!("cannot read the prompt {name}: {e}")))?;
            read_prompt(open, &name.to_string())
        }
        (None, None) => Err(CliError::Usage(
            "give the question with --prompt TEXT, --prompt-file FILE or --prompt - for stdin".into(),
        )),
        _ => read_prompt(std::io::stdin().lock(), "stdin"),
    }
}

fn read_prompt(reader: impl Read, name: &str) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    reader
        .take(MAX_PROMPT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| CliError::Usage(format!("cannot read the prompt from {name}: {e}")))?;
    if bytes.len() as u64 > MAX_PROMPT_BYTES {
        return Err(CliError::Usage(format!("the prompt in {name} is larger than {MAX_PROMPT_BYTES} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| {
        CliError::Usage(format!("the prompt in {name} is not UTF-8 at byte {}", e.utf8_error().valid_up_to()))
    })
}

/// One line about speed, for stderr.
fn summary(answer: &Answer, loaded: &Loaded) -> String {
    let stats = &answer.generation.stats;
    let mut line = format!(
        "{} tokens, {:.1} tokens/s, first token after {:.2} s",
        stats.generated_tokens,
        answer.tokens_per_s(),
        answer.first_token_s
    );
    if stats.drafted > 0 {
        line += &format!(", drafts {}/{} accepted", stats.accepted, stats.drafted);
    }
    if loaded.cluster.is_some() {
        let served = loaded.served();
        for node in &served.nodes {
            line += &format!(", {} experts by {}", node.experts, node.name);
        }
        line += &format!(", {} here ({} as fall-back)", served.local + served.fallback, served.fallback);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_must_be_text() {
        let error = read_prompt(&b"ok\xff"[..], "p.txt").unwrap_err().to_string();
        assert!(error.contains("p.txt") && error.contains("byte 2"), "{error}");
        assert_eq!(read_prompt("häuser".as_bytes(), "p").unwrap(), "häuser");
    }

    #[test]
    fn the_system_message_comes_first() {
        let messages = messages(Some("be short"), "why?");
        assert_eq!(messages[0]["role"], "system");
        assert_eq!(messages[1]["content"], "why?");
    }
}
