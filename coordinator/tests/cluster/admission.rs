//! Who is let in: tokens, certificates, models, protocol versions.

use std::time::Duration;

use shimmer::cluster::ClusterState;
use shimmer_common::container::Fingerprint;
use shimmer_node::token::Token;
use shimmer_node::{NodeError, Records, tls};
use shimmer_proto::v1;
use shimmer_proto::v1::cluster_client::ClusterClient;
use shimmer_proto::v1::experts_client::ExpertsClient;
use shimmer_proto::v1::shards_client::ShardsClient;

use crate::support::*;

fn join_error(cluster: &Cluster, token: &str) -> NodeError {
    let dir = cluster.root.path().join("refused");
    let error = shimmer_node::join(token, &dir, options("refused")).unwrap_err();
    assert!(!dir.exists(), "a refused join writes nothing");
    error
}

#[test]
fn bad_tokens_are_refused_with_a_sentence() {
    let cluster = Cluster::start(Setup::default());
    let token = cluster.invite();

    let error = join_error(&cluster, "shimmer1-nonsense");
    assert!(error.to_string().contains("copy the whole line again"), "{error}");

    let mut forged = Token::decode(&token).unwrap();
    forged.secret[0] ^= 1;
    let error = join_error(&cluster, &forged.encode());
    assert!(error.to_string().contains("did not make that join token"), "{error}");
    assert_eq!(error.exit_code(), 1);

    let expired = cluster.state.invite(&[cluster.experts.control_addr()], Duration::ZERO, 1).unwrap();
    let error = join_error(&cluster, &expired);
    assert!(error.to_string().contains("has expired"), "{error}");

    shimmer_node::join(&token, &cluster.root.path().join("first"), options("first")).unwrap();
    let error = join_error(&cluster, &token);
    assert!(error.to_string().contains("used up"), "{error}");
}

#[test]
fn a_taken_port_is_noticed_before_the_token_is_used() {
    let cluster = Cluster::start(Setup::default());
    let token = cluster.invite();
    let dir = cluster.root.path().join("late");
    let taken = cluster.experts.control_addr().to_string();
    let data = dir.to_str().unwrap();
    let _exit_code = shimmer_node::cli::main_with(
        ["shimmer-node", "join", &token, "--data", data, "--listen", &taken].map(Into::into),
    );
    assert!(!dir.exists() && cluster.state.members().unwrap().is_empty(), "it joined all the same");
    shimmer_node::join(&token, &dir, options("late")).unwrap();
}

#[test]
fn damaged_certificates_are_named() {
    let cluster = Cluster::start(Setup::default());
    for name in ["ca.crt", "node.crt", "node.key"] {
        let config = cluster.join(&name.replace('.', "-"));
        std::fs::write(config.data_dir.join(name), "damaged").unwrap();
        let error = Node::start(config.clone(), "127.0.0.1:0".parse().unwrap()).end().unwrap_err();
        let sentence = error.to_string();
        assert!(sentence.contains(name) && sentence.contains("join again"), "{sentence}");
        assert_eq!(error.exit_code(), 3);
    }
}

#[test]
fn the_secret_is_shown_to_the_right_coordinator_only() {
    let ours = Cluster::start(Setup::default());
    let other = Cluster::start(Setup::default());
    let mut token = Token::decode(&ours.invite()).unwrap();
    token.addresses = vec![other.experts.control_addr().to_string()];
    let error = join_error(&ours, &token.encode());
    assert!(error.to_string().contains("certificate of another cluster"), "{error}");
    assert_eq!(error.exit_code(), 4);

    token.addresses = vec!["127.0.0.1:1".to_owned()];
    let error = join_error(&ours, &token.encode());
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert_eq!(error.exit_code(), 4);
}

#[test]
fn joining_again_keeps_id_and_key_but_nobody_can_take_an_id() {
    let cluster = Cluster::start(Setup::default());
    let first = cluster.join("kitchen");
    let key = std::fs::read(first.data_dir.join("node.key")).unwrap();
    let again = cluster.join("kitchen");
    assert_eq!(first.settings.id, again.settings.id);
    assert_eq!(std::fs::read(again.data_dir.join("node.key")).unwrap(), key);
    assert_eq!(cluster.state.members().unwrap().len(), 1);

    let (runtime, control) = control_channel(&cluster, None);
    let request = v1::JoinRequest {
        protocol: shimmer_proto::PROTOCOL_VERSION,
        secret: Token::decode(&cluster.invite()).unwrap().secret.to_vec().into(),
        node_id: first.settings.id,
        name: "thief".into(),
        certificate_request: certificate_request().into(),
    };
    let status = runtime.block_on(ClusterClient::new(control).join(request)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::AlreadyExists, "{status:?}");
}

/// The request of a key of our own.
fn certificate_request() -> Vec<u8> {
    let key = rcgen::KeyPair::generate().unwrap();
    rcgen::CertificateParams::default().serialize_request(&key).unwrap().der().to_vec()
}

#[cfg(unix)]
#[test]
fn a_node_keeps_its_secrets_to_itself() {
    use std::os::unix::fs::PermissionsExt as _;
    let cluster = Cluster::start(Setup::default());
    let config = cluster.join("private");
    let mode = |p: &std::path::Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&config.data_dir), 0o700);
    for name in ["node.json", "node.key", "node.crt", "ca.crt"] {
        assert_eq!(mode(&config.data_dir.join(name)), 0o600, "{name}");
    }
    let key = std::fs::read_to_string(config.data_dir.join("node.key")).unwrap();
    for file in std::fs::read_dir(cluster.state.dir()).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        assert!(!text.contains(key.lines().nth(1).unwrap()), "the coordinator has the node's key");
    }
}

#[test]
fn without_a_certificate_nothing_but_join_is_served() {
    let cluster = Cluster::start(Setup::default());
    let node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();

    let (runtime, control) = control_channel(&cluster, None);
    let status = runtime
        .block_on(ClusterClient::new(control.clone()).register(v1::RegisterRequest::default()))
        .unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);
    assert!(status.message().contains("join first"), "{}", status.message());
    let status = runtime.block_on(ShardsClient::new(control).fetch(v1::FetchRequest::default())).unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);

    // A node does not even finish a call without a certificate …
    let anonymous = tls::Credentials { identity: None, ..node.config.credentials().unwrap() };
    let name = tls::node_name(&node.config.settings.id);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let served = runtime.block_on(async {
        let channel = tls::connect(&anonymous, &node.addr.to_string(), &name, PATIENCE).await?;
        let stream = tokio_stream::iter([v1::ToNode::default()]);
        ExpertsClient::new(channel).serve(stream).await.map(drop).map_err(|status| status.to_string())
    });
    assert!(served.is_err(), "an anonymous caller was served");

    // … and does not serve another node.
    let other = cluster.join("other");
    let (runtime, to_node) = channel(&other.credentials().unwrap(), node.addr, &name);
    let stream = tokio_stream::iter([v1::ToNode::default()]);
    let status = runtime.block_on(ExpertsClient::new(to_node).serve(stream)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);
    assert!(status.message().contains("coordinator only"), "{}", status.message());
}

#[test]
fn another_model_is_refused_naming_both_sides() {
    let cluster = Cluster::start(Setup::default());
    let mut config = cluster.join("kitchen");
    let source = std::sync::Arc::new(Synthetic::new(|_| true));
    config.records = Records::Source { source, fingerprint: Fingerprint([0x91; 32]) };
    let error = Node::start(config, "127.0.0.1:0".parse().unwrap()).end().unwrap_err();
    let sentence = error.to_string();
    for part in
        ["node kitchen has model 919191919191…", "the coordinator has model 3f3f3f3f3f3f…", "same model"]
    {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }
    assert_eq!(error.exit_code(), 3);
}

#[test]
fn another_protocol_version_is_refused_naming_both_sides() {
    let cluster = Cluster::start(Setup::default());
    let node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let peer = v1::Peer { protocol: 99, name: "node future".into(), ..v1::Peer::default() };

    let (runtime, control) = control_channel(&cluster, Some(&node.config));
    let request = v1::RegisterRequest { peer: Some(peer.clone()), ..v1::RegisterRequest::default() };
    let status = runtime.block_on(ClusterClient::new(control.clone()).register(request)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert!(
        status.message().contains("node future speaks protocol 99, the coordinator speaks protocol 2"),
        "{}",
        status.message()
    );

    let request = v1::JoinRequest { protocol: 99, ..v1::JoinRequest::default() };
    let status = runtime.block_on(ClusterClient::new(control).join(request)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);

    let name = tls::node_name(&node.config.settings.id);
    let (runtime, to_node) = channel(&coordinator_credentials(&cluster.state), node.addr, &name);
    let hello = v1::CoordinatorHello {
        peer: Some(v1::Peer { name: "the coordinator".into(), ..peer }),
        ..v1::CoordinatorHello::default()
    };
    let hello = v1::ToNode { message: Some(v1::to_node::Message::Hello(hello)) };
    let answer = runtime.block_on(async {
        let mut answers =
            ExpertsClient::new(to_node).serve(tokio_stream::iter([hello])).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap().message.unwrap()
    });
    let v1::from_node::Message::Refused(why) = answer else { panic!("{answer:?}") };
    assert!(why.contains("the coordinator speaks protocol 99, node kitchen speaks protocol 2"), "{why}");
}

#[test]
fn a_revoked_node_is_cut_off() {
    let cluster = Cluster::start(Setup::default());
    let node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    ClusterState::open(cluster.state.dir()).unwrap().revoke("kitchen").unwrap();
    let (runtime, control) = control_channel(&cluster, Some(&node.config));
    let status =
        runtime.block_on(ClusterClient::new(control).register(v1::RegisterRequest::default())).unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
    wait_until("the link is cut", || cluster.status("kitchen").state == "lost");
    cluster.check(&batch(LAYERS[0], 1, 1));
}
