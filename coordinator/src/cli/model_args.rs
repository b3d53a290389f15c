//! The flags every command that runs a model shares.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use shimmer_common::experts::usage::simulate::PolicyKind;
use shimmer_common::io::{Caching, IoMode, IoOptions};
use shimmer_common::kernels::{Isa, Kernels};

use super::error::CliError;
use crate::cluster::{LocalShare, Settle};
use crate::decode::DraftPolicy;
use crate::model::LOOKAHEAD_DEPTH;
use shimmer_common::size::Size;

/// Which instruction set computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IsaChoice {
    /// The fastest one this CPU has.
    #[default]
    Auto,
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 with VNNI.
    Avx512,
}

impl IsaChoice {
    /// The kernels of this choice.
    ///
    /// # Errors
    /// [`CliError::Usage`] when this CPU lacks the instruction set.
    pub fn kernels(self) -> Result<Kernels, CliError> {
        let isa = match self {
            Self::Auto => return Ok(Kernels::best()),
            Self::Portable => Isa::Portable,
            Self::Avx2 => Isa::Avx2,
            Self::Avx512 => Isa::Avx512,
        };
        Kernels::new(isa).map_err(|e| CliError::Usage(e.to_string()))
    }
}

/// `--io`: how records are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IoChoice {
    /// io_uring on Linux where the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring, or threads where it is refused.
    Uring,
    /// Threads.
    Pread,
}

/// `--io-cache`: what reading does to the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IoCacheChoice {
    /// Take what it holds, read the rest past it.
    #[default]
    Auto,
    /// Always from the disk.
    Direct,
    /// Through it; it grows beyond --ram.
    Buffered,
}

/// Who computes the routed experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExpertsChoice {
    /// The cluster first (when `--cluster` is given), this machine's disk as fall-back.
    #[default]
    Auto,
    /// This machine only.
    Local,
    /// The cluster only; an expert no node holds is an error.
    Cluster,
}

/// `--draft auto|off|N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftArg(pub DraftPolicy);

/// Longest chain of drafts that may be asked for.
const MAX_DRAFTS: usize = 16;

impl FromStr for DraftArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(DraftPolicy::Auto)),
            "off" | "0" => Ok(Self(DraftPolicy::Off)),
            number => match number.parse::<usize>() {
                Ok(n) if n <= MAX_DRAFTS => Ok(Self(DraftPolicy::Fixed(n))),
                _ => Err(format!("write auto, off or a number up to {MAX_DRAFTS}")),
            },
        }
    }
}

/// `--local-share auto|0…1`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalShareArg(pub LocalShare);

impl FromStr for LocalShareArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            _ if text == "auto" => Ok(Self(LocalShare::Planned)),
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self(LocalShare::Fixed(share))),
            _ => Err("write auto or a number from 0 to 1".to_owned()),
        }
    }
}

/// `--usage auto|off|FILE`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UsageArg {
    /// Beside the model where files can be made there, else in the user's cache directory.
    #[default]
    Auto,
    /// Nothing is read or kept.
    Off,
    /// This file.
    File(PathBuf),
}

impl FromStr for UsageArg {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "off" => Self::Off,
            file => Self::File(file.into()),
        })
    }
}

/// A rate as people write it: `50MB/s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub u64);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint = || "write a rate of at least 1KB/s, such as 50MB/s".to_owned();
        let size: Size = text.strip_suffix("/s").and_then(|size| size.parse().ok()).ok_or_else(hint)?;
        // 0 would mean that there is no limit.
        if size.0 >= 1000 { Ok(Self(size.0)) } else { Err(hint()) }
    }
}

/// Flags that say which model runs, on what, within which limits.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model directory; repeat it for a model spread over several disks
    #[arg(long, value_name = "DIR", required = true)]
    pub model: Vec<PathBuf>,

    /// Read expert records from this pack instead of the container
    #[arg(long, value_name = "DIR")]
    pub pack: Option<PathBuf>,

    #[command(flatten)]
    pub limits: LimitArgs,
}

/// Limits and placement, shared by commands that bring their own model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct LimitArgs {
    /// RAM budget of the whole process; `plan` shows how it is divided [default: what the machine can spare]
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,

    /// RAM budget of cached expert records alone, instead of deriving it from --ram
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub expert_ram: Option<Size>,

    /// Compute threads [default: physical cores this process may use]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,

    /// Instruction set; every choice gives the same bits
    #[arg(long, value_enum, value_name = "ISA", default_value_t)]
    pub isa: IsaChoice,

    /// How expert records are read
    #[arg(long, value_enum, value_name = "HOW", default_value_t, hide_short_help = true)]
    pub io: IoChoice,

    /// What reading experts does to the page cache
    #[arg(long, value_enum, value_name = "HOW", default_value_t, hide_short_help = true)]
    pub io_cache: IoCacheChoice,

    /// Reads under way at once, per disk, 1 MiB each, 1 to 256 [default: 32, down to 8 where --ram is small]
    #[arg(long, value_name = "N", value_parser = parse_depth, hide_short_help = true)]
    pub io_depth: Option<usize>,

    /// Layers whose experts are guessed and read ahead, 0 to 3; any value gives the same bits
    #[arg(long, value_name = "LAYERS", default_value_t = LOOKAHEAD_DEPTH, value_parser = parse_lookahead, hide_short_help = true)]
    pub lookahead: usize,

    /// Longest conversation in tokens [default: 8192, or the model's limit if that is lower]
    #[arg(long, value_name = "TOKENS", value_parser = parse_positive)]
    pub context: Option<usize>,

    /// Drafts per round by the MTP layer: auto, off or a number up to 16
    #[arg(long, value_name = "N", default_value = "auto")]
    pub draft: DraftArg,

    /// Prompt rows per prefill step; any value gives the same bits [default: as many as pay and fit into RAM]
    #[arg(long, value_name = "TOKENS", value_parser = parse_positive, hide_short_help = true)]
    pub prefill_chunk: Option<usize>,

    /// Who computes the routed experts
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub experts: ExpertsChoice,

    /// Cluster state directory made by `shimmer cluster init`
    #[arg(long, value_name = "DIR")]
    pub cluster: Option<PathBuf>,

    /// When to plan for nodes that come; set by commands that know how many will.
    #[arg(skip)]
    pub settle: Option<Settle>,

    /// Share out the experts as soon as this many nodes have joined, without waiting for more
    #[arg(long, requires = "cluster", value_name = "COUNT", hide_short_help = true)]
    pub awaited_nodes: Option<usize>,

    /// Share of the experts this machine computes beside its nodes: auto (as planned) or 0 to 1
    #[arg(long, value_name = "SHARE", default_value = "auto", hide_short_help = true)]
    pub local_share: LocalShareArg,
    /// Do not announce the cluster on the network by multicast DNS
    #[arg(long, requires = "cluster", hide_short_help = true)]
    pub no_discovery: bool,

    /// Network interface to announce the cluster on, such as eth0
    #[arg(long, value_name = "NAME", requires = "cluster", hide_short_help = true)]
    pub interface: Option<String>,

    /// Where learned expert usage is kept: auto (beside the model, else in the cache directory), off, or a file
    #[arg(long, value_name = "WHERE", default_value = "auto", hide_short_help = true)]
    pub usage: UsageArg,

    /// Another eviction policy than the learned one, for measurements; names as in `shimmer usage simulate`
    #[arg(long, value_name = "NAME", hide = true)]
    pub policy: Option<PolicyKind>,

    /// Record which experts every row is routed to, for `shimmer usage simulate`
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub trace_routes: Option<PathBuf>,

    /// Nodes to use besides those that register, host:port,…
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = parse_host_port)]
    pub expert_nodes: Vec<String>,

    /// Most bytes per second a node fetches experts with, such as 50MB/s [default: what the link carries]
    #[arg(long, value_name = "SIZE/s", hide_short_help = true)]
    pub sync_rate: Option<Rate>,
}

impl LimitArgs {
    /// How expert records are to be read.
    pub fn io_options(&self) -> IoOptions {
        let defaults = IoOptions::default();
        IoOptions {
            mode: match self.io {
                IoChoice::Auto => IoMode::Auto,
                IoChoice::Uring => IoMode::Uring,
                IoChoice::Pread => IoMode::Pread,
            },
            caching: match self.io_cache {
                IoCacheChoice::Auto => Caching::Auto,
                IoCacheChoice::Direct => Caching::Direct,
                IoCacheChoice::Buffered => Caching::Buffered,
            },
            depth: self.io_depth.unwrap_or_else(|| self.default_depth(defaults.depth)),
            ..defaults
        }
    }

    /// Buffers of reads shall not be what a small budget is spent on.
    fn default_depth(&self, most: usize) -> usize {
        const LEAST: usize = 8;
        const RAM_PER_READ: u64 = 64 << 20;
        self.ram.map_or(most, |ram| ((ram.0 / RAM_PER_READ) as usize).clamp(LEAST, most))
    }
}

/// Parses a number of layers to look ahead.
fn parse_lookahead(text: &str) -> Result<usize, String> {
    let layers = text.parse::<usize>().ok().filter(|&layers| layers <= LOOKAHEAD_DEPTH);
    layers.ok_or_else(|| format!("{text:?} is not a number of layers from 0 to {LOOKAHEAD_DEPTH}"))
}

/// Checks that an address has the form host:port.
///
/// # Errors
/// A hint.
pub fn parse_host_port(text: &str) -> Result<String, String> {
    let hint = || format!("{text:?} is not an address of the form host:port, such as 192.168.1.20:7421");
    let (host, port) = text.rsplit_once(':').ok_or_else(hint)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let named = !bare.is_empty() && !bare.contains(|c: char| c.is_whitespace() || "/@[]".contains(c));
    // A bare IPv6 address cannot be told from one with a port.
    let whole = bare.len() < host.len() || !host.contains(':');
    let possible = port.parse::<u16>().is_ok_and(|port| port > 0);
    if named && whole && possible { Ok(text.to_owned()) } else { Err(hint()) }
}

/// Parses a whole number of at least one.
///
/// # Errors
/// A sentence for clap.
pub fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("write a whole number of at least 1".to_owned()),
    }
}

/// Parses a number of threads.
///
/// # Errors
/// A hint.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n @ 1..=1024) => Ok(n),
        _ => Err("write a number of threads from 1 to 1024".to_owned()),
    }
}

/// Parses a number of reads under way.
///
/// # Errors
/// A hint.
pub fn parse_depth(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n @ 1..=256) => Ok(n),
        _ => Err("write a number of reads from 1 to 256".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_nodes_have_a_host_and_a_port() {
        for good in ["192.168.1.20:7421", "cellar.local:7421", "[::1]:7421", "[fe80::1%3]:1"] {
            assert_eq!(parse_host_port(good).as_deref(), Ok(good));
        }
        for bad in [
            "garbage",
            "",
            ":7421",
            "host:",
            "host:0",
            "host:70000",
            "::1:7421",
            "a b:1",
            "http://x:1",
            "[]:1",
        ] {
            assert!(parse_host_port(bad).unwrap_err().contains("host:port"), "{bad}");
        }
    }

    #[test]
    fn drafts_are_auto_off_or_a_number() {
        assert_eq!("auto".parse::<DraftArg>(), Ok(DraftArg(DraftPolicy::Auto)));
        assert_eq!("off".parse::<DraftArg>(), Ok(DraftArg(DraftPolicy::Off)));
        assert_eq!("0".parse::<DraftArg>(), Ok(DraftArg(DraftPolicy::Off)));
        assert_eq!("3".parse::<DraftArg>(), Ok(DraftArg(DraftPolicy::Fixed(3))));
        assert!("many".parse::<DraftArg>().is_err());
        assert!("99".parse::<DraftArg>().unwrap_err().contains("16"));
    }

    #[test]
    fn rates_are_sizes_per_second() {
        assert_eq!("50MB/s".parse::<Rate>(), Ok(Rate(50_000_000)));
        for bad in ["50MB", "50/s", "0B/s", "999B/s", "fast", "MB/s", "1MB/h"] {
            assert!(bad.parse::<Rate>().unwrap_err().contains("50MB/s"), "{bad}");
        }
    }

    #[test]
    fn counts_are_positive() {
        assert_eq!(parse_positive("7"), Ok(7));
        assert!(parse_positive("0").is_err());
        assert!(parse_threads("0").is_err());
        assert_eq!(parse_threads("2"), Ok(2));
    }
}
