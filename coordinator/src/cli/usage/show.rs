//! `shimmer usage show`: how unevenly experts are used.

use clap::Args;
use serde::Serialize;
use shimmer_common::experts::ExpertId;
use shimmer_common::experts::usage::{SavedUsage, Usage, UsageOptions};

use super::super::error::CliError;
use super::super::output;
use super::files::KeptArgs;

/// Shares of a layer's experts whose part of the uses is shown.
const SHARES: [f64; 4] = [0.05, 0.10, 0.25, 0.50];

/// Arguments of `shimmer usage show`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer usage show --model /models/glm-5.2

A line per layer: which part of its routed rows went to its hottest 5, 10, 25 and 50 % of experts (decayed counts),
and the hottest ones with the share of tokens that needed them.")]
pub struct ShowArgs {
    #[command(flatten)]
    kept: KeptArgs,

    /// Hottest experts named per layer
    #[arg(long, value_name = "N", default_value = "5")]
    hottest: usize,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    file: String,
    model: String,
    lifetime_tokens: f64,
    /// Of a layer's experts.
    shares_of_experts: [f64; 4],
    layers: Vec<LayerReport>,
}

#[derive(Serialize)]
struct LayerReport {
    layer: u16,
    experts: usize,
    used: usize,
    /// Part of the uses that the hottest experts cover, by share of experts.
    covered: [f64; 4],
    hottest: Vec<Hot>,
}

#[derive(Serialize)]
struct Hot {
    expert: u16,
    /// Share of tokens that needed it.
    heat: f64,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ShowArgs) -> Result<(), CliError> {
    let kept = args.kept.open()?;
    let mut saved = kept.load()?.unwrap_or_default();
    saved.fit(kept.container.experts().layout());
    let report = Report {
        file: kept.path.display().to_string(),
        model: kept.model.to_string(),
        lifetime_tokens: saved.lifetime_tokens,
        shares_of_experts: SHARES,
        layers: layers(saved, args.hottest),
    };
    if args.json { output::emit_json(&report) } else { output::emit(&text(&report)) }
}

fn layers(saved: SavedUsage, hottest: usize) -> Vec<LayerReport> {
    let shapes: Vec<(u16, usize)> = saved.layers.iter().map(|l| (l.layer, l.experts.len())).collect();
    let usage = Usage::resume(saved, UsageOptions::default());
    let layer = |(layer, experts): (u16, usize)| {
        let heat = |index: usize| {
            let expert = index as u16;
            Hot { expert, heat: usage.heat(ExpertId { layer, index: expert }) }
        };
        let mut ranking: Vec<Hot> = (0..experts).map(heat).collect();
        ranking.sort_by(|a, b| b.heat.total_cmp(&a.heat));
        let total: f64 = ranking.iter().map(|hot| hot.heat).sum();
        let covered = SHARES.map(|share| {
            let count = (share * experts as f64).ceil() as usize;
            let sum: f64 = ranking.iter().take(count).map(|hot| hot.heat).sum();
            if total > 0.0 { sum / total } else { 0.0 }
        });
        let used = ranking.iter().filter(|hot| hot.heat > 0.0).count();
        ranking.truncate(hottest.min(used));
        LayerReport { layer, experts, used, covered, hottest: ranking }
    };
    shapes.into_iter().map(layer).collect()
}

fn text(report: &Report) -> String {
    if report.layers.is_empty() {
        return format!("{}: nothing was learned yet\n", report.file);
    }
    let mut text = format!("{}: {:.0} tokens\n", report.file, report.lifetime_tokens);
    text += "layer experts   used  top5% top10% top25% top50%  hottest (share of tokens)\n";
    for l in &report.layers {
        text += &format!("{:>5} {:>7} {:>6} ", l.layer, l.experts, l.used);
        l.covered.iter().for_each(|covered| text += &format!("{:>5.1}% ", covered * 100.0));
        for hot in &l.hottest {
            text += &format!(" {} ({:.0}%)", hot.expert, hot.heat * 100.0);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use shimmer_common::experts::usage::SavedLayer;

    use super::*;

    #[test]
    fn coverage_counts_the_hottest_first() {
        let experts = [1.0, 6.0, 3.0, 0.0].map(|n| [n; 3]).to_vec();
        let layers_saved = vec![SavedLayer { layer: 4, experts }];
        let saved = SavedUsage { lifetime_tokens: 10.0, tokens: [10.0; 3], layers: layers_saved };
        let report = &layers(saved, 9)[0];
        assert_eq!((report.layer, report.experts, report.used), (4, 4, 3));
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(report.covered[2], 0.6) && close(report.covered[3], 0.9), "{:?}", report.covered);
        assert_eq!(report.hottest.iter().map(|hot| hot.expert).collect::<Vec<_>>(), [1, 2, 0]);
        assert!(close(report.hottest[0].heat, 0.6));
    }
}
