//! `shimmer convert`: a Hugging Face checkpoint becomes a quantised container.

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use shimmer_common::convert::{self, ConvertError, ConvertOptions, TargetFormat};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::output;
use shimmer_common::size::Size;

/// Arguments of `shimmer convert`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer convert --from /hf/GLM-5.2-FP8 --to /models/glm-5.2
  shimmer convert --from /hf/GLM-5.2-FP8 --to /models/glm-5.2-small --dense int4-g64

Formats: int4-g64, int4-row, int8, bf16. Norms and routers stay f32. An interrupted run continues where it stopped.")]
pub struct ConvertArgs {
    /// Checkpoint to read (bf16, f16, f32 or FP8)
    #[arg(long, value_name = "DIR")]
    from: PathBuf,

    /// Directory to write
    #[arg(long, value_name = "DIR")]
    to: PathBuf,

    /// Routed experts
    #[arg(long, value_name = "FORMAT", default_value_t = ConvertOptions::default().experts)]
    experts: TargetFormat,

    /// Attention, dense MLPs and shared experts
    #[arg(long, value_name = "FORMAT", default_value_t = ConvertOptions::default().dense)]
    dense: TargetFormat,

    /// The MTP (draft) layer
    #[arg(long, value_name = "FORMAT", default_value_t = ConvertOptions::default().mtp)]
    mtp: TargetFormat,

    /// The DSA indexers
    #[arg(long, value_name = "FORMAT", default_value_t = ConvertOptions::default().indexer)]
    indexer: TargetFormat,

    /// Embedding table and output head
    #[arg(long, value_name = "FORMAT", default_value_t = ConvertOptions::default().embeddings)]
    embeddings: TargetFormat,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let options = ConvertOptions {
        experts: args.experts,
        dense: args.dense,
        mtp: args.mtp,
        indexer: args.indexer,
        embeddings: args.embeddings,
    };
    let bar = output::bytes_bar("converting", 0);
    let report = convert::convert(&args.from, &args.to, &options, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.bytes);
        if interrupt.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let report = report?;
    for warning in &report.warnings {
        output::note(&format!("warning: {warning}"));
    }
    if args.json {
        return output::emit_json(&json!({
            "to": args.to,
            "written_files": report.written_files,
            "kept_files": report.kept_files,
            "bytes": report.bytes,
            "summary": report.summary,
            "warnings": report.warnings,
        }));
    }
    output::emit(&format!("{}: {}, {}\n", args.to.display(), Size(report.bytes), report.summary))
}

impl From<ConvertError> for CliError {
    fn from(error: ConvertError) -> Self {
        let message = error.to_string();
        match error {
            ConvertError::Cancelled => {
                output::note(&message);
                Self::Interrupted
            }
            ConvertError::Options(_) | ConvertError::Target { .. } => Self::Usage(message),
            ConvertError::Space { .. } | ConvertError::Io { .. } => Self::Failed(message),
            _ => Self::Data(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_conversion_is_an_interruption() {
        assert_eq!(CliError::from(ConvertError::Cancelled).exit_code(), 130);
        assert_eq!(CliError::from(ConvertError::Options("mtp".into())).exit_code(), 2);
    }
}
