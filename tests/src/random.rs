//! Random moments that can be repeated.

/// SplitMix64.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Seeded by `SHIMMER_FAULT_SEED`, or anew; prints the seed.
    pub fn announced() -> Self {
        let given = std::env::var("SHIMMER_FAULT_SEED").ok().and_then(|text| text.parse().ok());
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_micros()));
        let seed = given.unwrap_or_else(clock);
        println!("SHIMMER_FAULT_SEED={seed}");
        Self(seed)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % end as u64) as usize
    }
}
