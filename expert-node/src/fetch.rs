//! Fetching records from the coordinator: each is named by its BLAKE3 and checked before it is kept.
//!
//! What arrived is appended to the shard at once, so that a node killed half way goes on where it was.

use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::pack::{PackError, PackStore};
use shimmer_common::experts::{ExpertId, ExpertLayout, ExpertSource as _};
use shimmer_proto::v1;
use shimmer_proto::v1::shards_client::ShardsClient;
use tonic::transport::Channel;

use crate::wire::{Facts, peer_to_wire};

/// Records asked for in one call: a call that breaks costs at most these.
const RECORDS_PER_CALL: usize = 32;
/// Longest silence within a call; a record may have to come from a slow disk.
const SILENCE: Duration = Duration::from_secs(60);
/// How often a record that arrives damaged is asked for again.
const ATTEMPTS: usize = 3;

/// Why fetching stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// The connection or the coordinator failed; the next heartbeat tries again.
    #[error("the coordinator stopped sending records: {0}")]
    Broken(String),
    /// What arrived is not what was asked for.
    #[error("the coordinator sent a wrong record: {0}")]
    Wrong(String),
    /// The shard cannot be written.
    #[error(transparent)]
    Store(#[from] PackError),
}

/// Fetches `wanted` into `store`; `stored` is called after every record with its size.
pub(crate) async fn fetch(
    channel: Channel,
    ours: &Facts,
    store: &Arc<PackStore>,
    wanted: &[ExpertId],
    mut stored: impl FnMut(usize),
) -> Result<(), FetchError> {
    let mut client = ShardsClient::new(channel);
    for ids in wanted.chunks(RECORDS_PER_CALL) {
        let mut attempt = 1;
        loop {
            let missing = store.missing(ids);
            if missing.is_empty() {
                break;
            }
            match fetch_some(&mut client, ours, store, &missing, &mut stored).await {
                Err(FetchError::Store(PackError::WrongRecord { id, what })) if attempt < ATTEMPTS => {
                    attempt += 1;
                    tracing::warn!(%id, what, "a record arrived damaged, fetching it again");
                }
                done => done?,
            }
        }
    }
    let store = store.clone();
    blocking(move || store.flush()).await
}

async fn fetch_some(
    client: &mut ShardsClient<Channel>,
    ours: &Facts,
    store: &Arc<PackStore>,
    ids: &[ExpertId],
    stored: &mut impl FnMut(usize),
) -> Result<(), FetchError> {
    let request = v1::FetchRequest {
        peer: Some(peer_to_wire(ours)),
        layers: ids.iter().map(|id| id.layer.into()).collect(),
        experts: ids.iter().map(|id| id.index.into()).collect(),
        offsets: Vec::new(),
    };
    let broken = |status: tonic::Status| FetchError::Broken(status.message().to_owned());
    let mut parts = client.fetch(request).await.map_err(broken)?.into_inner();
    let mut assembler = Assembler::new(store.layout(), ids);
    loop {
        let part = tokio::time::timeout(SILENCE, parts.message()).await;
        let part = part.map_err(|_| FetchError::Broken("it fell silent".to_owned()))?.map_err(broken)?;
        let Some(part) = part else { break };
        if let Some(record) = assembler.push(part).map_err(FetchError::Wrong)? {
            let (store, bytes) = (store.clone(), record.bytes.len());
            // Hashing and writing would hold up the heartbeat and the dispatches.
            blocking(move || store.append(record.id, &record.bytes, record.blake3).map(drop)).await?;
            stored(bytes);
        }
    }
    assembler.end().map_err(FetchError::Broken)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PackError> + Send + 'static,
) -> Result<T, FetchError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|e| FetchError::Broken(e.to_string()))??)
}

/// A complete record, not yet compared with its hash.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    id: ExpertId,
    bytes: Vec<u8>,
    blake3: [u8; 32],
}

/// Puts records together from the parts of one call.
struct Assembler<'a> {
    layout: &'a ExpertLayout,
    wanted: std::slice::Iter<'a, ExpertId>,
    /// The record being received and its full length.
    current: Option<(Record, usize)>,
}

impl<'a> Assembler<'a> {
    fn new(layout: &'a ExpertLayout, wanted: &'a [ExpertId]) -> Self {
        Self { layout, wanted: wanted.iter(), current: None }
    }

    /// Takes the next part; returns the record it completes.
    fn push(&mut self, part: v1::RecordPart) -> Result<Option<Record>, String> {
        match part.part {
            Some(v1::record_part::Part::Header(header)) => self.begin(&header).map(|()| None),
            Some(v1::record_part::Part::Data(data)) => {
                let (mut record, len) = self.current.take().ok_or("data without a header")?;
                if data.is_empty() || data.len() > len - record.bytes.len() {
                    return Err(format!("{} has {} bytes too many", record.id, data.len()));
                }
                record.bytes.extend_from_slice(&data);
                if record.bytes.len() == len {
                    return Ok(Some(record));
                }
                self.current = Some((record, len));
                Ok(None)
            }
            None => Err("an empty part".to_owned()),
        }
    }

    fn begin(&mut self, header: &v1::RecordHeader) -> Result<(), String> {
        if let Some((record, _)) = &self.current {
            return Err(format!("{} is cut off", record.id));
        }
        let id = *self.wanted.next().ok_or("more records than asked for")?;
        if (header.layer, header.expert) != (id.layer.into(), id.index.into()) {
            return Err(format!("layer {} expert {} instead of {id}", header.layer, header.expert));
        }
        let len = self.layout.record_bytes(id).ok_or("a record this model does not have")?;
        if header.record_bytes != len as u64 {
            return Err(format!("{id} with {} bytes instead of {len}", header.record_bytes));
        }
        let blake3 = header.blake3.as_ref().try_into().map_err(|_| format!("{id} without its BLAKE3"))?;
        self.current = Some((Record { id, bytes: Vec::with_capacity(len), blake3 }, len));
        Ok(())
    }

    /// The call ended: everything asked for must be there.
    fn end(mut self) -> Result<(), String> {
        match (self.current, self.wanted.next()) {
            (None, None) => Ok(()),
            (Some((record, _)), _) => Err(format!("{} is cut off", record.id)),
            (None, Some(id)) => Err(format!("{id} did not come")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use shimmer_proto::v1::shards_server::{Shards, ShardsServer};

    use super::*;
    use crate::testing::synthetic_layout;

    const ID: ExpertId = ExpertId { layer: 1, index: 2 };

    /// Serves records of sevens; flips a bit of the data while `flips` lasts.
    struct Flipping {
        layout: ExpertLayout,
        flips: AtomicUsize,
    }

    #[tonic::async_trait]
    impl Shards for Flipping {
        async fn locate(
            &self,
            _: tonic::Request<v1::LocateRequest>,
        ) -> Result<tonic::Response<v1::LocateReply>, tonic::Status> {
            Ok(tonic::Response::new(v1::LocateReply::default()))
        }

        type FetchStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::RecordPart, tonic::Status>>>;

        async fn fetch(
            &self,
            request: tonic::Request<v1::FetchRequest>,
        ) -> Result<tonic::Response<Self::FetchStream>, tonic::Status> {
            let request = request.into_inner();
            let mut parts = Vec::new();
            for (&layer, &expert) in request.layers.iter().zip(&request.experts) {
                let id = ExpertId { layer: layer as u16, index: expert as u16 };
                let mut record = vec![7u8; self.layout.record_bytes(id).unwrap()];
                let blake3 = blake3::hash(&record).as_bytes().to_vec().into();
                let record_bytes = record.len() as u64;
                if self.flips.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
                {
                    record[100] ^= 1;
                }
                let header = v1::RecordHeader { layer, expert, record_bytes, blake3, offset: 0 };
                parts.push(Ok(v1::RecordPart { part: Some(v1::record_part::Part::Header(header)) }));
                for chunk in record.chunks(5000) {
                    let data = v1::record_part::Part::Data(chunk.to_vec().into());
                    parts.push(Ok(v1::RecordPart { part: Some(data) }));
                }
            }
            Ok(tonic::Response::new(tokio_stream::iter(parts)))
        }
    }

    /// Fetches every expert from a coordinator that flips `flips` bits.
    fn fetch_with(flips: usize) -> (Result<(), FetchError>, usize) {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let dir = tempfile::tempdir().unwrap();
        let fingerprint = shimmer_common::container::Fingerprint([1; 32]);
        let store =
            Arc::new(PackStore::open_or_create(&dir.path().join("shard"), fingerprint, &layout).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let fetched = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = format!("http://{}", listener.local_addr().unwrap());
            let service =
                ShardsServer::new(Flipping { layout: layout.clone(), flips: AtomicUsize::new(flips) });
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            tokio::spawn(
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming),
            );
            let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
            let ours = Facts { name: "node test".into(), fingerprint: None, profile: None };
            let wanted: Vec<ExpertId> = layout.ids().collect();
            fetch(channel, &ours, &store, &wanted, |_| {}).await
        });
        (fetched, store.ids().len())
    }

    #[test]
    fn a_bit_flipped_on_the_way_is_noticed_and_fetched_again() {
        let (fetched, held) = fetch_with(2);
        assert!(fetched.is_ok() && held == 4, "{fetched:?}, {held} held");
    }

    #[test]
    fn a_coordinator_that_always_sends_damage_is_given_up_on() {
        let (fetched, held) = fetch_with(usize::MAX);
        let error = fetched.unwrap_err().to_string();
        assert!(error.contains("layer 1 expert 0") && error.contains("BLAKE3"), "{error}");
        assert_eq!(held, 0, "nothing damaged is kept");
    }

    fn header(change: impl FnOnce(&mut v1::RecordHeader)) -> v1::RecordPart {
        let bytes = synthetic_layout(64, 64, &[1], 4).record_bytes(ID).unwrap() as u64;
        let mut header = v1::RecordHeader {
            layer: 1,
            expert: 2,
            record_bytes: bytes,
            blake3: vec![9; 32].into(),
            offset: 0,
        };
        change(&mut header);
        v1::RecordPart { part: Some(v1::record_part::Part::Header(header)) }
    }

    fn data(len: usize) -> v1::RecordPart {
        v1::RecordPart { part: Some(v1::record_part::Part::Data(vec![7; len].into())) }
    }

    #[test]
    fn records_come_together_from_parts() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let bytes = layout.record_bytes(ID).unwrap();
        let mut assembler = Assembler::new(&layout, &[ID]);
        assert_eq!(assembler.push(header(|_| {})), Ok(None));
        assert_eq!(assembler.push(data(bytes - 1)), Ok(None));
        let record = assembler.push(data(1)).unwrap().unwrap();
        assert_eq!((record.id, record.bytes.len(), record.blake3), (ID, bytes, [9; 32]));
        assembler.end().unwrap();
    }

    #[test]
    fn anything_else_is_refused() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let bytes = layout.record_bytes(ID).unwrap();
        let refused = |parts: Vec<v1::RecordPart>| {
            let mut assembler = Assembler::new(&layout, &[ID]);
            let pushed: Result<Vec<_>, _> = parts.into_iter().map(|p| assembler.push(p)).collect();
            pushed.and_then(|_| assembler.end()).is_err()
        };
        assert!(refused(vec![]));
        assert!(refused(vec![data(1)]));
        assert!(refused(vec![v1::RecordPart { part: None }]));
        assert!(refused(vec![header(|_| {})]));
        assert!(refused(vec![header(|_| {}), header(|_| {})]));
        assert!(refused(vec![header(|_| {}), data(bytes + 1)]));
        assert!(refused(vec![header(|_| {}), data(0)]));
        assert!(refused(vec![header(|_| {}), data(bytes), header(|_| {})]));
        assert!(refused(vec![header(|h| h.expert = 3), data(bytes)]));
        assert!(refused(vec![header(|h| h.layer = u32::MAX), data(bytes)]));
        assert!(refused(vec![header(|h| h.record_bytes = u64::MAX), data(bytes)]));
        assert!(refused(vec![header(|h| h.blake3 = vec![0; 31].into()), data(bytes)]));
    }
}
