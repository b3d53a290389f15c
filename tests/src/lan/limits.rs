//! Control groups of a host, version 1 (one tree per controller) or 2 (one tree).

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::LabError;

const ROOT: &str = "/sys/fs/cgroup";
const V1_CONTROLLERS: [&str; 4] = ["memory", "cpu", "blkio", "freezer"];
const V2_CONTROLLERS: &str = "+memory +cpu +io";

fn is_v2() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

/// Directories with the groups of all labs.
pub(super) fn trees() -> Vec<PathBuf> {
    match is_v2() {
        true => vec![PathBuf::from(ROOT)],
        false => V1_CONTROLLERS.iter().map(|controller| Path::new(ROOT).join(controller)).collect(),
    }
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    std::fs::write(path, text).map_err(|e| LabError::file(path, e))
}

/// The groups of one host.
#[derive(Debug)]
pub(super) struct Limits {
    /// Below each of the [`trees`].
    below: PathBuf,
    v2: bool,
}

impl Limits {
    /// Makes the groups.
    pub(super) fn make(lab: &str, host: &str) -> Result<Self, LabError> {
        let limits = Self { below: Path::new(lab).join(host), v2: is_v2() };
        for tree in trees() {
            let of_lab = tree.join(lab);
            if limits.v2 {
                std::fs::create_dir_all(&of_lab).map_err(|e| LabError::file(&of_lab, e))?;
                write(&tree.join("cgroup.subtree_control"), V2_CONTROLLERS)?;
                write(&of_lab.join("cgroup.subtree_control"), V2_CONTROLLERS)?;
            }
            let dir = tree.join(&limits.below);
            std::fs::create_dir_all(&dir).map_err(|e| LabError::file(&dir, e))?;
        }
        Ok(limits)
    }

    /// The group of a version 1 controller, or the one group of version 2.
    fn group(&self, controller: &str) -> PathBuf {
        let tree = if self.v2 { PathBuf::from(ROOT) } else { Path::new(ROOT).join(controller) };
        tree.join(&self.below)
    }

    /// Files that a process writes itself into, separated by blanks.
    pub(super) fn entrances(&self) -> String {
        let files = trees().into_iter().map(|tree| tree.join(&self.below).join("cgroup.procs"));
        files.map(|file| file.display().to_string()).collect::<Vec<_>>().join(" ")
    }

    pub(super) fn freeze(&self, frozen: bool) -> Result<(), LabError> {
        let group = self.group("freezer");
        match (self.v2, frozen) {
            (true, _) => write(&group.join("cgroup.freeze"), if frozen { "1" } else { "0" }),
            (false, true) => write(&group.join("freezer.state"), "FROZEN"),
            (false, false) => write(&group.join("freezer.state"), "THAWED"),
        }
    }

    pub(super) fn memory(&self, bytes: Option<u64>) -> Result<(), LabError> {
        let group = self.group("memory");
        match (self.v2, bytes) {
            (true, Some(bytes)) => write(&group.join("memory.max"), &bytes.to_string()),
            (true, None) => write(&group.join("memory.max"), "max"),
            (false, Some(bytes)) => write(&group.join("memory.limit_in_bytes"), &bytes.to_string()),
            (false, None) => write(&group.join("memory.limit_in_bytes"), "-1"),
        }
    }

    pub(super) fn memory_peak(&self) -> Result<u64, LabError> {
        let file = if self.v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        let path = self.group("memory").join(file);
        let text = std::fs::read_to_string(&path).map_err(|e| LabError::file(&path, e))?;
        text.trim().parse().map_err(|_| LabError::Unsupported(format!("{}: {text}", path.display())))
    }

    pub(super) fn cpu_percent(&self, percent: Option<u32>) -> Result<(), LabError> {
        const PERIOD_US: u32 = 100_000;
        let group = self.group("cpu");
        let quota = percent.map(|percent| PERIOD_US / 100 * percent);
        match (self.v2, quota) {
            (true, Some(quota)) => write(&group.join("cpu.max"), &format!("{quota} {PERIOD_US}")),
            (true, None) => write(&group.join("cpu.max"), "max"),
            (false, Some(quota)) => {
                write(&group.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
                write(&group.join("cpu.cfs_quota_us"), &quota.to_string())
            }
            (false, None) => write(&group.join("cpu.cfs_quota_us"), "-1"),
        }
    }

    pub(super) fn disk_read(&self, path: &Path, bytes_per_s: Option<u64>) -> Result<(), LabError> {
        let disk = disk_of(path)?;
        let group = self.group("blkio");
        match (self.v2, bytes_per_s) {
            (true, Some(bytes)) => write(&group.join("io.max"), &format!("{disk} rbps={bytes}")),
            (true, None) => write(&group.join("io.max"), &format!("{disk} rbps=max")),
            (false, bytes) => {
                let file = group.join("blkio.throttle.read_bps_device");
                write(&file, &format!("{disk} {}", bytes.unwrap_or(0)))
            }
        }
    }
}

/// "major:minor" of the whole disk that holds `path`; partitions cannot be limited.
fn disk_of(path: &Path) -> Result<String, LabError> {
    let device = std::fs::metadata(path).map_err(|e| LabError::file(path, e))?.dev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let entry = Path::new("/sys/dev/block").join(&number);
    let Ok(known) = std::fs::canonicalize(&entry) else {
        return Err(LabError::Unsupported(format!(
            "{} is on no disk whose reads can be limited; choose a directory on one",
            path.display()
        )));
    };
    if !known.join("partition").exists() {
        return Ok(number);
    }
    let whole = known.join("../dev");
    let number = std::fs::read_to_string(&whole).map_err(|e| LabError::file(&whole, e))?;
    Ok(number.trim().to_owned())
}

/// Removes the groups of a lab whose programs have ended; the kernel may need a moment to see that.
pub(super) fn remove(lab: &str) {
    for tree in trees() {
        let of_lab = tree.join(lab);
        let hosts = std::fs::read_dir(&of_lab).into_iter().flatten().flatten();
        let groups = hosts.map(|host| host.path()).filter(|path| path.is_dir());
        for group in groups.chain([of_lab.clone()]) {
            for _ in 0..100 {
                if std::fs::remove_dir(&group).is_ok() || !group.exists() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Lets everything in a lab's groups run: the frozen cannot be killed.
pub(super) fn thaw_all(lab: &str) {
    for tree in trees() {
        for host in std::fs::read_dir(tree.join(lab)).into_iter().flatten().flatten() {
            let _ = std::fs::write(host.path().join("freezer.state"), "THAWED");
            let _ = std::fs::write(host.path().join("cgroup.freeze"), "0");
        }
    }
}
