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
    // By another process, as `shimmer cluster revoke` does it.
    ClusterState::open(cluster.state.dir()).unwrap().revoke("kitchen").unwrap();
    wait_until("the link is cut", || cluster.status("kitchen").why.contains("revoked"));
    assert_eq!(cluster.status("kitchen").state, "lost");
    let (runtime, control) = control_channel(&cluster, Some(&node.config));
    let status = runtime
        .block_on(ClusterClient::new(control.clone()).register(v1::RegisterRequest::default()))
        .unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
    let fetched = runtime.block_on(ShardsClient::new(control).fetch(v1::FetchRequest::default()));
    assert_eq!(fetched.unwrap_err().code(), tonic::Code::PermissionDenied);
    cluster.check(&batch(LAYERS[0], 1, 1));
}

#[test]
fn a_token_is_bound_to_its_ca() {
    let ours = Cluster::start(Setup::default());
    let other = Cluster::start(Setup::default());
    let mut token = Token::decode(&ours.invite()).unwrap();
    token.ca_der = Token::decode(&other.invite()).unwrap().ca_der;
    let error = join_error(&ours, &token.encode());
    assert!(error.to_string().contains("certificate of another cluster"), "{error}");

    // A token of one cluster is worth nothing in another, even for somebody who has the CA.
    let mut token = Token::decode(&ours.invite()).unwrap();
    token.ca_der = Token::decode(&other.invite()).unwrap().ca_der;
    token.addresses = vec![other.experts.control_addr().to_string()];
    let error = join_error(&other, &token.encode());
    assert!(error.to_string().contains("did not make that join token"), "{error}");
}

/// A certificate of the cluster's CA, for the key in `key_file`, valid in other times.
fn shifted_certificate(
    cluster: &std::path::Path,
    key_file: &std::path::Path,
    name: &str,
    days: i64,
) -> String {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap();
    let ca_key = rcgen::KeyPair::from_pem(&read(cluster.join("ca.key"))).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read(cluster.join("ca.crt")), ca_key).unwrap();
    let key = rcgen::KeyPair::from_pem(&read(key_file.to_owned())).unwrap();
    let names = vec![name.to_owned(), tls::ANY_NODE_NAME.to_owned()];
    let mut params = rcgen::CertificateParams::new(names).unwrap();
    params.not_before = time::OffsetDateTime::now_utc() + time::Duration::days(days);
    params.not_after = params.not_before + time::Duration::days(2);
    params.signed_by(&key, &issuer).unwrap().pem()
}

#[test]
fn clocks_out_of_joint_are_named() {
    let cluster = Cluster::start(Setup::default());
    // The node's certificate is of another time by the coordinator's clock.
    for days in [-100, 100] {
        let config = cluster.join("timeless");
        let id = tls::node_name(&config.settings.id);
        let certificate =
            shifted_certificate(cluster.state.dir(), &config.data_dir.join("node.key"), &id, days);
        std::fs::write(config.data_dir.join("node.crt"), certificate).unwrap();
        let address = cluster.experts.control_addr().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let credentials = config.credentials().unwrap();
        let call = || async {
            let channel = tls::connect(&credentials, &address, tls::COORDINATOR_NAME, PATIENCE).await?;
            let called = ClusterClient::new(channel).register(v1::RegisterRequest::default()).await;
            called.map(drop).map_err(|status| tls::status_cause(&status))
        };
        // An alert can be overtaken by the end of its connection.
        wait_until("the clock is named", || {
            let why = runtime.block_on(call()).unwrap_err();
            why.contains("clock of this machine says") && why.contains("set the clocks")
        });
    }

    // The coordinator's certificate is of another time by the node's clock.
    let token = cluster.invite();
    let (root, state) = cluster.stop();
    let key = state.dir().join("coordinator.key");
    for (days, sentence) in [(-100, "whose time ended at"), (100, "whose time begins at")] {
        let certificate = shifted_certificate(state.dir(), &key, tls::COORDINATOR_NAME, days);
        std::fs::write(state.dir().join("coordinator.crt"), certificate).unwrap();
        let experts = start_coordinator(&state, Setup::default());
        let mut token = Token::decode(&token).unwrap();
        token.addresses = vec![experts.control_addr().to_string()];
        let error = shimmer_node::join(&token.encode(), &root.path().join("late"), options("late"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(sentence) && error.contains("clock of this machine says"), "{error}");
    }
}

#[test]
fn a_node_whose_clock_is_wrong_works_all_the_same() {
    let cluster = Cluster::start(Setup::default());
    let config = cluster.join("yesterday");
    let (runtime, control) = control_channel(&cluster, Some(&config));
    let facts = shimmer_node::wire::Facts { name: "node".into(), fingerprint: None, profile: None };
    let mut client = ClusterClient::new(control);
    for hours in [0, 1_000_000_000] {
        let request = v1::RegisterRequest {
            peer: Some(shimmer_node::wire::peer_to_wire(&facts)),
            port: 1,
            unix_ms: 1 + hours * 3_600_000,
            ..v1::RegisterRequest::default()
        };
        let reply = runtime.block_on(client.register(request)).unwrap().into_inner();
        assert!(reply.unix_ms.abs_diff(tls::unix_millis()) < 600_000, "the coordinator says its time");
    }
}

#[test]
fn a_node_that_cannot_be_dialled_is_told_so() {
    let cluster = Cluster::start(Setup::default());
    let config = cluster.join("walled");
    let (runtime, control) = control_channel(&cluster, Some(&config));
    let facts = shimmer_node::wire::Facts { name: "node".into(), fingerprint: None, profile: None };
    let mut client = ClusterClient::new(control);
    let mut unreachable = String::new();
    wait_until("the coordinator says so", || {
        let request = v1::RegisterRequest {
            peer: Some(shimmer_node::wire::peer_to_wire(&facts)),
            advertise: vec!["127.0.0.1:1".to_owned()],
            ..v1::RegisterRequest::default()
        };
        unreachable = runtime.block_on(client.register(request)).unwrap().into_inner().unreachable;
        !unreachable.is_empty()
    });
    for part in ["tried 127.0.0.1:1", "refused", "firewall", "--advertise"] {
        assert!(unreachable.contains(part), "{part:?} is not in: {unreachable}");
    }
    assert_eq!(cluster.status("walled").unreachable, unreachable);
}

#[cfg(unix)]
#[test]
fn thousands_of_idle_connections_keep_nobody_out() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    const IDLE: usize = 2_000;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let mut idle = Vec::new();
    for target in [cluster.experts.control_addr(), node.addr] {
        idle.extend((0..IDLE).map(|_| std::net::TcpStream::connect(target).unwrap()));
    }
    cluster.check(&batch(LAYERS[0], 2, 1));
    let _late = cluster.node("late", Synthetic::new(|_| true));
    cluster.experts.wait_ready(2, PATIENCE).unwrap();
    cluster.check(&batch(LAYERS[0], 2, 2));
    // Most of them were sent away.
    let open = |mut stream: &std::net::TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let read = std::io::Read::read(&mut stream, &mut [0]);
        read.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let open = idle.iter().filter(|stream| open(stream)).count();
    assert!(open < IDLE, "{open} of {} idle connections are kept", idle.len());
}
