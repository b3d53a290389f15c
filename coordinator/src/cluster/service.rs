//! The control port: `Cluster` (join, register); `Shards` on the same port is in `shards`.
//!
//! TLS asks for a client certificate but lets a caller without one in, because a node has none before
//! it joins; every call but `Join` then insists on the certificate of a known node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertSource;
use shimmer_node::shards::{MAX_REQUEST_BYTES, RecordSender};
use shimmer_node::tls::{self, Credentials};
use shimmer_node::wire::{Facts, check_peer, layout_to_wire, peer_to_wire};
use shimmer_proto::v1::cluster_server::{Cluster, ClusterServer};
use shimmer_proto::v1::shards_server::ShardsServer;
use shimmer_proto::{PROTOCOL_VERSION, v1};
use tonic::transport::server::{TcpConnectInfo, TcpIncoming, TlsConnectInfo};
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::hashes::HashTable;
use super::membership::Membership;
use super::state::{ClusterState, Member};
use super::{ca, placement, token};

/// How often nodes register again.
const HEARTBEAT: Duration = Duration::from_secs(3);
/// How often a silent connection is asked for a sign of life, and how long one may take.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// What the control port serves.
#[derive(Clone)]
pub(super) struct Control {
    pub(super) state: ClusterState,
    pub(super) facts: Facts,
    pub(super) source: Arc<dyn ExpertSource>,
    pub(super) membership: Arc<Membership>,
    /// What records hash to.
    pub(super) hashes: HashTable,
    /// Sends records, below dispatches.
    pub(super) sender: RecordSender,
    /// Most bytes per second a node fetches with; 0 = no limit.
    pub(super) sync_rate: u64,
}

/// Serves on `listener` until `stop` is dropped.
pub(super) async fn serve(
    control: Control,
    credentials: Credentials,
    listener: std::net::TcpListener,
    stop: tokio::sync::oneshot::Receiver<()>,
) -> Result<(), String> {
    let listener = tokio::net::TcpListener::from_std(listener).map_err(|e| e.to_string())?;
    let identity = credentials.tonic_identity().ok_or("the coordinator has no certificate")?;
    let tls = ServerTlsConfig::new()
        .identity(identity)
        .client_ca_root(credentials.tonic_ca())
        .client_auth_optional(true)
        .timeout(Duration::from_secs(10));
    let server = Server::builder()
        .tls_config(tls)
        .map_err(|e| tls::cause(&e))?
        // A node whose machine lost power closes nothing.
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .add_service(ClusterServer::new(control.clone()))
        .add_service(ShardsServer::new(control.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
    let served = tokio::select! {
        served = server => served.map_err(|e| tls::cause(&e)),
        _ = stop => Ok(()),
    };
    control.hashes.save();
    served
}

impl Control {
    /// The member behind a call.
    pub(super) fn caller<T>(&self, request: &Request<T>) -> Result<Member, Status> {
        let id = tls::peer_node_id(request).ok_or_else(|| {
            Status::unauthenticated(
                "this call needs a node's certificate; join first with `shimmer-node join TOKEN`",
            )
        })?;
        self.member(&id)
    }

    /// The member `id`, as long as it is one.
    pub(super) fn member(&self, id: &str) -> Result<Member, Status> {
        let members = self.state.members().map_err(|e| internal(&e))?;
        match members.into_iter().find(|m| m.id == id) {
            Some(member) if member.revoked => {
                if let Some(node) = self.membership.get(id) {
                    node.cut.notify_one();
                }
                Err(Status::permission_denied(format!(
                    "node {} was revoked; join again under a new --data directory with a new token",
                    member.name
                )))
            }
            Some(member) => Ok(member),
            None => Err(Status::unauthenticated(format!(
                "this cluster has no node {id}; join again with a new token"
            ))),
        }
    }

    /// Everything a join does, in the order that leaves nothing half done: the invitation is used up
    /// only for a request that can be signed.
    fn join_now(&self, request: &v1::JoinRequest) -> Result<v1::JoinReply, Status> {
        if request.protocol != PROTOCOL_VERSION {
            return Err(Status::failed_precondition(format!(
                "the node speaks protocol {}, the coordinator speaks protocol {PROTOCOL_VERSION}: install the same version of Shimmer on both machines",
                request.protocol
            )));
        }
        let id = &request.node_id;
        if !tls::is_node_id(id) {
            return Err(Status::invalid_argument(
                "the node's id is malformed; install the same version of Shimmer on both machines",
            ));
        }
        let name: String = request.name.chars().filter(|c| !c.is_control()).take(64).collect();
        let ca = self.state.ca().map_err(|e| internal(&e))?;
        let issued = ca::sign_node(&ca, &request.certificate_request, id).map_err(|e| {
            Status::invalid_argument(format!("the node's certificate request cannot be signed: {e}"))
        })?;
        let members = self.state.members().map_err(|e| internal(&e))?;
        if let Some(old) = members.iter().find(|m| m.id == *id) {
            if old.revoked {
                return Err(Status::permission_denied(format!(
                    "node {} was revoked; join under a new --data directory",
                    old.name
                )));
            }
            if old.key_hash != issued.key_hash {
                return Err(Status::already_exists(format!(
                    "another node has the id {id}; join under a new --data directory"
                )));
            }
        }
        self.state
            .change_invitations(|invitations| token::redeem(invitations, &request.secret))
            .map_err(|e| internal(&e))?
            .map_err(Status::unauthenticated)?;
        self.state
            .change_members(|members| {
                members.retain(|m| m.id != *id);
                members.push(Member {
                    id: id.clone(),
                    name: name.clone(),
                    key_hash: issued.key_hash.clone(),
                    addresses: Vec::new(),
                    revoked: false,
                });
            })
            .map_err(|e| internal(&e))?;
        tracing::info!(node = name, id, "a node joined");
        Ok(v1::JoinReply { certificate: issued.der.into() })
    }
}

#[tonic::async_trait]
impl Cluster for Control {
    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinReply>, Status> {
        let control = self.clone();
        let request = request.into_inner();
        blocking(move || control.join_now(&request)).await.map(Response::new)
    }

    async fn register(
        &self,
        request: Request<v1::RegisterRequest>,
    ) -> Result<Response<v1::RegisterReply>, Status> {
        let member = self.caller(&request)?;
        let remote = remote_addr(&request);
        let request = request.into_inner();
        check_peer(&self.facts, request.peer.as_ref()).map_err(Status::failed_precondition)?;
        let mut addresses: Vec<String> =
            request.advertise.into_iter().filter(|a| !a.is_empty()).take(8).collect();
        if addresses.is_empty() {
            let port =
                u16::try_from(request.port).map_err(|_| Status::invalid_argument("the port is malformed"))?;
            let remote = remote.ok_or_else(|| Status::internal("the caller's address is not known"))?;
            addresses.push(SocketAddr::new(remote.ip(), port).to_string());
        }
        let control = self.clone();
        let held = request.held;
        blocking(move || {
            if let Some(node) = control.membership.get(&member.id) {
                node.introduce(&member.name, &addresses).map_err(Status::aborted)?;
            }
            // A heartbeat with the known addresses writes nothing.
            control
                .state
                .change_members(|members| {
                    if let Some(stored) = members.iter_mut().find(|m| m.id == member.id) {
                        stored.addresses.clone_from(&addresses);
                    }
                })
                .map_err(|e| internal(&e))?;
            // Dialled only when the address is stored: a coordinator that restarts finds it there.
            control.membership.get_or_add(&member.id, &member.name, &addresses).wake.notify_one();
            let members = control.state.members().map_err(|e| internal(&e))?;
            let roster = Self::roster(&members);
            // One that joined and was never seen serving owns nothing: nobody else would fetch its share.
            let serves = |m: &Member| !m.revoked && !m.addresses.is_empty();
            let owners: Vec<String> = members.into_iter().filter(serves).map(|m| m.id).collect();
            let layout = control.source.layout();
            let assigned = placement::assigned(layout, &owners, &member.id);
            Ok(Response::new(v1::RegisterReply {
                peer: Some(peer_to_wire(&control.facts)),
                layout: Some(layout_to_wire(layout)),
                sources: control.sources_for(&member.id, &assigned, &held),
                assigned: assigned.to_wire(),
                roster,
                fetch_bytes_per_s: control.sync_rate,
                heartbeat_ms: HEARTBEAT.as_millis() as u32,
                ..v1::RegisterReply::default()
            }))
        })
        .await
    }
}

/// Runs what touches the disk beside the network.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Status::internal(e.to_string()))?
}

fn internal(error: &dyn std::error::Error) -> Status {
    Status::internal(error.to_string())
}

fn remote_addr<T>(request: &Request<T>) -> Option<SocketAddr> {
    request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>()?.get_ref().remote_addr()
}
