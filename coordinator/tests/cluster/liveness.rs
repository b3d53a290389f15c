//! Signs of life: what they say, what counts as a death and what does not.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shimmer::cluster::ClusterOptions;
use shimmer_node::Records;

use crate::support::*;

#[test]
fn pulses_say_what_a_node_is_doing() {
    let cluster = Cluster::start(Setup { local: false, ..Setup::default() });
    let _node = cluster.node("kitchen", Synthetic::new(|_| true));
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    cluster.check(&batch(LAYERS[0], 2, 1));
    wait_until("a pulse tells of the dispatch", || {
        cluster.status("kitchen").load.is_some_and(|load| load.dispatches > 0 && load.experts > 0)
    });
    let status = cluster.status("kitchen");
    let load = status.load.clone().unwrap();
    assert!(load.experts > 0 && load.misses > 0 && load.read_bytes > 0 && load.slots > 0, "{load:?}");
    assert!(load.sync.is_some() && status.experts_held == layout().ids().count(), "{status:?}");
    assert!(status.ping_p50_us > 0 && status.ping_p50_us <= status.ping_p95_us, "{status:?}");
    let changes: Vec<_> =
        status.changes.iter().map(|change| (change.from.as_str(), change.to.as_str())).collect();
    assert_eq!(changes.first(), Some(&("joining", "ready")), "{changes:?}");
}

#[test]
fn a_long_read_is_not_a_death() {
    let options = ClusterOptions { deadline: Some(Duration::from_millis(100)), ..ClusterOptions::default() };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let source = Synthetic::new(|_| true);
    let stuck = source.stuck.clone();
    let _node = cluster.node("busy", source);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    stuck.store(true, Ordering::Relaxed);
    cluster.check(&batch(LAYERS[0], 2, 1));
    let begun = Instant::now();
    wait_until("longer than a silent node would be kept", || begun.elapsed() > Duration::from_secs(7));
    let status = cluster.status("busy");
    assert_eq!(status.state, "suspect", "{:?}", status.changes);
    assert!(status.pulse_age_ms.unwrap() < 5_000 && status.load.unwrap().queued > 0);
    stuck.store(false, Ordering::Relaxed);
    wait_until("the answer clears it", || cluster.status("busy").state == "ready");
    assert!(cluster.status("busy").changes.iter().all(|change| change.to != "lost"));
}

/// A cable that can be pulled: connections stay open, and nothing comes through.
struct Cable {
    addr: SocketAddr,
    pulled: Arc<AtomicBool>,
}

impl Cable {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let pulled = Arc::<AtomicBool>::default();
        let state = pulled.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(target) else { continue };
                let ways = [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())];
                for (from, to) in ways {
                    let (from, to, pulled) = (from.unwrap(), to.unwrap(), state.clone());
                    std::thread::spawn(move || forward(from, to, &pulled));
                }
            }
        });
        Self { addr, pulled }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, pulled: &AtomicBool) {
    let mut buffer = [0; 16 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        while pulled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    while pulled.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

#[test]
fn a_pulled_cable_is_noticed_and_forgiven() {
    let cluster = Cluster::start(Setup::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let cable = Cable::to(addr);
    let mut config = cluster.join("cellar");
    config.settings.advertise = vec![cable.addr.to_string()];
    config.records = Records::Source { source: Arc::new(Synthetic::new(|_| true)), fingerprint: FINGERPRINT };
    let _node = Node::start(config, addr);
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    wait_until("the first pulse", || cluster.status("cellar").pulse_age_ms.is_some());

    cable.pulled.store(true, Ordering::Relaxed);
    wait_until("the node is lost", || cluster.status("cellar").state == "lost");
    cluster.check(&batch(LAYERS[0], 2, 1));
    let status = cluster.status("cellar");
    let changes: Vec<_> =
        status.changes.iter().map(|change| (change.to.as_str(), change.why.as_str())).collect();
    assert!(changes.iter().any(|(to, why)| *to == "suspect" && why.contains("no pulse")), "{changes:?}");
    assert!(changes.iter().any(|(to, why)| *to == "lost" && why.contains("no pulse")), "{changes:?}");

    cable.pulled.store(false, Ordering::Relaxed);
    let begun = Instant::now();
    cluster.experts.wait_ready(1, PATIENCE).unwrap();
    println!("back {} ms after the cable", begun.elapsed().as_millis());
    let served = cluster.status("cellar").experts_served;
    cluster.check(&batch(LAYERS[0], 2, 2));
    assert!(cluster.status("cellar").experts_served > served);
}
