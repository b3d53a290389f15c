//! The coordinator's `Shards` service: records for the nodes that own them, and what records hash to.

use shimmer_common::experts::ExpertId;
use shimmer_node::shards::{RecordCall, RecordStream, expert_ids};
use shimmer_node::wire::{Held, check_peer};
use shimmer_proto::v1;
use shimmer_proto::v1::shards_server::Shards;
use tonic::{Request, Response, Status};

use super::service::Control;

/// Most hashes asked for in one call.
const MAX_HASHES: usize = 8192;

#[tonic::async_trait]
impl Shards for Control {
    async fn locate(&self, request: Request<v1::LocateRequest>) -> Result<Response<v1::LocateReply>, Status> {
        self.caller(&request)?;
        let request = request.into_inner();
        check_peer(&self.facts, request.peer.as_ref()).map_err(Status::failed_precondition)?;
        let ids = expert_ids(self.source.layout(), &request.layers, &request.experts)?;
        if ids.len() > MAX_HASHES {
            return Err(Status::invalid_argument(format!("more than {MAX_HASHES} hashes in one call")));
        }
        let hash = |id: ExpertId| self.hashes.get(id).unwrap_or_default();
        let blake3: Vec<u8> = ids.into_iter().flat_map(hash).collect();
        Ok(Response::new(v1::LocateReply { blake3: blake3.into() }))
    }

    type FetchStream = RecordStream;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<RecordStream>, Status> {
        let member = self.caller(&request)?;
        let request = request.into_inner();
        check_peer(&self.facts, request.peer.as_ref()).map_err(Status::failed_precondition)?;
        tracing::debug!(node = member.name, records = request.layers.len(), "fetch");
        let (control, id, hashes) = (self.clone(), member.id.clone(), self.hashes.clone());
        let call = RecordCall {
            caller: member.id,
            request,
            may_go_on: Box::new(move || control.member(&id).map(drop)),
            on_record: Box::new(move |id, hash| hashes.note(id, hash)),
        };
        // Written here rather than at the end of the call: it is the next call that may come late.
        let hashes = self.hashes.clone();
        tokio::task::spawn_blocking(move || hashes.save_if_due());
        self.sender.send(self.source.clone(), call).map(Response::new)
    }
}

impl Control {
    /// The nodes `caller` can fetch from what it lacks of `assigned`; `held` is what it says it has.
    pub(super) fn sources_for(&self, caller: &str, assigned: &Held, held: &[u8]) -> Vec<v1::Source> {
        let layout = self.source.layout();
        let mut missing = assigned.clone();
        if let Ok(held) = Held::from_wire(layout, held) {
            layout.ids().filter(|&id| held.contains(id)).for_each(|id| missing.remove(id));
        }
        if missing.is_empty() {
            return Vec::new();
        }
        let nodes = self.membership.all();
        nodes.iter().filter(|node| node.id != caller).filter_map(|node| node.as_source(&missing)).collect()
    }

    /// Ids of all members that may fetch.
    pub(super) fn roster(members: &[super::Member]) -> Vec<String> {
        members.iter().filter(|member| !member.revoked).map(|member| member.id.clone()).collect()
    }
}
