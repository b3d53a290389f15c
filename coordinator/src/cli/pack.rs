//! `shimmer pack`: writes an expert pack from a container.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::pack::{Pack, PackError, PackReport, write_pack};
use shimmer_common::experts::{ExpertId, ExpertLayout};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::open;
use super::output;
use shimmer_common::size::Size;

/// Arguments of `shimmer pack`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer pack --model /models/glm-5.2 --to /fast-disk/glm-5.2.pack
  shimmer pack --model /models/glm-5.2 --to part.pack --experts 3-10,40:0-127

LIST names layers (3, 3-10) or experts of a layer (40:0-127, 40:7), separated by commas. An interrupted run
continues where it stopped. Use the pack with --pack DIR.")]
pub struct PackArgs {
    /// Model directory; repeat it for a model spread over several disks
    #[arg(long, value_name = "DIR", required = true)]
    model: Vec<PathBuf>,

    /// Directory to write the pack to
    #[arg(long, value_name = "DIR")]
    to: PathBuf,

    /// Experts to pack, for example 3-10,40:0-127 [default: all]
    #[arg(long, value_name = "LIST")]
    experts: Option<String>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &PackArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let container = open::container(&args.model)?;
    let source = container.experts();
    let ids = match &args.experts {
        None => source.layout().ids().collect(),
        Some(list) => {
            select(list, source.layout()).map_err(|e| CliError::Usage(format!("--experts {list}: {e}")))?
        }
    };
    let fingerprint = container.fingerprint()?;
    let bar = output::bytes_bar("packing", 0);
    let report = write_pack(&*source, &ids, fingerprint, &args.to, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.bytes);
        if interrupt.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let report = match report {
        Err(error @ PackError::Occupied { .. }) => finished(&args.to, &ids, fingerprint).ok_or(error)?,
        report => report?,
    };
    if args.json {
        return output::emit_json(&json!({
            "to": args.to,
            "records": report.records,
            "bytes": report.bytes,
            "resumed_records": report.resumed_records,
            "fingerprint": fingerprint.to_string(),
        }));
    }
    output::emit(&format!("{}: {} experts, {}\n", args.to.display(), report.records, Size(report.bytes)))
}

/// The report of a pack that is there already, when it holds exactly these experts of this model: the
/// command may have been stopped after its last step.
fn finished(to: &Path, ids: &[ExpertId], fingerprint: Fingerprint) -> Option<PackReport> {
    let pack = Pack::open(to).ok()?;
    let asked: std::collections::BTreeSet<_> = ids.iter().copied().collect();
    let same = pack.is_sealed() && pack.fingerprint() == fingerprint && pack.ids().into_iter().eq(asked);
    let records = pack.ids().len();
    same.then(|| PackReport { records, resumed_records: records, bytes: pack.bytes() })
}

/// The experts a list names.
fn select(list: &str, layout: &ExpertLayout) -> Result<Vec<ExpertId>, String> {
    let mut ids = Vec::new();
    for item in list.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        let (layers, experts) = match item.split_once(':') {
            Some((layers, experts)) => (range(layers)?, Some(range(experts)?)),
            None => (range(item)?, None),
        };
        let before = ids.len();
        let chosen = |id: &ExpertId| {
            layers.contains(&id.layer) && experts.as_ref().is_none_or(|experts| experts.contains(&id.index))
        };
        ids.extend(layout.ids().filter(chosen));
        if ids.len() == before {
            return Err(format!("{item} names no expert of this model"));
        }
    }
    if ids.is_empty() { Err("name at least one layer".to_owned()) } else { Ok(ids) }
}

fn range(text: &str) -> Result<std::ops::RangeInclusive<u16>, String> {
    let number = |t: &str| t.trim().parse::<u16>().map_err(|_| format!("{t:?} is not a number"));
    match text.split_once('-') {
        Some((low, high)) => Ok(number(low)?..=number(high)?),
        None => number(text).map(|n| n..=n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> ExpertLayout {
        let layers = [(3u16, vec![0u8; 4]), (4, vec![0; 4]), (7, vec![0; 4])];
        ExpertLayout { hidden_size: 64, specs: Vec::new(), layers: layers.into_iter().collect() }
    }

    #[test]
    fn lists_name_layers_and_experts() {
        let ids = select("3,4:1-2,7:0", &layout()).unwrap();
        let pairs: Vec<(u16, u16)> = ids.iter().map(|id| (id.layer, id.index)).collect();
        assert_eq!(pairs, [(3, 0), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (7, 0)]);
    }

    #[test]
    fn what_does_not_exist_is_named() {
        assert!(select("5", &layout()).unwrap_err().contains("5 names no expert"));
        assert!(select("3:x", &layout()).unwrap_err().contains("\"x\""));
        assert!(select("", &layout()).is_err());
    }
}
