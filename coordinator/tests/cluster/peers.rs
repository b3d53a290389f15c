//! Peers that lie, flood or fall silent: wrong numbers never get in, and nobody runs out of memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use shimmer::cluster::{ClusterOptions, ClusterState};
use shimmer_common::kernels::GROUP;
use shimmer_common::profile::NumericProfile;
use shimmer_node::tls;
use shimmer_node::wire::{Facts, Held, MAX_MESSAGE_BYTES, peer_to_wire};
use shimmer_proto::v1;
use shimmer_proto::v1::cluster_client::ClusterClient;
use shimmer_proto::v1::experts_client::ExpertsClient;
use shimmer_proto::v1::experts_server::{Experts, ExpertsServer};
use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status, Streaming};

use crate::support::*;

/// Answers of a node that went mad, for a dispatch.
pub type Madness = fn(&v1::Dispatch) -> Vec<v1::from_node::Message>;

fn sums(id: u64, bytes: Vec<u8>) -> v1::from_node::Message {
    let outcome = Some(v1::reply::Outcome::Sums(bytes.into()));
    v1::from_node::Message::Reply(v1::Reply { id, outcome, ..v1::Reply::default() })
}

fn failure(id: u64, code: i32, expert: Option<u32>) -> v1::from_node::Message {
    let failure = v1::Failure { code, sentence: "x\u{7}y".repeat(1000), expert };
    let outcome = Some(v1::reply::Outcome::Failure(failure));
    v1::from_node::Message::Reply(v1::Reply { id, outcome, ..v1::Reply::default() })
}

pub struct Mad {
    pub id: String,
    pub answer: Madness,
}

#[tonic::async_trait]
impl Experts for Mad {
    type ServeStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::FromNode, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<v1::ToNode>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        let mut held = Held::none(&layout());
        layout().ids().for_each(|id| held.insert(id));
        let facts = Facts {
            name: "node mad".into(),
            fingerprint: Some(FINGERPRINT),
            profile: Some(NumericProfile::default()),
        };
        let hello = v1::from_node::Message::Hello(v1::NodeHello {
            peer: Some(peer_to_wire(&facts)),
            node_id: self.id.clone(),
            holdings: Some(v1::Holdings { held: held.to_wire(), syncing: false }),
            isa: "mad".into(),
            ram_bytes: u64::MAX,
            ..v1::NodeHello::default()
        });
        let answer = self.answer;
        let (answers, stream) = tokio::sync::mpsc::unbounded_channel();
        let mut incoming = request.into_inner();
        tokio::spawn(async move {
            while let Ok(Some(message)) = incoming.message().await {
                let messages = match message.message {
                    Some(v1::to_node::Message::Hello(_)) => vec![hello.clone()],
                    Some(v1::to_node::Message::Dispatch(dispatch)) => answer(&dispatch),
                    _ => Vec::new(),
                };
                for message in messages {
                    let _ = answers.send(Ok(v1::FromNode { message: Some(message) }));
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::UnboundedReceiverStream::new(stream))))
    }
}

/// A member of the cluster that answers with `answer`; it serves until the runtime is dropped.
fn mad_node(cluster: &Cluster, answer: Madness) -> tokio::runtime::Runtime {
    let config = cluster.join("mad");
    let mad = Mad { id: config.settings.id.clone(), answer };
    let runtime = serve_as(cluster, &config, tonic::service::Routes::new(ExpertsServer::new(mad)));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    runtime
}

pub async fn register(
    cluster: &Cluster,
    credentials: &tls::Credentials,
    port: u16,
) -> Result<v1::RegisterReply, Status> {
    let address = cluster.experts.control_addr().to_string();
    let channel = tls::connect(credentials, &address, tls::COORDINATOR_NAME, PATIENCE).await.unwrap();
    let facts = Facts { name: "node".into(), fingerprint: None, profile: None };
    let request = v1::RegisterRequest {
        peer: Some(peer_to_wire(&facts)),
        port: port.into(),
        ..v1::RegisterRequest::default()
    };
    ClusterClient::new(channel).register(request).await.map(Response::into_inner)
}

#[test]
fn whatever_a_node_answers_the_sums_are_right() {
    let cases: [(&str, Madness); 10] = [
        ("nothing at all", |d| vec![sums(d.id, Vec::new())]),
        ("too short", |d| vec![sums(d.id, vec![1; 7])]),
        ("noise", |d| {
            vec![sums(d.id, (0..d.rows as usize * HIDDEN * 8 + 3).map(|i| (i * 31) as u8).collect())]
        }),
        ("megabytes", |d| vec![sums(d.id, vec![0xff; 32 << 20])]),
        ("an empty reply", |d| {
            vec![v1::from_node::Message::Reply(v1::Reply { id: d.id, ..v1::Reply::default() })]
        }),
        ("unknown codes", |d| vec![failure(d.id, 12345, Some(u32::MAX))]),
        ("an expert nobody has", |d| vec![failure(d.id, v1::ErrorCode::Damaged.into(), Some(65_535))]),
        ("other ids, then twice", |d| {
            vec![sums(u64::MAX, vec![0]), sums(d.id, vec![0; 3]), sums(d.id, vec![0; 3])]
        }),
        ("a second greeting", |_| vec![v1::from_node::Message::Hello(v1::NodeHello::default())]),
        ("impossible holdings", |_| {
            vec![v1::from_node::Message::Holdings(v1::Holdings {
                held: vec![0xff; 99].into(),
                syncing: true,
            })]
        }),
    ];
    for (what, answer) in cases {
        eprintln!("{what}");
        let cluster = Cluster::start(Setup::default());
        let _node = mad_node(&cluster, answer);
        for seed in 0..3 {
            cluster.check(&batch(LAYERS[(seed % 2) as usize], 3, seed));
        }
        let (_, fallback) = cluster.experts.local_counts();
        assert!(fallback > 0 && cluster.status("mad").experts_served == 0, "{what} was believed");
    }
}

#[test]
fn a_node_that_never_answers_is_asked_once() {
    let options = ClusterOptions { deadline: Some(Duration::from_millis(200)), ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let _node = mad_node(&cluster, |_| Vec::new());
    for seed in 0..5 {
        cluster.check(&batch(LAYERS[0], 2, seed));
    }
    wait_until("its deadline passes", || cluster.status("mad").state == "suspect");
    assert_eq!(cluster.status("mad").failures, 1);
}

#[test]
fn a_late_node_that_is_the_only_hope_is_waited_for() {
    let deadline = Duration::from_millis(100);
    let options = ClusterOptions { deadline: Some(deadline), ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { local: false, options, ..Setup::default() });
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let _node = cluster.node("slow", source);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    stuck.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let computing = scope.spawn(|| cluster.check(&batch(LAYERS[0], 2, 1)));
        let begun = Instant::now();
        wait_until("the deadline passed long ago", || begun.elapsed() > deadline * 4);
        stuck.store(false, Ordering::Relaxed);
        computing.join().unwrap();
    });
    assert_eq!(cluster.status("slow").state, "ready");
}

#[test]
fn two_processes_with_one_identity_are_told_apart() {
    let cluster = Cluster::start(Setup::default());
    let credentials = cluster.join("twin").credentials().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let register = |port| runtime.block_on(register(&cluster, &credentials, port));
    register(1111).unwrap();
    register(1111).unwrap();
    register(2222).unwrap();
    let refused = register(1111).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Aborted);
    assert!(refused.message().contains("node twin at 127.0.0.1:2222"), "{}", refused.message());
    register(2222).unwrap();
    register(3333).unwrap();
    let stored = cluster.state.members().unwrap();
    assert_eq!(stored[0].addresses, ["127.0.0.1:3333"]);
}

#[test]
fn a_member_that_never_served_owns_nothing() {
    let cluster = Cluster::start(Setup::default());
    let _never_started = cluster.join("absent");
    let credentials = cluster.join("present").credentials().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reply = runtime.block_on(register(&cluster, &credentials, 1111)).unwrap();
    let assigned = Held::from_wire(&layout(), &reply.assigned).unwrap();
    assert_eq!(assigned.len(), layout().ids().count());
}

/// The stream of a coordinator that has been let in; the cluster's own has been stopped.
fn open_stream(
    state: &ClusterState,
    node: &Node,
    work: impl tokio_stream::Stream<Item = v1::Dispatch> + Send + 'static,
) -> (tokio::runtime::Runtime, Streaming<v1::FromNode>) {
    let facts = Facts {
        name: "the coordinator".into(),
        fingerprint: Some(FINGERPRINT),
        profile: Some(NumericProfile::default()),
    };
    let name = tls::node_name(&node.config.settings.id);
    let (runtime, to_node) = channel(&coordinator_credentials(state), node.addr, &name);
    let hello = v1::to_node::Message::Hello(v1::CoordinatorHello {
        peer: Some(peer_to_wire(&facts)),
        ..v1::CoordinatorHello::default()
    });
    let verdict = v1::to_node::Message::Verdict(v1::Verdict { accepted: true, reason: String::new() });
    wait_until("the node is free", || {
        let hello = v1::ToNode { message: Some(hello.clone()) };
        let call = ExpertsClient::new(to_node.clone());
        runtime.block_on(async move {
            let mut answers = { call }.serve(tokio_stream::iter([hello])).await.unwrap().into_inner();
            let answer = answers.message().await.unwrap().unwrap().message;
            matches!(answer, Some(v1::from_node::Message::Hello(_)))
        })
    });
    let messages = tokio_stream::iter([hello, verdict]).chain(work.map(v1::to_node::Message::Dispatch));
    let messages = messages.map(|message| v1::ToNode { message: Some(message) });
    let answers = runtime.block_on(async {
        let mut client = ExpertsClient::new(to_node).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut answers = client.serve(messages).await.unwrap().into_inner();
        let hello = answers.message().await.unwrap().unwrap().message;
        assert!(matches!(hello, Some(v1::from_node::Message::Hello(_))), "{hello:?}");
        answers
    });
    (runtime, answers)
}

/// `rows` rows of ones for one expert of the int8 layer.
fn dispatch(id: u64, rows: usize) -> v1::Dispatch {
    let scales: Vec<u8> = 1f32.to_le_bytes().repeat(rows * HIDDEN.div_ceil(GROUP));
    v1::Dispatch {
        id,
        deadline_ms: 600_000,
        layer: LAYERS[0].into(),
        rows: rows as u32,
        values: vec![1; rows * HIDDEN].into(),
        scales: scales.into(),
        experts: vec![1],
        counts: vec![rows as u32],
        row_indices: (0..rows as u32).collect(),
        gates: vec![0.5; rows],
        ..v1::Dispatch::default()
    }
}

#[test]
fn absurd_dispatches_are_answered_and_the_node_goes_on() {
    let cluster = Cluster::start(Setup::default());
    let node = cluster.node("calm", Synthetic::new(|_| true));
    let changes: Vec<fn(&mut v1::Dispatch)> = vec![
        |d| d.rows = u32::MAX,
        |d| d.rows = 0,
        |d| d.layer = u32::MAX,
        |d| d.layer = 77,
        |d| d.experts = vec![u32::MAX],
        |d| d.experts = (0..100_000).collect(),
        |d| d.counts = vec![u32::MAX],
        |d| d.counts = vec![0],
        |d| d.gates[0] = f32::NAN,
        |d| d.gates[0] = f32::INFINITY,
        |d| d.row_indices[1] = u32::MAX,
        |d| d.row_indices = vec![0; 2],
        |d| d.scales = f32::NAN.to_le_bytes().repeat(4).into(),
        |d| d.scales = vec![1].into(),
        |d| d.values = vec![0x80; 2 * HIDDEN].into(),
        |d| d.values = Vec::new().into(),
        |d| d.floats = vec![0; 8].into(),
    ];
    let count = changes.len() as u64;
    let bad = changes.into_iter().enumerate().map(|(i, change)| {
        let mut dispatch = dispatch(i as u64 + 1, 2);
        change(&mut dispatch);
        dispatch
    });
    let work: Vec<_> = bad.chain([dispatch(1000, 2)]).collect();
    let stream = tokio_stream::iter(work).chain(tokio_stream::pending());
    let (_root, state) = cluster.stop();
    let (runtime, mut answers) = open_stream(&state, &node, stream);
    let mut refused = 0;
    loop {
        let message = runtime.block_on(answers.message()).unwrap().unwrap().message.unwrap();
        let v1::from_node::Message::Reply(reply) = message else { continue };
        match reply.outcome.unwrap() {
            v1::reply::Outcome::Failure(failure) => {
                assert_eq!(failure.code(), v1::ErrorCode::Malformed, "{}: {}", reply.id, failure.sentence);
                refused += 1;
            }
            v1::reply::Outcome::Sums(_) => {
                assert_eq!(reply.id, 1000);
                break;
            }
        }
    }
    assert_eq!(refused, count);
}

#[test]
fn a_flood_of_dispatches_is_held_back_at_the_sender() {
    const FLOOD: u64 = 300;
    const ROWS: usize = 16_384;
    let cluster = Cluster::start(Setup::default());
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let node = cluster.node("small", source);
    stuck.store(true, Ordering::Relaxed);
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = sent.clone();
    let flood = tokio_stream::iter(1..=FLOOD).map(move |id| {
        counter.fetch_add(1, Ordering::Relaxed);
        dispatch(id, ROWS)
    });
    let (_root, state) = cluster.stop();
    let (runtime, mut answers) = open_stream(&state, &node, flood.chain(tokio_stream::pending()));
    // Let the sender go on until it has been stopped for a while.
    let (mut seen, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(1) {
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(20)).await });
        let now = sent.load(Ordering::Relaxed);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
    assert!((2..60).contains(&seen), "{seen} of {FLOOD} dispatches of megabytes were taken in");
    stuck.store(false, Ordering::Relaxed);
    for _ in 0..seen {
        let message = runtime.block_on(answers.message()).unwrap().unwrap().message.unwrap();
        assert!(matches!(message, v1::from_node::Message::Reply(_)), "{message:?}");
    }
    assert!(sent.load(Ordering::Relaxed) > seen, "the sender goes on when there is room");
}
