//! The cluster as a whole, in one process with real TLS on loopback.

mod support;

use support::*;

#[test]
fn one_node_returns_the_bits_of_the_local_store() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let _node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    for layer in LAYERS {
        for rows in [1, 3, 40] {
            cluster.check(&batch(layer, rows, rows as u64));
        }
    }
    let status = cluster.status("kitchen");
    assert!(status.experts_served > 0 && status.failures == 0, "{status:?}");
    assert_eq!(cluster.experts.local_counts(), (0, 0));
}
