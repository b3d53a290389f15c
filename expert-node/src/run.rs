//! Running a node: serve, register, fetch what is missing, until told to stop.

use std::future::Future;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use shimmer_proto::v1::experts_server::ExpertsServer;
use shimmer_proto::v1::liveness_server::LivenessServer;
use shimmer_proto::v1::probe_server::ProbeServer;
use shimmer_proto::v1::shards_server::ShardsServer;
use tonic::service::InterceptorLayer;
use tonic::transport::{Server, ServerTlsConfig};

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::gate;
use crate::liveness::LivenessService;
use crate::probe::{About, Admits, MAX_PROBE_BYTES, ProbeService};
use crate::register::{Backoff, Registrar, Registration};
use crate::service::{ExpertsService, Shared};
use crate::shard::Shard;
use crate::shards::{MAX_REQUEST_BYTES, ShardsService};
use crate::tls::{self, Credentials};
use crate::wire::MAX_MESSAGE_BYTES;

/// For how long a node that was started again may look like a copy of itself.
const SAME_NODE: Duration = Duration::from_secs(4);
/// Longest wait for the compute thread at the end.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves experts on `listener` until `shutdown` is done. Blocks: the network runs on this thread,
/// the arithmetic on others. A coordinator that is away is waited for.
///
/// # Errors
/// [`NodeError`]: unusable data directory, or a coordinator that refuses the first registration.
pub fn run(
    config: NodeConfig,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    let _lock = config.lock()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| NodeError::Machine { what: "cannot start the network runtime", cause: e.to_string() })?;
    let (alive, stopped) = mpsc::channel();
    let ended = runtime.block_on(async {
        tokio::select! {
            () = shutdown => Ok(()),
            ended = serve(config, listener, alive) => ended,
        }
    });
    // Closes every connection; the coordinator notices at once.
    drop(runtime);
    // The directory can be used again when the compute thread has let go of it. One that hangs in a
    // read is left behind.
    let _ = stopped.recv_timeout(LET_GO_TIMEOUT);
    ended
}

async fn serve(config: NodeConfig, listener: TcpListener, alive: mpsc::Sender<()>) -> Result<(), NodeError> {
    let credentials = config.credentials()?;
    let listen_error = |source| NodeError::Listen { address: config.settings.listen.to_string(), source };
    listener.set_nonblocking(true).map_err(listen_error)?;
    let port = listener.local_addr().map_err(listen_error)?.port();
    let listener = tokio::net::TcpListener::from_std(listener).map_err(listen_error)?;
    config.settings.kernels()?;
    let shared = Arc::new(Shared::new(config.settings.clone(), &config.data_dir, alive)?);
    let shard = Shard::open(&config, &shared)?;
    let gate = shared.gate.clone();
    let server = server(&credentials, &config.data_dir)?
        .layer(InterceptorLayer::new(move |request| gate.recognise(request)))
        .add_service(LivenessServer::new(LivenessService { shared: shared.clone() }))
        .add_service(
            ExpertsServer::new(ExpertsService { shared: shared.clone() })
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .add_service(
            ShardsServer::new(ShardsService { shared: shared.clone() })
                .max_decoding_message_size(MAX_REQUEST_BYTES),
        )
        .add_service(
            ProbeServer::new(probe(&shared, &credentials)).max_decoding_message_size(2 * MAX_PROBE_BYTES),
        )
        .serve_with_incoming(shared.gate.incoming(listener));
    let settings = &config.settings;
    tracing::info!(node = settings.name, id = settings.id, port, "expert node is up");
    let registrar = Registrar::new(shared, credentials, config, port);
    tokio::select! {
        served = server => served.map_err(|e| NodeError::Machine { what: "the server stopped", cause: tls::cause(&e) }),
        ended = stay_registered(registrar, shard) => ended,
    }
}

/// Measurements for the coordinator and for members that may fetch records.
fn probe(shared: &Arc<Shared>, credentials: &Credentials) -> ProbeService {
    let (admitting, telling) = (shared.clone(), shared.clone());
    let admits: Admits = Arc::new(move |names| {
        let is_member = |name: &String| tls::node_id(name).is_some_and(|id| admitting.roster.contains(id));
        names.iter().any(|name| name == tls::COORDINATOR_NAME || is_member(name))
    });
    let about: About = Arc::new(move || {
        let source = telling.records.get().map(|(source, _)| source.clone());
        (telling.facts(), source)
    });
    ProbeService::new(credentials.clone(), shared.settings.id.clone(), admits, about)
}

fn server(credentials: &Credentials, data_dir: &Path) -> Result<Server, NodeError> {
    let Some(identity) = credentials.tonic_identity() else {
        return Err(NodeError::Usage(
            "this node has not joined a cluster; run `shimmer-node join TOKEN --data DIR`".to_owned(),
        ));
    };
    let tls = ServerTlsConfig::new()
        .identity(identity)
        .client_ca_root(credentials.tonic_ca())
        .timeout(Duration::from_secs(10));
    let server = Server::builder().tls_config(tls).map_err(|e| NodeError::Data {
        path: data_dir.to_owned(),
        what: format!(
            "ca.crt, node.crt or node.key is damaged ({}); restore it or join again with a new token under another --data directory",
            tls::cause(&e).trim_end_matches('.')
        ),
    })?;
    Ok(gate::limited(server))
}

/// Registers for ever. The first answer decides whether this node belongs here; later refusals are
/// logged and tried again, because a coordinator may come back with another model and leave again.
async fn stay_registered(mut registrar: Registrar, mut shard: Shard) -> Result<(), NodeError> {
    let mut backoff = Backoff::new();
    let mut accepted = false;
    let mut complained = false;
    let mut unreachable: Option<String> = None;
    let begun = Instant::now();
    let mut skewed = false;
    loop {
        let pause = match registrar.register().await {
            Ok(registration) => {
                if !accepted || complained {
                    tracing::info!(coordinator = registrar.reached(), "registered");
                }
                (accepted, complained) = (true, false);
                backoff.reset();
                if unreachable.as_ref() != Some(&registration.unreachable) {
                    let before = unreachable.replace(registration.unreachable.clone());
                    registrar
                        .note_reachable(before.as_deref().unwrap_or_default(), &registration.unreachable);
                }
                if let Some(skew) = registration.skew.as_ref().filter(|_| !skewed) {
                    tracing::warn!("{skew}");
                }
                skewed = registration.skew.is_some();
                take_up(&registrar, &mut shard, &registration)?;
                registration.heartbeat
            }
            // The coordinator may not have noticed yet that this process was started again.
            Err(error @ NodeError::Twin(_)) if !accepted && begun.elapsed() > SAME_NODE => return Err(error),
            Err(error @ (NodeError::Mismatch(_) | NodeError::Refused(_))) if !accepted => return Err(error),
            Err(error) => {
                if !complained {
                    tracing::warn!(%error, "not registered, trying again");
                }
                complained = true;
                backoff.pause()
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Serves the coordinator's model and fetches what is assigned and missing.
fn take_up(registrar: &Registrar, shard: &mut Shard, registration: &Registration) -> Result<(), NodeError> {
    let shared = &registrar.shared;
    let coordinator = &registration.coordinator;
    let fingerprint = coordinator.fingerprint.ok_or_else(|| {
        NodeError::Mismatch(
            "the coordinator did not name its model; install the same version of Shimmer on both machines"
                .to_owned(),
        )
    })?;
    shard.begin(shared, fingerprint, &registration.layout)?;
    shared.serve(coordinator.profile)?;
    shard.fetch_missing(shared, &registrar.credentials, registration);
    Ok(())
}
