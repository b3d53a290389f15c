//! The cluster's part of `shimmer doctor`: directory, certificates, nodes.

use std::path::Path;

use shimmer_node::tls;

use super::cluster::{own_addresses, probe};
use super::doctor::{Area, Check};
use super::doctor_links;
use crate::cluster::{ClusterState, Coordinator, Member};

/// Days before its end from which a certificate is worth a warning.
const EXPIRY_WARNING_DAYS: i64 = 30;
const DAY_S: i64 = 86_400;

/// Checks the cluster directory, its certificates and every known or listed node.
pub fn checks(dir: &Path, listed: &[String]) -> Vec<Check> {
    let area = Area::Cluster;
    let state = match ClusterState::open(dir) {
        Ok(state) => state,
        Err(error) => {
            return vec![Check::fail(
                area,
                "cluster",
                error.to_string(),
                "make one with `shimmer cluster init`",
            )];
        }
    };
    let mut checks = vec![Check::ok(area, "cluster", format!("nodes join at {}", state.listen()))];
    checks.extend(["ca.crt", "coordinator.crt"].map(|name| certificate(&dir.join(name))));
    match state.members() {
        Err(error) => checks.push(Check::fail(area, "nodes", error.to_string(), "restore the file")),
        Ok(mut members) => {
            members.retain(|m| !m.revoked);
            checks.extend(doctor_links::duplicates(&members));
            checks.extend(links(&state, &members));
        }
    }
    for address in listed {
        checks.push(match probe(address) {
            Some(ms) => Check::ok(area, address, format!("answers in {ms:.1} ms")),
            None => not_reachable(address, address),
        });
    }
    checks
}

/// Every way between this machine, the running coordinator and the nodes.
fn links(state: &ClusterState, members: &[Member]) -> Vec<Check> {
    let area = Area::Cluster;
    let start = "start it with `shimmer serve --cluster DIR --model DIR`";
    let credentials = match state.credentials() {
        Ok(credentials) => credentials,
        Err(error) => return vec![Check::fail(area, "keys", error.to_string(), "restore the file")],
    };
    let (check, seen_at) = match Coordinator::connect(state) {
        Ok(Some(coordinator)) => {
            let found = format!("runs at {}", coordinator.address());
            (Check::ok(area, "coordinator", found), own_address(state))
        }
        Ok(None) => {
            let found = "does not run, so the ways from the nodes to it are not measured";
            (Check::warn(area, "coordinator", found, start), None)
        }
        Err(error) => (Check::fail(area, "coordinator", error.to_string(), start), None),
    };
    let mut checks = vec![check];
    checks.extend(doctor_links::checks(&credentials, members, seen_at.as_deref()));
    checks
}

/// Where other machines reach the coordinator.
fn own_address(state: &ClusterState) -> Option<String> {
    let addresses = own_addresses(state.running_at(), None).ok()?;
    addresses.first().map(ToString::to_string)
}

fn not_reachable(name: &str, addresses: &str) -> Check {
    let found = format!("does not answer at {addresses}");
    Check::fail(
        Area::Cluster,
        name,
        found,
        "start it with `shimmer-node start --data DIR` and check the firewall",
    )
}

fn certificate(path: &Path) -> Check {
    let what =
        path.file_name().map_or_else(|| "certificate".to_owned(), |n| n.to_string_lossy().into_owned());
    let again = "start a new cluster with `shimmer cluster init` and invite the nodes again";
    let pem = std::fs::read(path).map_err(|e| format!("cannot be read: {e}"));
    match pem.and_then(|pem| tls::validity(&pem)) {
        Err(error) => Check::fail(Area::Cluster, &what, error, again),
        Ok(validity) => validity_check(&what, validity, again),
    }
}

/// Whether a certificate is valid now and for some time; `validity` in seconds since 1970, `again` how to get a
/// new one.
pub fn validity_check(what: &str, (begins, ends): (i64, i64), again: &str) -> Check {
    let now = i64::try_from(tls::unix_millis() / 1000).unwrap_or(i64::MAX);
    let days = (ends - now).div_euclid(DAY_S);
    if now < begins {
        Check::fail(Area::Cluster, what, "is not valid yet", "set the clocks of both machines")
    } else if days < 0 {
        Check::fail(Area::Cluster, what, format!("ended {} days ago", -days), again)
    } else if days < EXPIRY_WARNING_DAYS {
        Check::warn(Area::Cluster, what, format!("ends in {days} days"), again)
    } else {
        Check::ok(Area::Cluster, what, format!("valid for {days} days"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::doctor::State;
    use super::*;

    #[test]
    fn a_fresh_cluster_is_sound_and_a_missing_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = dir.path().join("cluster");
        assert_eq!(checks(&cluster, &[])[0].state, State::Fail);
        ClusterState::init(&cluster, "127.0.0.1:0".parse().unwrap()).unwrap();
        let found = checks(&cluster, &["127.0.0.1:1".to_owned()]);
        let states: Vec<State> = found.iter().map(|c| c.state).collect();
        assert_eq!(states, [State::Ok, State::Ok, State::Ok, State::Warn, State::Fail], "{found:?}");
        std::fs::write(cluster.join("ca.crt"), "nonsense").unwrap();
        assert!(checks(&cluster, &[]).iter().any(|c| c.what == "ca.crt" && c.state == State::Fail));
    }
}
