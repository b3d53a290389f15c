//! The command line: one file per subcommand.
//!
//! Arguments pass four layers ([`layers`]): flag, environment, `shimmer.toml`, default. Results go to
//! stdout and everything else to stderr ([`output`]); errors carry their exit code ([`error`]).

mod answer;
mod bandwidth;
mod bench;
mod chat;
mod chat_session;
mod cluster;
mod completions;
mod config_show;
mod convert;
mod demo;
mod demo_model;
mod demo_nodes;
mod doctor;
mod doctor_cluster;
mod doctor_links;
mod doctor_model;
mod error;
mod http_client;
mod interrupt;
mod layers;
mod logging;
mod memory;
mod model_args;
mod node;
mod open;
mod output;
mod pack;
mod plan;
mod plan_cluster;
mod run;
mod sampling_args;
mod score;
mod serve;
mod synth;
mod tensor_file;
mod usage;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use shimmer_common::kernels::{Isa, Kernels};

pub use error::CliError;

/// Several PCs on a LAN carry one mixture-of-experts model together.
#[derive(Parser, Debug)]
#[command(
    name = "shimmer",
    version = version(),
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "Start with `shimmer demo`: it needs no model and no second machine.

Every flag can also be set as SHIMMER_FLAG_NAME or in shimmer.toml; see `shimmer config show`.
Exit codes: 0 done, 1 failed, 2 bad usage, 3 model or data damaged or unsupported, 4 node or coordinator
unreachable, 130 interrupted."
)]
struct Cli {
    /// Configuration file [default: shimmer.toml in the current directory, if there is one]
    #[arg(long, value_name = "FILE", global = true, help_heading = "Global options")]
    config: Option<PathBuf>,

    /// Form of log lines on stderr; RUST_LOG chooses how many
    #[arg(
        long,
        value_enum,
        value_name = "FORM",
        global = true,
        default_value_t,
        help_heading = "Global options"
    )]
    log_format: logging::LogFormat,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The main job with nothing to install: a toy model, expert nodes on this machine, a chat
    Demo(Box<demo::DemoArgs>),
    /// One answer to stdout
    Run(Box<run::RunArgs>),
    /// A conversation in the terminal
    Chat(Box<chat::ChatArgs>),
    /// The HTTP gateway and status page
    Serve(Box<serve::ServeArgs>),
    /// Teacher-forced logits and perplexity of token ids
    Score(Box<score::ScoreArgs>),
    /// Turn a Hugging Face checkpoint into a quantised container
    Convert(convert::ConvertArgs),
    /// Write a random model of any shape, to measure with
    Synth(Box<synth::SynthArgs>),
    /// Write an expert pack from a container
    Pack(pack::PackArgs),
    /// What the hardware gives and how much of it the engine takes
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// What would go where and how fast it might be, from headers only
    Plan(Box<plan::PlanArgs>),
    /// Read-only checks of machine, model and cluster
    Doctor(Box<doctor::DoctorArgs>),
    /// Learned expert usage: show, reset, copy; cache policies replayed on routing traces
    #[command(subcommand)]
    Usage(usage::UsageCommand),
    /// The cluster: certificates, invitations, nodes
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// The expert node's command line
    #[command(hide = true, disable_help_flag = true)]
    Node(node::NodeArgs),
    /// Shell completions
    Completions(completions::CompletionsArgs),
    /// The effective configuration and where it comes from
    #[command(subcommand)]
    Config(config_show::ConfigCommand),
}

/// Parses the arguments, runs the command, maps errors to exit codes.
pub fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    let command = Cli::command();
    let layered = match layers::parse(&command, &argv, false) {
        Ok(layered) => layered,
        Err(layers::LayerError::File(error)) => return error.report(),
        Err(layers::LayerError::Clap(error)) => return report_clap(&error),
    };
    let cli = match Cli::from_arg_matches(&layered.matches) {
        Ok(cli) => cli,
        Err(error) => return report_clap(&error),
    };
    let cli_command = match cli.command {
        // A node sets up its own logging and has its own exit codes.
        Command::Node(args) => return node::run(args),
        other => other,
    };
    logging::start(cli.log_format);
    match dispatch(cli_command, &command, &argv) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}

fn dispatch(command: Command, clap: &clap::Command, argv: &[OsString]) -> Result<(), CliError> {
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Pack(args) => pack::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Cluster(command) => cluster::run(&command),
        Command::Usage(command) => usage::run(&command),
        Command::Node(_) => Ok(()),
        Command::Completions(args) => completions::run(&args, clap),
        Command::Config(config_show::ConfigCommand::Show(args)) => config_show::run(&args, clap, argv),
    }
}

/// Prints clap's message: help and version on stdout (0), everything else on stderr (2).
fn report_clap(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // A closed stderr is nobody's problem.
        let _ = error.print();
        return ExitCode::from(2);
    }
    match output::emit(&error.render().to_string()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}

/// Version, git hash and the instruction set found.
fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        format!(
            "{} ({}, {})",
            env!("CARGO_PKG_VERSION"),
            env!("SHIMMER_GIT_HASH"),
            isa_name(Kernels::best().isa())
        )
    })
}

/// The name `--isa` knows an instruction set by.
fn isa_name(isa: Isa) -> &'static str {
    match isa {
        Isa::Portable => "portable",
        Isa::Avx2 => "avx2",
        Isa::Avx512 => "avx512",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_definitions_are_consistent() {
        layers::with_environment(Cli::command()).debug_assert();
    }

    #[test]
    fn every_command_has_help_and_every_flag_a_sentence() {
        fn check(command: &clap::Command) {
            assert!(
                command.get_about().is_some() || command.is_hide_set(),
                "{} has no help",
                command.get_name()
            );
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {arg} has no help", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
