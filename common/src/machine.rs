//! What this machine offers: cores this process may use and memory it may take.
//!
//! Containers and systemd slices set limits below the machine's own, so affinity and cgroups
//! (version 1 and 2) are read as well.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Memory as seen by this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Physical memory, or the cgroup limit if that is lower.
    pub total_bytes: u64,
    /// What can be taken now without swapping, within the cgroup limit.
    pub available_bytes: u64,
    /// The cgroup limit, if there is one below physical memory.
    pub cgroup_limit_bytes: Option<u64>,
}

/// Reads memory limits below `/` (a test may pass another root).
pub fn memory() -> Memory {
    memory_below(Path::new("/"))
}

fn memory_below(root: &Path) -> Memory {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total = field_bytes(&meminfo, "MemTotal").unwrap_or(0);
    let available = field_bytes(&meminfo, "MemAvailable").unwrap_or(total);
    let mut memory = Memory { total_bytes: total, available_bytes: available, cgroup_limit_bytes: None };
    for (limit, used) in cgroup_limits(root) {
        if limit < memory.total_bytes {
            memory.total_bytes = limit;
            memory.cgroup_limit_bytes = Some(limit);
        }
        memory.available_bytes = memory.available_bytes.min(limit.saturating_sub(used));
    }
    memory
}

/// Bytes of this process that are in RAM; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    field_bytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
}

/// The value of a line `name:  number kB`.
fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Share of the last ten seconds in which every task stalled for memory, in per cent: of this process's
/// cgroup, else of the machine; `None` where the kernel does not report pressure.
pub fn memory_stall_percent() -> Option<f64> {
    stall_below(Path::new("/"))
}

fn stall_below(root: &Path) -> Option<f64> {
    let membership = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let own = membership.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.map(|path| root.join("sys/fs/cgroup").join(path).join("memory.pressure"));
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let text = own.and_then(read).or_else(|| read(root.join("proc/pressure/memory")))?;
    let full = text.lines().find_map(|line| line.strip_prefix("full "))?;
    full.split_whitespace().find_map(|field| field.strip_prefix("avg10=")?.parse().ok())
}

/// `(limit, memory in use that cannot be reclaimed)` of this process's cgroup and its ancestors.
fn cgroup_limits(root: &Path) -> Vec<(u64, u64)> {
    let membership = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let v1 = controllers.split(',').any(|c| c == "memory");
        if !v1 && !controllers.is_empty() {
            continue;
        }
        let base = root.join(if v1 { "sys/fs/cgroup/memory" } else { "sys/fs/cgroup" });
        let (limit_file, usage_file, reclaimable) = if v1 {
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        } else {
            ("memory.max", "memory.current", "inactive_file")
        };
        for dir in ancestors(&base, path) {
            let Some(limit) = read_number(&dir.join(limit_file)) else { continue };
            let used = read_number(&dir.join(usage_file)).unwrap_or(0);
            let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
            let cache = stat.lines().find_map(|l| l.strip_prefix(reclaimable)?.trim().parse::<u64>().ok());
            limits.push((limit, used.saturating_sub(cache.unwrap_or(0))));
        }
    }
    limits
}

/// The cgroup's directory and all above it, down from `base`; in a cgroup namespace only `base` exists.
fn ancestors(base: &Path, path: &str) -> Vec<PathBuf> {
    let mut dirs = vec![base.to_path_buf()];
    let mut dir = base.to_path_buf();
    for part in path.split('/').filter(|p| !p.is_empty() && *p != "..") {
        dir.push(part);
        dirs.push(dir.clone());
    }
    dirs
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Physical cores in this process's affinity, at most what a cgroup's CPU quota pays for.
pub fn physical_cores() -> usize {
    let logical = allowed_cpus();
    let mut cores = BTreeSet::new();
    for &cpu in &logical {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // Without topology files every logical CPU counts as a core.
        cores.insert(std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string()));
    }
    // `available_parallelism` knows cgroup quotas.
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    if cores.is_empty() { quota } else { cores.len().min(quota).max(1) }
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

/// Memory nodes of this machine (1 where the system does not say): with several, memory belongs to the
/// socket whose core touched it first.
pub fn memory_nodes() -> usize {
    memory_nodes_below(Path::new("/"))
}

fn memory_nodes_below(root: &Path) -> usize {
    let text = std::fs::read_to_string(root.join("sys/devices/system/node/has_memory")).unwrap_or_default();
    // "0-1,4"
    let count = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    text.split(',').filter_map(count).fold(0, usize::saturating_add).max(1)
}

/// The kernel's transparent huge page mode (`always`, `madvise`, `never`), where it has one.
pub fn huge_page_mode() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    const MEMINFO: &str = "MemTotal:  24000000 kB\nMemAvailable:  20000000 kB\n";

    #[test]
    fn machine_memory_without_cgroups() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/meminfo", MEMINFO);
        let memory = memory_below(dir.path());
        assert_eq!(memory.available_bytes, 20_000_000 * 1024);
        assert_eq!(memory.cgroup_limit_bytes, None);
    }

    #[test]
    fn cgroup_v2_limits_of_ancestors_count() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/meminfo", MEMINFO);
        write(dir.path(), "proc/self/cgroup", "0::/slice/unit\n");
        write(dir.path(), "sys/fs/cgroup/slice/memory.max", "4000000000\n");
        write(dir.path(), "sys/fs/cgroup/slice/memory.current", "1500000000\n");
        write(dir.path(), "sys/fs/cgroup/slice/memory.stat", "anon 1\ninactive_file 500000000\n");
        write(dir.path(), "sys/fs/cgroup/slice/unit/memory.max", "max\n");
        let memory = memory_below(dir.path());
        assert_eq!(memory.total_bytes, 4_000_000_000);
        assert_eq!(memory.available_bytes, 3_000_000_000);
        assert_eq!(memory.cgroup_limit_bytes, Some(4_000_000_000));
    }

    #[test]
    fn cgroup_v1_limits_count() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/meminfo", MEMINFO);
        write(dir.path(), "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n");
        write(dir.path(), "sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000\n");
        write(dir.path(), "sys/fs/cgroup/memory/memory.usage_in_bytes", "500000000\n");
        let memory = memory_below(dir.path());
        assert_eq!(memory.available_bytes, 1_500_000_000);
    }

    #[test]
    fn memory_nodes_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(memory_nodes_below(dir.path()), 1);
        for (text, nodes) in [("0\n", 1), ("0-1\n", 2), ("0-1,4\n", 3), ("\n", 1), ("7-2,x\n", 1)] {
            write(dir.path(), "sys/devices/system/node/has_memory", text);
            assert_eq!(memory_nodes_below(dir.path()), nodes, "{text}");
        }
    }

    #[test]
    fn stalls_of_the_cgroup_come_before_those_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(stall_below(dir.path()), None);
        let pressure = |some: &str, full: &str| {
            format!(
                "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=0.00 avg300=0.00 total=1\n"
            )
        };
        write(dir.path(), "proc/pressure/memory", &pressure("9.00", "1.50"));
        assert_eq!(stall_below(dir.path()), Some(1.5));
        write(dir.path(), "proc/self/cgroup", "3:memory:/x\n0::/slice/unit\n");
        assert_eq!(stall_below(dir.path()), Some(1.5));
        write(dir.path(), "sys/fs/cgroup/slice/unit/memory.pressure", &pressure("30.00", "12.25"));
        assert_eq!(stall_below(dir.path()), Some(12.25));
    }

    #[test]
    fn this_process_is_in_memory() {
        if cfg!(target_os = "linux") {
            assert!(resident_bytes().unwrap() > 1 << 20);
        }
    }

    #[test]
    fn this_machine_has_cores() {
        assert!(physical_cores() >= 1);
    }
}
