//! Which of this machine's addresses others can reach it at.
//!
//! A PC has more addresses than its owner knows: bridges of containers and virtual machines, tunnels,
//! link-local ones. Cables and radios come first; what is virtual counts only when there is nothing else.

use std::net::IpAddr;

/// Most addresses given to anybody: every one costs a try.
const MOST: usize = 6;

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    name: String,
    ip: IpAddr,
    /// Whether there is a device behind the name.
    physical: bool,
}

/// This machine's addresses, the most promising first; those of one interface when it is `pinned`.
///
/// # Errors
/// One sentence when the pinned interface does not exist or has no address.
pub fn addresses(pinned: Option<&str>) -> Result<Vec<IpAddr>, String> {
    let found = if_addrs::get_if_addrs().map_err(|e| {
        format!("this machine's network interfaces cannot be listed ({e}); give the address instead")
    })?;
    let candidates: Vec<Candidate> = found
        .into_iter()
        .filter(|i| i.is_oper_up() || i.oper_status == if_addrs::IfOperStatus::Unknown)
        .map(|i| Candidate { physical: is_physical(&i.name), ip: i.ip(), name: i.name })
        .collect();
    choose(&candidates, pinned)
}

/// Names of the interfaces worth announcing on: those of [`addresses`].
pub fn names(pinned: Option<&str>) -> Vec<String> {
    if let Some(name) = pinned {
        return vec![name.to_owned()];
    }
    let chosen = addresses(None).unwrap_or_default();
    let mut names: Vec<String> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|i| chosen.contains(&i.ip()))
        .map(|i| i.name)
        .collect();
    names.dedup();
    names
}

fn choose(candidates: &[Candidate], pinned: Option<&str>) -> Result<Vec<IpAddr>, String> {
    let mut tiers: [Vec<(u8, IpAddr)>; 4] = Default::default();
    for candidate in candidates.iter().filter(|c| pinned.is_none_or(|name| c.name == name)) {
        if let Some((tier, order)) = rank(candidate, pinned.is_some()) {
            tiers[tier].push((order, candidate.ip));
        }
    }
    let Some(mut best) = tiers.into_iter().find(|tier| !tier.is_empty()) else {
        let mut names: Vec<&str> = candidates.iter().map(|c| c.name.as_str()).collect();
        names.dedup();
        return Err(match pinned {
            Some(name) => {
                format!("this machine has no usable interface {name}; it has {}", names.join(", "))
            }
            None => "this machine has no network address; connect it, or give the address".to_owned(),
        });
    };
    best.sort();
    best.dedup();
    Ok(best.into_iter().map(|(_, ip)| ip).take(MOST).collect())
}

/// Tier (only the first that is not empty counts) and order within it.
fn rank(candidate: &Candidate, pinned: bool) -> Option<(usize, u8)> {
    let virtual_name = !candidate.physical && has_virtual_name(&candidate.name) && !pinned;
    match candidate.ip {
        ip if ip.is_loopback() => Some((3, u8::from(ip.is_ipv6()))),
        IpAddr::V4(ip) if ip.is_link_local() => Some((2, 0)),
        // Means something on one interface only, and a port cannot say which.
        IpAddr::V6(ip) if ip.is_unicast_link_local() => None,
        ip if ip.is_unspecified() || ip.is_multicast() => None,
        IpAddr::V4(ip) => {
            let order = u8::from(!ip.is_private()) + 4 * u8::from(!candidate.physical);
            Some((usize::from(virtual_name), order))
        }
        IpAddr::V6(ip) => {
            let order = 2 + u8::from(!ip.is_unique_local()) + 4 * u8::from(!candidate.physical);
            Some((usize::from(virtual_name), order))
        }
    }
}

/// Names that bridges, tunnels and virtual cables usually have.
fn has_virtual_name(name: &str) -> bool {
    const PREFIXES: [&str; 17] = [
        "docker",
        "br-",
        "veth",
        "virbr",
        "vmnet",
        "vboxnet",
        "lxc",
        "lxd",
        "cni",
        "flannel",
        "cali",
        "podman",
        "tun",
        "tap",
        "wg",
        "tailscale",
        "zt",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(target_os = "linux")]
fn is_physical(name: &str) -> bool {
    std::path::Path::new("/sys/class/net").join(name).join("device").exists()
}

#[cfg(not(target_os = "linux"))]
fn is_physical(name: &str) -> bool {
    name.starts_with("en") || name.starts_with("eth") || name.starts_with("wl")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, ip: &str, physical: bool) -> Candidate {
        Candidate { name: name.to_owned(), ip: ip.parse().unwrap(), physical }
    }

    fn texts(ips: Vec<IpAddr>) -> Vec<String> {
        ips.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn cables_and_radios_come_before_everything_else() {
        let all = [
            at("lo", "127.0.0.1", false),
            at("docker0", "172.17.0.1", false),
            at("br-1f2e", "172.18.0.1", false),
            at("wlp3s0", "fe80::1", true),
            at("wlp3s0", "2001:db8::7", true),
            at("wlp3s0", "192.168.1.23", true),
            at("eno1", "169.254.7.7", true),
            at("bond0", "10.0.0.9", false),
            at("eno1", "10.0.0.4", true),
            at("tun0", "10.8.0.2", false),
        ];
        let chosen = texts(choose(&all, None).unwrap());
        assert_eq!(chosen, ["10.0.0.4", "192.168.1.23", "2001:db8::7", "10.0.0.9"]);
        assert_eq!(texts(choose(&all, Some("docker0")).unwrap()), ["172.17.0.1"]);
        assert_eq!(texts(choose(&all, Some("eno1")).unwrap()), ["10.0.0.4"]);
        let missing = choose(&all, Some("eth9")).unwrap_err();
        assert!(missing.contains("no usable interface eth9") && missing.contains("eno1"), "{missing}");
    }

    #[test]
    fn what_is_virtual_or_local_counts_when_there_is_nothing_else() {
        let all = [
            at("lo", "::1", false),
            at("lo", "127.0.0.1", false),
            at("veth0", "10.1.0.2", false),
            at("eno1", "169.254.7.7", true),
        ];
        assert_eq!(texts(choose(&all, None).unwrap()), ["10.1.0.2"]);
        assert_eq!(texts(choose(&all[3..], None).unwrap()), ["169.254.7.7"]);
        assert_eq!(texts(choose(&all[..2], None).unwrap()), ["127.0.0.1", "::1"]);
        assert!(choose(&[], None).is_err());
    }

    #[test]
    fn this_machine_has_an_address() {
        assert!(!addresses(None).unwrap().is_empty());
        assert!(addresses(Some("no such interface")).is_err());
    }
}
