//! The `Liveness` service: answers pings from the network thread with what the node is doing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use shimmer_proto::v1;
use shimmer_proto::v1::liveness_server::Liveness;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::lease::Stay;
use crate::service::{Shared, coordinator_only};

/// Pulses a coordinator may leave unread before its stream is closed.
const UNREAD: usize = 16;

/// The service.
pub(crate) struct LivenessService {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl Liveness for LivenessService {
    type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::Pulse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<Streaming<v1::Ping>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        coordinator_only(&self.shared, &request)?;
        let (pulses, stream) = mpsc::channel(UNREAD);
        tokio::spawn(answer(self.shared.clone(), request.into_inner(), pulses));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Answers until the coordinator hangs up or reads no more.
async fn answer(
    shared: Arc<Shared>,
    mut pings: Streaming<v1::Ping>,
    pulses: mpsc::Sender<Result<v1::Pulse, Status>>,
) {
    let mut stay = None;
    while let Ok(Some(ping)) = pings.message().await {
        let refused = hold(&shared, &mut stay, &ping).err().unwrap_or_default();
        if refused.is_empty() {
            shared.revoke(&ping.revoked);
        }
        let pulse = v1::Pulse {
            id: ping.id,
            instance: shared.instance.to_vec().into(),
            load: Some(load(&shared)),
            refused,
        };
        if pulses.try_send(Ok(pulse)).is_err() {
            return;
        }
    }
}

/// Gives or lengthens the lease the ping asks for.
fn hold(shared: &Shared, stay: &mut Option<Stay>, ping: &v1::Ping) -> Result<(), String> {
    let time = Duration::from_millis(ping.lease_ms.into());
    if stay.as_ref().is_some_and(|stay| stay.extend(time)) {
        return Ok(());
    }
    *stay = None;
    *stay = Some(shared.lease.take(&ping.instance, time)?);
    Ok(())
}

/// What the node is doing now.
fn load(shared: &Shared) -> v1::Load {
    let mut load = v1::Load {
        sync: Some(shared.sync_progress()),
        measurement: shared.meter.read(),
        sent_bytes: shared.sharing.sender.sent_bytes(),
        ..v1::Load::default()
    };
    if let Some(serving) = shared.serving() {
        serving.compute.describe(&mut load);
    }
    load
}
