//! `shimmer bench`: what the hardware gives, and how much of it the engine takes.
//!
//! Every command repeats its measurement, prints medians with the smallest and largest value, and measures
//! the limits it divides by in the same run, between its own measurements: on a machine with other work only
//! such ratios mean anything.

mod cluster;
mod decode;
mod disk;
mod gemv;
mod mem;
mod prefill;
mod rates;
mod session;
mod stats;
mod sweep;

use clap::Subcommand;

use super::error::CliError;

/// What to measure.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Memory reads, int8 and f32 multiply-adds: the limits of this machine
    Mem(mem::MemArgs),
    /// Weight matrices times a few activation rows
    Gemv(gemv::GemvArgs),
    /// Disk reads: engines, page cache, depth
    Disk(disk::DiskArgs),
    /// Tokens per second of a model, against what memory and disk allow
    Decode(Box<decode::DecodeArgs>),
    /// Tokens per second over nodes, against what the cost model says of them
    Cluster(Box<cluster::ClusterArgs>),
    /// Prompt tokens per second of a model, against what the processor allows
    Prefill(Box<prefill::PrefillArgs>),
    /// Decoding with the default settings and with every other, one at a time
    Sweep(sweep::SweepArgs),
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(command: &BenchCommand) -> Result<(), CliError> {
    match command {
        BenchCommand::Mem(args) => mem::run(args),
        BenchCommand::Gemv(args) => gemv::run(args),
        BenchCommand::Disk(args) => disk::run(args),
        BenchCommand::Decode(args) => decode::run(args),
        BenchCommand::Cluster(args) => cluster::run(args),
        BenchCommand::Prefill(args) => prefill::run(args),
        BenchCommand::Sweep(args) => sweep::run(args),
    }
}
