//! `shimmer`: an argument parser and one call.

fn main() -> std::process::ExitCode {
    shimmer::cli::main()
}
