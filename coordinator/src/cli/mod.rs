//! The command line: one file per subcommand.

/// Parses the arguments, runs the command, maps errors to exit codes.
pub fn main() -> std::process::ExitCode {
    todo!()
}
