//! `shimmer plan`: what would go where and how fast it might be, from headers only.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use shimmer_common::container::config::ModelConfig;
use shimmer_common::container::{ByteSums, Container};
use shimmer_common::experts::ExpertLayout;

use super::bandwidth;
use super::error::CliError;
use super::memory::{self, MemoryPlan, Needs};
use super::model_args::ModelArgs;
use super::open;
use super::output;
use super::plan_cluster;
use crate::cluster::{LOCAL, PlanReport, Rates, Worker};
use shimmer_common::size::Size;

/// Arguments of `shimmer plan`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer plan --model /models/glm-5.2
  shimmer plan --model /models/glm-5.2 --ram 64GiB --context 32768 --disk-bandwidth 6GB --json

Reads headers only. Speeds are estimates; their terms are shown.")]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Bytes per second this machine's disk reads [default: measured briefly]
    #[arg(long, value_name = "SIZE")]
    disk_bandwidth: Option<Size>,

    /// Bytes per second this machine's memory reads [default: measured briefly]
    #[arg(long, value_name = "SIZE")]
    memory_bandwidth: Option<Size>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    for (flag, given) in [("disk", args.disk_bandwidth), ("memory", args.memory_bandwidth)] {
        if given.is_some_and(|size| size.0 == 0) {
            return Err(CliError::Usage(format!(
                "--{flag}-bandwidth is 0; give bytes per second, such as 2GB"
            )));
        }
    }
    let container = open::container(&args.model.model)?;
    let source = open::expert_source(&container, args.model.pack.as_ref())?;
    let layout = source.layout();
    let needs = Needs::of(&container, layout, &args.model.limits).with_program_now();
    let memory = memory::divide(&args.model.limits, &needs)?;
    let routed = Routed::of(container.config(), layout);
    let speeds = Speeds {
        disk: match args.disk_bandwidth {
            Some(given) => Bandwidth { bytes_per_s: given.0 as f64, measured: false },
            None => Bandwidth { bytes_per_s: bandwidth::disk(container.dir()), measured: true },
        },
        memory: match args.memory_bandwidth {
            Some(given) => Bandwidth { bytes_per_s: given.0 as f64, measured: false },
            None => Bandwidth { bytes_per_s: bandwidth::memory(), measured: true },
        },
    };
    let cluster = match &args.model.limits.cluster {
        Some(dir) => Some(plan_cluster::report(dir, &container, layout, this_machine(&memory, &speeds))?),
        None => None,
    };
    let estimate = Estimate::of(&container.bytes(), &routed, &memory, &speeds);
    if args.json {
        return output::emit_json(&document(
            &container,
            &needs,
            &memory,
            &routed,
            &speeds,
            &estimate,
            cluster.as_ref(),
        ));
    }
    let text = table(&container, &needs, &memory, &routed, &speeds, &estimate);
    output::emit(&(text + &cluster.as_ref().map(plan_cluster::table).unwrap_or_default()))
}

/// The routed experts of the main layers, as one token sees them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Routed {
    /// Experts of the model, the MTP layer's included.
    experts: usize,
    /// Layers with routed experts, without the MTP layer.
    layers: usize,
    /// Experts one token visits, without the MTP layer.
    visited_per_token: usize,
    /// Bytes of those experts.
    bytes_per_token: u64,
}

impl Routed {
    fn of(config: &ModelConfig, layout: &ExpertLayout) -> Self {
        let main_layers = match config {
            ModelConfig::Glm(c) => c.num_hidden_layers,
            ModelConfig::Olmoe(c) => c.num_hidden_layers,
        };
        let per_token = config.experts_per_token();
        let mut routed = Self { experts: 0, layers: 0, visited_per_token: 0, bytes_per_token: 0 };
        for (&layer, experts) in &layout.layers {
            routed.experts += experts.len();
            if usize::from(layer) >= main_layers || experts.is_empty() {
                continue;
            }
            let bytes: u64 = experts
                .iter()
                .filter_map(|&spec| layout.specs.get(usize::from(spec)))
                .map(|spec| spec.record_bytes() as u64)
                .sum();
            routed.layers += 1;
            routed.visited_per_token += per_token;
            routed.bytes_per_token += bytes / experts.len() as u64 * per_token as u64;
        }
        routed
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Bandwidth {
    bytes_per_s: f64,
    measured: bool,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Speeds {
    disk: Bandwidth,
    memory: Bandwidth,
}

/// Seconds per token and what they are made of; one sequence, no drafts, nothing overlapped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Estimate {
    /// Dense bytes every token reads from memory (the embedding table is a look-up).
    dense_bytes_per_token: u64,
    /// Share of expert bytes expected in RAM when warm, without any luck in the choice.
    warm_hit_rate: f64,
    /// Seconds for the dense part.
    dense_s: f64,
    /// Seconds for experts that are in RAM already, all of them.
    experts_ram_s: f64,
    /// Seconds to read all of a token's experts from disk.
    experts_disk_s: f64,
    /// Tokens per second with nothing cached.
    cold_tokens_per_s: f64,
    /// Tokens per second with the cache full.
    warm_tokens_per_s: f64,
}

impl Estimate {
    fn of(bytes: &ByteSums, routed: &Routed, memory: &MemoryPlan, speeds: &Speeds) -> Self {
        // Table and head have one size; a token reads one row of the table and the whole head.
        let dense = bytes.resident_main().saturating_sub(bytes.embeddings_head / 2);
        let hit = if memory.all_experts_bytes == 0 {
            1.0
        } else {
            memory.expert_bytes as f64 / memory.all_experts_bytes as f64
        };
        let per = |bytes: u64, bandwidth: &Bandwidth| bytes as f64 / bandwidth.bytes_per_s.max(1.0);
        let dense_s = per(dense, &speeds.memory);
        let experts_ram_s = per(routed.bytes_per_token, &speeds.memory);
        let experts_disk_s = per(routed.bytes_per_token, &speeds.disk);
        let speed = |hit: f64| 1.0 / (dense_s + experts_ram_s + (1.0 - hit) * experts_disk_s).max(1e-9);
        Self {
            dense_bytes_per_token: dense,
            warm_hit_rate: hit,
            dense_s,
            experts_ram_s,
            experts_disk_s,
            cold_tokens_per_s: speed(0.0),
            warm_tokens_per_s: speed(hit),
        }
    }
}

/// Bytes of the container by part, exact.
fn parts(bytes: &ByteSums) -> [(&'static str, u64); 10] {
    [
        ("embeddings_head", bytes.embeddings_head),
        ("attention", bytes.attention),
        ("norms", bytes.norms),
        ("dense_mlp", bytes.dense_mlp),
        ("shared_experts", bytes.shared_experts),
        ("router", bytes.router),
        ("indexer", bytes.indexer),
        ("mtp_dense", bytes.mtp_dense),
        ("routed_main", bytes.routed_main),
        ("routed_mtp", bytes.routed_mtp),
    ]
}

fn document(
    container: &Container,
    needs: &Needs,
    memory: &MemoryPlan,
    routed: &Routed,
    speeds: &Speeds,
    estimate: &Estimate,
    cluster: Option<&PlanReport>,
) -> Value {
    let bytes = container.bytes();
    let mut sums: serde_json::Map<String, Value> =
        parts(&bytes).into_iter().map(|(name, n)| (name.to_owned(), n.into())).collect();
    sums.insert("resident_main".into(), bytes.resident_main().into());
    sums.insert("resident".into(), bytes.resident().into());
    sums.insert("routed".into(), bytes.routed().into());
    sums.insert("total".into(), bytes.total().into());
    json!({
        "model": { "dir": container.dir(), "summary": container.summary().line, "warnings": container.summary().warnings },
        "bytes": sums,
        "memory": memory,
        "cache_bytes_per_token": needs.cache_bytes_per_token,
        "experts": {
            "count": routed.experts,
            "layers": routed.layers,
            "largest_bytes": needs.largest_expert_bytes,
            "visited_per_token": routed.visited_per_token,
            "bytes_per_token": routed.bytes_per_token,
            "in_ram_bytes": memory.expert_bytes,
            "on_disk_bytes": needs.all_experts_bytes - memory.expert_bytes,
        },
        "cluster": cluster,
        "bandwidth": speeds,
        "estimate": estimate,
    })
}

/// This machine as one that may own experts.
fn this_machine(memory: &MemoryPlan, speeds: &Speeds) -> Worker {
    let rates = Rates {
        disk_bytes_per_s: speeds.disk.bytes_per_s,
        gemv_bytes_per_s: speeds.memory.bytes_per_s,
        round_trip_s: 0.0,
        link_bytes_per_s: Rates::NO_LINK,
    };
    Worker {
        id: LOCAL.to_owned(),
        name: "this machine".to_owned(),
        rates: rates.sane(),
        ram_bytes: memory.expert_bytes,
        disk_bytes: None,
    }
}

fn table(
    container: &Container,
    needs: &Needs,
    memory: &MemoryPlan,
    routed: &Routed,
    speeds: &Speeds,
    estimate: &Estimate,
) -> String {
    let mut text = format!("{}\n\nStored bytes\n", shown_dir(container.dir()));
    let bytes = container.bytes();
    for (name, n) in parts(&bytes).into_iter().chain([("total", bytes.total())]) {
        text += &format!("  {name:<18} {n:>18}  {}\n", Size(n));
    }
    text += &format!("\nRAM budget {} on this machine\n", Size(memory.budget_bytes));
    for (name, n) in memory.parts() {
        text += &format!("  {name:<18} {n:>18}  {}\n", Size(n));
    }
    text += &format!(
        "\n{} experts of up to {}: {} in RAM, {} read from disk when needed\n",
        routed.experts,
        Size(needs.largest_expert_bytes),
        Size(memory.expert_bytes),
        Size(needs.all_experts_bytes - memory.expert_bytes),
    );
    let how = |b: &Bandwidth| if b.measured { "measured" } else { "given" };
    text += &format!(
        "\nEstimated speed of one sequence, without drafts and nodes: {:.2} tokens/s cold, {:.2} warm\n\
         \u{20} per token: dense {} = {:.1} ms, {} experts {} = {:.1} ms from RAM, {:.1} ms more from disk\n\
         \u{20} warm: {:.0} % of the experts in RAM\n\
         \u{20} memory {}/s ({}), disk {}/s ({})\n",
        estimate.cold_tokens_per_s,
        estimate.warm_tokens_per_s,
        Size(estimate.dense_bytes_per_token),
        estimate.dense_s * 1e3,
        routed.visited_per_token,
        Size(routed.bytes_per_token),
        estimate.experts_ram_s * 1e3,
        estimate.experts_disk_s * 1e3,
        estimate.warm_hit_rate * 100.0,
        Size(speeds.memory.bytes_per_s as u64),
        how(&speeds.memory),
        Size(speeds.disk.bytes_per_s as u64),
        how(&speeds.disk),
    );
    text
}

fn shown_dir(dir: &Path) -> String {
    PathBuf::from(dir).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_add_up() {
        let bytes = ByteSums { embeddings_head: 200, attention: 900, ..ByteSums::default() };
        let routed = Routed { experts: 10, layers: 1, visited_per_token: 2, bytes_per_token: 1000 };
        let memory = MemoryPlan {
            budget_bytes: 0,
            program_bytes: 0,
            dense_bytes: 0,
            context_tokens: 0,
            kv_bytes: 0,
            step_rows: 0,
            step_bytes: 0,
            score_rows: 0,
            io_bytes: 0,
            reserve_bytes: 0,
            expert_bytes: 2500,
            all_experts_bytes: 5000,
        };
        let at = |bytes_per_s| Bandwidth { bytes_per_s, measured: false };
        let estimate =
            Estimate::of(&bytes, &routed, &memory, &Speeds { disk: at(100.0), memory: at(1000.0) });
        assert_eq!(estimate.dense_bytes_per_token, 1000);
        assert!((estimate.cold_tokens_per_s - 1.0 / 12.0).abs() < 1e-9);
        assert!((estimate.warm_tokens_per_s - 1.0 / 7.0).abs() < 1e-9);
    }
}
