//! A member that says it holds everything and sends records that are wrong in one of several ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shimmer_common::experts::{ExpertId, ExpertSource as _};
use shimmer_proto::v1;
use shimmer_proto::v1::experts_server::ExpertsServer;
use shimmer_proto::v1::record_part::Part;
use shimmer_proto::v1::shards_server::{Shards, ShardsServer};
use tonic::{Request, Response, Status};

use crate::peers::Mad;
use crate::support::*;

#[derive(Clone, Copy, Debug)]
pub enum Lie {
    /// Wrong data under the right hash.
    FlippedBit,
    /// Wrong data with its own hash.
    OwnHash,
    /// The right beginning, then the connection breaks.
    HalfThenHangUp,
    /// A byte more than the record has.
    TooMuch,
    /// Data from another place than asked for.
    OtherOffset,
}

struct LyingShards {
    lie: Lie,
    asked: Arc<AtomicUsize>,
}

impl LyingShards {
    fn parts(&self, id: ExpertId) -> Vec<Result<Part, Status>> {
        let truth = Synthetic::new(|_| true);
        let mut record = vec![0; truth.layout().record_bytes(id).unwrap()];
        truth.read(id, &mut record).unwrap();
        let mut header = v1::RecordHeader {
            layer: id.layer.into(),
            expert: id.index.into(),
            record_bytes: record.len() as u64,
            blake3: blake3::hash(&record).as_bytes().to_vec().into(),
            offset: 0,
        };
        let mut end = None;
        match self.lie {
            Lie::FlippedBit => record[77] ^= 1,
            Lie::OwnHash => {
                record[77] ^= 1;
                header.blake3 = blake3::hash(&record).as_bytes().to_vec().into();
            }
            Lie::HalfThenHangUp => {
                record.truncate(record.len() / 2);
                end = Some(Err(Status::unavailable("gone")));
            }
            Lie::TooMuch => record.push(0),
            Lie::OtherOffset => header.offset = 4096,
        }
        let parts = [Ok(Part::Header(header)), Ok(Part::Data(record.into()))];
        parts.into_iter().chain(end).collect()
    }
}

#[tonic::async_trait]
impl Shards for LyingShards {
    async fn locate(&self, _: Request<v1::LocateRequest>) -> Result<Response<v1::LocateReply>, Status> {
        Err(Status::unimplemented("a node does not know"))
    }

    type FetchStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::RecordPart, Status>>>;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let request = request.into_inner();
        let ids = request.layers.iter().zip(&request.experts);
        let ids = ids.map(|(&layer, &index)| ExpertId { layer: layer as u16, index: index as u16 });
        let parts = ids.flat_map(|id| self.parts(id));
        let parts: Vec<_> = parts.map(|part| part.map(|part| v1::RecordPart { part: Some(part) })).collect();
        Ok(Response::new(tokio_stream::iter(parts)))
    }
}

/// Serves until dropped.
pub struct Liar {
    asked: Arc<AtomicUsize>,
    _runtime: tokio::runtime::Runtime,
}

impl Liar {
    /// How often it was asked for records.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

/// A member of the cluster that tells `lie`, once it counts as ready.
pub fn lying_node(cluster: &Cluster, lie: Lie) -> Liar {
    let config = cluster.join("liar");
    let asked = Arc::new(AtomicUsize::new(0));
    let silent = Mad { id: config.settings.id.clone(), answer: |_| Vec::new() };
    let shards = LyingShards { lie, asked: asked.clone() };
    let services =
        tonic::service::Routes::new(ExpertsServer::new(silent)).add_service(ShardsServer::new(shards));
    let runtime = serve_as(cluster, &config, services);
    wait_until("the liar is ready", || cluster.status("liar").state == "ready");
    Liar { asked, _runtime: runtime }
}
