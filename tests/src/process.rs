//! Running the program under test and looking at how it ended.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest a single command of a test may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The program under test.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
}

impl Program {
    /// `path` is `env!("CARGO_BIN_EXE_shimmer-e2e")`.
    pub fn new(path: &str) -> Self {
        Self { path: PathBuf::from(path) }
    }

    /// A command without the caller's SHIMMER_ settings, with no terminal.
    pub fn command<I, S>(&self, args: I) -> Command
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let mut command = Command::new(&self.path);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SHIMMER_") {
                command.env_remove(name);
            }
        }
        command.args(args).stdin(Stdio::null());
        command
    }

    /// Runs to the end and returns what came out.
    pub fn output<I, S>(&self, args: I) -> Output
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        self.command(args).output().expect("the program starts")
    }

    /// Runs to the end, asserts success, returns stdout.
    ///
    /// # Panics
    /// When the program fails.
    pub fn ok<I, S>(&self, args: I) -> String
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let out = self.output(args);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "exit {:?}, stderr: {stderr}", out.status.code());
        String::from_utf8(out.stdout).expect("stdout is UTF-8")
    }

    /// Runs to the end, asserts success, parses stdout as one JSON document.
    ///
    /// # Panics
    /// When the program fails or prints something else.
    pub fn json<I, S>(&self, args: I) -> Value
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let text = self.ok(args);
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
    }

    /// Runs to the end and asserts a clean refusal: exit `code`, nothing on stdout, an error that
    /// mentions every one of `mentions`, and no panic.
    ///
    /// # Panics
    /// When it ends otherwise.
    pub fn refused<I, S>(&self, code: i32, mentions: &[&str], args: I) -> String
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let out = self.output(args);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "stderr: {stderr}");
        assert!(out.stdout.is_empty(), "stdout: {}", String::from_utf8_lossy(&out.stdout));
        assert!(!stderr.contains("panicked"), "{stderr}");
        for mention in mentions {
            assert!(stderr.contains(mention), "`{mention}` is not mentioned in: {stderr}");
        }
        stderr
    }
}

/// Waits until `ready` answers, with a deadline.
///
/// # Panics
/// When `what` does not happen in time.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "gave up waiting for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Copies a model directory (one level of files), so that a test may damage the copy.
///
/// # Panics
/// When a file cannot be copied.
pub fn copy_model(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the target can be made");
    for entry in std::fs::read_dir(from).expect("the source exists") {
        let entry = entry.expect("a readable entry");
        if entry.file_type().expect("a file type").is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
        }
    }
}
