//! Reaching the coordinator: at the addresses known and, beside them, wherever it announces itself.
//!
//! The running coordinator announces `_shimmer._tcp.local.` with the fingerprint of its CA. Nothing in an
//! announcement is believed: it only suggests an address to dial, and TLS decides who answers there. A
//! network without multicast finds nothing this way, which is no error.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{IfKind, ServiceDaemon, ServiceEvent};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::tls::{self, Credentials};
use crate::{interfaces, token};

/// Service type the coordinator announces.
pub const SERVICE: &str = "_shimmer._tcp.local.";
/// TXT key of the CA's fingerprint, and of the protocol version.
pub const TXT_CA: &str = "ca";
/// See [`TXT_CA`].
pub const TXT_VERSION: &str = "v";

/// How long the known addresses are tried before anything is asked of the network.
const HEAD_START: Duration = Duration::from_millis(300);
/// Most addresses taken from one announcement, and dialled in one attempt: anybody can announce anything.
const MOST_FOUND: usize = 16;
const MOST_DIALLED: usize = 64;

/// Where and how to look for the coordinator.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    /// Addresses (`host:port`) known.
    pub(crate) addresses: Vec<String>,
    /// Whether to listen for announcements as well.
    pub(crate) discovery: bool,
    /// Interface to listen on; absent means those that lead to other machines.
    pub(crate) interface: Option<String>,
    /// How long to go on listening when no known address answers.
    pub(crate) listen: Duration,
}

impl Search {
    /// The first answer by a holder of the coordinator's certificate, and the address it came from.
    ///
    /// # Errors
    /// One sentence that names every address tried.
    pub(crate) async fn reach(
        &self,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<(Channel, String), String> {
        let mut tried = Tried { attempts: JoinSet::new(), seen: BTreeSet::new(), failures: Vec::new() };
        for address in &self.addresses {
            tried.dial(credentials, address, timeout);
        }
        let mut discovery = self.discovery;
        let mut browser: Option<Browser> = None;
        let head_start = tokio::time::sleep(HEAD_START);
        let until = tokio::time::sleep(timeout);
        let enough = tokio::time::sleep(self.listen);
        tokio::pin!(head_start, until, enough);
        while discovery || !tried.attempts.is_empty() {
            let waiting = discovery && browser.is_none();
            let idle = tried.attempts.is_empty();
            let nothing_known = waiting && idle;
            tokio::select! {
                Some(attempt) = tried.attempts.join_next() => match attempt {
                    Ok((address, Ok(channel))) => return Ok((channel, address)),
                    Ok((address, Err(what))) => tried.failures.push(format!("{address} {what}")),
                    Err(ended) => tracing::debug!(%ended, "an attempt to connect ended"),
                },
                () = async { if !nothing_known { head_start.as_mut().await } }, if waiting => {
                    browser = Browser::start(credentials, self.interface.as_deref());
                    discovery = browser.is_some();
                }
                found = next(&mut browser), if browser.is_some() => {
                    found.iter().for_each(|address| tried.dial(credentials, address, timeout));
                }
                () = &mut enough, if idle => break,
                () = &mut until => break,
                else => break,
            }
        }
        Err(tried.summary(browser.is_some()))
    }
}

/// Attempts under way and what became of the others.
struct Tried {
    attempts: JoinSet<(String, Result<Channel, String>)>,
    seen: BTreeSet<String>,
    failures: Vec<String>,
}

impl Tried {
    fn dial(&mut self, credentials: &Credentials, address: &str, timeout: Duration) {
        if self.seen.len() < MOST_DIALLED && self.seen.insert(address.to_owned()) {
            let (credentials, address) = (credentials.clone(), address.to_owned());
            self.attempts.spawn(async move {
                let dialled = tls::connect(&credentials, &address, tls::COORDINATOR_NAME, timeout).await;
                (address, dialled)
            });
        }
    }

    fn summary(mut self, browsed: bool) -> String {
        let failed: Vec<String> = self.failures.clone();
        for address in self.seen {
            if !failed.iter().any(|f| f.starts_with(&format!("{address} "))) {
                self.failures.push(format!("{address} did not answer in time"));
            }
        }
        if self.failures.is_empty() {
            self.failures.push("no address is known".to_owned());
        }
        if browsed {
            self.failures.push("no announcement of this cluster was heard on the network (mDNS)".to_owned());
        }
        self.failures.join("; ")
    }
}

async fn next(browser: &mut Option<Browser>) -> Vec<String> {
    match browser {
        Some(browser) => browser.next().await,
        None => std::future::pending().await,
    }
}

/// Listens for announcements until dropped.
struct Browser {
    daemon: ServiceDaemon,
    events: mdns_sd::Receiver<ServiceEvent>,
    ca: String,
}

impl Browser {
    /// `None` where there is no multicast.
    fn start(credentials: &Credentials, interface: Option<&str>) -> Option<Self> {
        let ca = token::fingerprint_of(&tls::pem_to_der(&credentials.ca_pem)?);
        let started = daemon(interface)
            .and_then(|daemon| daemon.browse(SERVICE).map(|events| Self { daemon, events, ca }));
        started.inspect_err(|error| tracing::debug!(%error, "no discovery by mDNS")).ok()
    }

    /// Addresses of the next announcement of our cluster.
    async fn next(&mut self) -> Vec<String> {
        loop {
            let Ok(event) = self.events.recv_async().await else { return std::future::pending().await };
            let ServiceEvent::ServiceResolved(service) = event else { continue };
            let ours = service.get_property_val_str(TXT_CA) == Some(self.ca.as_str());
            if !ours {
                continue;
            }
            let version = service.get_property_val_str(TXT_VERSION);
            if version != Some(shimmer_proto::PROTOCOL_VERSION.to_string().as_str()) {
                tracing::debug!(version, "a coordinator of another version announces itself");
            }
            let ips = service.get_addresses().iter().map(mdns_sd::ScopedIp::to_ip_addr);
            return dialable(ips, service.get_port());
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Fails only when its thread has ended already.
        let _ = self.daemon.shutdown();
    }
}

/// A multicast DNS thread on the interfaces that lead to other machines.
///
/// # Errors
/// The library's, where there is no multicast.
pub fn daemon(interface: Option<&str>) -> Result<ServiceDaemon, mdns_sd::Error> {
    let daemon = ServiceDaemon::new()?;
    let names = interfaces::names(interface);
    if !names.is_empty() {
        daemon.disable_interface(IfKind::All)?;
        daemon.enable_interface(names.into_iter().map(IfKind::Name).collect::<Vec<_>>())?;
    }
    Ok(daemon)
}

/// What of announced addresses can be dialled, IPv4 first.
fn dialable(ips: impl Iterator<Item = IpAddr>, port: u16) -> Vec<String> {
    let usable = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_multicast(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_unicast_link_local(),
    };
    let mut ips: Vec<IpAddr> = ips.filter(usable).collect();
    ips.sort();
    ips.dedup();
    ips.into_iter().take(MOST_FOUND).map(|ip| SocketAddr::new(ip, port).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_addresses_are_dialled_where_that_makes_sense() {
        let ips = ["fe80::1", "2001:db8::1", "192.168.1.4", "0.0.0.0", "224.0.0.251", "192.168.1.4"];
        let found = dialable(ips.iter().map(|ip| ip.parse().unwrap()), 7420);
        assert_eq!(found, ["192.168.1.4:7420", "[2001:db8::1]:7420"]);
        assert!(dialable((1..100).map(|i| IpAddr::from([10, 0, 0, i])), 1).len() <= MOST_FOUND);
    }

    #[test]
    fn every_address_tried_is_named() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let certificate = rcgen::generate_simple_self_signed(Vec::new()).unwrap().cert.pem();
        let credentials = Credentials { ca_pem: certificate, identity: None };
        let addresses = vec!["127.0.0.1:1".to_owned(), "no address".to_owned()];
        let listen = Duration::ZERO;
        let search = Search { addresses, discovery: false, interface: None, listen };
        let why = runtime.block_on(search.reach(&credentials, Duration::from_secs(20))).unwrap_err();
        assert!(why.contains("127.0.0.1:1 ") && why.contains("no address is not an address"), "{why}");
        let search = Search { addresses: Vec::new(), ..search };
        let why = runtime.block_on(search.reach(&credentials, Duration::from_secs(20))).unwrap_err();
        assert_eq!(why, "no address is known");
    }
}
