//! The switch: `switch.c`, compiled at the start of every lab, and commands to it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::{LabError, leftovers, run};

/// The C compiler.
pub(super) const COMPILER: &str = "cc";

/// Frames and bytes over one host's cable since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Frames the host sent.
    pub sent_frames: u64,
    /// Their bytes on the wire, with preamble, checksum and gap.
    pub sent_bytes: u64,
    /// Those of them that were lost.
    pub sent_dropped: u64,
    /// Frames on their way to the host.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames for the host that were lost.
    pub received_dropped: u64,
}

#[derive(Debug)]
struct Talk {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Talk {
    /// Lines up to `last`.
    fn answer(&mut self, last: &str) -> Result<Vec<String>, LabError> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let got = self.stdout.read_line(&mut line).map_err(|e| LabError::Switch(e.to_string()))?;
            let line = line.trim_end();
            if got == 0 || line.starts_with("error") {
                let why = if got == 0 { "it ended; its stderr says why" } else { line };
                return Err(LabError::Switch(why.to_owned()));
            }
            if line == last {
                return Ok(lines);
            }
            lines.push(line.to_owned());
        }
    }
}

/// A running switch.
#[derive(Debug)]
pub(super) struct Switch {
    child: Child,
    talk: Mutex<Talk>,
    _dir: tempfile::TempDir,
}

impl Switch {
    /// Compiles the switch and gives each of the namespaces an `eth0`.
    pub(super) fn start(namespaces: &[String]) -> Result<Self, LabError> {
        let dir = compile_dir()?;
        let program = compile(dir.path(), "switch", include_str!("switch.c"))?;
        let mut command = Command::new(program);
        command.args(namespaces.iter().map(|name| leftovers::namespace_path(name)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let failed = |e: std::io::Error| LabError::Switch(e.to_string());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(LabError::Switch("it has no pipes".to_owned()));
        };
        let mut talk = Talk { stdin, stdout: BufReader::new(stdout) };
        let ready = talk.answer("ready");
        let switch = Self { child, talk: Mutex::new(talk), _dir: dir };
        ready.map(|_| switch)
    }

    /// `verb PORT VALUE`, as in `switch.c`.
    pub(super) fn set(&self, verb: &str, port: usize, value: f64) -> Result<(), LabError> {
        self.ask(&format!("{verb} {port} {value}")).map(drop)
    }

    /// Counters of one port.
    pub(super) fn stats(&self, port: usize) -> Result<PortStats, LabError> {
        let lines = self.ask("stats")?;
        let numbers: Vec<u64> = lines
            .get(port)
            .map(|line| line.split(' ').filter_map(|number| number.parse().ok()).collect())
            .unwrap_or_default();
        let [sent_frames, sent_bytes, sent_dropped, received_frames, received_bytes, received_dropped] =
            numbers[..]
        else {
            return Err(LabError::Switch(format!("odd counters: {lines:?}")));
        };
        Ok(PortStats {
            sent_frames,
            sent_bytes,
            sent_dropped,
            received_frames,
            received_bytes,
            received_dropped,
        })
    }

    fn ask(&self, command: &str) -> Result<Vec<String>, LabError> {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(talk.stdin, "{command}").map_err(|e| LabError::Switch(format!("it ended ({e})")))?;
        talk.answer("ok")
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory of this process, found again by its name when the process is dead.
pub(super) fn compile_dir() -> Result<tempfile::TempDir, LabError> {
    let made = tempfile::Builder::new().prefix(&leftovers::prefix()).tempdir();
    made.map_err(|e| LabError::file(std::env::temp_dir(), e))
}

/// Compiles a C program of the lab into `dir`.
pub(super) fn compile(dir: &Path, name: &str, source: &str) -> Result<PathBuf, LabError> {
    let (from, to) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&from, source).map_err(|e| LabError::file(&from, e))?;
    run(Command::new(COMPILER).args(["-O2", "-o"]).arg(&to).arg(&from))?;
    Ok(to)
}
