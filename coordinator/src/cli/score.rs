//! `shimmer score`: teacher-forced logits, perplexity and intermediate values.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::ModelArgs;
use super::open::{self, Loaded};
use super::output;
use super::run;
use super::tensor_file::{self, Tensor};
use crate::decode::DraftPolicy;
use crate::decode::score::{Score, ScoreOptions, score};
use crate::model::{Rows, TraceLevel, TraceTensor};

/// Index score written for positions a row cannot see.
const NOT_VISIBLE: f32 = -1e30;

/// Arguments of `shimmer score`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer score --model /models/glm-5.2 --ids ids.json --out logits.safetensors
  shimmer score --model /models/glm-5.2 --ids ids.json --out trace.safetensors --trace --json

FILE.json holds a list of token ids or a list of such lists. One sequence gives the tensor `logits`
[T, vocabulary], several give `0.logits`, `1.logits`, …; --trace adds hidden.L, router_ids.L, router_weights.L,
index_topk.L and mtp_logits under the same prefixes. Equal input gives equal bytes on every topology, with every
--prefill-chunk, and with --draft N, which makes the ids go through draft-and-verify rounds as in a generation
(auto and off: plain chunks).")]
pub struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// JSON list of token ids, or list of lists
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,

    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Add intermediate values of every layer
    #[arg(long)]
    trace: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ScoreArgs) -> Result<(), CliError> {
    tensor_file::check_place(&args.out, &args.model.model)?;
    let sequences = read_ids(&args.ids)?;
    let interrupt = Interrupt::install();
    let mut model_args = args.model.clone();
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(1);
    model_args.limits.context = Some(model_args.limits.context.unwrap_or(longest).max(longest));
    let loaded = open::load_with(&model_args, |container| check_ids(&sequences, container, &args.ids))?;
    let total: usize = sequences.iter().map(Vec::len).sum();
    let bar = output::count_bar("scoring", total as u64);
    let mut tensors = BTreeMap::new();
    let options = ScoreOptions {
        prefill_chunk: loaded.memory.score_rows,
        drafts: match model_args.limits.draft.0 {
            DraftPolicy::Fixed(drafts) => drafts,
            DraftPolicy::Auto | DraftPolicy::Off => 0,
        },
        trace: args.trace.then_some(TraceLevel::Score),
    };
    let mut sum = Score::default();
    for (index, ids) in sequences.iter().enumerate() {
        let prefix = if sequences.len() == 1 { String::new() } else { format!("{index}.") };
        let progress = &mut |rows| bar.inc(rows);
        let scored = loaded.pool.install(|| score_sequence(&loaded, ids, options, &interrupt, progress))?;
        sum.add(&scored.score);
        scored.into_tensors(&prefix, &mut tensors);
    }
    bar.finish_and_clear();
    tensor_file::write(&args.out, &tensors)?;
    report(args, &sum, &loaded, sequences.len())
}

fn report(args: &ScoreArgs, sum: &Score, loaded: &Loaded<()>, sequences: usize) -> Result<(), CliError> {
    if args.json {
        return output::emit_json(&json!({
            "sequences": sequences,
            "tokens": sum.rows,
            "predicted": sum.scored,
            "mean_nll": sum.mean_nll(),
            "perplexity": sum.perplexity(),
            "drafts": { "proposed": sum.drafted, "accepted": sum.accepted },
            "out": args.out,
            "experts": loaded.served(),
            "lookahead": run::lookahead(&*loaded.model),
        }));
    }
    match (sum.mean_nll(), sum.perplexity()) {
        (Some(mean), Some(perplexity)) => output::emit(&format!(
            "mean negative log-likelihood {mean:.6} nats over {} predicted tokens, perplexity {perplexity:.4}\n",
            sum.scored,
        )),
        _ => output::emit("no token has a successor, so there is no likelihood\n"),
    }
}

/// What one sequence gives.
struct Scored {
    logits: Rows,
    score: Score,
}

impl Scored {
    fn into_tensors(self, prefix: &str, out: &mut BTreeMap<String, Tensor>) {
        let logits = Tensor::F32 { width: self.logits.width, data: self.logits.data };
        out.insert(format!("{prefix}logits"), logits);
        for (name, tensor) in self.score.trace.map(|t| t.tensors).into_iter().flatten() {
            let tensor = match tensor {
                TraceTensor::F32 { width, data } => Tensor::F32 { width, data },
                TraceTensor::I32 { rows } => Tensor::I32 { rows },
                TraceTensor::F32Causal { rows } => square(rows),
            };
            out.insert(format!("{prefix}{name}"), tensor);
        }
    }
}

/// Rows that grow with the position, padded to the longest with a score no position can have.
fn square(rows: Vec<Vec<f32>>) -> Tensor {
    let width = rows.iter().map(Vec::len).max().unwrap_or(0);
    let padded = rows.into_iter().flat_map(|mut row| {
        row.resize(width, NOT_VISIBLE);
        row
    });
    Tensor::F32 { width, data: padded.collect() }
}

fn score_sequence(
    loaded: &Loaded<()>,
    ids: &[u32],
    options: ScoreOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(u64),
) -> Result<Scored, CliError> {
    let model = loaded.model.as_ref();
    let mut logits = Rows { data: Vec::new(), width: model.info().vocab_size };
    let score = score(model, ids, options, &mut |rows| {
        logits.data.extend_from_slice(&rows.data);
        progress(rows.rows() as u64);
        if interrupt.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if score.rows < ids.len() {
        return Err(CliError::Interrupted);
    }
    Ok(Scored { logits, score })
}

/// Reads a list of ids or a list of lists.
fn read_ids(path: &Path) -> Result<Vec<Vec<u32>>, CliError> {
    let name = path.display();
    let bytes =
        std::fs::read(path).map_err(|e| CliError::Usage(format!("cannot read the ids {name}: {e}")))?;
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|e| CliError::Usage(format!("{name} is not JSON: {e}")))?;
    parse_ids(&value).map_err(|what| CliError::Usage(format!("{name}: {what}")))
}

fn parse_ids(value: &Value) -> Result<Vec<Vec<u32>>, String> {
    let list = value.as_array().ok_or("write a list of token ids or a list of such lists")?;
    let nested = list.first().is_some_and(Value::is_array);
    let sequences: Vec<&Value> = if nested { list.iter().collect() } else { vec![value] };
    let mut out = Vec::with_capacity(sequences.len());
    for (index, sequence) in sequences.into_iter().enumerate() {
        let ids =
            sequence.as_array().ok_or(format!("entry {index} is not a list, although the first one is"))?;
        let ids: Result<Vec<u32>, String> = ids
            .iter()
            .enumerate()
            .map(|(at, id)| {
                let number = id.as_u64().and_then(|n| u32::try_from(n).ok());
                number.ok_or_else(|| format!("sequence {index} position {at}: {id} is not a token id"))
            })
            .collect();
        let ids = ids?;
        if ids.is_empty() {
            return Err(format!("sequence {index} is empty; give at least one token id"));
        }
        out.push(ids);
    }
    Ok(out)
}

/// Refuses ids and lengths the model does not know, before anything is loaded.
fn check_ids(
    sequences: &[Vec<u32>],
    container: &shimmer_common::container::Container,
    path: &Path,
) -> Result<(), CliError> {
    let config = container.config();
    let (vocab_size, limit) = (config.vocab_size(), config.max_position_embeddings());
    for (index, ids) in sequences.iter().enumerate() {
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
            return Err(CliError::Usage(format!(
                "{}: sequence {index} position {at}: token id {id} is not below the vocabulary size {vocab_size}",
                path.display()
            )));
        }
        if ids.len() > limit {
            return Err(CliError::Usage(format!(
                "{}: sequence {index} has {} tokens, the model supports {limit}",
                path.display(),
                ids.len()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_list_or_many() {
        assert_eq!(parse_ids(&json!([1, 2, 3])).unwrap(), [[1, 2, 3]]);
        assert_eq!(parse_ids(&json!([[1], [2, 3]])).unwrap(), [vec![1], vec![2, 3]]);
    }

    #[test]
    fn bad_ids_are_named_by_place() {
        for (value, word) in [
            (json!({}), "list"),
            (json!([]), "sequence 0 is empty"),
            (json!([1, -2]), "position 1"),
            (json!([[1], [2.5]]), "sequence 1 position 0"),
            (json!([[1], 2]), "entry 1"),
            (json!([4294967296u64]), "position 0"),
        ] {
            let error = parse_ids(&value).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
