//! The `Shards` service of a node, and the sending of records that the coordinator shares with it.
//!
//! Whoever asks gets bounded service: so many records a call, so many calls at once, one record in
//! memory per call; a reader that falls silent is hung up on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use shimmer_common::experts::{ExpertError, ExpertId, ExpertLayout, ExpertSource};
use shimmer_common::mem::AlignedBuf;
use shimmer_proto::v1;
use shimmer_proto::v1::shards_server::Shards;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::fetch::progress::Progress;
use crate::pace::{Activity, Pacer};
use crate::records::KnownHashes;
use crate::roster::Roster;
use crate::service::Shared;
use crate::tls;
use crate::wire::check_peer;

/// Most records asked for in one call.
pub const MAX_RECORDS_PER_CALL: usize = 64;
/// Largest request to the service: ids and offsets of so many records need far less.
pub const MAX_REQUEST_BYTES: usize = 256 << 10;
/// Calls of one member at once.
const CALLS_PER_CALLER: usize = 4;
/// Records in memory at once, for all callers.
const RECORDS_IN_MEMORY: usize = 8;
/// Bytes of a record per message: small enough to stop between two when a dispatch comes.
const PART_BYTES: usize = 256 << 10;
/// Longest wait for a reader to take a part.
const SLOW_READER: Duration = Duration::from_secs(60);

/// The parts of the records of one call.
pub type RecordStream = ReceiverStream<Result<v1::RecordPart, Status>>;

/// Sends records from this process to whoever may have them.
#[derive(Clone, Debug)]
pub struct RecordSender {
    pacer: Arc<Pacer>,
    memory: Arc<Semaphore>,
    calls: Arc<Mutex<HashMap<String, usize>>>,
    sent_bytes: Arc<AtomicU64>,
}

/// What one call is about.
pub struct RecordCall {
    /// Who asks, for the limit of calls at once.
    pub caller: String,
    /// What is asked for.
    pub request: v1::FetchRequest,
    /// Asked before every record: why the caller may not have it any more.
    pub may_go_on: Box<dyn Fn() -> Result<(), Status> + Send + Sync>,
    /// Told of every record's hash before it is sent.
    pub on_record: Box<dyn Fn(ExpertId, [u8; 32]) + Send + Sync>,
}

impl RecordSender {
    /// A sender that gives way to `activity`.
    pub fn new(activity: Activity) -> Self {
        Self {
            pacer: Arc::new(Pacer::new(activity)),
            memory: Arc::new(Semaphore::new(RECORDS_IN_MEMORY)),
            calls: Arc::default(),
            sent_bytes: Arc::default(),
        }
    }

    /// Bytes of records sent since the process began.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    /// Starts sending what `call` asks for out of `source`.
    ///
    /// # Errors
    /// `invalid_argument` for experts the model lacks, offsets beyond a record or too many records,
    /// `resource_exhausted` for too many calls of one caller.
    pub fn send(&self, source: Arc<dyn ExpertSource>, call: RecordCall) -> Result<RecordStream, Status> {
        let wanted = wanted(source.layout(), &call.request)?;
        let counted = self.count_call(&call.caller)?;
        let (parts, stream) = mpsc::channel(2);
        let sender = self.clone();
        tokio::spawn(async move {
            let _counted = counted;
            for (id, offset) in wanted {
                if let Err(status) = sender.send_record(&source, &call, id, offset, &parts).await {
                    // Fails only when the other side has hung up.
                    let _ = parts.try_send(Err(status));
                    return;
                }
            }
        });
        Ok(ReceiverStream::new(stream))
    }

    async fn send_record(
        &self,
        source: &Arc<dyn ExpertSource>,
        call: &RecordCall,
        id: ExpertId,
        offset: usize,
        parts: &mpsc::Sender<Result<v1::RecordPart, Status>>,
    ) -> Result<(), Status> {
        (call.may_go_on)()?;
        let gone = || Status::cancelled("the other side hung up or reads nothing");
        let _room = tokio::select! {
            room = self.memory.acquire() => room.map_err(|_| gone())?,
            () = parts.closed() => return Err(gone()),
        };
        let mut begun = Instant::now();
        let from = source.clone();
        let read = tokio::task::spawn_blocking(move || read_record(from.as_ref(), id)).await;
        let (record, hash) = read.map_err(|e| Status::internal(e.to_string()))??;
        (call.on_record)(id, hash);
        let mut paused = false;
        let header = v1::RecordHeader {
            layer: id.layer.into(),
            expert: id.index.into(),
            record_bytes: record.len() as u64,
            blake3: hash.to_vec().into(),
            offset: offset as u64,
        };
        let mut next = v1::record_part::Part::Header(header);
        let mut at = offset;
        let sent = record.len() - offset;
        loop {
            let message = v1::RecordPart { part: Some(next) };
            let sent = tokio::time::timeout(SLOW_READER, parts.send(Ok(message))).await;
            sent.map_err(|_| gone())?.map_err(|_| gone())?;
            if at == record.len() {
                break;
            }
            let part = record.slice(at..record.len().min(at + PART_BYTES));
            let pause = self.pacer.pause(part.len());
            if !pause.is_zero() {
                paused = true;
                begun = Instant::now();
                tokio::time::sleep(pause).await;
            }
            at += part.len();
            self.sent_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            next = v1::record_part::Part::Data(part);
        }
        if !paused {
            self.pacer.measured(sent, begun.elapsed());
        }
        Ok(())
    }

    fn count_call(&self, caller: &str) -> Result<CountedCall, Status> {
        let mut calls = lock(&self.calls);
        let count = calls.entry(caller.to_owned()).or_default();
        if *count >= CALLS_PER_CALLER {
            return Err(Status::resource_exhausted(format!(
                "{CALLS_PER_CALLER} fetches of this node are under way; wait for one to end"
            )));
        }
        *count += 1;
        Ok(CountedCall { calls: self.calls.clone(), caller: caller.to_owned() })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call under way.
struct CountedCall {
    calls: Arc<Mutex<HashMap<String, usize>>>,
    caller: String,
}

impl Drop for CountedCall {
    fn drop(&mut self) {
        let mut calls = lock(&self.calls);
        if let Some(count) = calls.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.caller);
            }
        }
    }
}

/// What a request asks for: experts with the number of bytes their asker has.
fn wanted(layout: &ExpertLayout, request: &v1::FetchRequest) -> Result<Vec<(ExpertId, usize)>, Status> {
    let invalid = |what: String| Err(Status::invalid_argument(what));
    let ids = expert_ids(layout, &request.layers, &request.experts)?;
    if ids.len() > MAX_RECORDS_PER_CALL {
        return invalid(format!("{} records in one fetch; {MAX_RECORDS_PER_CALL} are the most", ids.len()));
    }
    let offsets = &request.offsets;
    if !offsets.is_empty() && offsets.len() != ids.len() {
        return invalid(format!("{} offsets for {} records", offsets.len(), ids.len()));
    }
    let mut wanted = Vec::with_capacity(ids.len());
    for (i, id) in ids.into_iter().enumerate() {
        let bytes = layout.record_bytes(id).unwrap_or(0);
        let offset = offsets.get(i).copied().unwrap_or(0);
        match usize::try_from(offset) {
            Ok(offset) if offset < bytes => wanted.push((id, offset)),
            _ => return invalid(format!("nothing of {id} lies at byte {offset}: it has {bytes} bytes")),
        }
    }
    Ok(wanted)
}

/// The experts named by two lists of numbers.
///
/// # Errors
/// `invalid_argument` when the lists differ in length or name what the model does not have.
pub fn expert_ids(layout: &ExpertLayout, layers: &[u32], experts: &[u32]) -> Result<Vec<ExpertId>, Status> {
    let id = |(&layer, &index): (&u32, &u32)| {
        let id = ExpertId { layer: layer.try_into().ok()?, index: index.try_into().ok()? };
        layout.spec(id).map(|_| id)
    };
    let ids: Option<Vec<ExpertId>> = layers.iter().zip(experts).map(id).collect();
    ids.filter(|ids| ids.len() == layers.len() && ids.len() == experts.len())
        .ok_or_else(|| Status::invalid_argument("the request names experts this model does not have"))
}

/// Lets message parts share the record they are cut from.
struct SharedRecord(AlignedBuf);

impl AsRef<[u8]> for SharedRecord {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn read_record(source: &dyn ExpertSource, id: ExpertId) -> Result<(Bytes, [u8; 32]), Status> {
    let bytes =
        source.layout().record_bytes(id).ok_or_else(|| Status::not_found(format!("{id} does not exist")))?;
    let mut record = AlignedBuf::zeroed(bytes)
        .map_err(|e| Status::resource_exhausted(format!("no memory for {id}: {e}")))?;
    source.read(id, &mut record).map_err(|e| match e {
        ExpertError::Missing { .. } => Status::not_found(e.to_string()),
        _ => Status::data_loss(e.to_string()),
    })?;
    let hash = *blake3::hash(&record).as_bytes();
    Ok((Bytes::from_owner(SharedRecord(record)), hash))
}

fn check_member(roster: &Roster, id: &str) -> Result<(), Status> {
    if roster.contains(id) {
        return Ok(());
    }
    Err(Status::permission_denied("this node gives records to members of its cluster only"))
}

/// What other members get from this node and what it gets from them.
pub(crate) struct Sharing {
    /// Dispatches in work, which come first.
    pub(crate) activity: Activity,
    pub(crate) sender: RecordSender,
    /// Hashes the coordinator vouches for.
    pub(crate) hashes: KnownHashes,
    pub(crate) progress: Progress,
}

impl Sharing {
    pub(crate) fn new() -> Self {
        let activity = Activity::new();
        let sender = RecordSender::new(activity.clone());
        Self { activity, sender, hashes: KnownHashes::default(), progress: Progress::default() }
    }
}

/// The service of a node.
pub(crate) struct ShardsService {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl Shards for ShardsService {
    async fn locate(&self, _: Request<v1::LocateRequest>) -> Result<Response<v1::LocateReply>, Status> {
        Err(Status::unimplemented("only the coordinator says what records hash to"))
    }

    type FetchStream = RecordStream;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<RecordStream>, Status> {
        let sharing = &self.shared.sharing;
        let roster = self.shared.roster.clone();
        let (caller, may_go_on): (String, Box<dyn Fn() -> Result<(), Status> + Send + Sync>) =
            if tls::peer_names(&request).iter().any(|name| name == tls::COORDINATOR_NAME) {
                (tls::COORDINATOR_NAME.to_owned(), Box::new(|| Ok(())))
            } else {
                let id = tls::peer_node_id(&request)
                    .ok_or_else(|| Status::unauthenticated("this call needs a node's certificate"))?;
                check_member(&roster, &id)?;
                (id.clone(), Box::new(move || check_member(&roster, &id)))
            };
        let request = request.into_inner();
        check_peer(&self.shared.facts(), request.peer.as_ref()).map_err(Status::failed_precondition)?;
        let Some((source, _)) = self.shared.records.get() else {
            return Err(Status::unavailable("this node has no records yet"));
        };
        let call = RecordCall { caller, request, may_go_on, on_record: Box::new(|_, _| {}) };
        sharing.sender.send(source.clone(), call).map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;

    fn request(ids: &[(u32, u32)], offsets: &[u64]) -> v1::FetchRequest {
        v1::FetchRequest {
            layers: ids.iter().map(|id| id.0).collect(),
            experts: ids.iter().map(|id| id.1).collect(),
            offsets: offsets.to_vec(),
            ..v1::FetchRequest::default()
        }
    }

    #[test]
    fn only_possible_requests_are_taken() {
        let layout = synthetic_layout(64, 64, &[1, 2], 100);
        let bytes = layout.record_bytes(ExpertId { layer: 1, index: 0 }).unwrap() as u64;
        let two = [(1, 2), (2, 3)];
        let good = wanted(&layout, &request(&two, &[7, bytes - 1])).unwrap();
        let id = |layer, index| ExpertId { layer, index };
        assert_eq!(good, [(id(1, 2), 7), (id(2, 3), bytes as usize - 1)]);
        assert_eq!(wanted(&layout, &request(&two, &[])).unwrap()[1], (id(2, 3), 0));
        let many: Vec<(u32, u32)> = (0..65).map(|i| (1, i)).collect();
        assert!(wanted(&layout, &request(&many[..64], &[])).is_ok());
        for bad in [
            request(&many, &[]),
            request(&two, &[0]),
            request(&two, &[0, bytes]),
            request(&two, &[0, u64::MAX]),
            request(&[(9, 0)], &[]),
            request(&[(1, 100)], &[]),
            request(&[(1 << 16, 0)], &[]),
            v1::FetchRequest { layers: vec![1], ..v1::FetchRequest::default() },
        ] {
            assert_eq!(wanted(&layout, &bad).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
    }

    #[test]
    fn a_caller_has_few_calls_and_gets_them_back() {
        let sender = RecordSender::new(Activity::new());
        let calls: Vec<_> = (0..CALLS_PER_CALLER).map(|_| sender.count_call("a").ok().unwrap()).collect();
        let refused = sender.count_call("a").err().unwrap();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(sender.count_call("b").is_ok(), "others are not held up");
        drop(calls);
        assert!(sender.count_call("a").is_ok());
        assert!(lock(&sender.calls).is_empty());
    }
}
