//! Nodes that fetch their records from the coordinator.

use shimmer_common::experts::pack::Pack;

use crate::support::*;

#[test]
fn nodes_fetch_their_shares_and_keep_them() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let first = Node::start(cluster.join("first"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    assert_eq!(cluster.status("first").experts_held, 32, "the only node owns everything");
    cluster.check(&batch(LAYERS[0], 5, 1));

    let second = Node::start(cluster.join("second"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(2, PATIENCE).unwrap();
    let held = cluster.status("second").experts_held;
    assert!((4..29).contains(&held), "{held} of 32");
    cluster.check(&batch(LAYERS[1], 5, 2));
    assert!(cluster.status("second").experts_served > 0);

    // Started again, a node has its records before it has talked to anybody about them.
    let (config, addr) = second.stop();
    let shard = config.data_dir.join("shard");
    assert_eq!(Pack::open(&shard).unwrap().ids().len(), held);
    let second = Node::start(config, addr);
    cluster.experts.wait_ready(2, PATIENCE).unwrap();
    // It may have got spare copies meanwhile, but nothing twice.
    drop(second);
    let pack = Pack::open(&shard).unwrap();
    assert!(pack.ids().len() >= held);
    let records: usize = pack.ids().iter().map(|&id| layout().record_bytes(id).unwrap()).sum();
    let stored = std::fs::metadata(shard.join("experts-00000.pack")).unwrap().len();
    assert_eq!(stored, records as u64, "something was fetched again");
    drop(first);
}

#[test]
fn a_flipped_bit_on_a_nodes_disk_is_noticed_and_healed() {
    let cluster = Cluster::start(Setup::default());
    let node = Node::start(cluster.join("rusty"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    // The first record of the file is the first one fetched: an expert of the first layer.
    flip_bit(&node.config.data_dir.join("shard/experts-00000.pack"), 100);
    for seed in 0..12 {
        cluster.check(&batch(LAYERS[0], 8, seed));
    }
    assert_eq!(cluster.status("rusty").failures, 1, "the damaged record was read once");
    wait_until("the record is fetched again", || cluster.status("rusty").experts_held == 32);
    for seed in 0..12 {
        cluster.check(&batch(LAYERS[0], 8, seed));
    }
    assert_eq!(cluster.status("rusty").failures, 1, "the new copy is good");
}

#[test]
fn a_damaged_shard_is_mended_where_it_can_be_and_explained_where_not() {
    let cluster = Cluster::start(Setup::default());
    let node = Node::start(cluster.join("torn"), "127.0.0.1:0".parse().unwrap());
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    let (mut config, mut addr) = node.stop();
    let shard = config.data_dir.join("shard");
    let data = shard.join("experts-00000.pack");
    let index = shard.join("records.idx");
    let damages: [&dyn Fn(); 4] = [
        &|| {
            let file = std::fs::OpenOptions::new().write(true).open(&data).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        },
        &|| std::fs::remove_file(&data).unwrap(),
        &|| flip_bit(&index, 130),
        &|| std::fs::remove_file(&index).unwrap(),
    ];
    for damage in damages {
        wait_until("the node is lost", || cluster.status("torn").state == "lost");
        damage();
        let node = Node::start(config, addr);
        wait_until("everything is fetched again", || {
            let status = cluster.status("torn");
            status.state == "ready" && status.experts_held == 32
        });
        cluster.check(&batch(LAYERS[0], 8, 1));
        (config, addr) = node.stop();
    }
    let manifest = shard.join("manifest.json");
    for damage in
        [&|| flip_bit(&manifest, 20), &|| std::fs::remove_file(&manifest).unwrap()] as [&dyn Fn(); 2]
    {
        damage();
        let error = Node::start(config.clone(), addr).end().unwrap_err();
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains("delete this directory and start again"), "{error}");
    }
    std::fs::remove_dir_all(&shard).unwrap();
    let _node = Node::start(config, addr);
    wait_until("everything is fetched", || cluster.status("torn").experts_held == 32);
}

fn flip_bit(path: &std::path::Path, at: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x20], at).unwrap();
}

#[test]
fn a_shard_of_another_model_is_not_touched() {
    let cluster = Cluster::start(Setup::default());
    let config = cluster.join("moved");
    let shard = config.data_dir.join("shard");
    let other = shimmer_common::container::Fingerprint([7; 32]);
    drop(shimmer_common::experts::pack::PackStore::open_or_create(&shard, other, &layout()).unwrap());
    let error = Node::start(config, "127.0.0.1:0".parse().unwrap()).end().unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("node moved has model 070707070707…"), "{error}");
    assert_eq!(Pack::open(&shard).unwrap().fingerprint(), other);
}
