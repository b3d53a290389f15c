//! `shimmer usage`: what is learned of the experts' usage, and cache policies replayed on routing traces.

mod files;
mod learning;
mod show;
mod simulate;

use clap::Subcommand;

use super::error::CliError;
pub use learning::Learning;

/// Subcommands of `shimmer usage`.
#[derive(Subcommand, Clone, Debug)]
pub enum UsageCommand {
    /// How unevenly experts are used, per layer, and which are hottest
    Show(show::ShowArgs),
    /// Forget what was learned about a model
    Reset(files::ResetArgs),
    /// Copy what was learned to a file
    Export(files::ExportArgs),
    /// Take over what was learned elsewhere, from such a file or a .coli_usage
    Import(files::ImportArgs),
    /// Replay routing traces against cache policies
    Simulate(simulate::SimulateArgs),
    /// Write a made-up routing trace
    #[command(hide = true)]
    SynthTrace(simulate::SynthTraceArgs),
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(command: &UsageCommand) -> Result<(), CliError> {
    match command {
        UsageCommand::Show(args) => show::run(args),
        UsageCommand::Reset(args) => files::reset(args),
        UsageCommand::Export(args) => files::export(args),
        UsageCommand::Import(args) => files::import(args),
        UsageCommand::Simulate(args) => simulate::run(args),
        UsageCommand::SynthTrace(args) => simulate::synth_trace(args),
    }
}
