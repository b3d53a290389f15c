//! Where results, progress and messages go: results on stdout, everything else on stderr.
//!
//! A closed stdout (`shimmer … | head`) becomes [`CliError::BrokenPipe`], which ends the program
//! quietly. Progress bars appear only when stderr is a terminal.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::error::CliError;

/// Writes `text` to stdout and flushes it.
///
/// # Errors
/// [`CliError::BrokenPipe`] when nobody reads any more.
pub fn emit(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|source| match source.kind() {
        std::io::ErrorKind::BrokenPipe => CliError::BrokenPipe,
        _ => CliError::io("cannot write to stdout", &source),
    })
}

/// Writes one JSON document and a newline to stdout.
///
/// # Errors
/// As [`emit`].
pub fn emit_json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| CliError::Failed(format!("cannot write JSON: {e}")))?;
    emit(&(text + "\n"))
}

/// Writes one JSON line to stdout.
///
/// # Errors
/// As [`emit`].
pub fn emit_json_line(value: &impl Serialize) -> Result<(), CliError> {
    let text =
        serde_json::to_string(value).map_err(|e| CliError::Failed(format!("cannot write JSON: {e}")))?;
    emit(&(text + "\n"))
}

/// Writes one line to stderr; a closed stderr is nobody's problem.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes text to stderr without a newline.
pub fn note_raw(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Whether stderr is a terminal, so that colours and progress bars make sense.
pub fn stderr_is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// Whether stdout is a terminal.
pub fn stdout_is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Makes text dim for a terminal; left alone elsewhere.
pub fn dim(text: &str, terminal: bool) -> String {
    if terminal && !text.is_empty() { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
}

/// A bar over bytes, visible only on a terminal.
pub fn bytes_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}")
}

/// A bar over counted things, visible only on a terminal.
pub fn count_bar(what: &str, total: u64) -> ProgressBar {
    bar(what, total, "{msg} {bar:30} {pos}/{len} {per_sec}")
}

fn bar(what: &str, total: u64, template: &str) -> ProgressBar {
    let target =
        if stderr_is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar =
        ProgressBar::with_draw_target(Some(total), target).with_style(style).with_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
