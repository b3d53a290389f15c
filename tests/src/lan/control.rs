//! Commands to a lab that another process has up, over a socket in its directory.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use shimmer_common::size::Size;

use super::switch::compile_dir;
use super::{Host, LabError, Lan};

/// Environment variable with the path of the socket.
pub const VARIABLE: &str = "SHIMMER_LAB";

/// Answers commands for a lab until dropped; the lab goes with it.
#[derive(Debug)]
pub struct Server {
    lan: Arc<Lan>,
    dir: tempfile::TempDir,
}

impl Server {
    /// `disk` is the directory whose disk `disk-read` is about.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn start(lan: Lan, disk: &Path) -> Result<Self, LabError> {
        let server = Self { lan: Arc::new(lan), dir: compile_dir()? };
        let path = server.socket();
        let listener = UnixListener::bind(&path).map_err(|e| LabError::file(&path, e))?;
        // Holds nothing that would keep the lab up: the process ends with it.
        let (lan, disk) = (Arc::downgrade(&server.lan), disk.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(lan) = lan.upgrade() else { return };
                // A caller that went away has no use for its answer.
                let _ = answer(&lan, &disk, stream);
            }
        });
        Ok(server)
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("lab.sock")
    }

    /// Addresses of the hosts.
    pub fn addresses(&self) -> Vec<Ipv4Addr> {
        self.lan.hosts().iter().map(Host::ip).collect()
    }
}

/// Sends a command; returns what it printed.
///
/// # Errors
/// [`LabError`], the lab's own among them.
pub fn tell(socket: &Path, line: &str) -> Result<String, LabError> {
    let failed = |e: std::io::Error| LabError::file(socket, e);
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    writeln!(stream, "{line}").map_err(failed)?;
    stream.shutdown(Shutdown::Write).map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    match answer.strip_prefix("error ") {
        Some(why) => Err(LabError::Unsupported(why.trim_end().to_owned())),
        None => Ok(answer),
    }
}

fn answer(lan: &Lan, disk: &Path, mut stream: UnixStream) -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    match obey(lan, disk, &words) {
        Ok(text) => stream.write_all(text.as_bytes()),
        Err(error) => writeln!(stream, "error {error}"),
    }
}

fn obey(lan: &Lan, disk: &Path, words: &[&str]) -> Result<String, LabError> {
    let host = |number: &str| {
        let found = number.parse().ok().and_then(|i: usize| lan.hosts().get(i));
        found.ok_or_else(|| LabError::Unsupported(format!("there is no host {number}")))
    };
    match words {
        ["stats"] => lan.hosts().iter().map(stats).collect(),
        ["entry", number] => Ok(entry(host(number)?)),
        ["set", number, change @ ..] => set(host(number)?, disk, change).map(|()| String::new()),
        _ => Err(LabError::Unsupported(format!("`{}` is no command", words.join(" ")))),
    }
}

fn stats(host: &Host) -> Result<String, LabError> {
    let stats = host.stats()?;
    Ok(format!(
        "{}: sent {} frames {} bytes (lost {}), received {} frames {} bytes (lost {}), memory peak {}\n",
        host.ip(),
        stats.sent_frames,
        stats.sent_bytes,
        stats.sent_dropped,
        stats.received_frames,
        stats.received_bytes,
        stats.received_dropped,
        host.memory_peak()?
    ))
}

/// Program and arguments that run the words after them on the host, separated by NUL.
fn entry(host: &Host) -> String {
    let command = host.command(&Command::new("env"));
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join("\0")
}

fn set(host: &Host, disk: &Path, change: &[&str]) -> Result<(), LabError> {
    let odd = || LabError::Unsupported(format!("`{}` cannot be set", change.join(" ")));
    let number = |text: &str| text.parse::<f64>().map_err(|_| odd());
    let size = |text: &str| match text {
        "none" => Ok(None),
        text => text.parse::<Size>().map(|size| Some(size.0)).map_err(|_| odd()),
    };
    match change {
        ["rate", mbit] => host.set_rate(number(mbit)?),
        ["delay", us] => host.set_delay_us(number(us)?),
        ["loss", ppm] => host.set_loss(ppm.parse().map_err(|_| odd())?),
        ["link", "down"] => host.cut(),
        ["link", "up"] => host.plug(),
        ["freeze"] => host.freeze(),
        ["thaw"] => host.thaw(),
        ["kill"] => {
            host.kill();
            Ok(())
        }
        ["memory", bytes] => host.set_memory(size(bytes)?),
        ["cpu", "none"] => host.set_cpu_percent(None),
        ["cpu", percent] => host.set_cpu_percent(Some(percent.parse().map_err(|_| odd())?)),
        ["disk-read", bytes] => host.set_disk_read(disk, size(bytes)?),
        _ => Err(odd()),
    }
}
