//! One host: its programs, its cable, its limits.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::limits::Limits;
use super::switch::{PortStats, Switch};
use super::{HostOptions, LabError, address, ip, leftovers, run};

/// Enters the control groups listed in its first argument, then becomes the rest.
const ENTER: &str = r#"for group in $0; do echo $$ > "$group" || exit 126; done; exec "$@""#;

/// A host of a [`super::Lan`].
#[derive(Debug)]
pub struct Host {
    index: usize,
    namespace: String,
    switch: Arc<Switch>,
    limits: Limits,
}

impl Host {
    pub(super) fn new(index: usize, namespace: String, switch: Arc<Switch>, limits: Limits) -> Self {
        Self { index, namespace, switch, limits }
    }

    /// Gives the device its addresses and the cable its properties.
    pub(super) fn plug_in(&self, options: &HostOptions) -> Result<(), LabError> {
        self.set_rate(options.rate_mbit)?;
        // A round trip crosses four cables.
        self.set_delay_us(options.rtt_us / 4.0)?;
        self.set_loss(options.loss_ppm)?;
        if let Some(bytes) = options.memory_bytes {
            self.set_memory(Some(bytes))?;
        }
        if let Some(percent) = options.cpu_percent {
            self.set_cpu_percent(Some(percent))?;
        }
        let mac = format!("02:53:48:00:00:{:02x}", self.index + 1);
        let network = format!("{}/24", address(self.index));
        for words in [
            "link set lo up".to_owned(),
            format!("link set eth0 address {mac}"),
            format!("addr add {network} dev eth0"),
            "link set eth0 up".to_owned(),
            "route add 224.0.0.0/4 dev eth0".to_owned(),
        ] {
            run(ip().args(["-n", &self.namespace]).args(words.split(' ')))?;
        }
        Ok(())
    }

    /// Its IPv4 address.
    pub fn ip(&self) -> Ipv4Addr {
        address(self.index)
    }

    /// Its address with a port.
    pub fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.ip()), port)
    }

    /// `command`, to be run on this host: same arguments, environment and directory.
    pub fn command(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", ENTER]).arg(self.limits.entrances()).arg("nsenter").arg(self.net_flag());
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        if let Some(dir) = command.get_current_dir() {
            inside.current_dir(dir);
        }
        inside
    }

    fn net_flag(&self) -> String {
        format!("--net={}", leftovers::namespace_path(&self.namespace).display())
    }

    /// Runs `work` on a thread of this process that is on this host's network: sockets made there stay
    /// there. The control groups do not apply.
    ///
    /// # Panics
    /// When `work` does, or when the namespace cannot be entered.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let space = File::open(leftovers::namespace_path(&self.namespace)).expect("the namespace");
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may enter a namespace");
                work()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Line rate in Mbit/s, each direction; 0 = unlimited.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn set_rate(&self, mbit: f64) -> Result<(), LabError> {
        self.switch.set("rate", self.index, mbit)
    }

    /// One-way delay of the cable: frames between two hosts take both their delays.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn set_delay_us(&self, microseconds: f64) -> Result<(), LabError> {
        self.switch.set("delay", self.index, microseconds)
    }

    /// Frames lost per million, each direction.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn set_loss(&self, ppm: u32) -> Result<(), LabError> {
        self.switch.set("loss", self.index, f64::from(ppm))
    }

    /// Pulls the cable: the host loses its carrier, the others hear nothing any more.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn cut(&self) -> Result<(), LabError> {
        self.switch.set("link", self.index, 0.0)
    }

    /// Plugs the cable in again.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn plug(&self) -> Result<(), LabError> {
        self.switch.set("link", self.index, 1.0)
    }

    /// What went over the cable so far.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn stats(&self) -> Result<PortStats, LabError> {
        self.switch.stats(self.index)
    }

    /// Stops every program, threads and all, without any of them noticing: a suspended PC.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn freeze(&self) -> Result<(), LabError> {
        self.limits.freeze(true)
    }

    /// Lets the programs go on.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn thaw(&self) -> Result<(), LabError> {
        self.limits.freeze(false)
    }

    /// Sends a signal to every program on this host. Their parents still have to wait for them.
    pub fn signal(&self, signal: Signal) {
        for pid in leftovers::programs(&self.namespace) {
            // One that has just ended is no failure.
            let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, signal));
        }
    }

    /// SIGKILL for every program: the kernel still closes their connections. For a power cut, pull the
    /// cable first.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// RAM and page cache of its programs; `None` lifts the limit.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn set_memory(&self, bytes: Option<u64>) -> Result<(), LabError> {
        self.limits.memory(bytes)
    }

    /// CPU time of its programs, in percent of one core; `None` lifts the limit.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn set_cpu_percent(&self, percent: Option<u32>) -> Result<(), LabError> {
        self.limits.cpu_percent(percent)
    }

    /// Bytes per second its programs may read from the disk that holds `path`; `None` lifts the limit.
    /// What is in the page cache is not held up.
    ///
    /// # Errors
    /// [`LabError`], also where `path` is on no disk of its own.
    pub fn set_disk_read(&self, path: &Path, bytes_per_s: Option<u64>) -> Result<(), LabError> {
        self.limits.disk_read(path, bytes_per_s)
    }

    /// The most RAM and page cache its programs had, in bytes.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn memory_peak(&self) -> Result<u64, LabError> {
        self.limits.memory_peak()
    }
}
