//! Directories that were on the node's machine before: their experts are not transferred.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shimmer::cluster::ClusterState;
use shimmer_common::container::{Container, Fingerprint};
use shimmer_common::experts::pack::{Pack, PackStore, write_pack};
use shimmer_common::experts::{ExpertCompute as _, ExpertId, ExpertSource};
use shimmer_node::NodeConfig;

use super::{free_address, wait_synced};
use crate::support::*;

/// Joins a node that adopts `dirs`.
fn join(cluster: &Cluster, name: &str, dirs: &[PathBuf]) -> Result<NodeConfig, shimmer_node::NodeError> {
    let options = shimmer_node::JoinOptions { adopt: dirs.to_vec(), ..options(name) };
    shimmer_node::join(&cluster.invite(), &cluster.root.path().join(name), options)
}

/// A pack of the synthetic model's experts that `holds`.
fn pack(dir: &Path, model: Fingerprint, holds: fn(ExpertId) -> bool) -> PathBuf {
    let source = Synthetic::new(holds);
    let ids: Vec<ExpertId> = source.layout().ids().filter(|&id| holds(id)).collect();
    write_pack(&source, &ids, model, dir, &mut |_| ControlFlow::Continue(())).unwrap();
    dir.to_owned()
}

fn setup() -> Setup {
    Setup { local: false, ..Setup::default() }
}

#[test]
fn what_is_adopted_is_served_and_only_the_rest_is_fetched() {
    let cluster = Cluster::start(setup());
    let even = pack(&cluster.root.path().join("even"), FINGERPRINT, |id| id.index % 2 == 0);
    let third = pack(&cluster.root.path().join("third"), FINGERPRINT, |id| id.index == 3);
    let config = join(&cluster, "thrifty", &[even.clone(), third.clone()]).unwrap();
    assert_eq!(NodeConfig::load(&config.data_dir).unwrap().settings.adopt, [even, third]);
    let node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let now = wait_synced(&node.config, 32);
    let record = |layer| layout().record_bytes(ExpertId { layer, index: 1 }).unwrap() as u64;
    let fetched = 7 * (record(LAYERS[0]) + record(LAYERS[1]));
    assert_eq!((now.received_bytes, cluster.experts.sent_bytes()), (fetched, fetched));
    for layer in LAYERS {
        cluster.check(&batch(layer, 40, 3));
    }
    assert_eq!(cluster.status("thrifty").experts_held, 32);
}

#[test]
fn an_adopted_record_that_is_not_the_coordinators_is_fetched_instead() {
    let cluster = Cluster::start(setup());
    // The coordinator learns the hashes.
    let first = Node::start(cluster.join("first"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    wait_synced(&first.config, 32);
    let dir = cluster.root.path().join("other-version");
    let store = PackStore::open_or_create(&dir, FINGERPRINT, &layout()).unwrap();
    let odd = ExpertId { layer: LAYERS[0], index: 4 };
    for id in layout().ids() {
        let mut record = vec![0; layout().record_bytes(id).unwrap()];
        Synthetic::new(|_| true).read(id, &mut record).unwrap();
        record[0] ^= u8::from(id == odd);
        store.append(id, &record, *blake3::hash(&record).as_bytes()).unwrap();
    }
    drop(store);
    drop(first);
    cluster.state.revoke("first").unwrap();
    wait_until("it is lost", || cluster.status("first").state == "lost");
    let node = Node::start(join(&cluster, "second", &[dir]).unwrap(), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    wait_synced(&node.config, 32);
    let shard = node.config.data_dir.join("shard");
    let work = batch(LAYERS[0], 40, 9);
    wait_until("the wrong record is noticed and replaced", || {
        if let Ok(sums) = cluster.experts.compute(&work, &mut || {}) {
            assert!(sums == expected(&work), "a wrong record was computed with");
        }
        Pack::open(&shard).unwrap().ids() == [odd]
    });
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    cluster.check(&work);
}

#[test]
fn a_model_directory_is_adopted_as_it_is() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/colibri-container"));
    let container = Container::open(&[dir.to_owned()]).unwrap();
    let (source, fingerprint) = (container.experts(), container.fingerprint().unwrap());
    let experts = source.layout().ids().count();
    let root = tempfile::tempdir().unwrap();
    let state = ClusterState::init(&root.path().join("cluster"), free_address()).unwrap();
    let model = shimmer::cluster::ClusterModel {
        fingerprint,
        profile: shimmer_common::profile::NumericProfile::default(),
        source: Arc::clone(&source),
        local: None,
        demand: shimmer::cluster::ExpertDemand::unknown(2),
    };
    let coordinator =
        shimmer::cluster::ClusterExperts::start(state.clone(), model, Default::default()).unwrap();
    let token = state.invite(&[coordinator.control_addr()], PATIENCE, 1).unwrap();
    let options = shimmer_node::JoinOptions { adopt: vec![dir.to_owned()], ..options("owner") };
    let config = shimmer_node::join(&token, &root.path().join("node"), options).unwrap();
    let node = Node::start(config, "127.0.0.1:0".parse().unwrap());
    coordinator.wait_ready(1, PATIENCE).unwrap();
    assert_eq!(coordinator.nodes()[0].experts_held, experts);
    assert_eq!(wait_synced(&node.config, experts as u32).received_bytes, 0);
    assert_eq!(coordinator.sent_bytes(), 0);
}

#[test]
fn directories_that_do_not_fit_are_refused_with_a_sentence() {
    let cluster = Cluster::start(setup());
    let other = pack(&cluster.root.path().join("other"), Fingerprint([7; 32]), |_| true);
    let config = join(&cluster, "wrong-model", &[other]).unwrap();
    let error = Node::start(config.clone(), "127.0.0.1:0".parse().unwrap()).end().unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let sentence = error.to_string();
    for part in ["cannot be adopted", "0707", "3f3f", "without this --adopt"] {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }
    assert!(!config.data_dir.join("shard").exists(), "nothing is begun");

    // Noticed before the token is used up.
    let empty = cluster.root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let token = cluster.invite();
    let options = shimmer_node::JoinOptions { adopt: vec![empty], ..options("no-model") };
    let error = shimmer_node::join(&token, &cluster.root.path().join("no-model"), options).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("leave out --adopt"), "{error}");
    shimmer_node::join(&token, &cluster.root.path().join("no-model"), crate::support::options("x")).unwrap();
}
