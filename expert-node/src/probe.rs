//! The `Probe` service, which coordinator and nodes offer to each other, and its client side: round trips,
//! throughput and disk as they are while everything serves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shimmer_common::experts::ExpertSource;
use shimmer_common::io::IoOptions;
use shimmer_common::measure::{Reads, disk_speed};
use shimmer_proto::v1;
use shimmer_proto::v1::probe_client::ProbeClient;
use shimmer_proto::v1::probe_server::Probe;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::tls::{self, Credentials};
use crate::wire::{Facts, peer_to_wire};

/// Largest message of an echo.
pub const MAX_PROBE_BYTES: usize = 1 << 20;
/// Bytes per message of a throughput measurement.
const PART_BYTES: usize = 256 << 10;
/// Bounds of what one call may ask for.
const MAX_ROUND_TRIPS: u32 = 200;
const MAX_BYTES: u64 = 64 << 20;
const MAX_DISK: Duration = Duration::from_secs(2);
/// Echoes and disk measurements at once.
const AT_ONCE: usize = 4;
/// Time for connecting, and for a whole measurement.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(30);
/// Nagle's algorithm against delayed acknowledgements costs at least this.
const STALL: Duration = Duration::from_millis(30);
/// TCP and IPv4 headers with time stamps.
const HEADER_BYTES: u32 = 52;

/// Who may call, judged by the names in a caller's certificate.
pub type Admits = Arc<dyn Fn(&[String]) -> bool + Send + Sync>;
/// What there is to say and to read now; it changes while a node learns its model.
pub type About = Arc<dyn Fn() -> (Facts, Option<Arc<dyn ExpertSource>>) + Send + Sync>;

/// The service.
pub struct ProbeService {
    credentials: Credentials,
    node_id: String,
    admits: Admits,
    about: About,
    room: Arc<Semaphore>,
}

impl ProbeService {
    /// `node_id` is empty for the coordinator.
    pub fn new(credentials: Credentials, node_id: String, admits: Admits, about: About) -> Self {
        Self { credentials, node_id, admits, about, room: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Leave to measure, until dropped.
    fn take_room(&self) -> Result<OwnedSemaphorePermit, Status> {
        let room = self.room.clone().try_acquire_owned();
        room.map_err(|_| Status::resource_exhausted("too many measurements at once; try again"))
    }

    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        if (self.admits)(&tls::peer_names(request)) {
            return Ok(());
        }
        Err(Status::permission_denied("only members of the cluster may measure; join it first"))
    }
}

#[tonic::async_trait]
impl Probe for ProbeService {
    type EchoStream = ReceiverStream<Result<v1::EchoPart, Status>>;

    async fn echo(
        &self,
        request: Request<tonic::Streaming<v1::EchoPart>>,
    ) -> Result<Response<Self::EchoStream>, Status> {
        self.check(&request)?;
        let room = self.take_room()?;
        let mut incoming = request.into_inner();
        let (parts, stream) = mpsc::channel(4);
        tokio::spawn(async move {
            let end = tokio::time::Instant::now() + PATIENCE;
            // Ends with the caller, or when it took too long.
            while let Ok(Ok(Some(part))) = tokio::time::timeout_at(end, incoming.message()).await {
                if parts.send(Ok(part)).await.is_err() {
                    break;
                }
            }
            drop(room);
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn reach(&self, request: Request<v1::ReachRequest>) -> Result<Response<v1::ReachReply>, Status> {
        self.check(&request)?;
        let request = request.into_inner();
        let name = match request.node_id.as_str() {
            "" => tls::COORDINATOR_NAME.to_owned(),
            id if tls::is_node_id(id) => tls::node_name(id),
            _ => return Err(Status::invalid_argument("the node id is malformed")),
        };
        let ask = Ask { round_trips: request.round_trips, bytes: request.bytes };
        Ok(Response::new(reach(&self.credentials, &request.address, &name, ask).await))
    }

    async fn disk(&self, request: Request<v1::DiskRequest>) -> Result<Response<v1::DiskReply>, Status> {
        self.check(&request)?;
        let room = self.take_room()?;
        let budget = Duration::from_millis(request.get_ref().millis.into()).min(MAX_DISK);
        let (_, source) = (self.about)();
        let measured = tokio::task::spawn_blocking(move || {
            let _room = room;
            let Some(source) = source else { return Err("there are no records yet".to_owned()) };
            let reads = Reads::of_experts(source.as_ref()).map_err(|e| e.to_string())?;
            disk_speed(&reads, IoOptions::default(), tls::unix_millis(), budget).map_err(|e| e.to_string())
        });
        let reply = match measured.await.map_err(|e| Status::internal(e.to_string()))? {
            Ok(speed) => v1::DiskReply {
                bytes_per_s: speed.bytes_per_s,
                read_us: speed.read_s * 1e6,
                ..v1::DiskReply::default()
            },
            Err(problem) => v1::DiskReply { problem, ..v1::DiskReply::default() },
        };
        Ok(Response::new(reply))
    }

    async fn facts(&self, request: Request<v1::FactsRequest>) -> Result<Response<v1::FactsReply>, Status> {
        self.check(&request)?;
        let (facts, _) = (self.about)();
        let certificate = self.credentials.identity.as_ref().map(|(pem, _)| tls::validity(pem.as_bytes()));
        let (not_before_unix, not_after_unix) = certificate.and_then(Result::ok).unwrap_or_default();
        Ok(Response::new(v1::FactsReply {
            peer: Some(peer_to_wire(&facts)),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node_id: self.node_id.clone(),
            not_before_unix,
            not_after_unix,
            unix_ms: tls::unix_millis(),
        }))
    }
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Round trips of a small message.
    pub round_trips: u32,
    /// Bytes for the throughput; 0 = not measured.
    pub bytes: u64,
}

/// Dials a member and measures the way to it; what goes wrong is in the reply.
pub async fn reach(credentials: &Credentials, address: &str, name: &str, ask: Ask) -> v1::ReachReply {
    let mtu = path_mtu(address).await;
    let measured = async {
        let channel = tls::connect(credentials, address, name, CONNECT_TIMEOUT).await?;
        measure(channel, ask).await
    };
    match tokio::time::timeout(PATIENCE, measured).await {
        Ok(Ok(reply)) => v1::ReachReply { mtu, ..reply },
        Ok(Err(problem)) => v1::ReachReply { problem, mtu, ..v1::ReachReply::default() },
        Err(_) => v1::ReachReply {
            problem: format!("answered, but not to the end within {} s", PATIENCE.as_secs()),
            mtu,
            ..v1::ReachReply::default()
        },
    }
}

/// Measures over an open channel.
async fn measure(channel: Channel, ask: Ask) -> Result<v1::ReachReply, String> {
    let mut client = ProbeClient::new(channel).max_decoding_message_size(2 * MAX_PROBE_BYTES);
    let (parts, outgoing) = mpsc::channel(2);
    let call = client.echo(ReceiverStream::new(outgoing)).await;
    let mut echoes = call.map_err(|status| status.message().to_owned())?.into_inner();
    let gone = || "closed the connection during the measurement".to_owned();
    let part = |sequence, bytes| v1::EchoPart { sequence, payload: vec![0x5a; bytes].into() };
    let mut round_trip_us = Vec::new();
    let mut pair = Duration::MAX;
    for sequence in 0..ask.round_trips.clamp(1, MAX_ROUND_TRIPS) {
        let begun = Instant::now();
        parts.send(part(sequence, 32)).await.map_err(|_| gone())?;
        echoes.message().await.map_err(|s| s.message().to_owned())?.ok_or_else(gone)?;
        round_trip_us.push(u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX));
        if sequence % 8 == 0 {
            // Two in a row: without NODELAY the second waits for an acknowledgement of the first.
            let begun = Instant::now();
            for _ in 0..2 {
                parts.send(part(sequence, 32)).await.map_err(|_| gone())?;
                tokio::task::yield_now().await;
            }
            for _ in 0..2 {
                echoes.message().await.map_err(|s| s.message().to_owned())?.ok_or_else(gone)?;
            }
            pair = pair.min(begun.elapsed());
        }
    }
    round_trip_us.sort_unstable();
    let fastest = Duration::from_micros(round_trip_us.first().copied().unwrap_or(0).into());
    let count = ask.bytes.min(MAX_BYTES).div_ceil(PART_BYTES as u64);
    let begun = Instant::now();
    let send = async {
        for sequence in 0..count {
            parts.send(part(sequence as u32, PART_BYTES)).await.map_err(|_| gone())?;
        }
        Ok::<_, String>(())
    };
    let receive = async {
        for _ in 0..count {
            echoes.message().await.map_err(|s| s.message().to_owned())?.ok_or_else(gone)?;
        }
        Ok::<_, String>(())
    };
    tokio::try_join!(send, receive)?;
    let seconds = begun.elapsed().as_secs_f64().max(1e-9);
    Ok(v1::ReachReply {
        round_trip_us,
        bytes_per_s: (count * PART_BYTES as u64) as f64 / seconds,
        no_delay: pair < fastest + STALL,
        ..v1::ReachReply::default()
    })
}

/// Largest packet to `address`, from the segment size the two sides agreed on; 0 where it cannot be known.
async fn path_mtu(address: &str) -> u32 {
    let connect = tokio::net::TcpStream::connect(address);
    let Ok(Ok(stream)) = tokio::time::timeout(CONNECT_TIMEOUT, connect).await else { return 0 };
    #[cfg(unix)]
    {
        let segment = socket2::SockRef::from(&stream).tcp_mss();
        segment.map_or(0, |segment| segment + HEADER_BYTES)
    }
    #[cfg(not(unix))]
    {
        drop(stream);
        0
    }
}
