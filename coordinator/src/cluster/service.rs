//! The control port: `Cluster` (join, register); `Shards` on the same port is in `shards`.
//!
//! TLS asks for a client certificate but lets a caller without one in, because a node has none before
//! it joins; every call but `Join` then insists on the certificate of a known node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertSource;
use shimmer_node::gate;
use shimmer_node::tls::{self, Credentials};
use shimmer_node::wire::{Facts, check_peer, layout_to_wire, peer_to_wire};
use shimmer_proto::v1::admin_server::AdminServer;
use shimmer_proto::v1::cluster_server::{Cluster, ClusterServer};
use shimmer_proto::v1::shards_server::ShardsServer;
use shimmer_proto::{PROTOCOL_VERSION, v1};
use tonic::service::InterceptorLayer;
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::admin::AdminService;
use super::membership::Membership;
use super::planner::Planner;
use super::state::{ClusterState, Measured, Member};
use super::{ca, token};

/// How often nodes register again: more often until they are reached, to hear why they are not.
const HEARTBEAT: Duration = Duration::from_secs(3);
const UNREACHED_HEARTBEAT: Duration = Duration::from_secs(1);

/// What the control port serves.
#[derive(Clone)]
pub(super) struct Control {
    pub(super) state: ClusterState,
    pub(super) facts: Facts,
    pub(super) source: Arc<dyn ExpertSource>,
    pub(super) membership: Arc<Membership>,
    pub(super) planner: Arc<Planner>,
}

/// Serves on `listener` until `stop` is dropped.
pub(super) async fn serve(
    control: Control,
    admin: AdminService,
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
    let gate = control.membership.gate.clone();
    let incoming = gate.incoming(listener);
    let server = gate::limited(Server::builder().tls_config(tls).map_err(|e| tls::cause(&e))?)
        .layer(InterceptorLayer::new(move |request| gate.recognise(request)))
        .add_service(ClusterServer::new(control.clone()))
        .add_service(AdminServer::new(admin))
        .add_service(ShardsServer::new(control))
        .serve_with_incoming(incoming);
    tokio::select! {
        served = server => served.map_err(|e| tls::cause(&e)),
        _ = stop => Ok(()),
    }
}

impl Control {
    /// The member behind a call.
    pub(super) fn caller<T>(&self, request: &Request<T>) -> Result<Member, Status> {
        let id = tls::peer_node_id(request).ok_or_else(|| {
            Status::unauthenticated(
                "this call needs a node's certificate; join first with `shimmer-node join TOKEN`",
            )
        })?;
        let members = self.state.members().map_err(|e| internal(&e))?;
        match members.into_iter().find(|m| m.id == id) {
            Some(member) if member.revoked => Err(Status::permission_denied(format!(
                "node {} was revoked; join again under a new --data directory with a new token",
                member.name
            ))),
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
                let known = members.iter().find(|m| m.id == *id).cloned();
                members.retain(|m| m.id != *id);
                members.push(Member {
                    id: id.clone(),
                    name: name.clone(),
                    key_hash: issued.key_hash.clone(),
                    addresses: Vec::new(),
                    revoked: false,
                    drained: false,
                    measured: known.and_then(|m| m.measured),
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
        let remote = request.remote_addr();
        let request = request.into_inner();
        check_peer(&self.facts, request.peer.as_ref()).map_err(Status::failed_precondition)?;
        let measured = request.measurement;
        let mut addresses: Vec<String> =
            request.advertise.iter().filter(|a| !a.is_empty()).take(8).cloned().collect();
        if addresses.is_empty() {
            let port =
                u16::try_from(request.port).map_err(|_| Status::invalid_argument("the port is malformed"))?;
            let remote = remote.ok_or_else(|| Status::internal("the caller's address is not known"))?;
            addresses.push(SocketAddr::new(remote.ip(), port).to_string());
        }
        let control = self.clone();
        let measurement = request.measurement;
        blocking(move || {
            let known = control.membership.get(&member.id);
            if let Some(node) = &known {
                measurement.into_iter().for_each(|measured| node.set_measurement(measured));
                node.introduce(&member.name, &addresses, &request.instance).map_err(Status::aborted)?;
            }
            // A heartbeat with the known addresses writes nothing.
            control
                .state
                .change_members(|members| {
                    if let Some(stored) = members.iter_mut().find(|m| m.id == member.id) {
                        stored.addresses.clone_from(&addresses);
                        measured.iter().for_each(|m| take_measurement(stored, m));
                    }
                })
                .map_err(|e| internal(&e))?;
            // Dialled only when the address is stored: a coordinator that restarts finds it there.
            let node = control.membership.get_or_add(&member.id, &member.name, &addresses);
            if known.is_none() {
                node.introduce(&member.name, &addresses, &request.instance).map_err(Status::aborted)?;
            }
            let now = tls::unix_millis();
            node.note_skew(tls::clock_skew(now, request.unix_ms, &format!("node {}", member.name)));
            control.planner.review().map_err(|e| internal(&e))?;
            let members = control.state.members().map_err(|e| internal(&e))?;
            let roster = members.into_iter().filter(|m| !m.revoked).map(|m| m.id).collect();
            let heartbeat = if node.is_connected() { HEARTBEAT } else { UNREACHED_HEARTBEAT };
            let layout = control.source.layout();
            Ok(Response::new(v1::RegisterReply {
                peer: Some(peer_to_wire(&control.facts)),
                layout: Some(layout_to_wire(layout)),
                assigned: control.planner.assigned(&member.id).to_wire(),
                heartbeat_ms: heartbeat.as_millis() as u32,
                roster,
                unreachable: node.unreachable(),
                unix_ms: now,
                ..v1::RegisterReply::default()
            }))
        })
        .await
    }
}

/// Takes over what a node measured of itself, unless nothing has changed much: every change is written.
fn take_measurement(member: &mut Member, told: &v1::Measurement) {
    let known = member.measured.clone().unwrap_or_default();
    let told = Measured {
        disk_bytes_per_s: told.disk_bytes_per_s,
        gemv_bytes_per_s: told.gemv_bytes_per_s,
        ram_bytes: told.ram_bytes,
        disk_bytes: Some(told.disk_bytes).filter(|bytes| *bytes > 0),
        ..known.clone()
    };
    let near = |a: f64, b: f64| (a - b).abs() <= 0.1 * a.abs().max(b.abs());
    let same = near(known.disk_bytes_per_s, told.disk_bytes_per_s)
        && near(known.gemv_bytes_per_s, told.gemv_bytes_per_s)
        && near(known.ram_bytes as f64, told.ram_bytes as f64)
        && near(known.disk_bytes.unwrap_or(0) as f64, told.disk_bytes.unwrap_or(0) as f64);
    if !same {
        member.measured = Some(told);
    }
}

/// Runs what touches the disk beside the network.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Status::internal(e.to_string()))?
}

pub(super) fn internal(error: &dyn std::error::Error) -> Status {
    Status::internal(error.to_string())
}
