//! A memory cgroup of one's own, to hold a program to a limit and to ask the kernel what it took.

use std::io::Result;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A cgroup below this process's own; removed when dropped.
pub struct MemoryCgroup {
    dir: PathBuf,
    v2: bool,
}

impl MemoryCgroup {
    /// Makes one with a limit in bytes. `None`, with a line that says why, where this is not permitted.
    pub fn with_limit(bytes: u64) -> Option<Self> {
        match Self::make(bytes) {
            Ok(cgroup) => Some(cgroup),
            Err(error) => {
                eprintln!("skipped: no memory cgroup can be made here ({error})");
                None
            }
        }
    }

    fn make(bytes: u64) -> Result<Self> {
        let membership = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = |controller: &str| {
            membership.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let found = parts.next()?.split(',').any(|c| c == controller);
                parts.next().filter(|_| found).map(|path| path.trim_start_matches('/').to_owned())
            })
        };
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (base, v2) = match own("memory").filter(|_| v1.is_dir()) {
            Some(path) => (v1.join(path), false),
            None => (Path::new("/sys/fs/cgroup").join(own("").unwrap_or_default()), true),
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = base.join(format!("shimmer-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir)?;
        let cgroup = Self { dir, v2 };
        cgroup.set_limit(bytes)?;
        // A limit that is only written and not kept would make every check below pass.
        let kept: u64 = cgroup.read(if v2 { "memory.max" } else { "memory.limit_in_bytes" })?;
        if kept.abs_diff(bytes) > 65536 {
            return Err(std::io::Error::other(format!("the limit is {kept} instead of {bytes}")));
        }
        Ok(cgroup)
    }

    fn read(&self, file: &str) -> Result<u64> {
        let text = std::fs::read_to_string(self.dir.join(file))?;
        text.trim().parse().map_err(std::io::Error::other)
    }

    /// Changes the limit; what is beyond it is reclaimed, or the kernel refuses.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_limit(&self, bytes: u64) -> Result<()> {
        let file = if self.v2 { "memory.max" } else { "memory.limit_in_bytes" };
        std::fs::write(self.dir.join(file), bytes.to_string())
    }

    /// The command, to be run inside.
    pub fn command(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        inside
    }

    /// The most bytes charged at any time: anonymous memory and page cache.
    ///
    /// # Panics
    /// When the kernel does not say.
    pub fn peak_bytes(&self) -> u64 {
        let file = if self.v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        self.read(file).expect("the kernel counts the peak")
    }

    /// Bytes of page cache charged now.
    pub fn cache_bytes(&self) -> u64 {
        let stat = std::fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let name = if self.v2 { "file " } else { "cache " };
        stat.lines().find_map(|line| line.strip_prefix(name)?.parse().ok()).unwrap_or(0)
    }

    /// Processes the kernel killed for want of memory.
    pub fn kills(&self) -> u64 {
        let file = if self.v2 { "memory.events" } else { "memory.oom_control" };
        let text = std::fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // Its processes have been waited for; the kernel may need a moment to forget them.
        for _ in 0..50 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        eprintln!("cannot remove {}", self.dir.display());
    }
}

/// The largest resident set of a process so far, in bytes.
pub fn peak_resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}
