//! Disks that are too small or run full while records arrive.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{LARGE_EXPERTS, LargeCluster, bytes_on_disk, report, wait_synced};
use crate::support::*;

/// A file system in memory, gone with its guard.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` where this process may not mount.
    fn mount(at: &Path, mib: u32) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={mib}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).output();
        mounted.ok()?.status.success().then(|| Self(at.to_owned()))
    }

    fn resize(&self, mib: u32) {
        let size = format!("remount,size={mib}m");
        assert!(Command::new("mount").args(["-o", &size]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_disk_that_is_too_small_or_full_is_named_and_used_when_there_is_room() {
    let cluster = LargeCluster::start(Some(1_000_000));
    let Some(disk) = SmallDisk::mount(&cluster.root.path().join("node"), 16) else {
        eprintln!("skipped: file systems can be mounted by root only");
        return;
    };
    let node = Node::start(cluster.join(&disk.0), "127.0.0.1:0".parse().unwrap());
    let problem = || report(&node.config).map(|now| now.problem).unwrap_or_default();
    wait_until("the disk is too small", || problem().contains("needed for the missing experts"));
    assert!(problem().contains("free some space"), "{}", problem());
    assert_eq!(cluster.experts.sent_bytes(), 0, "nothing is begun");

    disk.resize(90);
    wait_until("a record is here", || report(&node.config).is_some_and(|now| now.held_records >= 1));
    let filler = disk.0.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    for chunk in [1 << 20, 4096] {
        while file.write_all(&vec![1; chunk]).is_ok() {}
    }
    drop(file);
    wait_until("the disk is full", || !problem().is_empty());
    assert!(problem().contains("bytes are free") || problem().contains("are free;"), "{}", problem());
    let held = |nodes: Vec<shimmer::cluster::NodeStatus>| nodes[0].experts_held;
    wait_until("what is here is served", || held(cluster.experts.nodes()) >= 1);
    assert!(held(cluster.experts.nodes()) < LARGE_EXPERTS);
    assert_eq!(cluster.experts.nodes()[0].state, "syncing");

    std::fs::remove_file(&filler).unwrap();
    let now = wait_synced(&node.config, LARGE_EXPERTS as u32);
    assert_eq!(now.problem, "");
    wait_until("it is ready", || cluster.experts.nodes()[0].state == "ready");
    let (config, _) = node.stop();
    assert_eq!(bytes_on_disk(&config), cluster.source.bytes());
    cluster.check_shard(&config);
    drop(disk);
}
