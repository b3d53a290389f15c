//! Rendezvous hashing: a stable order of machines for every expert, used among equals.
//!
//! Every candidate gets a score from its id and the expert; the highest wins. Adding or losing a node
//! moves only the experts it wins or owned.

use shimmer_common::experts::ExpertId;

/// A node's place in the hash space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Seed(u64);

impl Seed {
    pub(in super::super) fn of(node_id: &str) -> Self {
        let hash = blake3::hash(node_id.as_bytes());
        let (first, _) = hash.as_bytes().split_first_chunk::<8>().expect("a BLAKE3 hash has 32 bytes");
        Self(u64::from_le_bytes(*first))
    }

    /// This node's score for an expert.
    pub(in super::super) fn score(self, id: ExpertId) -> u64 {
        mix(self.0 ^ mix(u64::from(id.layer) << 16 | u64::from(id.index)))
    }
}

/// Whether the coordinator keeps an expert for itself when it takes `share` (0 … 1) of each layer.
pub(in super::super) fn is_local(id: ExpertId, share: f64) -> bool {
    let unit = (Seed(0x5348_494d_4d45_5231).score(id) >> 11) as f64 / (1u64 << 53) as f64;
    unit < share
}

/// The finaliser of SplitMix64: every input bit changes half of the output bits.
pub(super) fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec};
    use shimmer_common::quant::Format;

    fn layout() -> ExpertLayout {
        let m = MatrixSpec { format: Format::Int8Row, rows: 64, cols: 64 };
        let specs = vec![ExpertSpec { gate: m, up: m, down: m }];
        ExpertLayout { hidden_size: 64, specs, layers: (3..23).map(|l| (l, vec![0; 256])).collect() }
    }

    #[test]
    fn shares_are_even_and_a_new_node_takes_from_the_others_only() {
        let seeds: Vec<Seed> = (0..4).map(|i| Seed::of(&format!("node{i}"))).collect();
        let best = |n: usize, id| (0..n).max_by_key(|&i| seeds[i].score(id));
        let ids: Vec<ExpertId> = layout().ids().collect();
        for node in 0..4 {
            let share = ids.iter().filter(|&&id| best(4, id) == Some(node)).count();
            assert!((1100..1460).contains(&share), "{share} of 5120 experts");
        }
        assert!(ids.iter().all(|&id| best(4, id) == best(3, id) || best(4, id) == Some(3)));
    }

    #[test]
    fn local_shares_are_near_what_was_asked() {
        let share = |s| layout().ids().filter(|&id| is_local(id, s)).count();
        assert_eq!((share(0.0), share(1.0)), (0, 5120));
        assert!((1150..1410).contains(&share(0.25)), "{}", share(0.25));
    }
}
