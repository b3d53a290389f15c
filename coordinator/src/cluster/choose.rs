//! Who computes which expert of a layer now.
//!
//! Experts that one node alone can compute go there first; every other goes where it is expected to be done
//! soonest, the planner's choice and then the one with the highest rendezvous score where that makes little
//! difference: the same expert goes to the same node again, which then has it in memory.

use std::sync::Arc;

use shimmer_common::experts::{ExpertId, ExpertWork};

use super::node::{Node, Offer, Standing};
use super::pace::Expected;

/// The planner's first choice for an expert: a node id.
pub type Preferred = Arc<dyn Fn(ExpertId) -> Option<Arc<str>> + Send + Sync>;

/// Times this close count as equal: a part of the sooner one, and at least this.
const ABOUT: f64 = 0.1;
const ABOUT_S: f64 = 75e-6;

/// Where an expert is computed.
#[derive(Clone)]
pub(super) enum Place {
    /// By this node.
    Node(Arc<Node>),
    /// By this one, which missed a deadline and is the only one that has it.
    LastHope(Arc<Node>),
    /// Here.
    Local,
    Nobody,
}

/// What a choice is made from.
pub(super) struct Choice<'a> {
    pub(super) layer: u16,
    pub(super) nodes: &'a [Arc<Node>],
    /// Nodes that are not asked.
    pub(super) excluded: &'a [String],
    pub(super) has_local: &'a dyn Fn(ExpertId) -> bool,
    pub(super) preferred: Option<&'a Preferred>,
    /// Whether nodes that are late or suspect may be asked where nobody else can.
    pub(super) desperate: bool,
}

impl Choice<'_> {
    /// A place for every expert of `work`.
    pub(super) fn places(&self, work: &[&ExpertWork]) -> Vec<Place> {
        let experts: Vec<u16> = work.iter().map(|w| w.expert).collect();
        let rows = work.iter().map(|w| w.rows.len()).sum::<usize>().div_ceil(work.len().max(1));
        let nodes: Vec<&Arc<Node>> = self.nodes.iter().filter(|n| !self.excluded.contains(&n.id)).collect();
        let offers: Vec<Offer> = nodes.iter().map(|n| n.offer(self.layer, &experts, rows)).collect();
        let mut places: Vec<Option<Place>> = vec![None; work.len()];
        for standing in [Standing::Good, Standing::Late, Standing::Suspect] {
            if standing == Standing::Late {
                for (place, &index) in places.iter_mut().zip(&experts).filter(|(place, _)| place.is_none()) {
                    *place = (self.has_local)(self.id(index)).then_some(Place::Local);
                }
                if !self.desperate {
                    break;
                }
            }
            let open: Vec<usize> = (0..work.len()).filter(|&i| places[i].is_none()).collect();
            let able =
                |node: usize, i: usize| offers[node].standing == standing && offers[node].holds[open[i]];
            let candidates: Vec<Candidates> = (0..open.len())
                .map(|i| Candidates {
                    nodes: (0..nodes.len()).filter(|&node| able(node, i)).collect(),
                    preferred: self.favourite(&nodes, experts[open[i]]),
                    scores: nodes.iter().map(|n| n.seed.score(self.id(experts[open[i]]))).collect(),
                })
                .collect();
            let expected: Vec<Expected> = offers.iter().map(|offer| offer.expected).collect();
            for (&i, node) in open.iter().zip(assign(&expected, &candidates)) {
                places[i] = node.and_then(|node| nodes.get(node)).map(|&node| match standing {
                    Standing::Suspect => Place::LastHope(node.clone()),
                    _ => Place::Node(node.clone()),
                });
            }
        }
        places.into_iter().map(|place| place.unwrap_or(Place::Nobody)).collect()
    }

    fn id(&self, index: u16) -> ExpertId {
        ExpertId { layer: self.layer, index }
    }

    fn favourite(&self, nodes: &[&Arc<Node>], index: u16) -> Option<usize> {
        let id = self.preferred.and_then(|preferred| preferred(self.id(index)))?;
        nodes.iter().position(|node| *node.id == *id)
    }
}

/// The nodes that can compute one expert.
struct Candidates {
    nodes: Vec<usize>,
    preferred: Option<usize>,
    /// Rendezvous scores of all nodes.
    scores: Vec<u64>,
}

/// The node of every expert; `None` where there is no candidate.
fn assign(expected: &[Expected], experts: &[Candidates]) -> Vec<Option<usize>> {
    let mut load = vec![0usize; expected.len()];
    let done_s = |load: &[usize], node: usize| {
        let Expected { wire_s, expert_s } = expected[node];
        wire_s + expert_s * (load[node] + 1) as f64
    };
    let mut chosen = vec![None; experts.len()];
    for (slot, expert) in chosen.iter_mut().zip(experts) {
        if let [node] = expert.nodes[..] {
            load[node] += 1;
            *slot = Some(node);
        }
    }
    for (slot, expert) in chosen.iter_mut().zip(experts).filter(|(slot, _)| slot.is_none()) {
        let soonest = expert.nodes.iter().map(|&n| done_s(&load, n)).min_by(f64::total_cmp);
        let Some(soonest) = soonest else { continue };
        let limit = soonest + (soonest * ABOUT).max(ABOUT_S);
        let near = expert.nodes.iter().copied().filter(|&n| done_s(&load, n) <= limit);
        let node = near.max_by_key(|&n| (Some(n) == expert.preferred, expert.scores[n]));
        if let Some(node) = node {
            load[node] += 1;
            *slot = Some(node);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(wire_ms: f64, expert_ms: f64) -> Expected {
        Expected { wire_s: wire_ms / 1e3, expert_s: expert_ms / 1e3 }
    }

    fn held_by(nodes: &[usize]) -> Candidates {
        Candidates { nodes: nodes.to_vec(), preferred: None, scores: vec![3, 2, 1] }
    }

    fn shares(expected: &[Expected], experts: &[Candidates]) -> Vec<usize> {
        let chosen = assign(expected, experts);
        (0..expected.len()).map(|node| chosen.iter().filter(|c| **c == Some(node)).count()).collect()
    }

    #[test]
    fn replicas_go_where_they_are_done_soonest() {
        let replicated: Vec<_> = (0..8).map(|_| held_by(&[0, 1])).collect();
        assert_eq!(shares(&[pace(0.1, 1.0), pace(0.1, 1.0)], &replicated), [4, 4]);
        assert_eq!(shares(&[pace(0.1, 3.0), pace(0.1, 1.0)], &replicated), [2, 6]);
        assert_eq!(shares(&[pace(50.0, 1.0), pace(0.1, 1.0)], &replicated), [0, 8]);
    }

    #[test]
    fn what_one_node_alone_holds_is_counted_before_replicas_are_placed() {
        let mut experts: Vec<_> = (0..4).map(|_| held_by(&[0, 1])).collect();
        experts.extend((0..4).map(|_| held_by(&[0])));
        experts.push(held_by(&[]));
        assert_eq!(shares(&[pace(0.1, 1.0), pace(0.1, 1.0)], &experts), [4, 4]);
        assert_eq!(assign(&[pace(0.1, 1.0), pace(0.1, 1.0)], &experts)[8], None);
    }

    #[test]
    fn with_equal_times_the_planner_decides_and_then_the_score() {
        let both = [pace(0.1, 1.0), pace(0.1, 1.0)];
        assert_eq!(assign(&both, &[held_by(&[0, 1])]), [Some(0)]);
        let planned = Candidates { preferred: Some(1), ..held_by(&[0, 1]) };
        assert_eq!(assign(&both, &[planned]), [Some(1)]);
        let planned = Candidates { preferred: Some(1), ..held_by(&[0, 1]) };
        assert_eq!(assign(&[pace(0.1, 1.0), pace(9.0, 1.0)], &[planned]), [Some(0)], "it is much slower");
    }
}
