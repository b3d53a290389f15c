//! Telling the coordinator where this node is, again and again, whether the coordinator is there or not.

use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertLayout;
use shimmer_proto::v1;
use shimmer_proto::v1::cluster_client::ClusterClient;
use tonic::transport::Channel;

use crate::error::NodeError;
use crate::fetch::Peer;
use crate::join::status_error;
use crate::service::Shared;
use crate::tls::{self, Credentials};
use crate::wire::{Facts, Held, check_peer, layout_from_wire, peer_to_wire, printable};

const CALL_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Nodes records can be fetched from.
    pub(crate) peers: Vec<Peer>,
    /// Most bytes per second to fetch with; 0 = no limit.
    pub(crate) fetch_bytes_per_s: u64,
}

/// The client side of the coordinator's control port.
pub(crate) struct Registrar {
    pub(crate) shared: Arc<Shared>,
    pub(crate) credentials: Credentials,
    pub(crate) coordinators: Vec<String>,
    pub(crate) advertise: Vec<String>,
    pub(crate) port: u16,
    channel: Option<Channel>,
}

impl Registrar {
    pub(crate) fn new(
        shared: Arc<Shared>,
        credentials: Credentials,
        coordinators: Vec<String>,
        advertise: Vec<String>,
        port: u16,
    ) -> Self {
        Self { shared, credentials, coordinators, advertise, port, channel: None }
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
            advertise: self.advertise.clone(),
            port: self.port.into(),
            held: self.shared.held(),
            ..v1::RegisterRequest::default()
        };
        let call =
            tokio::time::timeout(CALL_TIMEOUT, ClusterClient::new(channel.clone()).register(request)).await;
        let reply = match call {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => {
                self.channel = None;
                return Err(status_error(&status).unwrap_or_else(|| self.unreachable(status.message())));
            }
            Err(_) => {
                self.channel = None;
                return Err(self.unreachable("did not answer in time"));
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
        let peers = reply.sources.into_iter().take(MAX_PEERS).filter_map(|s| peer(&layout, s)).collect();
        self.shared.sharing.set_members(reply.roster);
        let fetch_bytes_per_s = reply.fetch_bytes_per_s;
        Ok(Registration { coordinator, layout, assigned, heartbeat, channel, peers, fetch_bytes_per_s })
    }

    async fn channel(&mut self) -> Result<Channel, NodeError> {
        if let Some(channel) = &self.channel {
            return Ok(channel.clone());
        }
        let mut last = "no address is known".to_owned();
        for address in &self.coordinators {
            match tls::connect(&self.credentials, address, tls::COORDINATOR_NAME, CALL_TIMEOUT).await {
                Ok(channel) => return Ok(self.channel.insert(channel).clone()),
                Err(what) => last = what,
            }
        }
        Err(self.unreachable(&last))
    }

    fn unreachable(&self, what: &str) -> NodeError {
        NodeError::Unreachable { address: self.coordinators.join(", "), what: what.to_owned() }
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

/// Pauses between attempts: doubling from 250 ms to 10 s.
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(250);
    const LONGEST: Duration = Duration::from_secs(10);

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
