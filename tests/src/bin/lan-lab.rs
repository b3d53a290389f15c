//! The LAN lab by hand: makes a LAN, runs a command with it, removes it.
//!
//! What there is to say stands in `docs/lab.md` and in `--help`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, Parser, Subcommand};
use shimmer_common::size::Size;
use shimmer_tests::lan::control::{self, Server};
use shimmer_tests::lan::{HostOptions, Lan, LanOptions};

const AFTER_HELP: &str = "\
Examples:
  lan-lab up 3 --rate 1000 --rtt 300 -- ./measure.sh
  lan-lab up 3 --memory 4GiB,1GiB,1GiB --disk-read 0,200MB,60MB --disk-path /data -- bash

In the command:
  lan-lab exec 1 shimmer-node start --data /data/node1 &
  lan-lab set 2 loss 500000
  lan-lab stats";

/// A LAN of spare PCs on this machine: needs root and a C compiler.
#[derive(Parser)]
#[command(name = "lan-lab", after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a LAN, run a command on the side, remove the LAN
    Up(UpArgs),
    /// Run a command on a host
    Exec {
        /// Number of the host, from 0
        host: usize,
        /// Program and arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// Change a host: its cable, its limits, its programs
    ///
    /// rate MBIT, delay US, loss PPM, link up|down, freeze, thaw, kill, memory SIZE, cpu PERCENT,
    /// disk-read SIZE; `none` lifts a limit
    Set {
        /// Number of the host, from 0
        host: usize,
        /// What, and its value
        #[arg(required = true, num_args = 1..=2)]
        change: Vec<String>,
    },
    /// Frames and bytes over every cable, and memory peaks, one line per host
    Stats,
}

/// Every list has one value for all hosts, or one per host.
#[derive(Args)]
struct UpArgs {
    /// Number of hosts
    #[arg(value_parser = clap::value_parser!(u8).range(1..=64))]
    hosts: u8,
    /// Line rates in Mbit/s; 0 = unlimited
    #[arg(long, value_delimiter = ',', default_value = "1000")]
    rate: Vec<f64>,
    /// Round trips in microseconds; between unlike hosts it is the mean
    #[arg(long, value_delimiter = ',', default_value = "300")]
    rtt: Vec<f64>,
    /// Frames lost per million
    #[arg(long, value_delimiter = ',', default_value = "0")]
    loss: Vec<u32>,
    /// RAM and page cache; 0B = no limit
    #[arg(long, value_delimiter = ',', default_value = "0B")]
    memory: Vec<Size>,
    /// CPU time in percent of a core; 0 = no limit
    #[arg(long, value_delimiter = ',', default_value = "0")]
    cpu: Vec<u32>,
    /// Bytes read per second from the disk of --disk-path; 0B = no limit
    #[arg(long, value_delimiter = ',', default_value = "0B")]
    disk_read: Vec<Size>,
    /// A directory on the disk that --disk-read is about
    #[arg(long, default_value = ".")]
    disk_path: PathBuf,
    /// Program and arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> anyhow::Result<u8> {
    match verb {
        Verb::Up(args) => up(&args),
        Verb::Exec { host, command } => exec(host, &command),
        Verb::Set { host, change } => tell(&format!("set {host} {}", change.join(" "))),
        Verb::Stats => tell("stats"),
    }
}

/// The value for host `i` of a list with one value for all or one for each.
fn pick<T: Copy>(what: &str, list: &[T], i: usize, hosts: usize) -> anyhow::Result<T> {
    ensure!(list.len() == 1 || list.len() == hosts, "--{what} takes one value or {hosts}");
    list.get(i).or(list.first()).copied().with_context(|| format!("--{what} is empty"))
}

fn up(args: &UpArgs) -> anyhow::Result<u8> {
    if let Err(need) = Lan::available() {
        bail!("the LAN lab needs {need}");
    }
    let count = usize::from(args.hosts);
    let mut options = LanOptions { hosts: Vec::new() };
    for i in 0..count {
        let positive = |n: u64| (n > 0).then_some(n);
        options.hosts.push(HostOptions {
            rate_mbit: pick("rate", &args.rate, i, count)?,
            rtt_us: pick("rtt", &args.rtt, i, count)?,
            loss_ppm: pick("loss", &args.loss, i, count)?,
            memory_bytes: positive(pick("memory", &args.memory, i, count)?.0),
            cpu_percent: Some(pick("cpu", &args.cpu, i, count)?).filter(|&percent| percent > 0),
        });
    }
    let lan = Lan::up(&options)?;
    for (i, host) in lan.hosts().iter().enumerate() {
        let bytes = pick("disk-read", &args.disk_read, i, count)?.0;
        if bytes > 0 {
            host.set_disk_read(&args.disk_path, Some(bytes))?;
        }
    }
    let server = Server::start(lan, &args.disk_path)?;
    let (program, rest) = args.command.split_first().context("no command")?;
    let mut command = Command::new(program);
    command.args(rest).env(control::VARIABLE, server.socket());
    for (i, address) in server.addresses().iter().enumerate() {
        command.env(format!("LAB_IP_{i}"), address.to_string());
    }
    leave_interrupts_to_the_command()?;
    let ended = command.status().with_context(|| format!("cannot run {program}"))?;
    Ok(ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Ctrl-C ends the command; the lab is then removed as at any other end.
fn leave_interrupts_to_the_command() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (ready, listening) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async {
            let signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
            let _ = ready.send(());
            if let Ok(mut signals) = signals {
                while signals.recv().await.is_some() {}
            }
        });
    });
    listening.recv().context("no thread for signals")
}

fn socket() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os(control::VARIABLE).context("no lab is up: run this below `lan-lab up`")?;
    Ok(Path::new(&path).to_owned())
}

fn tell(line: &str) -> anyhow::Result<u8> {
    let answer = control::tell(&socket()?, line)?;
    std::io::stdout().write_all(answer.as_bytes())?;
    Ok(0)
}

fn exec(host: usize, command: &[String]) -> anyhow::Result<u8> {
    use std::os::unix::process::CommandExt as _;
    let (program, rest) = command.split_first().context("no command")?;
    // The lab says how to get in; this process then becomes the program.
    let entry = control::tell(&socket()?, &format!("entry {host}"))?;
    let (first, words) = entry.trim_end().split_once('\0').context("the lab gave no way in")?;
    let error = Command::new(first).args(words.split('\0')).arg(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot run {program}"))
}
