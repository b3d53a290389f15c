//! Who owns and who computes an expert: rendezvous hashing.
//!
//! Every candidate gets a score from its id and the expert; the highest wins. Adding or losing a node
//! moves only the experts it wins or owned. Speed and RAM will weigh the scores here.

use shimmer_common::experts::{ExpertId, ExpertLayout};
use shimmer_node::wire::Held;

/// A node's place in the hash space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seed(u64);

impl Seed {
    pub(super) fn of(node_id: &str) -> Self {
        let hash = blake3::hash(node_id.as_bytes());
        let (first, _) = hash.as_bytes().split_first_chunk::<8>().expect("a BLAKE3 hash has 32 bytes");
        Self(u64::from_le_bytes(*first))
    }

    /// This node's score for an expert.
    pub(super) fn score(self, id: ExpertId) -> u64 {
        mix(self.0 ^ mix(u64::from(id.layer) << 16 | u64::from(id.index)))
    }
}

/// The experts that `member` should own among `members` (which includes it).
pub(super) fn assigned(layout: &ExpertLayout, members: &[String], member: &str) -> Held {
    let seeds: Vec<(Seed, bool)> = members.iter().map(|id| (Seed::of(id), id == member)).collect();
    let mut held = Held::none(layout);
    for id in layout.ids() {
        let owner = seeds.iter().max_by_key(|(seed, _)| seed.score(id));
        if owner.is_some_and(|&(_, is_member)| is_member) {
            held.insert(id);
        }
    }
    held
}

/// Whether the coordinator keeps an expert for itself when it takes `share` (0 … 1) of each layer.
pub(super) fn is_local(id: ExpertId, share: f64) -> bool {
    let unit = (Seed(0x5348_494d_4d45_5231).score(id) >> 11) as f64 / (1u64 << 53) as f64;
    unit < share
}

/// The finaliser of SplitMix64: every input bit changes half of the output bits.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_common::experts::{ExpertSpec, MatrixSpec};
    use shimmer_common::quant::Format;

    fn layout() -> ExpertLayout {
        let m = MatrixSpec { format: Format::Int8Row, rows: 64, cols: 64 };
        let specs = vec![ExpertSpec { gate: m, up: m, down: m }];
        ExpertLayout { hidden_size: 64, specs, layers: (3..23).map(|l| (l, vec![0; 256])).collect() }
    }

    #[test]
    fn every_expert_has_one_owner_and_shares_are_even() {
        let layout = layout();
        let members: Vec<String> = (0..4).map(|i| format!("node{i}")).collect();
        let parts: Vec<Held> = members.iter().map(|m| assigned(&layout, &members, m)).collect();
        for id in layout.ids() {
            assert_eq!(parts.iter().filter(|p| p.contains(id)).count(), 1, "{id}");
        }
        for part in &parts {
            assert!((1100..1460).contains(&part.len()), "{} of 5120 experts", part.len());
        }
    }

    #[test]
    fn a_new_node_takes_from_the_others_only() {
        let layout = layout();
        let three: Vec<String> = (0..3).map(|i| format!("node{i}")).collect();
        let four: Vec<String> = (0..4).map(|i| format!("node{i}")).collect();
        for member in &three {
            assert!(
                assigned(&layout, &three, member).covers(&assigned(&layout, &four, member)),
                "{member} gained"
            );
        }
    }

    #[test]
    fn local_shares_are_near_what_was_asked() {
        let share = |s| layout().ids().filter(|&id| is_local(id, s)).count();
        assert_eq!((share(0.0), share(1.0)), (0, 5120));
        assert!((1150..1410).contains(&share(0.25)), "{}", share(0.25));
    }
}
