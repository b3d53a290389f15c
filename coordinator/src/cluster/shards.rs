//! The coordinator's `Shards` service: records for the nodes that own them.

use shimmer_common::experts::{ExpertError, ExpertId, ExpertSource};
use shimmer_common::mem::AlignedBuf;
use shimmer_node::wire::check_peer;
use shimmer_proto::v1;
use shimmer_proto::v1::shards_server::Shards;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::service::Control;

/// Bytes of a record per message.
const PART_BYTES: usize = 1 << 20;

#[tonic::async_trait]
impl Shards for Control {
    async fn locate(&self, request: Request<v1::LocateRequest>) -> Result<Response<v1::LocateReply>, Status> {
        self.caller(&request)?;
        let blake3 = vec![0; 32 * request.get_ref().experts.len()].into();
        Ok(Response::new(v1::LocateReply { blake3 }))
    }

    type FetchStream = ReceiverStream<Result<v1::RecordPart, Status>>;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let member = self.caller(&request)?;
        let request = request.into_inner();
        check_peer(&self.facts, request.peer.as_ref()).map_err(Status::failed_precondition)?;
        let layout = self.source.layout();
        let wanted: Option<Vec<ExpertId>> = request
            .layers
            .iter()
            .zip(&request.experts)
            .map(|(&layer, &index)| {
                Some(ExpertId { layer: layer.try_into().ok()?, index: index.try_into().ok()? })
            })
            .map(|id| id.filter(|&id| layout.spec(id).is_some()))
            .collect();
        let wanted = wanted.filter(|w| w.len() == request.layers.len() && w.len() == request.experts.len());
        let wanted = wanted
            .ok_or_else(|| Status::invalid_argument("the fetch names experts this model does not have"))?;
        tracing::debug!(node = member.name, records = wanted.len(), "fetch");
        let (parts, stream) = mpsc::channel(4);
        let source = self.source.clone();
        tokio::task::spawn_blocking(move || {
            for id in wanted {
                if let Err(status) = send_record(source.as_ref(), id, &parts) {
                    // Fails only when the node has hung up.
                    let _ = parts.blocking_send(Err(status));
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

type Parts = mpsc::Sender<Result<v1::RecordPart, Status>>;

fn send_record(source: &dyn ExpertSource, id: ExpertId, parts: &Parts) -> Result<(), Status> {
    let bytes =
        source.layout().record_bytes(id).ok_or_else(|| Status::not_found(format!("{id} does not exist")))?;
    let mut record = AlignedBuf::zeroed(bytes)
        .map_err(|e| Status::resource_exhausted(format!("no memory for {id}: {e}")))?;
    source.read(id, &mut record).map_err(|e| match e {
        ExpertError::Missing { .. } => Status::not_found(e.to_string()),
        _ => Status::data_loss(e.to_string()),
    })?;
    let header = v1::RecordHeader {
        layer: id.layer.into(),
        expert: id.index.into(),
        record_bytes: bytes as u64,
        blake3: blake3::hash(&record).as_bytes().to_vec().into(),
        offset: 0,
    };
    let gone = |_| Status::cancelled("the node hung up");
    let part = |part| Ok(v1::RecordPart { part: Some(part) });
    parts.blocking_send(part(v1::record_part::Part::Header(header))).map_err(gone)?;
    for chunk in record.chunks(PART_BYTES) {
        let data = bytes::Bytes::copy_from_slice(chunk);
        parts.blocking_send(part(v1::record_part::Part::Data(data))).map_err(gone)?;
    }
    Ok(())
}
