//! `shimmer cluster drain|resume|remove|rebalance`: orders to the running coordinator.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use shimmer_proto::v1::Rebalance;
use shimmer_proto::v1::change_request::Change;

use super::super::error::CliError;
use super::super::interrupt::Interrupt;
use super::super::output;
use super::super::plan_cluster;
use crate::cluster::{ClusterState, Coordinator};

/// Pause between two attempts to remove a node whose experts are still being copied.
const AGAIN: Duration = Duration::from_secs(1);

/// Arguments of commands about one node.
#[derive(Args, Clone, Debug)]
pub struct NodeArgs {
    /// Name or id of the node
    node: String,

    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,
}

/// Arguments of `shimmer cluster remove`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  shimmer cluster remove laptop-3 --cluster ~/.shimmer/cluster --timeout 2h

The node serves until others have copies of everything it holds alone; then it is forgotten. A node that is
gone for good is forgotten at once. It can join again with a new token.")]
pub struct RemoveArgs {
    #[command(flatten)]
    node: NodeArgs,

    /// How long to wait for the others to fetch its experts: 30s, 10m, 24h
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = super::parse_duration)]
    timeout: Duration,
}

/// Arguments of `shimmer cluster rebalance`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer cluster rebalance --cluster ~/.shimmer/cluster --dry-run
  shimmer cluster rebalance --cluster ~/.shimmer/cluster")]
pub struct RebalanceArgs {
    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// Only show what would change
    #[arg(long)]
    dry_run: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// `drain` and `resume`.
pub(super) fn set_drained(args: &NodeArgs, drained: bool) -> Result<(), CliError> {
    let state = ClusterState::open(&args.cluster)?;
    let node = args.node.clone();
    let sentence = match Coordinator::connect(&state)? {
        Some(mut coordinator) => {
            let change = if drained { Change::Drain(node) } else { Change::Resume(node) };
            coordinator.change(change)?.0
        }
        None => {
            let member = state.set_drained(&node, drained)?;
            let what = if drained { "will own nothing" } else { "takes part again" };
            format!("{} {what} when a coordinator runs", member.name)
        }
    };
    output::emit(&format!("{sentence}\n"))
}

/// `remove`.
pub(super) fn remove(args: &RemoveArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let state = ClusterState::open(&args.node.cluster)?;
    let until = Instant::now() + args.timeout;
    let mut said = String::new();
    loop {
        let Some(mut coordinator) = Coordinator::connect(&state)? else {
            let member = state.forget(&args.node.node)?;
            return output::emit(&format!(
                "{} is forgotten; it can join again with a new token\n",
                member.name
            ));
        };
        match coordinator.change(Change::Remove(args.node.node.clone())) {
            Ok((sentence, _)) => return output::emit(&format!("{sentence}\n")),
            Err(error) if Instant::now() >= until || !error.to_string().contains("alone") => {
                return Err(error.into());
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    output::note(&text);
                    said = text;
                }
            }
        }
        if !interrupt.pause(AGAIN) {
            return Err(CliError::Interrupted);
        }
    }
}

/// `rebalance`.
pub(super) fn rebalance(args: &RebalanceArgs) -> Result<(), CliError> {
    let state = ClusterState::open(&args.cluster)?;
    let mut coordinator = Coordinator::connect(&state)?.ok_or_else(|| no_coordinator(&args.cluster))?;
    let change = Change::Rebalance(Rebalance { dry_run: args.dry_run });
    let (sentence, plan) = coordinator.change(change)?;
    if args.json {
        return output::emit_json(&json!({ "sentence": sentence, "dry_run": args.dry_run, "plan": plan }));
    }
    let table = plan.as_ref().map(plan_cluster::table).unwrap_or_default();
    output::emit(&format!("{sentence}\n{table}"))
}

fn no_coordinator(dir: &Path) -> CliError {
    CliError::Unreachable(format!(
        "no coordinator runs on {}; start one with `shimmer serve --cluster {} --model DIR`",
        dir.display(),
        dir.display()
    ))
}
