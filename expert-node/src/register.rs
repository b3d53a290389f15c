//! Telling the coordinator where this node is, again and again, whether the coordinator is there or not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertLayout;
use shimmer_proto::v1;
use shimmer_proto::v1::cluster_client::ClusterClient;
use tonic::transport::Channel;

use crate::config::NodeConfig;
use crate::discover::Search;
use crate::error::NodeError;
use crate::fetch::Peer;
use crate::interfaces;
use crate::join::status_error;
use crate::service::Shared;
use crate::tls::{self, Credentials};
use crate::wire::{Facts, Held, check_peer, clean_text, layout_from_wire, peer_to_wire, printable};

const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long announcements are waited for before the known addresses are tried again.
const LISTEN: Duration = Duration::from_secs(2);

/// What the coordinator told this node.
pub(crate) struct Registration {
    /// The coordinator's model and profile.
    pub(crate) coordinator: Facts,
    /// Record layout of the model.
    pub(crate) layout: ExpertLayout,
    /// Experts this node should own.
    pub(crate) assigned: Held,
    /// When to register again.
    pub(crate) heartbeat: Duration,
    /// The connection, for fetching records.
    pub(crate) channel: Channel,
    /// Why the coordinator cannot dial this node; empty when it can or has not tried.
    pub(crate) unreachable: String,
    /// What is wrong with the two clocks.
    pub(crate) skew: Option<String>,
    /// Nodes records can be fetched from.
    pub(crate) peers: Vec<Peer>,
    /// Whether it is open what this node should own.
    pub(crate) settling: bool,
    /// Most bytes per second to fetch with; 0 = no limit.
    pub(crate) fetch_bytes_per_s: u64,
}

/// The client side of the coordinator's control port.
pub(crate) struct Registrar {
    pub(crate) shared: Arc<Shared>,
    pub(crate) credentials: Credentials,
    config: NodeConfig,
    port: u16,
    /// The connection, and where it leads to.
    channel: Option<(Channel, String)>,
    /// Why the pinned interface cannot be used, once that has been said.
    no_interface: Option<String>,
}

impl Registrar {
    pub(crate) fn new(shared: Arc<Shared>, credentials: Credentials, config: NodeConfig, port: u16) -> Self {
        Self { shared, credentials, config, port, channel: None, no_interface: None }
    }

    /// Says whether the coordinator can dial this node, when that changes.
    pub(crate) fn note_reachable(&self, before: &str, why: &str) {
        if !why.is_empty() {
            tracing::warn!(why, "this node reaches the coordinator, but not the other way round");
        } else if !before.is_empty() {
            tracing::info!("the coordinator reaches this node again");
        }
        if let Err(error) = self.config.note_problem(why) {
            tracing::warn!(%error, "`shimmer-node status` will not show this");
        }
    }

    /// Where the coordinator was reached.
    pub(crate) fn reached(&self) -> &str {
        self.channel.as_ref().map_or("nowhere", |(_, address)| address)
    }

    /// Addresses the coordinator should dial; empty means "where my calls come from".
    fn advertise(&mut self) -> Vec<String> {
        let settings = &self.config.settings;
        let Some(interface) = settings.interface.as_deref().filter(|_| settings.advertise.is_empty()) else {
            return settings.advertise.clone();
        };
        match interfaces::addresses(Some(interface)) {
            Ok(ips) => ips.into_iter().map(|ip| SocketAddr::new(ip, self.port).to_string()).collect(),
            Err(why) => {
                if self.no_interface.as_ref() != Some(&why) {
                    tracing::warn!(why, "the coordinator will dial where the calls come from");
                    self.no_interface = Some(why);
                }
                Vec::new()
            }
        }
    }

    /// Registers once.
    ///
    /// # Errors
    /// [`NodeError::Unreachable`] when nobody answers, [`NodeError::Mismatch`] and
    /// [`NodeError::Refused`] when somebody does.
    pub(crate) async fn register(&mut self) -> Result<Registration, NodeError> {
        let ours = self.shared.facts();
        let channel = self.channel().await?;
        let request = v1::RegisterRequest {
            peer: Some(peer_to_wire(&ours)),
            advertise: self.advertise(),
            port: self.port.into(),
            instance: self.shared.instance.to_vec().into(),
            unix_ms: tls::unix_millis(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            held: self.shared.held(),
            measurement: self.shared.meter.read(),
        };
        let call =
            tokio::time::timeout(CALL_TIMEOUT, ClusterClient::new(channel.clone()).register(request)).await;
        let reply = match call {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => {
                self.channel = None;
                return Err(status_error(&status)
                    .unwrap_or_else(|| NodeError::Unreachable { what: tls::status_cause(&status) }));
            }
            Err(_) => {
                let what = format!("{} did not answer in time", self.reached());
                self.channel = None;
                return Err(NodeError::Unreachable { what });
            }
        };
        let coordinator = check_peer(&ours, reply.peer.as_ref()).map_err(NodeError::Mismatch)?;
        let odd = |what: String| {
            NodeError::Mismatch(format!(
                "the coordinator sent a {what}; install the same version of Shimmer on both machines"
            ))
        };
        let layout =
            layout_from_wire(reply.layout.as_ref().ok_or_else(|| odd("reply without a layout".to_owned()))?)
                .map_err(|e| odd(e.to_string()))?;
        let assigned = Held::from_wire(&layout, &reply.assigned).map_err(|e| odd(e.to_string()))?;
        let heartbeat = Duration::from_millis(reply.heartbeat_ms.clamp(200, 60_000).into());
        let skew = tls::clock_skew(tls::unix_millis(), reply.unix_ms, "the coordinator");
        // At once: members may ask as soon as the coordinator has named them.
        self.shared.roster.set(reply.roster);
        let unreachable = clean_text(&reply.unreachable, 500);
        let peers = reply.sources.into_iter().take(MAX_PEERS).filter_map(|s| peer(&layout, s)).collect();
        let (fetch_bytes_per_s, settling) = (reply.fetch_bytes_per_s, reply.settling);
        Ok(Registration {
            coordinator,
            layout,
            assigned,
            heartbeat,
            channel,
            unreachable,
            skew,
            peers,
            settling,
            fetch_bytes_per_s,
        })
    }

    async fn channel(&mut self) -> Result<Channel, NodeError> {
        if let Some((channel, _)) = &self.channel {
            return Ok(channel.clone());
        }
        let settings = &self.config.settings;
        let search = Search {
            addresses: settings.coordinators.clone(),
            discovery: settings.discovery,
            interface: settings.interface.clone(),
            listen: LISTEN,
        };
        let found = search.reach(&self.credentials, CALL_TIMEOUT).await;
        let (channel, address) = found.map_err(|what| NodeError::Unreachable { what })?;
        if !search.addresses.contains(&address) {
            tracing::info!(address, "found the coordinator by its announcement");
            if let Err(error) = self.config.remember(&address) {
                tracing::warn!(%error, "the coordinator's new address is not kept");
            }
        }
        self.channel = Some((channel.clone(), address));
        Ok(channel)
    }
}

/// Most nodes that records are fetched from.
const MAX_PEERS: usize = 256;

/// A source as it can be used; `None` for one that is malformed.
fn peer(layout: &ExpertLayout, source: v1::Source) -> Option<Peer> {
    let held = Held::from_wire(layout, &source.held).ok()?;
    let name = format!("node {}", printable(&source.name));
    let addresses = source.addresses.into_iter().take(8).collect();
    tls::is_node_id(&source.node_id).then_some(Peer { id: source.node_id, name, addresses, held })
}

/// Pauses between attempts: doubling from 250 ms to 5 s.
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(250);
    const LONGEST: Duration = Duration::from_secs(5);

    /// Starts with the shortest pause.
    pub fn new() -> Self {
        Self { next: Self::FIRST }
    }

    /// The pause before the next attempt; the one after that is longer.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(Self::LONGEST);
        pause
    }

    /// Starts again after a success.
    pub fn reset(&mut self) {
        self.next = Self::FIRST;
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}
