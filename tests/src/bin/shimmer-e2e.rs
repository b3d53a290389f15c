//! The `shimmer` binary as the end-to-end tests run it: same entry point, built with the tests.

fn main() -> std::process::ExitCode {
    shimmer::cli::main()
}
