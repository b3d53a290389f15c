//! Finding the coordinator where no known address leads to it.

use std::time::{Duration, Instant};

use shimmer::cluster::ClusterOptions;
use shimmer_node::token::Token;

use crate::support::*;

/// Whether announcements can be heard at all: sandboxes often have no network.
fn multicast_works() -> bool {
    let Ok(daemon) = shimmer_node::discover::daemon(None) else { return false };
    let kind = "_shimmer-test._tcp.local.";
    let name = format!("t{}", std::process::id());
    let ips = shimmer_node::interfaces::addresses(None).unwrap_or_default();
    if ips.iter().all(|ip| ip.is_loopback()) {
        return false;
    }
    let host = format!("{name}.local.");
    let info = mdns_sd::ServiceInfo::new(kind, &name, &host, &ips[..], 1, None).unwrap();
    let Ok(listener) = shimmer_node::discover::daemon(None) else { return false };
    let (Ok(()), Ok(events)) = (daemon.register(info), listener.browse(kind)) else { return false };
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut heard = false;
    while !heard && Instant::now() < deadline {
        let event = events.recv_timeout(Duration::from_millis(200));
        heard = matches!(event, Ok(mdns_sd::ServiceEvent::ServiceResolved(_)));
    }
    let _ = (daemon.shutdown(), listener.shutdown());
    heard
}

#[test]
fn a_node_finds_the_coordinator_by_its_announcement() {
    if !multicast_works() {
        eprintln!("skipped: no multicast on this machine");
        return;
    }
    let options = ClusterOptions {
        listen: Some("0.0.0.0:0".parse().unwrap()),
        discovery: true,
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(Setup { options, ..Setup::default() });
    let mut token = Token::decode(&cluster.invite()).unwrap();
    token.addresses = vec!["127.0.0.1:1".to_owned()];
    let dir = cluster.root.path().join("lost-note");
    let alone = shimmer_node::join(&token.encode(), &dir, options_of("lost-note", false)).unwrap_err();
    assert!(alone.to_string().contains("127.0.0.1:1"), "{alone}");
    let begun = Instant::now();
    let config = shimmer_node::join(&token.encode(), &dir, options_of("lost-note", true)).unwrap();
    println!("found by its announcement after {} ms", begun.elapsed().as_millis());
    let first = &config.settings.coordinators[0];
    let port = cluster.experts.control_addr().port();
    assert!(first.ends_with(&format!(":{port}")) && config.settings.coordinators.len() == 2, "{first}");
}

fn options_of(name: &str, discovery: bool) -> shimmer_node::JoinOptions {
    shimmer_node::JoinOptions { discovery, ..options(name) }
}
