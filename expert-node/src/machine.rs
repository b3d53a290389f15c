//! What this machine can spare, for defaults.

/// RAM for experts when nobody chose: 70 % of what is available now, and never nothing.
pub(crate) fn spare_ram_bytes() -> u64 {
    const FALLBACK: u64 = 1 << 30;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut available = meminfo_bytes(&meminfo, "MemAvailable:").unwrap_or(FALLBACK);
    // A container's limit, where there is one (cgroup version 2).
    let limit =
        std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|t| t.trim().parse::<u64>().ok());
    if let Some(limit) = limit {
        available = available.min(limit);
    }
    available / 10 * 7
}

fn meminfo_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_meminfo() {
        let text = "MemTotal:       24000000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(1_024_000));
        assert_eq!(meminfo_bytes(text, "SwapFree:"), None);
        assert!(spare_ram_bytes() > 0);
    }
}
