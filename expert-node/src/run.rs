//! Running a node: serve, register, fetch what is missing, until told to stop.

use std::future::Future;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::ExpertSource;
use shimmer_common::profile::NumericProfile;
use shimmer_proto::v1::experts_server::ExpertsServer;
use tokio::sync::watch;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Server, ServerTlsConfig};

use crate::compute::Compute;
use crate::config::{NodeConfig, Records};
use crate::error::NodeError;
use crate::register::{Backoff, Registrar, Registration};
use crate::service::{ExpertsService, Serving, Shared};
use crate::tls::Credentials;
use crate::wire::MAX_MESSAGE_BYTES;

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
    runtime.block_on(async {
        tokio::select! {
            () = shutdown => Ok(()),
            ended = serve(config, listener) => ended,
        }
    })
    // Dropping the runtime closes every connection; the coordinator notices at once.
}

async fn serve(config: NodeConfig, listener: TcpListener) -> Result<(), NodeError> {
    let credentials = config.credentials()?;
    let listen_error = |source| NodeError::Listen { address: config.settings.listen.to_string(), source };
    listener.set_nonblocking(true).map_err(listen_error)?;
    let port = listener.local_addr().map_err(listen_error)?.port();
    let listener = tokio::net::TcpListener::from_std(listener).map_err(listen_error)?;
    let shared = Arc::new(Shared {
        id: config.settings.id.clone(),
        name: config.settings.name.clone(),
        serving: OnceLock::new(),
        held_changed: watch::Sender::new(0),
    });
    if let Some((source, fingerprint)) = open_records(&config)? {
        start_serving(&shared, &config, source, fingerprint, NumericProfile::default())?;
    }
    let server = server(&credentials)?
        .add_service(
            ExpertsServer::new(ExpertsService { shared: shared.clone() })
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
    let settings = &config.settings;
    let registrar =
        Registrar::new(shared, credentials, settings.coordinators.clone(), settings.advertise.clone(), port);
    tracing::info!(node = settings.name, id = settings.id, port, "expert node is up");
    tokio::select! {
        served = server => served.map_err(|e| NodeError::Machine { what: "the server stopped", cause: crate::tls::cause(&e) }),
        ended = stay_registered(registrar, &config) => ended,
    }
}

fn server(credentials: &Credentials) -> Result<Server, NodeError> {
    let Some(identity) = credentials.tonic_identity() else {
        return Err(NodeError::Usage(
            "this node has not joined a cluster; run `shimmer-node join TOKEN --data DIR`".to_owned(),
        ));
    };
    let tls = ServerTlsConfig::new()
        .identity(identity)
        .client_ca_root(credentials.tonic_ca())
        .timeout(Duration::from_secs(10));
    Server::builder().tls_config(tls).map_err(|e| NodeError::Machine {
        what: "the node's certificates cannot be used",
        cause: crate::tls::cause(&e),
    })
}

/// The records this node has before it talked to anybody.
fn open_records(config: &NodeConfig) -> Result<Option<(Arc<dyn ExpertSource>, Fingerprint)>, NodeError> {
    match &config.records {
        Records::Source { source, fingerprint } => Ok(Some((source.clone(), *fingerprint))),
        Records::Pack(_) | Records::Fetched => Ok(None),
    }
}

fn start_serving(
    shared: &Shared,
    config: &NodeConfig,
    source: Arc<dyn ExpertSource>,
    fingerprint: Fingerprint,
    profile: NumericProfile,
) -> Result<(), NodeError> {
    let settings = &config.settings;
    let kernels = settings.kernels()?;
    let ram_bytes = settings.ram_bytes.unwrap_or_else(crate::machine::spare_ram_bytes);
    let threads =
        settings.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let ram = usize::try_from(ram_bytes).unwrap_or(usize::MAX);
    let compute = Compute::start(source.clone(), kernels, profile, ram, threads)?;
    let isa = format!("{:?}", kernels.isa()).to_lowercase();
    let _ = shared.serving.set(Serving {
        fingerprint,
        profile,
        source,
        compute,
        isa,
        ram_bytes,
        syncing: AtomicBool::new(false),
    });
    Ok(())
}

/// Registers for ever. The first answer decides whether this node belongs here; later refusals are
/// logged and tried again, because a coordinator may come back with another model and leave again.
async fn stay_registered(mut registrar: Registrar, config: &NodeConfig) -> Result<(), NodeError> {
    let mut backoff = Backoff::new();
    let mut accepted = false;
    let mut complained = false;
    loop {
        let pause = match registrar.register().await {
            Ok(registration) => {
                if !accepted || complained {
                    tracing::info!(coordinator = registrar.coordinators.join(", "), "registered");
                }
                (accepted, complained) = (true, false);
                backoff.reset();
                let heartbeat = registration.heartbeat;
                take_up(&registrar, config, registration).await?;
                heartbeat
            }
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

/// Does what a registration asks for.
async fn take_up(
    registrar: &Registrar,
    config: &NodeConfig,
    registration: Registration,
) -> Result<(), NodeError> {
    let _ = (registrar, config, registration);
    Ok(())
}
