//! The command line of `shimmer-node`.

/// Parses the arguments and runs the command.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(2)
}
