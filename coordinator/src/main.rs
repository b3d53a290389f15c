//! `shimmer`: an argument parser and one call.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    shimmer::cli::main()
}
