//! Expert nodes of the demo: child processes of this executable, never left behind.
//!
//! Each child holds the read end of a pipe as its stdin and ends when the pipe closes, so that it dies with
//! this process however that one dies. Dropping [`DemoNodes`] kills and reaps what still runs.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::CliError;
use super::interrupt::Interrupt;

/// Running nodes.
pub struct DemoNodes {
    children: Arc<Mutex<Vec<Child>>>,
}

impl DemoNodes {
    /// No nodes yet; a second Ctrl-C kills those that are started later.
    pub fn new(interrupt: &Interrupt) -> Self {
        let children: Arc<Mutex<Vec<Child>>> = Arc::default();
        let victims = children.clone();
        interrupt.on_kill(move || kill_all(&victims));
        Self { children }
    }

    /// Starts a node that joins with `token` and keeps its data in `data`.
    ///
    /// # Errors
    /// [`CliError::Failed`] when no process can be started.
    pub fn start(&self, name: &str, token: &str, data: &Path, threads: usize) -> Result<(), CliError> {
        let failed = |e: std::io::Error| CliError::io(format!("cannot start {name}"), &e);
        let executable = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(executable);
        command
            .args([
                "node",
                "--exit-with-stdin",
                "--",
                "join",
                token,
                "--listen",
                "127.0.0.1:0",
                "--name",
                name,
            ])
            .arg("--data")
            .arg(data)
            .args(["--threads", &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        // The demo shows its own summary; whoever wants the nodes' logs asks for them.
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "error");
        }
        own_process_group(&mut command);
        let child = command.spawn().map_err(failed)?;
        self.lock().push(child);
        Ok(())
    }

    /// A node that ended although it should run, with its exit status.
    pub fn ended(&self) -> Option<String> {
        self.lock()
            .iter_mut()
            .find_map(|child| child.try_wait().ok().flatten())
            .map(|status| status.to_string())
    }

    /// Process ids of the nodes.
    pub fn pids(&self) -> Vec<u32> {
        self.lock().iter().map(Child::id).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Child>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DemoNodes {
    fn drop(&mut self) {
        kill_all(&self.children);
    }
}

fn kill_all(children: &Mutex<Vec<Child>>) {
    for mut child in children.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // A child that is gone already cannot be killed; it is reaped all the same.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Ctrl-C in the terminal is for the demo, which then ends its nodes in order.
fn own_process_group(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(not(unix))]
    let _ = command;
}
