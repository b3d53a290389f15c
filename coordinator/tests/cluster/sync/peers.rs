//! Records from other nodes: who gives them to whom, and who is believed.

use shimmer::cluster::ClusterOptions;
use shimmer_common::experts::ExpertSource as _;
use shimmer_common::profile::NumericProfile;
use shimmer_node::tls;
use shimmer_node::wire::{Facts, peer_to_wire};
use shimmer_proto::v1;
use shimmer_proto::v1::shards_client::ShardsClient;

use super::liar::{Lie, lying_node};
use super::{report, start_again, wait_synced};
use crate::support::*;

const ANY: &str = "127.0.0.1:0";

fn setup() -> Setup {
    Setup { local: false, ..Setup::default() }
}

#[test]
fn a_second_node_fetches_from_the_first_and_nothing_is_sent_twice() {
    let cluster = Cluster::start(setup());
    // Joined before the first node registers, so that it is on its roster.
    let second = cluster.join("second");
    let first = Node::start(cluster.join("first"), ANY.parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let all = wait_synced(&first.config, 32);
    assert_eq!(all.received_bytes, cluster.experts.sent_bytes());

    let second = Node::start(second, ANY.parse().unwrap());
    cluster.experts.wait_ready(2, PATIENCE).unwrap();
    let held = cluster.status("second").experts_held as u32;
    let theirs = wait_synced(&second.config, held);
    assert_eq!(theirs.received_bytes, theirs.wanted_bytes);
    assert_eq!(cluster.experts.sent_bytes(), all.received_bytes, "all of it came from the first node");
    cluster.check(&batch(LAYERS[0], 5, 1));

    // The second goes for good: the first owns everything again, and has it.
    let (gone, _) = second.stop();
    cluster.state.revoke(&gone.settings.id).unwrap();
    wait_until("the plan is changed", || report(&first.config).is_some_and(|now| now.wanted_records == 32));
    let (config, addr) = first.stop();
    let first = start_again(config, addr);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    assert_eq!(wait_synced(&first.config, 32).received_bytes, 0);
    assert_eq!(cluster.experts.sent_bytes(), all.received_bytes, "nothing was sent again");
}

#[test]
fn hashes_outlive_the_coordinator_and_damage_to_their_file() {
    for damage in [false, true] {
        let mut cluster = Cluster::start(setup());
        // Joined before the first node registers, so that it is on its roster.
        let second = cluster.join("second");
        let first = Node::start(cluster.join("first"), ANY.parse().unwrap());
        cluster.experts.wait_ready(1, PATIENCE).unwrap();
        let all = wait_synced(&first.config, 32);
        let Cluster { root, state, experts } = cluster;
        let listen = experts.control_addr();
        drop(experts);
        let file = std::fs::read_dir(state.dir()).unwrap().map(|f| f.unwrap().path());
        let file = file.into_iter().find(|f| f.to_string_lossy().contains("hashes-")).unwrap();
        if damage {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[100] ^= 4;
            std::fs::write(&file, bytes).unwrap();
        }
        let options = ClusterOptions { listen: Some(listen), ..ClusterOptions::default() };
        let experts = start_coordinator(&state, Setup { options, ..setup() });
        cluster = Cluster { root, state, experts };
        cluster.experts.wait_ready(1, PATIENCE).unwrap();
        let second = Node::start(second, ANY.parse().unwrap());
        cluster.experts.wait_ready(2, PATIENCE).unwrap();
        let theirs = wait_synced(&second.config, cluster.status("second").experts_held as u32);
        let expected = if damage { theirs.wanted_bytes } else { 0 };
        assert_eq!(cluster.experts.sent_bytes(), expected, "damaged: {damage}");
        assert!(all.received_bytes > theirs.received_bytes);
    }
}

#[test]
fn a_peer_that_sends_wrong_records_is_not_believed() {
    for lie in [Lie::FlippedBit, Lie::OwnHash, Lie::HalfThenHangUp, Lie::TooMuch, Lie::OtherOffset] {
        let cluster = Cluster::start(setup());
        let honest = Node::start(cluster.join("honest"), ANY.parse().unwrap());
        cluster.experts.wait_ready(1, PATIENCE).unwrap();
        wait_synced(&honest.config, 32);
        drop(honest);
        wait_until("it is lost", || cluster.status("honest").state == "lost");
        let before = cluster.experts.sent_bytes();
        let liar = lying_node(&cluster, lie);
        let victim = Node::start(cluster.join("victim"), ANY.parse().unwrap());
        wait_until("it has its share", || {
            cluster.experts.nodes().iter().any(|n| n.name == "victim" && n.state == "ready")
        });
        let theirs = wait_synced(&victim.config, cluster.status("victim").experts_held as u32);
        assert!(liar.asked() > 0, "{lie:?}: it was never asked");
        assert!(cluster.experts.sent_bytes() - before > 0, "{lie:?}: nothing came from elsewhere");
        let shard = victim.config.data_dir.join("shard");
        let pack = shimmer_common::experts::pack::Pack::open(&shard).unwrap();
        assert_eq!(pack.ids().len() as u32, theirs.wanted_records);
        let truth = Synthetic::new(|_| true);
        for id in pack.ids() {
            let mut records = [0, 1].map(|_| vec![0; truth.layout().record_bytes(id).unwrap()]);
            pack.read(id, &mut records[0]).unwrap();
            truth.read(id, &mut records[1]).unwrap();
            assert!(records[0] == records[1], "{lie:?}: {id} is wrong");
        }
    }
}

/// Asks the node at `address` for one record with these credentials.
fn ask(
    credentials: &tls::Credentials,
    node: &Node,
    change: impl FnOnce(&mut v1::FetchRequest),
) -> Result<Vec<v1::record_part::Part>, tonic::Status> {
    let name = tls::node_name(&node.config.settings.id);
    let (runtime, channel) = channel(credentials, node.addr, &name);
    runtime.block_on(fetch(channel, change))
}

async fn fetch(
    channel: tonic::transport::Channel,
    change: impl FnOnce(&mut v1::FetchRequest),
) -> Result<Vec<v1::record_part::Part>, tonic::Status> {
    let facts = Facts {
        name: "node asker".into(),
        fingerprint: Some(FINGERPRINT),
        profile: Some(NumericProfile::default()),
    };
    let mut request = v1::FetchRequest {
        peer: Some(peer_to_wire(&facts)),
        layers: vec![LAYERS[0].into()],
        experts: vec![2],
        ..v1::FetchRequest::default()
    };
    change(&mut request);
    let mut stream = ShardsClient::new(channel).fetch(request).await?.into_inner();
    let mut parts = Vec::new();
    while let Some(part) = stream.message().await? {
        parts.push(part.part.unwrap());
    }
    Ok(parts)
}

#[test]
fn a_node_gives_records_to_members_of_its_cluster_only() {
    let cluster = Cluster::start(setup());
    let (friend, thief) = (cluster.join("friend"), cluster.join("thief"));
    cluster.state.revoke("thief").unwrap();
    let node = cluster.node("giver", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();

    // It hears who belongs to its cluster when its registration is answered.
    wait_until("the node knows its members", || ask(&friend.credentials().unwrap(), &node, |_| {}).is_ok());
    let parts = ask(&friend.credentials().unwrap(), &node, |_| {}).unwrap();
    assert!(matches!(&parts[0], v1::record_part::Part::Header(h) if h.offset == 0 && h.blake3.len() == 32));
    ask(&coordinator_credentials(&cluster.state), &node, |_| {}).unwrap();
    let refused = ask(&thief.credentials().unwrap(), &node, |_| {}).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused:?}");
    let model = |r: &mut v1::FetchRequest| r.peer.as_mut().unwrap().fingerprint = vec![1; 32].into();
    let refused = ask(&friend.credentials().unwrap(), &node, model).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused:?}");

    // A certificate of another cluster does not get through the handshake.
    let other = Cluster::start(setup());
    let stranger = other.join("stranger").credentials().unwrap();
    let mixed = tls::Credentials { ca_pem: friend.credentials().unwrap().ca_pem, ..stranger };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let name = tls::node_name(&node.config.settings.id);
    let served = runtime.block_on(async {
        let channel = tls::connect(&mixed, &node.addr.to_string(), &name, PATIENCE).await?;
        fetch(channel, |_| {}).await.map_err(|status| status.to_string())
    });
    assert!(served.is_err(), "a stranger was served");
}

#[test]
fn the_rest_of_a_record_is_sent_and_nothing_beyond_it() {
    let cluster = Cluster::start(setup());
    let node = cluster.node("giver", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let friend = node.config.credentials().unwrap();
    wait_until("the node knows its members", || ask(&friend, &node, |_| {}).is_ok());
    let id = shimmer_common::experts::ExpertId { layer: LAYERS[0], index: 2 };
    let mut record = vec![0; layout().record_bytes(id).unwrap()];
    Synthetic::new(|_| true).read(id, &mut record).unwrap();
    let (runtime, control) = control_channel(&cluster, Some(&node.config));
    for at_node in [false, true] {
        let fetch_at = |offsets: Vec<u64>| {
            let change = |r: &mut v1::FetchRequest| r.offsets = offsets;
            if at_node {
                ask(&friend, &node, change)
            } else {
                runtime.block_on(fetch(control.clone(), change))
            }
        };
        let parts = fetch_at(vec![5000]).unwrap();
        let [v1::record_part::Part::Header(header), data @ ..] = &parts[..] else { panic!("{parts:?}") };
        assert_eq!((header.offset, header.record_bytes), (5000, record.len() as u64));
        assert_eq!(header.blake3, blake3::hash(&record).as_bytes()[..], "of the whole record");
        let data: Vec<u8> = data
            .iter()
            .flat_map(|part| match part {
                v1::record_part::Part::Data(data) => data.to_vec(),
                v1::record_part::Part::Header(_) => panic!("two headers"),
            })
            .collect();
        assert!(data == record[5000..]);
        for offsets in [vec![record.len() as u64], vec![u64::MAX], vec![0, 0]] {
            let refused = fetch_at(offsets).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused:?}");
        }
    }
}

#[test]
fn a_node_takes_in_small_requests_only() {
    let cluster = Cluster::start(setup());
    let node = cluster.node("giver", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let friend = node.config.credentials().unwrap();
    wait_until("the node knows its members", || ask(&friend, &node, |_| {}).is_ok());
    let many = |count: usize| {
        move |r: &mut v1::FetchRequest| {
            (r.layers, r.experts) = (vec![LAYERS[0].into(); count], vec![2; count]);
        }
    };
    assert_eq!(ask(&friend, &node, many(65)).unwrap_err().code(), tonic::Code::InvalidArgument);
    assert_eq!(ask(&friend, &node, many(1_000_000)).unwrap_err().code(), tonic::Code::OutOfRange);
    assert!(ask(&friend, &node, many(64)).is_ok());
}
