//! Nodes that follow a script: they compute the right sums, and say so when and how a test wants.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shimmer_common::experts::{ExpertCompute as _, ExpertId, LocalStore};
use shimmer_common::profile::NumericProfile;
use shimmer_node::wire::{Facts, Held, dispatch_from_wire, peer_to_wire};
use shimmer_proto::v1;
use shimmer_proto::v1::experts_server::{Experts, ExpertsServer};
use tonic::{Request, Response, Status, Streaming};

use crate::support::*;

/// What a node does about a dispatch.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// The right sums.
    Right,
    /// The right sums under another id.
    Misnamed,
    /// Sums that do not decode.
    Garbage,
    /// A failure that blames no expert.
    Failure,
}

/// Answers to a dispatch, each after a time; none at all is possible.
pub type Script = Box<dyn Fn(&v1::Dispatch) -> Vec<(Duration, Act)> + Send + Sync>;

/// At once and right.
pub fn prompt() -> Script {
    after(0)
}

/// Right after some milliseconds.
pub fn after(ms: u64) -> Script {
    Box::new(move |_| vec![(Duration::from_millis(ms), Act::Right)])
}

/// Never.
pub fn silent() -> Script {
    Box::new(|_| Vec::new())
}

struct State {
    script: Mutex<Script>,
    holds: fn(ExpertId) -> bool,
    id: String,
    store: Arc<LocalStore>,
    dispatches: Mutex<Vec<v1::Dispatch>>,
    cancelled: Mutex<Vec<u64>>,
    /// What the next replies say about their making.
    reply: Mutex<v1::Reply>,
}

/// A scripted member of the cluster; it serves until it is dropped.
pub struct Fake {
    state: Arc<State>,
    _runtime: tokio::runtime::Runtime,
}

impl Fake {
    /// Joins a node that says it holds what `holds` says, and waits until it is ready.
    pub fn start(cluster: &Cluster, name: &str, holds: fn(ExpertId) -> bool, script: Script) -> Self {
        let config = cluster.join(name);
        let state = Arc::new(State {
            script: Mutex::new(script),
            holds,
            id: config.settings.id.clone(),
            store: store(Arc::new(Synthetic::new(|_| true))),
            dispatches: Mutex::default(),
            cancelled: Mutex::default(),
            reply: Mutex::default(),
        });
        let services = tonic::service::Routes::new(ExpertsServer::new(Service(state.clone())));
        let runtime = serve_as(cluster, &config, services);
        wait_until("the fake node is ready", || cluster.status(name).state == "ready");
        Self { state, _runtime: runtime }
    }

    /// What it does from now on.
    pub fn act(&self, script: Script) {
        *self.state.script.lock().unwrap() = script;
    }

    /// What its replies say about their making.
    pub fn claim(&self, reply: v1::Reply) {
        *self.state.reply.lock().unwrap() = reply;
    }

    /// Everything it was asked to do.
    pub fn dispatches(&self) -> Vec<v1::Dispatch> {
        self.state.dispatches.lock().unwrap().clone()
    }

    /// Everything it was then asked not to do.
    pub fn cancelled(&self) -> Vec<u64> {
        self.state.cancelled.lock().unwrap().clone()
    }
}

impl State {
    fn answer(&self, dispatch: &v1::Dispatch, act: Act) -> v1::from_node::Message {
        let claim = self.reply.lock().unwrap().clone();
        let (id, outcome) = match act {
            Act::Right | Act::Misnamed => {
                let batch = dispatch_from_wire(dispatch, self.store.layout()).unwrap();
                let sums = self.store.compute(&batch, &mut || {}).unwrap().pack();
                let id = if matches!(act, Act::Right) { dispatch.id } else { dispatch.id ^ 1 << 40 };
                (id, v1::reply::Outcome::Sums(sums.into()))
            }
            Act::Garbage => (dispatch.id, v1::reply::Outcome::Sums(vec![9; 11].into())),
            Act::Failure => {
                let code = v1::ErrorCode::Read.into();
                let failure = v1::Failure { code, sentence: "it was told to fail".into(), expert: None };
                (dispatch.id, v1::reply::Outcome::Failure(failure))
            }
        };
        v1::from_node::Message::Reply(v1::Reply { id, outcome: Some(outcome), ..claim })
    }
}

struct Service(Arc<State>);

#[tonic::async_trait]
impl Experts for Service {
    type ServeStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::FromNode, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<v1::ToNode>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        let state = self.0.clone();
        let mut held = Held::none(&layout());
        layout().ids().filter(|id| (state.holds)(*id)).for_each(|id| held.insert(id));
        let facts = Facts {
            name: "node fake".into(),
            fingerprint: Some(FINGERPRINT),
            profile: Some(NumericProfile::default()),
        };
        let hello = v1::from_node::Message::Hello(v1::NodeHello {
            peer: Some(peer_to_wire(&facts)),
            node_id: state.id.clone(),
            holdings: Some(v1::Holdings { held: held.to_wire(), syncing: false }),
            isa: "fake".into(),
            ..v1::NodeHello::default()
        });
        let (answers, stream) = tokio::sync::mpsc::unbounded_channel();
        let mut incoming = request.into_inner();
        tokio::spawn(async move {
            while let Ok(Some(message)) = incoming.message().await {
                match message.message {
                    Some(v1::to_node::Message::Hello(_)) => {
                        let _ = answers.send(Ok(v1::FromNode { message: Some(hello.clone()) }));
                    }
                    Some(v1::to_node::Message::Dispatch(dispatch)) => {
                        state.dispatches.lock().unwrap().push(dispatch.clone());
                        let acts = (state.script.lock().unwrap())(&dispatch);
                        for (delay, act) in acts {
                            let (state, dispatch, answers) =
                                (state.clone(), dispatch.clone(), answers.clone());
                            tokio::spawn(async move {
                                tokio::time::sleep(delay).await;
                                let message = Some(state.answer(&dispatch, act));
                                let _ = answers.send(Ok(v1::FromNode { message }));
                            });
                        }
                    }
                    Some(v1::to_node::Message::Cancel(cancel)) => {
                        state.cancelled.lock().unwrap().push(cancel.id);
                    }
                    _ => {}
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::UnboundedReceiverStream::new(stream))))
    }
}
