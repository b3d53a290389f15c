//! What this machine can spare, for defaults.

use shimmer_common::machine;

/// RAM for experts when nobody chose: 70 % of what is available now, and never nothing.
pub(crate) fn spare_ram_bytes() -> u64 {
    /// Where the system does not say.
    const FALLBACK: u64 = 1 << 30;
    let memory = machine::memory();
    let available = if memory.total_bytes == 0 { FALLBACK } else { memory.available_bytes };
    available / 10 * 7
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_spare_something() {
        let spare = spare_ram_bytes();
        assert!(spare > 0);
        assert!(spare < machine::memory().total_bytes.max(2 << 30));
    }
}
