//! A LAN of spare PCs on one Linux machine.
//!
//! Every host is a network namespace with one Ethernet port on a switch of our own ([`switch`]), and a
//! control group for each of memory, CPU, disk and freezing ([`limits`]). Rates, delays, losses and
//! limits are chosen per host and changed while programs run. Nothing can leave the machine: there is
//! no route out. Dropping a [`Lan`] kills what still runs in it and removes everything; what a killed
//! test left behind is removed by the next [`Lan::up`].

pub mod cluster;
pub mod control;
pub mod disk;
mod host;
mod leftovers;
pub mod limits;
mod switch;

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use host::Host;
pub use switch::PortStats;

use limits::Limits;
use switch::Switch;

/// Why the lab cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program of the system failed.
    #[error("`{command}` failed: {why}")]
    Command {
        /// What was run.
        command: String,
        /// What it said.
        why: String,
    },
    /// A file of the system, or one of ours, cannot be used.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The switch refused or ended.
    #[error("the lab's switch: {0}")]
    Switch(String),
    /// Something this machine or this lab does not have.
    #[error("{0}")]
    Unsupported(String),
}

impl LabError {
    fn file(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::File { path: path.as_ref().display().to_string(), source }
    }
}

/// One host and its cable.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Line rate in Mbit/s, each direction; 0 = unlimited.
    pub rate_mbit: f64,
    /// Round trip between two hosts of this kind in microseconds; between two kinds it is the mean.
    pub rtt_us: f64,
    /// Frames lost per million, each direction.
    pub loss_ppm: u32,
    /// RAM and page cache in bytes.
    pub memory_bytes: Option<u64>,
    /// Share of one core in percent; 200 = two cores.
    pub cpu_percent: Option<u32>,
}

impl Default for HostOptions {
    /// Gigabit Ethernet and no limits.
    fn default() -> Self {
        Self { rate_mbit: 1000.0, rtt_us: 300.0, loss_ppm: 0, memory_bytes: None, cpu_percent: None }
    }
}

/// A whole LAN.
#[derive(Clone, Debug)]
pub struct LanOptions {
    /// The hosts, at most 64.
    pub hosts: Vec<HostOptions>,
}

impl LanOptions {
    /// `count` hosts of one kind.
    pub fn uniform(count: usize, host: &HostOptions) -> Self {
        Self { hosts: vec![host.clone(); count] }
    }
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A running lab.
#[derive(Debug)]
pub struct Lan {
    hosts: Vec<Host>,
    name: String,
}

impl Lan {
    /// Whether a lab can run here.
    ///
    /// # Errors
    /// The reason why not, as half a sentence.
    pub fn available() -> Result<(), String> {
        if !rustix::process::geteuid().is_root() {
            return Err("root".to_owned());
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err("/dev/net/tun".to_owned());
        }
        for (program, argument) in [("ip", "-V"), ("nsenter", "--version"), (switch::COMPILER, "--version")] {
            run(Command::new(program).arg(argument)).map_err(|_| format!("the program `{program}`"))?;
        }
        let trial = format!("{}trial{}", leftovers::prefix(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let made = run(ip().args(["netns", "add", &trial]))
            .map_err(|error| format!("the right to make network namespaces ({error})"));
        let limits = Limits::make(&trial, "h0").map(drop);
        limits::remove(&trial);
        let _ = run(ip().args(["netns", "del", &trial]));
        made?;
        limits.map_err(|error| format!("the right to make control groups ({error})"))
    }

    /// Makes the LAN, or prints one line that says why this is not possible here.
    ///
    /// # Panics
    /// When it should be possible and is not.
    pub fn up_or_skip(options: &LanOptions) -> Option<Self> {
        if let Err(need) = Self::available() {
            eprintln!("skipped: the LAN lab needs {need}");
            return None;
        }
        Some(Self::up(options).unwrap_or_else(|error| panic!("the LAN lab does not come up: {error}")))
    }

    /// Makes hosts and switch; removes first what dead labs left behind.
    ///
    /// # Errors
    /// [`LabError`]; nothing is left behind.
    pub fn up(options: &LanOptions) -> Result<Self, LabError> {
        leftovers::remove_dead();
        let name = format!("{}{}", leftovers::prefix(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // From here on dropping it removes what is there.
        let mut lan = Self { hosts: Vec::new(), name };
        let namespaces: Vec<String> = (0..options.hosts.len()).map(|i| format!("{}-{i}", lan.name)).collect();
        for namespace in &namespaces {
            run(ip().args(["netns", "add", namespace]))?;
        }
        let switch = Arc::new(Switch::start(&namespaces)?);
        for (i, (namespace, options)) in namespaces.into_iter().zip(&options.hosts).enumerate() {
            let limits = Limits::make(&lan.name, &format!("h{i}"))?;
            let host = Host::new(i, namespace, switch.clone(), limits);
            host.plug_in(options)?;
            lan.hosts.push(host);
        }
        Ok(lan)
    }

    /// All hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// One host.
    ///
    /// # Panics
    /// When there is none of this number.
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        self.hosts.clear();
        leftovers::remove(&self.name);
    }
}

/// The address of host `index` in every lab. The range is set aside for benchmarks (RFC 2544): no real
/// LAN uses it.
fn address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 10 + index as u8)
}

fn ip() -> Command {
    Command::new("ip")
}

/// Runs a program of the system to its end; returns what it printed.
fn run(command: &mut Command) -> Result<String, LabError> {
    let shown = || {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    };
    let shown = shown();
    let failed = |why: String| LabError::Command { command: shown.clone(), why };
    let out = command.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    Err(failed(String::from_utf8_lossy(&out.stderr).trim().to_owned()))
}
