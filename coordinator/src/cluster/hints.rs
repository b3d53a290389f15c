//! Guesses of coming layers on their way to the nodes: they ride on the next dispatch.

use std::collections::{BTreeMap, HashMap};

use shimmer_proto::v1;

/// A guess rides within this many layers' calls after it was made, or not at all.
const FRESH: u64 = 3;

struct Guess {
    experts: Vec<u16>,
    /// The number of calls before it.
    made: u64,
}

/// Guesses by node id and layer.
#[derive(Default)]
pub(super) struct Hints {
    by_node: HashMap<String, BTreeMap<u16, Guess>>,
    calls: u64,
}

impl Hints {
    /// Puts a guess for `layer`, split by node, in the place of the one before.
    pub(super) fn replace(&mut self, layer: u16, split: HashMap<String, Vec<u16>>) {
        self.by_node.values_mut().for_each(|layers| {
            layers.remove(&layer);
        });
        for (node, experts) in split {
            self.by_node.entry(node).or_default().insert(layer, Guess { experts, made: self.calls });
        }
    }

    /// A call for `layer` begins: guesses for it and for those before are over, as are old ones.
    pub(super) fn call_begins(&mut self, layer: u16) {
        self.calls += 1;
        let calls = self.calls;
        for layers in self.by_node.values_mut() {
            layers.retain(|&guessed, guess| guessed > layer && calls - guess.made <= FRESH);
        }
        self.by_node.retain(|_, layers| !layers.is_empty());
    }

    /// Takes what is to be told to a node.
    pub(super) fn take(&mut self, node: &str) -> Vec<v1::Hint> {
        let layers = self.by_node.remove(node).unwrap_or_default();
        let hint = |(layer, guess): (u16, Guess)| v1::Hint {
            layer: layer.into(),
            experts: guess.experts.into_iter().map(Into::into).collect(),
        };
        layers.into_iter().map(hint).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(nodes: &[(&str, &[u16])]) -> HashMap<String, Vec<u16>> {
        nodes.iter().map(|(node, experts)| ((*node).to_owned(), experts.to_vec())).collect()
    }

    fn taken(hints: &mut Hints, node: &str) -> Vec<(u32, Vec<u32>)> {
        hints.take(node).into_iter().map(|hint| (hint.layer, hint.experts)).collect()
    }

    #[test]
    fn hints_are_told_once_and_only_for_layers_to_come() {
        let mut hints = Hints::default();
        hints.replace(5, split(&[("a", &[1, 2]), ("b", &[3])]));
        hints.replace(6, split(&[("a", &[7])]));
        hints.call_begins(5);
        assert_eq!(taken(&mut hints, "a"), [(6, vec![7])]);
        assert!(taken(&mut hints, "a").is_empty() && taken(&mut hints, "b").is_empty());
    }

    #[test]
    fn a_new_guess_replaces_the_old_one_at_every_node() {
        let mut hints = Hints::default();
        hints.replace(5, split(&[("a", &[1]), ("b", &[3])]));
        hints.replace(5, split(&[("b", &[4, 1])]));
        assert!(taken(&mut hints, "a").is_empty());
        assert_eq!(taken(&mut hints, "b"), [(5, vec![4, 1])]);
    }

    #[test]
    fn what_found_no_dispatch_to_ride_on_becomes_stale() {
        let mut hints = Hints::default();
        hints.replace(9, split(&[("a", &[1])]));
        (5..8).for_each(|layer| hints.call_begins(layer));
        assert_eq!(hints.by_node.len(), 1);
        hints.call_begins(8);
        assert!(hints.by_node.is_empty());
    }
}
