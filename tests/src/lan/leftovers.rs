//! Removing labs: our own at the end, and those of processes that died before they could.
//!
//! Every name a lab gives to something of the system begins with `shimmer-PID-`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{disk, ip, limits, run};

const PREFIX: &str = "shimmer-";

/// Beginning of the names of this process.
pub(super) fn prefix() -> String {
    format!("{PREFIX}{}-", std::process::id())
}

pub(super) fn namespace_path(name: &str) -> PathBuf {
    // `ip netns` keeps them here.
    Path::new("/run/netns").join(name)
}

/// Process ids of the programs in a namespace.
pub(super) fn programs(namespace: &str) -> Vec<i32> {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(space) = std::fs::metadata(namespace_path(namespace)) else { return Vec::new() };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let theirs = std::fs::metadata(entry.path().join("ns/net")).ok()?;
            ((theirs.dev(), theirs.ino()) == (space.dev(), space.ino())).then_some(pid)
        })
        .collect()
}

/// Removes programs, namespaces and control groups of the lab `name`.
pub(super) fn remove(name: &str) {
    limits::thaw_all(name);
    let of_lab = format!("{name}-");
    let mut namespaces = names_in(Path::new("/run/netns"));
    namespaces.retain(|namespace| namespace == name || namespace.starts_with(&of_lab));
    for namespace in &namespaces {
        // A program may start another one while we look.
        for _ in 0..100 {
            let programs = programs(namespace);
            if programs.is_empty() {
                break;
            }
            for pid in programs.into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Err(error) = run(ip().args(["netns", "del", namespace])) {
            eprintln!("{error}");
        }
    }
    limits::remove(name);
}

/// Removes what labs of dead processes left behind.
pub(super) fn remove_dead() {
    let groups = limits::trees().into_iter().flat_map(|tree| names_in(&tree));
    let found: BTreeSet<String> = names_in(Path::new("/run/netns")).into_iter().chain(groups).collect();
    // `shimmer-PID-LAB` and `shimmer-PID-LAB-HOST` belong to the lab `shimmer-PID-LAB`.
    let labs: BTreeSet<String> = found
        .iter()
        .filter(|name| is_dead(name))
        .map(|name| name.splitn(4, '-').take(3).collect::<Vec<_>>().join("-"))
        .collect();
    labs.iter().for_each(|lab| remove(lab));
    disk::unmount_where(&|mount: &Path| mount.iter().any(|part| part.to_str().is_some_and(is_dead)));
    for name in names_in(&std::env::temp_dir()).into_iter().filter(|name| is_dead(name)) {
        let _ = std::fs::remove_dir_all(std::env::temp_dir().join(name));
    }
}

/// Whether a name is one of ours and its process has ended.
fn is_dead(name: &str) -> bool {
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).map(|(pid, _)| pid);
    pid.and_then(|pid| pid.parse::<u32>().ok())
        .is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_dead_processes_are_removed() {
        assert!(!is_dead(&format!("{}0", prefix())));
        // Above the largest process id Linux can give.
        assert!(is_dead("shimmer-4194305-0-1"));
        assert!(!is_dead("shimmer-node"));
        assert!(!is_dead("shimmer-x-1"));
        assert!(!is_dead("other-4194305-0"));
    }
}
