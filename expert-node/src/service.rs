//! The `Experts` service: the one stream over which a coordinator uses this node.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::ExpertSource;
use shimmer_common::experts::usage::{UsageKeeper, file};
use shimmer_common::profile::NumericProfile;
use shimmer_proto::v1;
use shimmer_proto::v1::experts_server::Experts;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::compute::{Answers, Cancelled, Compute, Job, Outgoing};
use crate::config::Settings;
use crate::error::NodeError;
use crate::gate::Gate;
use crate::lease::{GREETING, Lease};
use crate::measure::Meter;
use crate::roster::Roster;
use crate::shards::Sharing;
use crate::tls;
use crate::wire::{Facts, Held, MAX_MESSAGE_BYTES, check_peer, peer_to_wire};

/// KiB of dispatches and their answers that one stream may have waiting in this process. Beyond that
/// the node reads no further, and HTTP/2 makes the coordinator wait.
const INTAKE_KIB: usize = (2 * MAX_MESSAGE_BYTES) >> 10;

/// What a node serves once it knows its model.
pub(crate) struct Serving {
    pub(crate) profile: NumericProfile,
    pub(crate) source: Arc<dyn ExpertSource>,
    pub(crate) compute: Compute,
    pub(crate) isa: String,
    pub(crate) ram_bytes: u64,
    /// Whether records are still being fetched.
    pub(crate) syncing: AtomicBool,
}

impl Serving {
    /// The experts held now.
    pub(crate) fn held(&self) -> Held {
        let layout = self.source.layout();
        let mut held = Held::none(layout);
        layout.ids().filter(|&id| self.source.contains(id)).for_each(|id| held.insert(id));
        held
    }

    fn holdings(&self) -> v1::Holdings {
        v1::Holdings { held: self.held().to_wire(), syncing: self.syncing.load(Ordering::Relaxed) }
    }
}

/// State shared by the service and the registration task.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    /// Random id of this process.
    pub(crate) instance: [u8; 16],
    /// For whom this node works.
    pub(crate) lease: Arc<Lease>,
    /// The connections to this node.
    pub(crate) gate: Arc<Gate>,
    /// Who may fetch records here.
    pub(crate) roster: Arc<Roster>,
    /// What this node measured of itself.
    pub(crate) meter: Meter,
    /// Whether it is open what this node should own.
    pub(crate) settling: AtomicBool,
    data_dir: PathBuf,
    /// Where the usage of this node's experts is kept.
    usage_path: PathBuf,
    /// The records and their model, once there are any.
    pub(crate) records: OnceLock<(Arc<dyn ExpertSource>, Fingerprint)>,
    /// Set by the first coordinator that has the same model: it also fixes the numeric profile.
    serving: OnceLock<Serving>,
    /// What other members get from this node and what it gets from them.
    pub(crate) sharing: Sharing,
    /// Counts how often the set of held experts changed.
    pub(crate) held_changed: watch::Sender<u64>,
    /// Dropped with the last user of the records.
    alive: std::sync::mpsc::Sender<()>,
}

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        data_dir: &Path,
        alive: std::sync::mpsc::Sender<()>,
    ) -> Result<Self, NodeError> {
        let mut instance = [0; 16];
        getrandom::fill(&mut instance)
            .map_err(|e| NodeError::Machine { what: "cannot draw a random id", cause: e.to_string() })?;
        Ok(Self {
            settings,
            instance,
            lease: Lease::new(),
            gate: Gate::new(),
            roster: Arc::default(),
            meter: Meter::default(),
            settling: AtomicBool::new(false),
            data_dir: data_dir.to_owned(),
            usage_path: data_dir.join(file::FILE_NAME),
            records: OnceLock::new(),
            serving: OnceLock::new(),
            sharing: Sharing::new(),
            held_changed: watch::Sender::new(0),
            alive,
        })
    }

    /// What is served, if anything is.
    pub(crate) fn serving(&self) -> Option<&Serving> {
        self.serving.get()
    }

    /// Cuts off members that were revoked.
    pub(crate) fn revoke(&self, ids: &[String]) {
        for id in self.roster.revoke(ids) {
            tracing::info!(id, "a member was revoked");
            self.gate.close_node(&id);
        }
    }

    /// What is served; begins to serve when there are records and `profile` is known.
    pub(crate) fn serve(&self, profile: Option<NumericProfile>) -> Result<Option<&Serving>, NodeError> {
        if let Some(serving) = self.serving.get() {
            return Ok(Some(serving));
        }
        let (Some((source, model)), Some(profile)) = (self.records.get(), profile) else { return Ok(None) };
        let settings = &self.settings;
        let kernels = settings.kernels()?;
        let ram_bytes = settings.ram_bytes.unwrap_or_else(crate::machine::spare_ram_bytes);
        let threads =
            settings.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let ram = usize::try_from(ram_bytes).unwrap_or(usize::MAX);
        let usage = UsageKeeper::open(Some(self.usage_path.clone()), *model, source.layout(), || None);
        let compute =
            Compute::start(source.clone(), kernels, profile, ram, threads, usage, self.alive.clone())?;
        self.meter.start(compute.store(), &self.data_dir, threads);
        Ok(Some(self.serving.get_or_init(|| Serving {
            profile,
            source: source.clone(),
            compute,
            isa: kernels.isa().to_string(),
            ram_bytes,
            syncing: AtomicBool::new(self.settling.load(Ordering::Relaxed)),
        })))
    }

    /// Notes whether records are still being fetched, and tells the coordinator of a change. As long as it is
    /// not decided what this node should own, it is not complete.
    pub(crate) fn set_syncing(&self, fetching: bool) {
        let syncing = fetching || self.settling.load(Ordering::Relaxed);
        if let Some(serving) = self.serving.get()
            && serving.syncing.swap(syncing, Ordering::Relaxed) != syncing
        {
            self.held_changed.send_modify(|n| *n += 1);
        }
    }

    /// How far the fetching of records is.
    pub(crate) fn sync_progress(&self) -> v1::SyncProgress {
        self.sharing.progress.to_wire()
    }

    /// The experts held, as a bitset; empty before there is a model.
    pub(crate) fn held(&self) -> bytes::Bytes {
        self.serving.get().map(|serving| serving.held().to_wire()).unwrap_or_default()
    }

    /// Our side of every handshake.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            name: format!("node {}", self.settings.name),
            fingerprint: self.records.get().map(|(_, fingerprint)| *fingerprint),
            profile: self.serving.get().map(|s| s.profile),
        }
    }
}

/// The service.
pub(crate) struct ExpertsService {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl Experts for ExpertsService {
    type ServeStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::FromNode, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<v1::ToNode>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        coordinator_only(&self.shared, &request)?;
        // The compute thread must never wait for a peer that does not read; what it may owe is bounded
        // by the intake.
        let (answers, stream) = mpsc::unbounded_channel();
        let shared = self.shared.clone();
        tokio::spawn(async move {
            let end = session(&shared, request.into_inner(), &answers).await;
            match end {
                Ok(()) => tracing::info!("the coordinator closed its stream"),
                Err(why) => tracing::info!(why, "a coordinator's stream ended"),
            }
        });
        // The room of an answer is free when it is taken out here.
        let stream = UnboundedReceiverStream::new(stream).map(|outgoing: Outgoing| Ok(outgoing.message));
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Refuses callers other than the coordinator. The TLS layer has checked that the certificate is of our
/// CA; only one name may use this node.
pub(crate) fn coordinator_only<T>(shared: &Shared, request: &Request<T>) -> Result<(), Status> {
    if tls::peer_names(request).iter().any(|name| name == tls::COORDINATOR_NAME) {
        return Ok(());
    }
    Err(Status::unauthenticated(format!(
        "node {} serves its coordinator only; call with the coordinator's certificate",
        shared.settings.name
    )))
}

async fn session(
    shared: &Shared,
    mut incoming: Streaming<v1::ToNode>,
    answers: &Answers,
) -> Result<(), String> {
    let send = |message| {
        let sent = answers.send(Outgoing { message: v1::FromNode { message: Some(message) }, _room: None });
        sent.map_err(|_| "the coordinator went away".to_owned())
    };
    let Some(v1::to_node::Message::Hello(hello)) = next(&mut incoming).await? else {
        return Err("it did not begin with a greeting".to_owned());
    };
    let checked = check_peer(&shared.facts(), hello.peer.as_ref()).and_then(|theirs| {
        let serving = shared.serve(theirs.profile).map_err(|e| e.to_string())?;
        let name = &shared.settings.name;
        let serving = serving
            .ok_or_else(|| format!("node {name} has no model yet; it asks the coordinator for one"))?;
        Ok((serving, shared.lease.take(&hello.instance, GREETING)?))
    });
    let (serving, mut stay) = match checked {
        Ok(agreed) => agreed,
        Err(why) => {
            send(v1::from_node::Message::Refused(why.clone()))?;
            return Err(why);
        }
    };
    let mut held_changed = shared.held_changed.subscribe();
    held_changed.mark_unchanged();
    send(v1::from_node::Message::Hello(v1::NodeHello {
        peer: Some(peer_to_wire(&shared.facts())),
        node_id: shared.settings.id.clone(),
        holdings: Some(serving.holdings()),
        isa: serving.isa.clone(),
        ram_bytes: serving.ram_bytes,
        instance: shared.instance.to_vec().into(),
    }))?;
    match next(&mut incoming).await? {
        Some(v1::to_node::Message::Verdict(verdict)) if verdict.accepted => {}
        Some(v1::to_node::Message::Verdict(verdict)) => return Err(verdict.reason),
        // Discovery looks at the greeting and leaves.
        None => return Ok(()),
        Some(_) => return Err("it sent work before its verdict".to_owned()),
    }
    tracing::info!("the coordinator reached this node; serving it");
    let cancelled = Cancelled::default();
    let intake = Arc::new(Semaphore::new(INTAKE_KIB));
    loop {
        let message = tokio::select! {
            message = next(&mut incoming) => message?,
            () = stay.lost() => {
                let why = "the pings stayed away and another coordinator took the node over".to_owned();
                send(v1::from_node::Message::Refused(why.clone()))?;
                return Err(why);
            }
            changed = held_changed.changed() => {
                changed.map_err(|_| "the node is stopping".to_owned())?;
                send(v1::from_node::Message::Holdings(serving.holdings()))?;
                continue;
            }
        };
        match message {
            None => return Ok(()),
            Some(v1::to_node::Message::Dispatch(dispatch)) => {
                let received = Instant::now();
                let room = intake.clone().acquire_many_owned(room_for(&dispatch, serving)).await;
                let room = room.map_err(|_| "the node is stopping".to_owned())?;
                let (cancelled, answers) = (cancelled.clone(), answers.clone());
                let working = shared.sharing.activity.begin();
                serving.compute.submit(Job {
                    dispatch,
                    received,
                    cancelled,
                    answers,
                    room,
                    _working: working,
                });
            }
            Some(v1::to_node::Message::Cancel(cancel)) => cancelled.add(cancel.id),
            Some(_) => return Err("it repeated its greeting".to_owned()),
        }
    }
}

/// KiB that a dispatch and its answer take up at most.
fn room_for(dispatch: &v1::Dispatch, serving: &Serving) -> u32 {
    let sums = (dispatch.rows as usize).saturating_mul(serving.source.layout().hidden_size).saturating_mul(8);
    let bytes = prost::Message::encoded_len(dispatch).saturating_add(sums);
    u32::try_from((bytes >> 10).saturating_add(1).min(INTAKE_KIB)).unwrap_or(u32::MAX)
}

/// The next message; `None` at the end of the stream.
async fn next(incoming: &mut Streaming<v1::ToNode>) -> Result<Option<v1::to_node::Message>, String> {
    match incoming.message().await {
        Ok(Some(message)) => message.message.map(Some).ok_or_else(|| "it sent an empty message".to_owned()),
        Ok(None) => Ok(None),
        Err(status) => Err(status.message().to_owned()),
    }
}
