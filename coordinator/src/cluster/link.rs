//! One link per node: dial, shake hands, hand answers to whoever waits, dial again.
//!
//! All links share the wire thread's single-threaded runtime; requests enter the stream directly from
//! the engine thread, so that a dispatch costs one wake-up each way.

use std::sync::Arc;
use std::time::Duration;

use shimmer_common::experts::ExpertLayout;
use shimmer_node::Backoff;
use shimmer_node::tls::{self, Credentials};
use shimmer_node::wire::{Facts, Held, MAX_MESSAGE_BYTES, check_peer, peer_to_wire};
use shimmer_proto::v1;
use shimmer_proto::v1::experts_client::ExpertsClient;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;

use super::membership::Membership;
use super::node::Node;
use super::state::ClusterState;

/// Time for connecting: the next address may be the right one.
const DIAL_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for each step of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// What every link needs.
pub(super) struct LinkContext {
    pub(super) credentials: Credentials,
    pub(super) facts: Facts,
    pub(super) layout: ExpertLayout,
    pub(super) state: ClusterState,
    /// Random id of this process.
    pub(super) instance: [u8; 16],
}

/// Why there is no session.
struct Failed {
    /// Whether the machine there spoke to us.
    reached: bool,
    what: String,
}

impl Failed {
    fn refused(what: impl Into<String>) -> Self {
        Self { reached: true, what: what.into() }
    }

    fn unreached(what: impl Into<String>) -> Self {
        Self { reached: false, what: what.into() }
    }
}

/// Runs all links until `stop` is dropped.
pub(super) async fn run_links(
    context: Arc<LinkContext>,
    membership: std::sync::Weak<Membership>,
    mut joined: UnboundedReceiver<Arc<Node>>,
    fixed: Vec<String>,
    stop: tokio::sync::oneshot::Receiver<()>,
) {
    for address in fixed {
        tokio::spawn(discover(context.clone(), membership.clone(), address));
    }
    let accept = async {
        while let Some(node) = joined.recv().await {
            tokio::spawn(keep_linked(context.clone(), node));
        }
    };
    tokio::select! {
        () = accept => {}
        _ = stop => {}
    }
}

/// Keeps one node connected.
async fn keep_linked(context: Arc<LinkContext>, node: Arc<Node>) {
    let mut backoff = Backoff::new();
    let mut said = String::new();
    while !node.is_revoked() {
        let mut why = "its address is not known yet".to_owned();
        let mut unreached = Vec::new();
        let addresses = node.addresses();
        for address in &addresses {
            match session(&context, &node, address).await {
                Ok(ended) => {
                    backoff.reset();
                    why = ended;
                    break;
                }
                Err(failed) => {
                    why = format!("{address} {}", failed.what);
                    if !failed.reached {
                        unreached.push(why.clone());
                    }
                }
            }
        }
        if !addresses.is_empty() && unreached.len() == addresses.len() {
            node.dialled(Err(format!(
                "tried {}; open the port in the firewall of that PC, or join it again with --advertise HOST:PORT",
                unreached.join("; ")
            )));
        }
        if why != said {
            tracing::info!(node = node.name(), why, "no link");
            said.clone_from(&why);
        }
        node.lost(&why);
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            // The node registered: it is there.
            () = node.wake.notified() => backoff.reset(),
        }
    }
}

/// Dials, and once more from the beginning when there is news of the node meanwhile: what went into a
/// pulled cable is repeated later and later.
async fn dial_awake(
    context: &LinkContext,
    node: &Node,
    address: &str,
    name: &str,
) -> Result<Handshake, Failed> {
    tokio::select! {
        dialled = Handshake::dial(context, address, name) => return dialled,
        () = node.wake.notified() => {}
    }
    Handshake::dial(context, address, name).await
}

/// One connection: `Err` when it never came to be, `Ok` with why it ended otherwise.
async fn session(context: &LinkContext, node: &Node, address: &str) -> Result<String, Failed> {
    let mut cuts = node.cuts.subscribe();
    if context
        .state
        .members()
        .map_err(|e| Failed::refused(e.to_string()))?
        .iter()
        .any(|m| m.id == node.id && m.revoked)
    {
        return Err(Failed::refused("is revoked"));
    }
    let name = tls::node_name(&node.id);
    let mut link = dial_awake(context, node, address, &name).await?;
    node.dialled(Ok(address));
    let hello = link.greet(context).await.map_err(Failed::refused)?;
    if hello.node_id != node.id {
        return Err(Failed::refused(format!("is node {}, not {}", hello.node_id, node.id)));
    }
    let (held, syncing) = holdings(&context.layout, hello.holdings.as_ref()).map_err(Failed::refused)?;
    let verdict = v1::Verdict { accepted: true, reason: String::new() };
    link.send(v1::to_node::Message::Verdict(verdict)).map_err(Failed::refused)?;
    let Handshake { stream, mut incoming } = link;
    node.connected(stream, held, syncing);
    loop {
        let message = tokio::select! {
            message = incoming.message() => message,
            _ = cuts.changed() => return Ok(node.cut_why()),
        };
        match message {
            Ok(Some(v1::FromNode { message: Some(message) })) => match message {
                v1::from_node::Message::Reply(reply) => node.answered(reply),
                v1::from_node::Message::Holdings(wire) => match holdings(&context.layout, Some(&wire)) {
                    Ok((held, syncing)) => node.holds(held, syncing),
                    Err(why) => return Ok(why),
                },
                v1::from_node::Message::Refused(why) => return Ok(why),
                v1::from_node::Message::Hello(_) => return Ok("it greeted twice".to_owned()),
            },
            Ok(Some(_)) => return Ok("it sent an empty message".to_owned()),
            Ok(None) => return Ok("it closed the connection".to_owned()),
            Err(status) => return Ok(format!("the connection broke ({})", tls::cause(&status))),
        }
    }
}

fn holdings(layout: &ExpertLayout, wire: Option<&v1::Holdings>) -> Result<(Held, bool), String> {
    let wire = wire.ok_or("it did not say what it holds")?;
    let held = Held::from_wire(layout, &wire.held).map_err(|e| e.to_string())?;
    Ok((held, wire.syncing))
}

/// An opened stream before the verdict.
struct Handshake {
    stream: UnboundedSender<v1::ToNode>,
    incoming: Streaming<v1::FromNode>,
}

impl Handshake {
    async fn dial(context: &LinkContext, address: &str, name: &str) -> Result<Self, Failed> {
        let channel = tls::connect(&context.credentials, address, name, DIAL_TIMEOUT)
            .await
            .map_err(Failed::unreached)?;
        let mut client = ExpertsClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let (stream, outgoing) = mpsc::unbounded_channel();
        let call = client.serve(UnboundedReceiverStream::new(outgoing));
        let response = tokio::time::timeout(HANDSHAKE_TIMEOUT, call)
            .await
            .map_err(|_| Failed::refused("did not answer in time"))?;
        let incoming = response
            .map_err(|status| Failed::refused(format!("refused: {}", tls::cause(&status))))?
            .into_inner();
        Ok(Self { stream, incoming })
    }

    /// Greets, checks the answer, and refuses with a sentence when it does not fit.
    async fn greet(&mut self, context: &LinkContext) -> Result<v1::NodeHello, String> {
        self.send(v1::to_node::Message::Hello(v1::CoordinatorHello {
            peer: Some(peer_to_wire(&context.facts)),
            instance: context.instance.to_vec().into(),
        }))?;
        let answer = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.incoming.message()).await;
        let answer = answer.map_err(|_| "did not greet in time")?.map_err(|status| tls::cause(&status))?;
        let hello = match answer.and_then(|m| m.message) {
            Some(v1::from_node::Message::Hello(hello)) => hello,
            Some(v1::from_node::Message::Refused(why)) => return Err(format!("refused: {why}")),
            _ => return Err("did not greet".to_owned()),
        };
        if let Err(reason) = check_peer(&context.facts, hello.peer.as_ref()) {
            let _ = self
                .send(v1::to_node::Message::Verdict(v1::Verdict { accepted: false, reason: reason.clone() }));
            return Err(format!("is refused: {reason}"));
        }
        Ok(hello)
    }

    fn send(&self, message: v1::to_node::Message) -> Result<(), String> {
        self.stream
            .send(v1::ToNode { message: Some(message) })
            .map_err(|_| "closed the connection".to_owned())
    }
}

/// Finds out which node listens at a fixed address, then leaves it to that node's link.
async fn discover(context: Arc<LinkContext>, membership: std::sync::Weak<Membership>, address: String) {
    let mut backoff = Backoff::new();
    let mut complained = false;
    loop {
        match identify(&context, &address).await {
            Ok((id, name)) => {
                let Some(membership) = membership.upgrade() else { return };
                membership.get_or_add(&id, &name, &[]).fix_address(address);
                return;
            }
            Err(why) if !complained => {
                complained = true;
                tracing::warn!(address, why, "no node at this listed address yet, trying again");
            }
            Err(why) => tracing::debug!(address, why, "no node there yet"),
        }
        tokio::time::sleep(backoff.pause()).await;
    }
}

async fn identify(context: &LinkContext, address: &str) -> Result<(String, String), String> {
    let dialled = Handshake::dial(context, address, tls::ANY_NODE_NAME).await;
    let mut link = dialled.map_err(|failed| failed.what)?;
    let hello = link.greet(context).await?;
    let members = context.state.members().map_err(|e| e.to_string())?;
    let member = members.into_iter().find(|m| m.id == hello.node_id && !m.revoked);
    member.map(|m| (m.id, m.name)).ok_or_else(|| "is not a member of this cluster".to_owned())
}
