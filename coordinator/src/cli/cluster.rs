//! `shimmer cluster`: the private CA, invitations, who is there.

mod change;
mod status;

pub use change::{NodeArgs, RebalanceArgs, RemoveArgs};

use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use super::error::CliError;
use super::interrupt::Interrupt;
use super::output;
use crate::cluster::{ClusterState, Coordinator, Member};
use shimmer_node::interfaces;

/// How long a node may take to accept a connection before it counts as away.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause between two redraws of `status --watch`.
const WATCH_PERIOD: Duration = Duration::from_secs(2);

/// Subcommands of `shimmer cluster`.
#[derive(Subcommand, Clone, Debug)]
pub enum ClusterCommand {
    /// Make a cluster: a private CA and the coordinator's certificate
    Init(InitArgs),
    /// Print a token with which nodes join
    Invite(InviteArgs),
    /// Who belongs to the cluster and who can be reached
    Status(StatusArgs),
    /// List the nodes that ever joined
    Nodes(NodesArgs),
    /// Have a node own nothing; it serves until others have its experts
    Drain(NodeArgs),
    /// Let a drained node take part again
    Resume(NodeArgs),
    /// Drain a node, wait until nobody needs it, and forget it
    Remove(RemoveArgs),
    /// Plan anew who owns what, with what has been measured and learned
    Rebalance(RebalanceArgs),
    /// Stop accepting a node's certificate, now and for good
    Revoke(RevokeArgs),
}

/// Arguments of `shimmer cluster revoke`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  shimmer cluster revoke laptop-3 --cluster ~/.shimmer/cluster

A running coordinator notices within a second. To let the PC in again, join it under a
new --data directory.")]
pub struct RevokeArgs {
    /// Name or id of the node, as `shimmer cluster nodes` lists it
    node: String,

    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// Print the node as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `shimmer cluster init`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  shimmer cluster init --cluster ~/.shimmer/cluster --listen 0.0.0.0:7420")]
pub struct InitArgs {
    /// Directory to make
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// IP:PORT where nodes will join and fetch
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7420")]
    listen: SocketAddr,
}

/// Arguments of `shimmer cluster invite`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer cluster invite --cluster ~/.shimmer/cluster
  shimmer cluster invite --cluster ~/.shimmer/cluster --advertise 192.168.1.10:7420 --valid 10m --uses 3

On the other PC: shimmer-node join TOKEN --data DIR, while `shimmer serve --cluster DIR …` runs here.")]
pub struct InviteArgs {
    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// Addresses nodes should try, IP:PORT,… [default: this machine's, with the cluster's port]
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    advertise: Vec<SocketAddr>,

    /// Network interface whose addresses nodes should try, such as eth0
    #[arg(long, value_name = "NAME", conflicts_with = "advertise")]
    interface: Option<String>,

    /// How long the token is valid: 30s, 10m, 24h, 7d
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    valid: Duration,

    /// How many nodes may use it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    uses: u32,

    /// Print the token as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `shimmer cluster status`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer cluster status --cluster ~/.shimmer/cluster
  shimmer cluster status --cluster ~/.shimmer/cluster --watch")]
pub struct StatusArgs {
    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// Redraw every two seconds until Ctrl-C
    #[arg(long, conflicts_with = "json")]
    watch: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `shimmer cluster nodes`.
#[derive(Args, Clone, Debug)]
pub struct NodesArgs {
    /// Cluster state directory
    #[arg(long, value_name = "DIR")]
    cluster: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs a subcommand.
///
/// # Errors
/// [`CliError`].
pub fn run(command: &ClusterCommand) -> Result<(), CliError> {
    match command {
        ClusterCommand::Init(args) => init(args),
        ClusterCommand::Invite(args) => invite(args),
        ClusterCommand::Status(args) => status(args),
        ClusterCommand::Nodes(args) => nodes(args),
        ClusterCommand::Drain(args) => change::set_drained(args, true),
        ClusterCommand::Resume(args) => change::set_drained(args, false),
        ClusterCommand::Remove(args) => change::remove(args),
        ClusterCommand::Rebalance(args) => change::rebalance(args),
        ClusterCommand::Revoke(args) => revoke(args),
    }
}

fn init(args: &InitArgs) -> Result<(), CliError> {
    let state = ClusterState::init(&args.cluster, args.listen)?;
    output::emit(&format!(
        "cluster made in {}\nCA fingerprint {}\nnext: shimmer cluster invite --cluster {}\n",
        args.cluster.display(),
        state.ca_fingerprint()?,
        args.cluster.display()
    ))
}

fn invite(args: &InviteArgs) -> Result<(), CliError> {
    let state = ClusterState::open(&args.cluster)?;
    let advertise = match args.advertise.is_empty() {
        true => own_addresses(state.listen(), args.interface.as_deref())?,
        false => args.advertise.clone(),
    };
    let token = state.invite(&advertise, args.valid, args.uses)?;
    if args.json {
        let addresses: Vec<String> = advertise.iter().map(SocketAddr::to_string).collect();
        return output::emit_json(&json!({
            "token": token,
            "addresses": addresses,
            "valid_s": args.valid.as_secs(),
            "uses": args.uses,
        }));
    }
    let addresses: Vec<String> = advertise.iter().map(SocketAddr::to_string).collect();
    output::note(&format!(
        "valid for {} s, {} use(s), coordinator at {}; on the other PC: shimmer-node join TOKEN --data DIR",
        args.valid.as_secs(),
        args.uses,
        addresses.join(", ")
    ));
    output::emit(&(token + "\n"))
}

/// The addresses other machines reach `listen` at. An unspecified address stands for those of the
/// interfaces that lead to other machines, or of the pinned one.
pub fn own_addresses(listen: SocketAddr, interface: Option<&str>) -> Result<Vec<SocketAddr>, CliError> {
    if !listen.ip().is_unspecified() {
        return Ok(vec![listen]);
    }
    let ips = interfaces::addresses(interface).map_err(CliError::Usage)?;
    // `0.0.0.0` takes no IPv6 connections.
    let served = |ip: &IpAddr| listen.is_ipv6() || ip.is_ipv4();
    let served: Vec<_> =
        ips.into_iter().filter(served).map(|ip| SocketAddr::new(ip, listen.port())).collect();
    match served.is_empty() {
        true => Err(CliError::Usage(format!(
            "this machine has only IPv6 addresses there, but the cluster listens on {listen}; make it with --listen [::]:{}",
            listen.port()
        ))),
        false => Ok(served),
    }
}

fn revoke(args: &RevokeArgs) -> Result<(), CliError> {
    let member = ClusterState::open(&args.cluster)?.revoke(&args.node)?;
    if args.json {
        return output::emit_json(&member);
    }
    output::emit(&format!(
        "{} ({}) is revoked; a running coordinator cuts it off within a second\n",
        member.name, member.id
    ))
}

/// One node as `status` shows it.
#[derive(Clone, Debug, Serialize)]
struct NodeLine {
    id: String,
    name: String,
    addresses: Vec<String>,
    revoked: bool,
    /// Whether a connection was accepted.
    reachable: bool,
    /// Milliseconds until it was.
    connect_ms: Option<f64>,
}

fn status(args: &StatusArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    loop {
        let state = ClusterState::open(&args.cluster)?;
        let report = Coordinator::connect(&state)?.map(|mut running| running.report()).transpose()?;
        // Without a coordinator nobody knows more than whether nodes accept connections.
        let lines = if report.is_some() { Vec::new() } else { probe_all(state.members()?) };
        if args.json {
            return output::emit_json(&json!({
                "cluster": state.dir(),
                "listen": state.listen().to_string(),
                "ca_fingerprint": state.ca_fingerprint()?,
                "coordinator": report.is_some(),
                "nodes": match &report {
                    Some(report) => serde_json::to_value(&report.nodes).unwrap_or_default(),
                    None => serde_json::to_value(&lines).unwrap_or_default(),
                },
                "plan": report.as_ref().and_then(|report| report.plan.as_ref()),
            }));
        }
        if args.watch && output::stdout_is_terminal() {
            output::emit("\x1b[2J\x1b[H")?;
        }
        output::emit(&heading(&state)?)?;
        output::emit(&match &report {
            Some(report) => status::table(report),
            None => table(&lines),
        })?;
        if !args.watch || !interrupt.pause(WATCH_PERIOD) {
            return Ok(());
        }
    }
}

fn heading(state: &ClusterState) -> Result<String, CliError> {
    let (dir, listen, ca) = (state.dir().display(), state.listen(), state.ca_fingerprint()?);
    Ok(format!("cluster {dir}, nodes join at {listen}, CA {ca}\n"))
}

fn table(lines: &[NodeLine]) -> String {
    let mut text =
        "no coordinator runs; start one with `shimmer serve --cluster DIR --model DIR`\n".to_owned();
    if lines.is_empty() {
        text += "no node has joined yet; shimmer cluster invite makes a token\n";
    }
    for line in lines {
        let state = match (line.revoked, line.connect_ms) {
            (true, _) => "revoked".to_owned(),
            (_, Some(ms)) => format!("reachable in {ms:.1} ms"),
            (_, None) => "not reachable".to_owned(),
        };
        text += &format!("{:<16} {:<22} {state}\n", line.name, line.addresses.join(","));
    }
    text
}

/// Asks every node at once whether it accepts a connection.
fn probe_all(members: Vec<Member>) -> Vec<NodeLine> {
    std::thread::scope(|scope| {
        let probes: Vec<_> = members
            .iter()
            .map(|member| {
                scope.spawn(|| match member.revoked {
                    true => None,
                    false => member.addresses.iter().find_map(|address| probe(address)),
                })
            })
            .collect();
        let times = probes.into_iter().map(|probe| probe.join().unwrap_or(None));
        let line = |(member, connect_ms): (&Member, Option<f64>)| NodeLine {
            id: member.id.clone(),
            name: member.name.clone(),
            addresses: member.addresses.clone(),
            revoked: member.revoked,
            reachable: connect_ms.is_some(),
            connect_ms,
        };
        members.iter().zip(times).map(line).collect()
    })
}

/// Milliseconds until `address` accepts a connection.
pub fn probe(address: &str) -> Option<f64> {
    let started = Instant::now();
    let address = address.to_socket_addrs().ok()?.next()?;
    TcpStream::connect_timeout(&address, PROBE_TIMEOUT).ok()?;
    Some(started.elapsed().as_secs_f64() * 1e3)
}

fn nodes(args: &NodesArgs) -> Result<(), CliError> {
    let members = ClusterState::open(&args.cluster)?.members()?;
    if args.json {
        return output::emit_json(&members);
    }
    if members.is_empty() {
        output::note(&format!("no node has joined the cluster {}", shown(&args.cluster)));
    }
    for member in members {
        let mark = if member.revoked { " (revoked)" } else { "" };
        output::emit(&format!("{}\t{}\t{}{mark}\n", member.name, member.id, member.addresses.join(",")))?;
    }
    Ok(())
}

fn shown(dir: &Path) -> std::path::Display<'_> {
    dir.display()
}

/// Parses `30s`, `10m`, `24h`, `7d`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let hint = || "write a time such as 30s, 10m, 24h or 7d".to_owned();
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(hint)?;
    let seconds: u64 = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(hint()),
    };
    let number: u64 = number.parse().map_err(|_| hint())?;
    match number.checked_mul(seconds) {
        Some(total) if (1..=366 * 86_400).contains(&total) => Ok(Duration::from_secs(total)),
        _ => Err("a token is valid for one second to a year".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_need_units() {
        assert_eq!(parse_duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_secs(604_800)));
        for bad in ["", "10", "m", "0s", "-1h", "400d", "ä"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn unspecified_addresses_become_reachable_ones() {
        let addresses = own_addresses("0.0.0.0:7420".parse().unwrap(), None).unwrap();
        assert!(addresses.iter().all(|a| !a.ip().is_unspecified() && a.port() == 7420), "{addresses:?}");
        assert!(!addresses.is_empty());
        let fixed: SocketAddr = "192.168.7.1:99".parse().unwrap();
        assert_eq!(own_addresses(fixed, None).unwrap(), [fixed]);
        assert!(own_addresses("0.0.0.0:7420".parse().unwrap(), Some("no such interface")).is_err());
    }

    #[test]
    fn probes_tell_open_from_closed_ports() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert!(probe(&address).is_some());
        drop(listener);
        assert!(probe(&address).is_none());
        assert!(probe("not an address").is_none());
    }
}
