//! The measuring part of `shimmer doctor --cluster`: every machine to every other, both ways.

use std::time::Duration;

use shimmer_node::probe::{Ask, reach};
use shimmer_node::tls::{self, Credentials};
use shimmer_proto::v1;
use shimmer_proto::v1::probe_client::ProbeClient;
use tonic::transport::Channel;

use super::doctor::{Area, Check};
use super::doctor_cluster::validity_check;
use crate::cluster::Member;

/// What is measured per way.
const ASK: Ask = Ask { round_trips: 40, bytes: 8 << 20 };
const DISK_MILLIS: u32 = 500;
/// Time for connecting, and for one answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);
/// A payload below this makes even one token wait for the network.
const SLOW_BYTES_PER_S: f64 = 20e6;
/// A way whose 95th percentile is this many times its median is not steady.
const UNSTEADY: u32 = 8;
const UNSTEADY_FLOOR_US: u32 = 5_000;
/// Clocks further apart than this are worth a word.
const SKEW_MS: u64 = 5 * 60 * 1000;
/// A disk that gives less than this part of what it gave when nothing else ran.
const BUSY_DISK: f64 = 0.5;

/// One machine as the doctor sees it.
struct Machine<'a> {
    member: &'a Member,
    address: &'a str,
    facts: Option<v1::FactsReply>,
}

/// Checks every node and every pair; `coordinator` is where the nodes reach the running one, if it runs.
pub fn checks(credentials: &Credentials, members: &[Member], coordinator: Option<&str>) -> Vec<Check> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let found = format!("no network runtime can be started: {error}");
            return vec![Check::fail(Area::Cluster, "links", found, "close other programs and try again")];
        }
    };
    runtime.block_on(all(credentials, members, coordinator))
}

async fn all(credentials: &Credentials, members: &[Member], coordinator: Option<&str>) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut machines = Vec::new();
    for member in members {
        let (found, machine) = from_here(credentials, member).await;
        checks.extend(found);
        machines.extend(machine);
    }
    checks.extend(agreement(&machines));
    for from in &machines {
        let mut targets: Vec<(String, String, &str)> = Vec::new();
        if let Some(address) = coordinator {
            targets.push(("the coordinator".to_owned(), String::new(), address));
        }
        let others = machines.iter().filter(|to| to.member.id != from.member.id);
        targets.extend(others.map(|to| (to.member.name.clone(), to.member.id.clone(), to.address)));
        for (name, id, address) in targets {
            let what = format!("{} -> {name}", from.member.name);
            let answer = ask_to_reach(credentials, from, &id, address).await;
            checks.push(match answer {
                Ok(reply) => way(&what, address, &reply),
                Err(why) => {
                    Check::fail(Area::Cluster, &what, why, "run `shimmer-node start --data DIR` there")
                }
            });
        }
    }
    checks
}

/// This machine to a node: the way, who answers there, its disk.
async fn from_here<'a>(credentials: &Credentials, member: &'a Member) -> (Vec<Check>, Option<Machine<'a>>) {
    let name = tls::node_name(&member.id);
    let mut problem = "has told no address yet".to_owned();
    for address in &member.addresses {
        let reply = reach(credentials, address, &name, ASK).await;
        if !reply.problem.is_empty() {
            problem = format!("{address} {}", reply.problem);
            continue;
        }
        let mut checks = vec![way(&format!("here -> {}", member.name), address, &reply)];
        let facts = ask_facts(credentials, address, &name).await;
        match &facts {
            Ok(facts) => checks.extend(certificate_and_clock(&member.name, facts)),
            Err(why) => checks.push(Check::fail(
                Area::Cluster,
                &member.name,
                why.clone(),
                "install the same version of Shimmer there",
            )),
        }
        checks.push(disk(credentials, member, address, &name).await);
        return (checks, Some(Machine { member, address, facts: facts.ok() }));
    }
    let port = member.addresses.first().and_then(|a| a.rsplit(':').next()).unwrap_or("7421");
    let remedy = format!(
        "run `shimmer-node start --data DIR` on {}, and let its firewall accept TCP port {port} (`sudo ufw allow {port}/tcp`)",
        member.name
    );
    (vec![Check::fail(Area::Cluster, &format!("here -> {}", member.name), problem, remedy)], None)
}

/// What a measured way is worth.
fn way(what: &str, address: &str, reply: &v1::ReachReply) -> Check {
    if !reply.problem.is_empty() {
        let port = address.rsplit(':').next().unwrap_or(address);
        return Check::fail(
            Area::Cluster,
            what,
            format!("{address} {}", reply.problem),
            format!(
                "let the firewall there accept TCP port {port} (`sudo ufw allow {port}/tcp`), or give --advertise HOST:PORT when joining"
            ),
        );
    }
    let at = |percent: usize| {
        let last = reply.round_trip_us.len().saturating_sub(1);
        reply.round_trip_us.get(last * percent / 100).copied().unwrap_or(0)
    };
    let ms = |us: u32| f64::from(us) / 1e3;
    let mtu = if reply.mtu > 0 { format!(", MTU {}", reply.mtu) } else { String::new() };
    let found = format!(
        "{address}: round trip {:.2} / {:.2} / {:.2} ms (median, 95 %, longest of {}), {:.0} MB/s{mtu}",
        ms(at(50)),
        ms(at(95)),
        ms(at(100)),
        reply.round_trip_us.len(),
        reply.bytes_per_s / 1e6,
    );
    if !reply.no_delay {
        let found = format!("{found}; small messages are held back");
        return Check::warn(
            Area::Cluster,
            what,
            found,
            "install the same version of Shimmer on both machines",
        );
    }
    if reply.bytes_per_s < SLOW_BYTES_PER_S {
        return Check::warn(
            Area::Cluster,
            what,
            found,
            "use a cable instead of Wi-Fi, or a faster switch port",
        );
    }
    if at(95) > (at(50) * UNSTEADY).max(UNSTEADY_FLOOR_US) {
        let found = format!("{found}; not steady");
        return Check::warn(Area::Cluster, what, found, "look for a bad cable or a busy Wi-Fi channel");
    }
    Check::ok(Area::Cluster, what, found)
}

async fn channel(
    credentials: &Credentials,
    address: &str,
    name: &str,
) -> Result<ProbeClient<Channel>, String> {
    tls::connect(credentials, address, name, CONNECT_TIMEOUT).await.map(ProbeClient::new)
}

/// An answer within the time an answer may take.
async fn answer<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(format!("refused: {}", status.message())),
        Err(_) => Err("did not answer in time".to_owned()),
    }
}

async fn ask_facts(credentials: &Credentials, address: &str, name: &str) -> Result<v1::FactsReply, String> {
    let mut client = channel(credentials, address, name).await?;
    answer(client.facts(v1::FactsRequest {})).await
}

async fn ask_to_reach(
    credentials: &Credentials,
    from: &Machine<'_>,
    node_id: &str,
    address: &str,
) -> Result<v1::ReachReply, String> {
    let mut client = channel(credentials, from.address, &tls::node_name(&from.member.id)).await?;
    let request = v1::ReachRequest {
        node_id: node_id.to_owned(),
        address: address.to_owned(),
        round_trips: ASK.round_trips,
        bytes: ASK.bytes,
    };
    answer(client.reach(request)).await
}

async fn disk(credentials: &Credentials, member: &Member, address: &str, name: &str) -> Check {
    let what = format!("{} disk", member.name);
    let asked = async {
        let mut client = channel(credentials, address, name).await?;
        let reply = answer(client.disk(v1::DiskRequest { millis: DISK_MILLIS })).await?;
        if reply.problem.is_empty() { Ok(reply) } else { Err(reply.problem) }
    };
    match asked.await {
        Err(why) => Check::warn(Area::Cluster, &what, why, "run this again when the node has its records"),
        Ok(reply) => {
            let found =
                format!("{:.0} MB/s now, one read {:.1} ms", reply.bytes_per_s / 1e6, reply.read_us / 1e3);
            let usual = member.measured.as_ref().map_or(0.0, |m| m.disk_bytes_per_s);
            if reply.bytes_per_s < usual * BUSY_DISK {
                let found = format!("{found}; it gave {:.0} MB/s before", usual / 1e6);
                let remedy = "look for what else uses the disk, and for a drive that gets too hot";
                return Check::warn(Area::Cluster, &what, found, remedy);
            }
            Check::ok(Area::Cluster, &what, found)
        }
    }
}

fn certificate_and_clock(name: &str, facts: &v1::FactsReply) -> Vec<Check> {
    let now_ms = tls::unix_millis();
    let again = "join it again under a new --data directory with a new token";
    let validity = (facts.not_before_unix, facts.not_after_unix);
    let certificate = validity_check(&format!("{name} certificate"), validity, again);
    let skew = facts.unix_ms.abs_diff(now_ms);
    let what = format!("{name} clock");
    let clock = if skew > SKEW_MS {
        let found = format!("differs from this machine's by {} minutes", skew / 60_000);
        Check::warn(Area::Cluster, &what, found, "switch on network time (`timedatectl set-ntp true`)")
    } else {
        Check::ok(Area::Cluster, &what, format!("within {:.1} s of this machine's", skew as f64 / 1e3))
    };
    vec![certificate, clock]
}

/// Whether all run one version on one model, each as itself.
fn agreement(machines: &[Machine<'_>]) -> Vec<Check> {
    let ours = env!("CARGO_PKG_VERSION");
    let mut checks = Vec::new();
    for machine in machines {
        let Some(facts) = &machine.facts else { continue };
        let what = format!("{} version", machine.member.name);
        let peer = facts.peer.clone().unwrap_or_default();
        checks.push(if peer.protocol != shimmer_proto::PROTOCOL_VERSION {
            let found = format!("{} speaks protocol {}", facts.version, peer.protocol);
            let remedy = format!("install Shimmer {ours} there");
            Check::fail(Area::Cluster, &what, found, remedy)
        } else {
            Check::ok(Area::Cluster, &what, facts.version.clone())
        });
        if facts.node_id != machine.member.id {
            let found = format!("answers as node {}", facts.node_id);
            let remedy = "stop the copy and join it again under a new --data directory";
            checks.push(Check::fail(Area::Cluster, &format!("{} id", machine.member.name), found, remedy));
        }
    }
    let models: Vec<(&str, Vec<u8>)> = machines
        .iter()
        .filter_map(|m| {
            let peer = m.facts.as_ref()?.peer.as_ref()?;
            (!peer.fingerprint.is_empty()).then(|| (m.member.name.as_str(), peer.fingerprint.to_vec()))
        })
        .collect();
    if let Some((_, first)) = models.first() {
        let hex: String = first.iter().take(6).map(|b| format!("{b:02x}")).collect();
        let others: Vec<&str> = models.iter().filter(|(_, m)| m != first).map(|(name, _)| *name).collect();
        checks.push(if others.is_empty() {
            Check::ok(Area::Cluster, "model", format!("{hex}… on all {} nodes", models.len()))
        } else {
            let found = format!("{} hold another model than {hex}…", others.join(", "));
            let remedy = "empty the shard directory there (`rm -r DATA/shard`) and start the node again";
            Check::fail(Area::Cluster, "model", found, remedy)
        });
    }
    checks
}

/// Nodes that share an id, a name or an address.
pub fn duplicates(members: &[Member]) -> Vec<Check> {
    let mut checks = Vec::new();
    for (i, a) in members.iter().enumerate() {
        for b in members.iter().skip(i + 1) {
            let shared = a.addresses.iter().find(|address| b.addresses.contains(address));
            if let Some(address) = shared {
                let found = format!("{} and {} both say they serve at {address}", a.name, b.name);
                let remedy = format!("forget the one that is gone: `shimmer cluster remove {}`", a.name);
                checks.push(Check::warn(Area::Cluster, "addresses", found, remedy));
            }
            if a.name == b.name {
                let found = format!("two nodes are called {} ({} and {})", a.name, a.id, b.id);
                let remedy = "name them apart with `shimmer-node join --name NAME`, or use their ids";
                checks.push(Check::warn(Area::Cluster, "names", found, remedy));
            }
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::doctor::State;
    use super::*;

    #[test]
    fn ways_are_judged_by_what_was_measured() {
        let good = v1::ReachReply {
            round_trip_us: vec![300; 40],
            bytes_per_s: 110e6,
            no_delay: true,
            mtu: 1500,
            ..v1::ReachReply::default()
        };
        let check = way("a -> b", "10.0.0.2:7421", &good);
        assert_eq!(check.state, State::Ok);
        assert!(check.found.contains("0.30") && check.found.contains("MTU 1500"), "{check:?}");
        let slow = v1::ReachReply { bytes_per_s: 3e6, ..good.clone() };
        assert!(way("a -> b", "x:1", &slow).remedy.contains("cable"));
        let held = v1::ReachReply { no_delay: false, ..good.clone() };
        assert_eq!(way("a -> b", "x:1", &held).state, State::Warn);
        let jumpy = v1::ReachReply { round_trip_us: [vec![300; 30], vec![90_000; 10]].concat(), ..good };
        assert!(way("a -> b", "x:1", &jumpy).found.contains("not steady"));
        let dead = v1::ReachReply { problem: "refused".into(), ..v1::ReachReply::default() };
        let check = way("a -> b", "10.0.0.2:7421", &dead);
        assert!(check.state == State::Fail && check.remedy.contains("7421"));
    }

    #[test]
    fn nodes_that_share_a_name_or_an_address_are_named() {
        let member = |id: &str, name: &str, address: &str| Member {
            id: id.into(),
            name: name.into(),
            key_hash: String::new(),
            addresses: vec![address.into()],
            revoked: false,
            drained: false,
            measured: None,
        };
        let found = duplicates(&[member("1", "a", "x:1"), member("2", "a", "x:1"), member("3", "b", "y:1")]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(duplicates(&[member("1", "a", "x:1"), member("2", "b", "x:2")]).is_empty());
    }
}
