//! `shimmer completions`: completion scripts for shells.

use clap::Args;
use clap_complete::Shell;

use super::error::CliError;
use super::output;

/// Arguments of `shimmer completions`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer completions bash > ~/.local/share/bash-completion/completions/shimmer
  shimmer completions zsh > ~/.zfunc/_shimmer")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script.
///
/// # Errors
/// [`CliError::BrokenPipe`].
pub fn run(args: &CompletionsArgs, command: &clap::Command) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command.clone(), "shimmer", &mut script);
    output::emit(&String::from_utf8_lossy(&script))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Cli;

    #[test]
    fn scripts_know_the_commands() {
        let mut script = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut Cli::command(), "shimmer", &mut script);
        let script = String::from_utf8(script).unwrap();
        assert!(script.contains("--max-tokens") && script.contains("score"));
    }
}
