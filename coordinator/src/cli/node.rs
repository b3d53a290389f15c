//! `shimmer node …` (hidden): the expert node's own command line inside this executable, so that
//! `shimmer demo` needs no second binary.

use std::ffi::OsString;
use std::io::Read;
use std::process::ExitCode;

use clap::Args;

/// Arguments of `shimmer node`.
#[derive(Args, Clone, Debug)]
pub struct NodeArgs {
    /// End when stdin closes: the parent holds its other end, so the node cannot outlive it
    #[arg(long)]
    exit_with_stdin: bool,

    /// Arguments of `shimmer-node`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Runs the node until it ends.
pub fn run(args: NodeArgs) -> ExitCode {
    if args.exit_with_stdin {
        let watchdog = std::thread::Builder::new().name("parent".into()).spawn(wait_for_parent);
        if watchdog.is_err() {
            return ExitCode::FAILURE;
        }
    }
    shimmer_node::cli::main_with([OsString::from("shimmer-node")].into_iter().chain(args.args))
}

/// Ends the process when the parent's end of the pipe closes, however the parent died.
fn wait_for_parent() {
    let mut stdin = std::io::stdin().lock();
    let mut ignored = [0u8; 64];
    while stdin.read(&mut ignored).is_ok_and(|n| n > 0) {}
    std::process::exit(0);
}
