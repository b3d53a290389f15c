//! Announcing the coordinator on the network, so that nodes find it where its address has changed.

use std::net::SocketAddr;

use mdns_sd::{ServiceDaemon, ServiceInfo};
use shimmer_node::discover::{self, SERVICE, TXT_CA, TXT_VERSION};
use shimmer_node::interfaces;
use shimmer_proto::PROTOCOL_VERSION;

/// An announcement; taken back when dropped.
pub(super) struct Announcement {
    daemon: ServiceDaemon,
    name: String,
}

impl Announcement {
    /// Announces the control port `bound` of the cluster whose CA has the fingerprint `ca`. `None` where
    /// nobody could follow: no multicast, or a port of this machine alone.
    pub(super) fn start(ca: &str, bound: SocketAddr, interface: Option<&str>) -> Option<Self> {
        let failed =
            |why: String| tracing::info!(why, "not announced by mDNS; nodes use the known addresses");
        let ips = match bound.ip() {
            ip if ip.is_unspecified() => interfaces::addresses(interface).map_err(failed).ok()?,
            ip => vec![ip],
        };
        if ips.iter().all(|ip| ip.is_loopback()) {
            return None;
        }
        Self::announce(ca, &ips, bound.port(), interface).map_err(|e| failed(e.to_string())).ok()
    }

    fn announce(
        ca: &str,
        ips: &[std::net::IpAddr],
        port: u16,
        interface: Option<&str>,
    ) -> Result<Self, mdns_sd::Error> {
        let daemon = discover::daemon(interface)?;
        // Names on the network must not collide: the first digits of the CA tell clusters apart.
        let short: String = ca.chars().take(16).collect();
        let version = PROTOCOL_VERSION.to_string();
        let txt = [(TXT_CA, ca), (TXT_VERSION, version.as_str())];
        let host = format!("shimmer-{short}.local.");
        let info = ServiceInfo::new(SERVICE, &short, &host, ips, port, &txt[..])?;
        let name = info.get_fullname().to_owned();
        daemon.register(info)?;
        Ok(Self { daemon, name })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // Both fail only when its thread has ended already.
        let _ = self.daemon.unregister(&self.name);
        let _ = self.daemon.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_this_machine_alone_is_not_announced() {
        assert!(Announcement::start("00ff", SocketAddr::from(([127, 0, 0, 1], 7420)), None).is_none());
    }
}
