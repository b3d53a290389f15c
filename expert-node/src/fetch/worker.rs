//! Fetching from one source, and asking the coordinator what records hash to.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shimmer_common::experts::ExpertId;
use shimmer_proto::v1;
use shimmer_proto::v1::shards_client::ShardsClient;
use tonic::transport::Channel;

use super::assembler::Wanted;
use super::receive::{FetchError, receive};
use super::work::SourceId;
use super::{Context, Peer, Target, lock};
use crate::tls::{self, Credentials};
use crate::wire::peer_to_wire;

/// Time for connecting to a peer, and for the coordinator to say what it knows.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Hashes asked for in one call.
const HASHES_PER_CALL: usize = 8192;

/// How a worker ended.
pub(super) struct Ended {
    pub(super) source: SourceId,
    pub(super) name: String,
    pub(super) outcome: Result<(), FetchError>,
}

/// Fetches from one source until there is nothing for it to send.
pub(super) async fn work_for(
    context: Arc<Context>,
    source: SourceId,
    coordinator: Channel,
    peer: Option<Peer>,
    first: Vec<Wanted>,
) -> Ended {
    let name = match &peer {
        None => "the coordinator".to_owned(),
        Some(peer) => peer.name.clone(),
    };
    context.progress().begin(&name);
    let outcome = fetch_all(&context, &source, coordinator, peer, first).await;
    context.progress().end(&name);
    Ended { source, name, outcome }
}

async fn fetch_all(
    context: &Arc<Context>,
    source: &SourceId,
    coordinator: Channel,
    peer: Option<Peer>,
    mut wanted: Vec<Wanted>,
) -> Result<(), FetchError> {
    let channel = match (source, &peer) {
        (SourceId::Coordinator, _) => coordinator,
        (_, Some(peer)) => dial(&context.credentials, peer).await?,
        (_, None) => return Err(FetchError::Broken("it is not known any more".to_owned())),
    };
    while !wanted.is_empty() {
        let begun = Instant::now();
        let bytes = receive(context, channel.clone(), *source == SourceId::Coordinator, &wanted).await?;
        lock(&context.work).succeeded(source, bytes, begun.elapsed());
        if *source == SourceId::Coordinator {
            context.progress().set_problem(String::new());
        }
        wanted = context.take(source);
    }
    Ok(())
}

/// Connects to a peer and makes sure that it is who it should be.
async fn dial(credentials: &Credentials, peer: &Peer) -> Result<Channel, FetchError> {
    let mut last = "its address is not known".to_owned();
    for address in &peer.addresses {
        match tls::connect(credentials, address, &tls::node_name(&peer.id), CALL_TIMEOUT).await {
            Ok(channel) => return Ok(channel),
            Err(what) => last = format!("{address} {what}"),
        }
    }
    Err(FetchError::Broken(last))
}

/// Asks the coordinator what records hash to, of those for which that is not known here. Without an
/// answer they come from the coordinator.
pub(super) async fn locate(context: &Arc<Context>, target: &Target, ids: &[ExpertId]) {
    let unknown: Vec<ExpertId> = {
        let known = context.shared.sharing.hashes.read().unwrap_or_else(PoisonError::into_inner);
        ids.iter().copied().filter(|&id| known.get(id).is_none()).collect()
    };
    for ids in unknown.chunks(HASHES_PER_CALL) {
        let request = v1::LocateRequest {
            peer: Some(peer_to_wire(&context.shared.facts())),
            layers: ids.iter().map(|id| id.layer.into()).collect(),
            experts: ids.iter().map(|id| id.index.into()).collect(),
        };
        let mut client = ShardsClient::new(target.coordinator.clone());
        let reply = tokio::time::timeout(CALL_TIMEOUT, client.locate(request)).await;
        let Ok(Ok(reply)) = reply else { return };
        let reply = reply.into_inner();
        let (hashes, rest) = reply.blake3.as_chunks::<32>();
        if hashes.len() != ids.len() || !rest.is_empty() {
            tracing::warn!(hashes = hashes.len(), asked = ids.len(), "the coordinator named odd hashes");
            return;
        }
        for (&id, &hash) in ids.iter().zip(hashes).filter(|(_, hash)| **hash != [0; 32]) {
            context.know(id, hash);
        }
    }
}
