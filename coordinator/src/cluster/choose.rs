//! Who computes which expert of a layer now.
//!
//! A layer takes as long as its slowest machine. Experts are given out one after the other, those that only
//! one machine can compute first, then the costliest: each where the slowest machine is done soonest, and
//! where that makes little difference to whoever has it in memory, then to the planner's choice, then to
//! whoever is done first, then by rendezvous score: the same expert goes to the same machine again, which
//! then has it in memory.

use std::sync::Arc;

use shimmer_common::experts::{ExpertId, ExpertWork, LocalStore};

use super::node::{Node, Offer, Standing};
use super::pace::Expected;
use super::placement::{LOCAL, Placement, Seed};

/// A first choice for an expert in place of the planner's: a node id, or [`LOCAL`].
pub type Preferred = Arc<dyn Fn(ExpertId) -> Option<Arc<str>> + Send + Sync>;

/// Times this close count as equal: a part of the sooner one, and at least this.
const ABOUT: f64 = 0.1;
const ABOUT_S: f64 = 75e-6;

/// Who is asked where nobody else can, in order, with whether it can be expected to read the expert.
const LAST_HOPES: [(Standing, bool); 5] = [
    (Standing::Late, true),
    (Standing::Suspect, true),
    (Standing::Good, false),
    (Standing::Late, false),
    (Standing::Suspect, false),
];

/// Where an expert is computed.
#[derive(Clone)]
pub(super) enum Place {
    /// By this node.
    Node(Arc<Node>),
    /// By this one, which missed a deadline and is the only one that has it.
    LastHope(Arc<Node>),
    /// By this machine, as one among others.
    Here,
    /// By this machine, because no node can.
    Local,
    Nobody,
}

/// This machine as one among others.
pub(super) struct Here<'a> {
    pub(super) local: &'a LocalStore,
    pub(super) expected: Expected,
}

/// What a choice is made from.
pub(super) struct Choice<'a> {
    pub(super) layer: u16,
    pub(super) nodes: Vec<Arc<Node>>,
    /// Nodes that are not asked.
    pub(super) excluded: &'a [String],
    /// Bytes of a record.
    pub(super) record_bytes: usize,
    pub(super) has_local: Box<dyn Fn(ExpertId) -> bool + 'a>,
    pub(super) here: Option<Here<'a>>,
    /// Asked instead of the placement in force.
    pub(super) preferred: Option<Preferred>,
    pub(super) placement: &'a Placement,
    /// Whether nodes that are late or suspect, or whose disk fails, may be asked where nobody else can.
    pub(super) desperate: bool,
}

impl Choice<'_> {
    /// A place for every expert of `work`.
    pub(super) fn places(&self, work: &[&ExpertWork]) -> Vec<Place> {
        let experts: Vec<u16> = work.iter().map(|w| w.expert).collect();
        let rows = work.iter().map(|w| w.rows.len()).sum::<usize>().div_ceil(work.len().max(1));
        let nodes: Vec<&Arc<Node>> = self.nodes.iter().filter(|n| !self.excluded.contains(&n.id)).collect();
        let offers: Vec<Offer> =
            nodes.iter().map(|n| n.offer(self.layer, &experts, rows, self.record_bytes)).collect();
        let mut places = self.good_places(&experts, &nodes, &offers);
        for (place, &index) in places.iter_mut().zip(&experts).filter(|(place, _)| place.is_none()) {
            *place = (self.has_local)(self.id(index)).then_some(Place::Local);
        }
        if self.desperate {
            for (standing, reads) in LAST_HOPES {
                for (i, place) in places.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
                    let able = (0..nodes.len()).filter(|&n| {
                        let offer = &offers[n];
                        offer.standing == standing && offer.holds[i] && offer.reads[i] == reads
                    });
                    let best = able.max_by_key(|&n| nodes[n].seed.score(self.id(experts[i])));
                    *place = best.map(|n| match standing {
                        Standing::Suspect => Place::LastHope(nodes[n].clone()),
                        _ => Place::Node(nodes[n].clone()),
                    });
                }
            }
        }
        places.into_iter().map(|place| place.unwrap_or(Place::Nobody)).collect()
    }

    /// Places among machines that work as they should; `None` for experts none of them can compute.
    fn good_places(&self, experts: &[u16], nodes: &[&Arc<Node>], offers: &[Offer]) -> Vec<Option<Place>> {
        let (here, local_seed) = (nodes.len(), Seed::of(LOCAL));
        let resident_here = self.here.as_ref().map(|h| h.local.are_resident(self.layer, experts));
        let wanted: Vec<Wanted> = (0..experts.len())
            .map(|i| {
                let id = self.id(experts[i]);
                let good = |n: &usize| {
                    let offer = &offers[*n];
                    offer.standing == Standing::Good && offer.holds[i] && offer.reads[i]
                };
                let mut able: Vec<(usize, bool)> =
                    (0..nodes.len()).filter(good).map(|n| (n, offers[n].resident[i])).collect();
                if let Some(resident) = resident_here.as_ref().filter(|_| (self.has_local)(id)) {
                    able.push((here, resident[i]));
                }
                // Machines that are to own nothing only where nobody else can.
                let takes_part = |n: usize| n == here || self.placement.takes_part(&nodes[n].id);
                if able.iter().any(|&(n, _)| takes_part(n)) {
                    able.retain(|&(n, _)| takes_part(n));
                }
                let named = self.preferred.as_ref().map(|preferred| preferred(id));
                let favourite = match &named {
                    Some(named) => named.as_deref(),
                    None => self.placement.owner(id),
                };
                let name = |n: usize| if n == here { LOCAL } else { nodes[n].id.as_str() };
                let preferred = able.iter().map(|&(n, _)| n).find(|&n| favourite == Some(name(n)));
                let seed = |n: usize| if n == here { local_seed } else { nodes[n].seed };
                let scores = able.iter().map(|&(n, _)| seed(n).score(id)).collect();
                Wanted { able, preferred, scores }
            })
            .collect();
        let mut expected: Vec<Expected> = offers.iter().map(|offer| offer.expected).collect();
        expected.extend(self.here.as_ref().map(|h| h.expected));
        let place = |machine: usize| match nodes.get(machine) {
            Some(node) => Place::Node((*node).clone()),
            None => Place::Here,
        };
        assign(&expected, &wanted).into_iter().map(|machine| machine.map(place)).collect()
    }

    fn id(&self, index: u16) -> ExpertId {
        ExpertId { layer: self.layer, index }
    }
}

/// The machines that can compute one expert.
struct Wanted {
    /// With whether the expert is in the machine's memory.
    able: Vec<(usize, bool)>,
    preferred: Option<usize>,
    /// Rendezvous scores, in the order of `able`.
    scores: Vec<u64>,
}

impl Wanted {
    fn cheapest_s(&self, expected: &[Expected]) -> f64 {
        self.able.iter().map(|&(m, resident)| expected[m].seconds(resident)).fold(f64::INFINITY, f64::min)
    }
}

/// Seconds a machine's disk and its cores are busy with what it was given.
#[derive(Clone, Copy, Default)]
struct Load {
    disk_s: f64,
    cores_s: f64,
    touched: bool,
}

impl Load {
    fn with(self, expected: &Expected, resident: bool) -> Self {
        let read_s = if resident { 0.0 } else { expected.cold_s - expected.warm_s };
        Self { disk_s: self.disk_s + read_s, cores_s: self.cores_s + expected.warm_s, touched: true }
    }

    /// When it is done: reading and computing overlap.
    fn done_s(self, expected: &Expected) -> f64 {
        if self.touched { expected.wire_s + self.disk_s.max(self.cores_s) } else { 0.0 }
    }
}

/// The machine of every expert; `None` where there is no candidate.
fn assign(expected: &[Expected], experts: &[Wanted]) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..experts.len()).collect();
    let cost: Vec<f64> = experts.iter().map(|e| e.cheapest_s(expected)).collect();
    order.sort_by(|&a, &b| {
        let alone = |i: usize| experts[i].able.len() == 1;
        alone(b).cmp(&alone(a)).then(cost[b].total_cmp(&cost[a])).then(a.cmp(&b))
    });
    let mut loads = vec![Load::default(); expected.len()];
    let mut chosen = vec![None; experts.len()];
    for i in order {
        let slowest_s = (0..loads.len()).map(|m| loads[m].done_s(&expected[m])).fold(0.0, f64::max);
        let with = |m: usize, resident: bool| loads[m].with(&expected[m], resident).done_s(&expected[m]);
        let soonest = experts[i].able.iter().map(|&(m, r)| with(m, r).max(slowest_s)).min_by(f64::total_cmp);
        let Some(soonest) = soonest else { continue };
        let limit = soonest + (soonest * ABOUT).max(ABOUT_S);
        let near = experts[i].able.iter().zip(&experts[i].scores).filter(|((m, r), _)| with(*m, *r) <= limit);
        let best = near.min_by(|((a, a_resident), a_score), ((b, b_resident), b_score)| {
            let cost = |m: usize, resident: bool| expected[m].seconds(resident);
            let similar = |a: f64, b: f64| (a - b).abs() <= (a.min(b) * ABOUT).max(ABOUT_S);
            let (a_cost, b_cost) = (cost(*a, *a_resident), cost(*b, *b_resident));
            let by_cost =
                if similar(a_cost, b_cost) { std::cmp::Ordering::Equal } else { a_cost.total_cmp(&b_cost) };
            let is_preferred = |m: usize| experts[i].preferred == Some(m);
            by_cost.then(is_preferred(*b).cmp(&is_preferred(*a))).then(b_score.cmp(a_score))
        });
        if let Some(((machine, resident), _)) = best {
            loads[*machine] = loads[*machine].with(&expected[*machine], *resident);
            chosen[i] = Some(*machine);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(wire_ms: f64, warm_ms: f64) -> Expected {
        Expected { wire_s: wire_ms / 1e3, warm_s: warm_ms / 1e3, cold_s: (warm_ms + 10.0) / 1e3 }
    }

    fn held_by(machines: &[usize]) -> Wanted {
        let able: Vec<_> = machines.iter().map(|&m| (m, true)).collect();
        Wanted { scores: (0..able.len() as u64).rev().collect(), able, preferred: None }
    }

    fn on_disk_of(machines: &[usize]) -> Wanted {
        let mut wanted = held_by(machines);
        wanted.able.iter_mut().for_each(|(_, resident)| *resident = false);
        wanted
    }

    fn shares(expected: &[Expected], experts: &[Wanted]) -> Vec<usize> {
        let chosen = assign(expected, experts);
        (0..expected.len()).map(|m| chosen.iter().filter(|c| **c == Some(m)).count()).collect()
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
        let planned = || Wanted { preferred: Some(1), ..held_by(&[0, 1]) };
        assert_eq!(assign(&both, &[planned()]), [Some(1)]);
        assert_eq!(assign(&[pace(0.1, 1.0), pace(9.0, 1.0)], &[planned()]), [Some(0)], "it is much slower");
    }

    #[test]
    fn an_expert_goes_where_it_is_in_memory() {
        let both = [pace(0.1, 1.0), pace(0.1, 1.0)];
        let cached = Wanted { able: vec![(0, false), (1, true)], preferred: Some(0), scores: vec![2, 1] };
        assert_eq!(assign(&both, &[cached]), [Some(1)]);
        // The disk of 1 is busy with another expert; computing this one costs it nothing more.
        let cached = Wanted { able: vec![(0, false), (1, true)], preferred: Some(0), scores: vec![2, 1] };
        assert_eq!(assign(&both, &[on_disk_of(&[1]), cached]), [Some(1), Some(1)]);
    }

    #[test]
    fn reads_are_spread_over_the_disks_that_have_a_copy() {
        let four = [pace(0.1, 1.0); 4];
        let experts: Vec<_> = (0..8).map(|i| on_disk_of(&[i % 4, (i + 1) % 4])).collect();
        assert_eq!(shares(&four, &experts), [2, 2, 2, 2]);
        let crowded: Vec<_> = (0..6).map(|_| on_disk_of(&[0, 1])).collect();
        assert_eq!(shares(&four, &crowded), [3, 3, 0, 0]);
    }
}
