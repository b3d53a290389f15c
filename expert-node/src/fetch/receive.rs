//! One call to one source: what arrives is on the disk before the next part is taken.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use shimmer_common::experts::pack::{PackError, PackStore, Partial};
use shimmer_common::experts::{ExpertId, ExpertSource as _};
use shimmer_proto::v1;
use shimmer_proto::v1::shards_client::ShardsClient;
use tonic::transport::Channel;

use super::assembler::{Assembler, Odd, Step, Wanted};
use super::{Context, lock};
use crate::wire::peer_to_wire;

/// Longest silence within a call; a record may have to come from a slow disk.
const SILENCE: Duration = Duration::from_secs(30);

/// Why a call ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The connection or the source failed.
    #[error("stopped sending records: {0}")]
    Broken(String),
    /// What arrived is not what was asked for.
    #[error("sent something else than was asked for: {0}")]
    Wrong(String),
    /// A record is not what it should be. `alone` when all of it came in this call.
    #[error("sent a wrong record: {what}")]
    Damaged { id: ExpertId, alone: bool, what: String },
    /// The shard cannot be written.
    #[error(transparent)]
    Store(#[from] PackError),
}

/// Fetches `wanted` over `channel` and returns the bytes that came; `trusted` when the sender is the
/// coordinator.
pub(super) async fn receive(
    context: &Arc<Context>,
    channel: Channel,
    trusted: bool,
    wanted: &[Wanted],
) -> Result<u64, FetchError> {
    let any_offset = wanted.iter().any(|wanted| wanted.offset > 0);
    let request = v1::FetchRequest {
        peer: Some(peer_to_wire(&context.shared.facts())),
        layers: wanted.iter().map(|wanted| wanted.id.layer.into()).collect(),
        experts: wanted.iter().map(|wanted| wanted.id.index.into()).collect(),
        offsets: if any_offset { wanted.iter().map(|w| w.offset).collect() } else { Vec::new() },
    };
    let broken = |status: tonic::Status| FetchError::Broken(status.message().to_owned());
    let mut client = ShardsClient::new(channel);
    let call = tokio::time::timeout(SILENCE, client.fetch(request)).await;
    let silent = || FetchError::Broken("it fell silent".to_owned());
    let mut parts = call.map_err(|_| silent())?.map_err(broken)?.into_inner();
    let store = context.records.store();
    let mut assembler = Assembler::new(store.layout(), wanted, trusted);
    let mut arriving: Option<(Partial, u64)> = None;
    let mut bytes = 0;
    loop {
        let part = tokio::time::timeout(SILENCE, parts.message()).await;
        let Some(part) = part.map_err(|_| silent())?.map_err(broken)? else { break };
        match assembler.push(part) {
            Ok(Step::Begin(wanted, hash)) => {
                if trusted {
                    context.know(wanted.id, hash);
                }
                arriving = Some((begin(store, wanted, hash).await?, wanted.offset));
            }
            Ok(Step::Data(data, last)) => {
                let Some((mut partial, offset)) = arriving.take() else { continue };
                let arrived = data.len();
                bytes += arrived as u64;
                // Writing and hashing would hold up the heartbeat and the dispatches.
                let partial = blocking(move || partial.push(&data).map(|()| partial)).await?;
                context.progress().received(arrived);
                let limit = context.bytes_per_s.load(Ordering::Relaxed);
                tokio::time::sleep(context.slots.pause(arrived, limit as f64)).await;
                if last {
                    keep(context, partial, offset == 0).await?;
                } else {
                    arriving = Some((partial, offset));
                }
            }
            Err(Odd::Wrong(what)) => return Err(FetchError::Wrong(what)),
            Err(Odd::Changed(wanted, now)) => {
                context.know(wanted.id, now);
                if let Some(old) = wanted.hash {
                    let store = store.clone();
                    blocking(move || store.drop_partial(wanted.id, old)).await?;
                }
                return Err(FetchError::Broken(format!("{} is another record than before", wanted.id)));
            }
        }
    }
    assembler.end().map_err(FetchError::Broken)?;
    Ok(bytes)
}

async fn begin(store: &Arc<PackStore>, wanted: Wanted, hash: [u8; 32]) -> Result<Partial, FetchError> {
    let store = store.clone();
    blocking(move || store.open_partial(wanted.id, hash, wanted.offset)).await
}

/// Stores a complete record. A wrong one is blamed on the sender when all of it came from there.
async fn keep(context: &Arc<Context>, partial: Partial, alone: bool) -> Result<(), FetchError> {
    let id = partial.id();
    let store = context.records.store().clone();
    match blocking(move || partial.finish(&store)).await {
        Ok(new) => {
            context.stored(id, new);
            Ok(())
        }
        Err(FetchError::Store(PackError::WrongRecord { id, what })) => {
            lock(&context.work).forget_partial(id);
            Err(FetchError::Damaged { id, alone, what: format!("{id}: {what}") })
        }
        Err(error) => Err(error),
    }
}

/// Runs what touches the disk beside the network.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PackError> + Send + 'static,
) -> Result<T, FetchError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|e| FetchError::Broken(e.to_string()))??)
}
