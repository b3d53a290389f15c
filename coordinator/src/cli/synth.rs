//! `shimmer synth`: a random model of any shape.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde_json::json;
use shimmer_common::quant::Format;
use shimmer_common::size::Size;
use shimmer_common::synth::{self, RouterSkew, SynthError, SynthOptions, SynthShape};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::parse_positive;
use super::output;

/// A shape to start from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// GLM-5.2's matrix shapes in 6 layers (1 dense, 5 with 64 experts), vocabulary of 2048: 7.7 GB.
    #[default]
    #[value(name = "glm-5.2")]
    Glm,
    /// All of GLM-5.2: 78 layers, 256 experts, 154,880 tokens.
    #[value(name = "glm-5.2-full")]
    GlmFull,
    /// Under a million parameters.
    Tiny,
}

/// A storage format by the name of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FormatArg(pub(super) Format);

/// Group sizes the container format knows.
const GROUPS: [u32; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

impl FromStr for FormatArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let format = match text {
            "f32" => Format::F32,
            "f16" => Format::F16,
            "bf16" => Format::Bf16,
            "fp8" => Format::Fp8Block,
            "int8" => Format::Int8Row,
            "int4-row" => Format::Int4Row,
            "int3" => Format::Int3G64,
            "int2" => Format::Int2Row,
            other => match other.strip_prefix("int4-g").and_then(|group| group.parse().ok()) {
                Some(group) if GROUPS.contains(&group) => Format::Int4Grouped { group },
                _ => {
                    return Err(format!(
                        "{text:?} is not a storage format; the formats are int4-g64 (or g16, g32, g48, g96, g128, g192, g256), int4-row, int8, int3, int2, fp8, bf16, f16, f32"
                    ));
                }
            },
        };
        Ok(Self(format))
    }
}

/// Arguments of `shimmer synth`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer synth --to /tmp/uniform
  shimmer synth --to /tmp/zipf --router zipf
  shimmer synth --to /tmp/headers --preset glm-5.2-full --mtp --headers-only
  shimmer synth --to /tmp/small --preset tiny --layers 8 --experts 32 --expert-format int8 --mtp

Weights are random, so the text such a model writes means nothing; its sizes and speeds are real. It has no stop
ids and writes until --max-tokens. --router zipf:S draws a layer's experts with probability proportional to
rank^-S (default 1.25: with 8 of 64 experts the best fixed quarter serves 71 % of the choices, a least-recently-used
cache of that size 56 %). Formats: int4-g64 (and other groups), int4-row, int8, int3, int2, fp8, bf16, f16, f32; routers
and norms are f32. The same flags give the same bytes.")]
pub struct SynthArgs {
    /// Directory to write; it must not exist
    #[arg(long, value_name = "DIR")]
    to: PathBuf,

    /// Shape to start from; the flags below change it
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    preset: Preset,

    /// Layers
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    layers: Option<usize>,

    /// First layers without experts
    #[arg(long, value_name = "N", help_heading = "Shape")]
    dense_layers: Option<usize>,

    /// Routed experts per layer
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    experts: Option<usize>,

    /// Experts chosen per token and layer
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    top_k: Option<usize>,

    /// Shared experts per layer
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    shared_experts: Option<usize>,

    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    hidden: Option<usize>,

    /// Inner width of an expert
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    expert_inner: Option<usize>,

    /// Inner width of the MLP of layers without experts
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    dense_inner: Option<usize>,

    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    vocab: Option<usize>,

    /// Attention heads
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    heads: Option<usize>,

    /// Rank of the query projection
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    q_rank: Option<usize>,

    /// Rank of the key and value projection: what is cached per token
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    kv_rank: Option<usize>,

    /// Positions an indexer selects
    #[arg(long, value_name = "N", value_parser = parse_positive, help_heading = "Shape")]
    index_top_k: Option<usize>,

    /// Longest context
    #[arg(long, value_name = "TOKENS", value_parser = parse_positive, help_heading = "Shape")]
    max_context: Option<usize>,

    /// Add an MTP (draft) layer
    #[arg(long, help_heading = "Shape")]
    mtp: bool,

    /// Routed experts
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64", help_heading = "Formats")]
    expert_format: FormatArg,

    /// Attention, dense MLPs and shared experts
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64", help_heading = "Formats")]
    dense_format: FormatArg,

    /// The MTP layer
    #[arg(long, value_name = "FORMAT", default_value = "int8", help_heading = "Formats")]
    mtp_format: FormatArg,

    /// The indexers
    #[arg(long, value_name = "FORMAT", default_value = "int8", help_heading = "Formats")]
    indexer_format: FormatArg,

    /// Embedding table and output head
    #[arg(long, value_name = "FORMAT", default_value = "int8", help_heading = "Formats")]
    embedding_format: FormatArg,

    /// How often experts are chosen: uniform, zipf or zipf:S
    #[arg(long, value_name = "SKEW", default_value = "uniform")]
    router: RouterSkew,

    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Largest shard
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    shard_size: Size,

    /// Write headers only, for commands that read no weights (plan): any size in no space
    #[arg(long)]
    headers_only: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl SynthArgs {
    fn shape(&self) -> SynthShape {
        let mut shape = match self.preset {
            Preset::Glm => SynthShape::glm_slice(),
            Preset::GlmFull => SynthShape::glm(),
            Preset::Tiny => SynthShape::tiny(),
        };
        for (value, wish) in [
            (&mut shape.num_hidden_layers, self.layers),
            (&mut shape.first_k_dense_replace, self.dense_layers),
            (&mut shape.n_routed_experts, self.experts),
            (&mut shape.num_experts_per_tok, self.top_k),
            (&mut shape.n_shared_experts, self.shared_experts),
            (&mut shape.hidden_size, self.hidden),
            (&mut shape.moe_intermediate_size, self.expert_inner),
            (&mut shape.intermediate_size, self.dense_inner),
            (&mut shape.vocab_size, self.vocab),
            (&mut shape.num_attention_heads, self.heads),
            (&mut shape.q_lora_rank, self.q_rank),
            (&mut shape.kv_lora_rank, self.kv_rank),
            (&mut shape.index_topk, self.index_top_k),
            (&mut shape.max_position_embeddings, self.max_context),
        ] {
            *value = wish.unwrap_or(*value);
        }
        shape
    }

    fn options(&self) -> SynthOptions {
        SynthOptions {
            shape: self.shape(),
            expert_format: self.expert_format.0,
            dense_format: self.dense_format.0,
            mtp_format: self.mtp_format.0,
            indexer_format: self.indexer_format.0,
            embedding_format: self.embedding_format.0,
            mtp: self.mtp,
            router: self.router,
            seed: self.seed,
            shard_bytes: self.shard_size.0,
            headers_only: self.headers_only,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &SynthArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let bar = output::bytes_bar("writing", 0);
    let started = Instant::now();
    let report = synth::synthesise(&args.to, &args.options(), &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if interrupt.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        return output::emit_json(&json!({
            "to": args.to,
            "files": report.files,
            "bytes": report.bytes,
            "summary": report.summary,
            "router": args.router.to_string(),
            "seed": args.seed,
            "tokenizer": report.tokenizer,
            "token_dense_bytes": report.token.dense,
            "token_expert_bytes": report.token.routed,
            "seconds": started.elapsed().as_secs_f64(),
        }));
    }
    if !report.tokenizer {
        output::note(
            "the vocabulary is too small for a tokenizer: only commands that take token ids can use this model",
        );
    }
    output::emit(&format!(
        "{}: {}, {}; a token touches {} (dense part {}, experts {})\n",
        args.to.display(),
        Size(report.bytes),
        report.summary,
        Size(report.token.total()),
        Size(report.token.dense),
        Size(report.token.routed),
    ))
}

impl From<SynthError> for CliError {
    fn from(error: SynthError) -> Self {
        let message = error.to_string();
        match error {
            SynthError::Cancelled => Self::Interrupted,
            SynthError::Options(_) | SynthError::Occupied { .. } => Self::Usage(message),
            SynthError::Space { .. } | SynthError::Io { .. } => Self::Failed(message),
            SynthError::Container(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_name() {
        for (name, format) in [("int8", Format::Int8Row), ("int4-g128", Format::Int4Grouped { group: 128 })] {
            assert_eq!(name.parse(), Ok(FormatArg(format)));
        }
        for bad in ["int4", "int4-g65", "int4-g", "int5", ""] {
            assert!(bad.parse::<FormatArg>().unwrap_err().contains("int4-g64"), "{bad}");
        }
    }
}
