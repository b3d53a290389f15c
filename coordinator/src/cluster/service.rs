//! The control port: `Cluster` (join, register); `Shards` on the same port is in `shards`.
//!
//! TLS asks for a client certificate but lets a caller without one in, because a node has none before
//! it joins; every call but `Join` then insists on the certificate of a known node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertSource;
use shimmer_node::gate;
use shimmer_node::probe::{About, Admits, Ask, MAX_PROBE_BYTES, ProbeService, reach};
use shimmer_node::shards::{MAX_REQUEST_BYTES, RecordSender};
use shimmer_node::tls::{self, Credentials};
use shimmer_node::wire::{Facts, Held, check_peer, clean_text, layout_to_wire, peer_to_wire};
use shimmer_proto::v1::admin_server::AdminServer;
use shimmer_proto::v1::cluster_server::{Cluster, ClusterServer};
use shimmer_proto::v1::probe_server::ProbeServer;
use shimmer_proto::v1::shards_server::ShardsServer;
use shimmer_proto::{PROTOCOL_VERSION, v1};
use tonic::service::InterceptorLayer;
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::admin::AdminService;
use super::hashes::HashTable;
use super::membership::Membership;
use super::node::{Node, Way};
use super::placement::{LOCAL, Rates, Worker};
use super::planner::{Planner, Review};
use super::state::{ClusterState, Measured, Member};
use super::{ca, token};

/// How often nodes register again: more often until they are reached, to hear why they are not.
const HEARTBEAT: Duration = Duration::from_secs(3);
const UNREACHED_HEARTBEAT: Duration = Duration::from_secs(1);
/// And more often still while it is not decided what they own.
const SETTLING_HEARTBEAT: Duration = Duration::from_millis(300);

/// Bytes sent there and back to measure a link.
const LINK_BYTES: u64 = 4 << 20;
/// A link that is this slow with these bytes is not burdened with more: 100 Mbit/s are.
const FIRST_LINK_BYTES: u64 = 256 << 10;
const SLOW_LINK_BYTES_PER_S: f64 = 13e6;

/// What the control port serves.
#[derive(Clone)]
pub(super) struct Control {
    pub(super) state: ClusterState,
    pub(super) credentials: Credentials,
    pub(super) facts: Facts,
    pub(super) source: Arc<dyn ExpertSource>,
    pub(super) membership: Arc<Membership>,
    pub(super) planner: Arc<Planner>,
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
    admin: AdminService,
    listener: std::net::TcpListener,
    stop: tokio::sync::oneshot::Receiver<()>,
) -> Result<(), String> {
    let listener = tokio::net::TcpListener::from_std(listener).map_err(|e| e.to_string())?;
    let credentials = &control.credentials;
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
        .add_service(ProbeServer::new(control.probe()).max_decoding_message_size(2 * MAX_PROBE_BYTES))
        .add_service(ShardsServer::new(control.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming(incoming);
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
        let name = clean_text(&request.name, 64);
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

    /// Measurements for members.
    fn probe(&self) -> ProbeService {
        let (state, facts, source) = (self.state.clone(), self.facts.clone(), self.source.clone());
        let admits: Admits = Arc::new(move |names| {
            let members = state.members().unwrap_or_default();
            let is_member = |id: &str| members.iter().any(|m| m.id == id && !m.revoked);
            names
                .iter()
                .any(|name| name == tls::COORDINATOR_NAME || tls::node_id(name).is_some_and(is_member))
        });
        let about: About = Arc::new(move || (facts.clone(), Some(source.clone())));
        ProbeService::new(self.credentials.clone(), String::new(), admits, about)
    }

    /// Measures the payload of the link to a node, once per connection.
    fn measure_link(&self, node: &Arc<Node>, addresses: &[String]) {
        if node.way().bytes_per_s.is_some() || !node.is_connected() {
            return;
        }
        // Assumed until it is known, so that one measurement is under way at a time.
        node.set_link_rate(Rates::ASSUMED.link_bytes_per_s);
        let (node, credentials, addresses) = (node.clone(), self.credentials.clone(), addresses.to_vec());
        tokio::spawn(async move {
            for address in addresses {
                for bytes in [FIRST_LINK_BYTES, LINK_BYTES] {
                    let ask = Ask { round_trips: 8, bytes };
                    let reply = reach(&credentials, &address, &tls::node_name(&node.id), ask).await;
                    if !reply.problem.is_empty() {
                        break;
                    }
                    node.set_link_rate(reply.bytes_per_s);
                    if bytes == LINK_BYTES || reply.bytes_per_s < SLOW_LINK_BYTES_PER_S {
                        return;
                    }
                }
            }
        });
    }

    /// What a member should hold: its own experts, and spare copies once everybody has its own.
    fn assigned(&self, member: &str) -> Held {
        let placement = self.planner.placement();
        let nodes = self.membership.all();
        let has_own = |worker: &Worker| {
            let owned = placement.owned(self.source.layout(), &worker.id);
            nodes.iter().find(|node| node.id == worker.id).is_some_and(|node| node.covers(&owned))
        };
        let complete = placement.workers.iter().filter(|w| w.id != LOCAL).all(has_own);
        if complete {
            placement.assigned(self.source.layout(), member)
        } else {
            // What it fetched of its copies stays; nobody takes records away.
            placement.owned(self.source.layout(), member)
        }
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
        let held = request.held;
        if let Some(node) = self.membership.get(&member.id) {
            self.measure_link(&node, &addresses);
        }
        blocking(move || {
            let known = control.membership.get(&member.id);
            let way = known.as_ref().map(|node| node.way()).unwrap_or_default();
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
                        take_measurement(stored, measurement.as_ref(), way);
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
            let settling = control.planner.review().map_err(|e| internal(&e))? == Review::Settling;
            let members = control.state.members().map_err(|e| internal(&e))?;
            let roster = Self::roster(&members);
            let assigned = control.assigned(&member.id);
            let heartbeat = match node.is_connected() {
                _ if settling => SETTLING_HEARTBEAT,
                true => HEARTBEAT,
                false => UNREACHED_HEARTBEAT,
            };
            let layout = control.source.layout();
            Ok(Response::new(v1::RegisterReply {
                peer: Some(peer_to_wire(&control.facts)),
                layout: Some(layout_to_wire(layout)),
                sources: control.sources_for(&member.id, &assigned, &held),
                assigned: assigned.to_wire(),
                fetch_bytes_per_s: control.sync_rate,
                heartbeat_ms: heartbeat.as_millis() as u32,
                roster,
                unreachable: node.unreachable(),
                unix_ms: now,
                settling,
            }))
        })
        .await
    }
}

/// Takes over what a node measured of itself and what we measured of the way to it, unless nothing has changed
/// much: every change is written.
fn take_measurement(member: &mut Member, told: Option<&v1::Measurement>, way: Way) {
    let known = member.measured.clone().unwrap_or_default();
    let mut new = Measured {
        round_trip_us: way.round_trip_us.or(known.round_trip_us),
        link_bytes_per_s: way.bytes_per_s.or(known.link_bytes_per_s),
        ..known.clone()
    };
    if let Some(told) = told {
        new.disk_bytes_per_s = told.disk_bytes_per_s;
        new.gemv_bytes_per_s = told.gemv_bytes_per_s;
        new.ram_bytes = told.ram_bytes;
        new.disk_bytes = Some(told.disk_bytes).filter(|bytes| *bytes > 0);
    }
    let near = |a: f64, b: f64| (a - b).abs() <= 0.2 * a.abs().max(b.abs());
    let same = near(known.disk_bytes_per_s, new.disk_bytes_per_s)
        && near(known.gemv_bytes_per_s, new.gemv_bytes_per_s)
        && near(known.ram_bytes as f64, new.ram_bytes as f64)
        && near(known.disk_bytes.unwrap_or(0) as f64, new.disk_bytes.unwrap_or(0) as f64)
        && near(known.round_trip_us.unwrap_or(0.0), new.round_trip_us.unwrap_or(0.0))
        && near(known.link_bytes_per_s.unwrap_or(0.0), new.link_bytes_per_s.unwrap_or(0.0));
    if !same {
        member.measured = Some(new);
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
