//! Whether nodes live: pings on connections and a thread of their own, and revocations as they happen.
//!
//! Nothing else runs here, so that neither a long dispatch nor a transfer of records looks like a death.
//! Pings also hold the lease of a node, see `docs/cluster.md`.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use shimmer_node::tls;
use shimmer_proto::v1;
use shimmer_proto::v1::liveness_client::LivenessClient;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;

use super::link::LinkContext;
use super::membership::Membership;
use super::node::{LOST_AFTER, Node, PING_EVERY};
use super::state::ClusterState;

/// For how long a ping keeps the node for this coordinator.
const LEASE: Duration = Duration::from_secs(10);
/// Time for connecting, and the pause between attempts.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
const DIAL_EVERY: Duration = Duration::from_millis(500);
/// How often the list of members is looked at for revocations.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Watches all nodes until `stop` is dropped.
pub(super) async fn run_pulses(
    context: Arc<LinkContext>,
    membership: Weak<Membership>,
    mut joined: UnboundedReceiver<Arc<Node>>,
    stop: tokio::sync::oneshot::Receiver<()>,
) {
    let accept = async {
        while let Some(node) = joined.recv().await {
            tokio::spawn(count_strikes(node.clone()));
            tokio::spawn(keep_watched(context.clone(), membership.clone(), node));
        }
    };
    tokio::select! {
        () = accept => {}
        () = follow_revocations(&context.state, &membership) => {}
        _ = stop => {}
    }
}

fn every(period: Duration) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(period);
    // After this machine slept nobody is to blame for the pause.
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

async fn count_strikes(node: Arc<Node>) {
    let mut interval = every(PING_EVERY);
    while !node.is_revoked() {
        interval.tick().await;
        node.count_strike();
    }
}

/// Keeps one node's stream of pulses open.
async fn keep_watched(context: Arc<LinkContext>, membership: Weak<Membership>, node: Arc<Node>) {
    while !node.is_revoked() {
        for address in node.addresses() {
            let ended = watch(&context, &membership, &node, &address).await;
            node.pulse_ended();
            if let Err(why) = ended {
                tracing::debug!(node = node.name(), address, why, "no pulse");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(DIAL_EVERY) => {}
            () = node.watch.notified() => {}
        }
    }
}

/// One stream of pulses: `Err` with why it ended, `Ok` when it is wanted no more.
async fn watch(
    context: &LinkContext,
    membership: &Weak<Membership>,
    node: &Node,
    address: &str,
) -> Result<(), String> {
    let name = tls::node_name(&node.id);
    let channel = tls::connect(&context.credentials, address, &name, DIAL_TIMEOUT).await?;
    let (pings, outgoing) = mpsc::channel(LOST_AFTER as usize);
    let mut client = LivenessClient::new(channel);
    let call = client.watch(ReceiverStream::new(outgoing));
    let answered = tokio::time::timeout(DIAL_TIMEOUT, call).await.map_err(|_| "did not answer in time")?;
    let mut pulses = answered.map_err(|status| tls::cause(&status))?.into_inner();
    let mut unanswered: VecDeque<(u64, Instant)> = VecDeque::new();
    let mut interval = every(PING_EVERY);
    let (mut id, mut first) = (0, true);
    loop {
        tokio::select! {
            biased;
            pulse = pulses.message() => {
                let pulse = pulse.map_err(|status| tls::cause(&status))?.ok_or("closed the stream")?;
                let sent = unanswered.iter().find(|(id, _)| *id == pulse.id).map(|(_, sent)| *sent);
                let sent = sent.ok_or("answered a ping nobody sent")?;
                unanswered.retain(|(id, _)| *id > pulse.id);
                node.pulsed(pulse, sent.elapsed(), std::mem::take(&mut first));
            }
            _ = interval.tick() => {
                let Some(membership) = membership.upgrade().filter(|_| !node.is_revoked()) else {
                    return Ok(());
                };
                if unanswered.len() >= LOST_AFTER as usize {
                    return Err("no pulse in time".to_owned());
                }
                id += 1;
                unanswered.push_back((id, Instant::now()));
                let ping = v1::Ping {
                    id,
                    instance: context.instance.to_vec().into(),
                    lease_ms: LEASE.as_millis() as u32,
                    revoked: membership.revoked(),
                };
                pings.try_send(ping).map_err(|_| "takes no pings")?;
            }
        }
    }
}

/// Looks for nodes that `shimmer cluster revoke` has struck off.
async fn follow_revocations(state: &ClusterState, membership: &Weak<Membership>) {
    let mut interval = every(LOOK_EVERY);
    let mut seen = None;
    loop {
        interval.tick().await;
        let Some(membership) = membership.upgrade() else { return };
        match state.members_if_changed(&mut seen) {
            Ok(None) => {}
            Ok(Some(members)) => {
                for member in members.iter().filter(|m| m.revoked) {
                    membership.revoke(&member.id);
                }
            }
            Err(error) => tracing::error!(%error, "revocations cannot be followed"),
        }
    }
}
