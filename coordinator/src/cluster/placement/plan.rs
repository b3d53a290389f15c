//! All layers: who takes part, who owns what, spare copies, and what to say about it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shimmer_common::experts::{ExpertId, ExpertLayout};
use shimmer_node::wire::Held;

use super::demand::{Demand, LayerDemand};
use super::layer::{Arrangement, Machine, MachineUse};
use super::worker::{LOCAL, Worker};

/// A machine takes part when leaving it out would cost at least this part of the time.
const WORTH_TAKING_PART: f64 = 0.01;
/// A machine that is not much slower than most takes part in any case: it is a second home for experts.
const WEAK: f64 = 1.5;
/// An existing placement is kept unless a new one is this much faster.
const WORTH_MOVING: f64 = 0.03;
/// Spare copies in memory take at most this part of what a machine owns.
const SPARE_PART: f64 = 0.25;
/// Above this share of uses in memory nobody needs a second disk.
const MOSTLY_IN_MEMORY: f64 = 0.9;
/// Layers a question is answered with, evenly spaced.
const ASKED_LAYERS: usize = 6;

/// Who owns which expert.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// Machines, by the indices used below; those left out own nothing.
    pub workers: Vec<Worker>,
    /// Per layer, the owner of each expert; `None` where no disk had room.
    pub owners: BTreeMap<u16, Vec<Option<u16>>>,
    /// Spare copies of much used experts.
    pub replicas: Vec<(ExpertId, u16)>,
}

impl Placement {
    /// Id of the machine that owns an expert.
    pub fn owner(&self, id: ExpertId) -> Option<&str> {
        let owner = *self.owners.get(&id.layer)?.get(usize::from(id.index))?;
        self.workers.get(usize::from(owner?)).map(|w| w.id.as_str())
    }

    /// Whether a machine may be given work by choice: everybody before there is a plan.
    pub fn takes_part(&self, id: &str) -> bool {
        self.workers.is_empty() || self.workers.iter().any(|w| w.id == id)
    }

    /// The experts a machine should hold: its own and its spare copies.
    pub fn assigned(&self, layout: &ExpertLayout, member: &str) -> Held {
        let mut held = self.owned(layout, member);
        if let Some(number) = self.workers.iter().position(|w| w.id == member) {
            let copies = self.replicas.iter().filter(|(_, w)| usize::from(*w) == number);
            copies.for_each(|(id, _)| held.insert(*id));
        }
        held
    }

    /// The experts a machine owns.
    pub fn owned(&self, layout: &ExpertLayout, member: &str) -> Held {
        let mut held = Held::none(layout);
        let Some(number) = self.workers.iter().position(|w| w.id == member) else { return held };
        let ours = |w: u16| usize::from(w) == number;
        for (&layer, owners) in &self.owners {
            let mine = owners.iter().enumerate().filter(|(_, owner)| owner.is_some_and(ours));
            mine.for_each(|(index, _)| held.insert(ExpertId { layer, index: index as u16 }));
        }
        held
    }

    /// Experts whose owner is another machine than in `other`.
    pub fn moved_since(&self, other: &Self) -> usize {
        let ids = self.owners.iter().flat_map(|(&layer, owners)| {
            (0..owners.len() as u16).map(move |index| ExpertId { layer, index })
        });
        ids.filter(|&id| self.owner(id) != other.owner(id)).count()
    }
}

/// What a machine does under a placement, and whether it should take part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The machine as it was measured.
    pub worker: Worker,
    /// Experts owned, spare copies not counted, and their bytes.
    pub experts: usize,
    /// See `experts`.
    pub bytes: u64,
    /// Spare copies.
    pub replicas: usize,
    /// Share of all expert uses it is expected to serve, 0 to 1.
    pub share: f64,
    /// Share of those that find the expert in memory; `None` without any use.
    pub hit_rate: Option<f64>,
    /// Expected milliseconds at work per layer and token.
    pub ms_per_layer: f64,
    /// Share of layers that wait for this machine.
    pub straggler: f64,
    /// What taking part does.
    pub advice: Advice,
}

/// Whether a machine should take part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Advice {
    /// Without it every token would take `saves` (a part of the time now) longer.
    Keep {
        /// 0.25 = a quarter longer without it; absent when it cannot be done without.
        saves: Option<f64>,
    },
    /// It brings nothing; an equal split with it would take `slower` longer than this placement.
    LeaveOut {
        /// 0.19 = 19 % slower.
        slower: f64,
    },
}

/// What would help most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Upgrade {
    /// Name of the machine.
    pub name: String,
    /// "twice the RAM", …
    pub what: String,
    /// Expected reduction of the experts' time, 0 to 1.
    pub saves: f64,
}

/// What the planner found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// One per machine, in the order given.
    pub workers: Vec<WorkerReport>,
    /// Expected milliseconds of experts per layer and token: the mean over tokens of the slowest machine.
    pub ms_per_layer: f64,
    /// The same with experts split evenly over all machines.
    pub equal_split_ms_per_layer: f64,
    /// Layers with routed experts.
    pub layers: usize,
    /// Experts no disk had room for.
    pub homeless: usize,
    /// What would help most, if anything much does.
    pub upgrade: Option<Upgrade>,
}

/// Plans for `workers`, keeping what `current` has where that is nearly as good.
pub fn plan(demand: &Demand, workers: &[Worker], current: Option<&Placement>) -> (Placement, PlanReport) {
    let known = current.map(|current| translate(current, workers, demand)).unwrap_or_default();
    let mut active = vec![true; workers.len()];
    let mut solved = solve(demand, workers, &active, &known);
    let mut worth = vec![0.0; workers.len()];
    for w in 0..workers.len() {
        if active.iter().filter(|&&a| a).count() == 1 {
            worth[w] = f64::INFINITY;
            break;
        }
        active[w] = false;
        let without = solve(demand, workers, &active, &solved.owners);
        worth[w] = if without.homeless > solved.homeless {
            f64::INFINITY
        } else {
            without.mean_s / solved.mean_s - 1.0
        };
        if worth[w] < WORTH_TAKING_PART && is_weak(demand, workers, w) {
            solved = without;
        } else {
            active[w] = true;
        }
    }
    let kept = arrange(demand, workers, &active, &known, false);
    // A machine that has nothing yet is always planned for.
    let has_something = |w: usize| known.iter().flatten().any(|owner| *owner == Some(w as u16));
    let same = (0..workers.len()).all(|w| !active[w] || has_something(w));
    if same && kept.homeless == solved.homeless && kept.mean_s < solved.mean_s * (1.0 + WORTH_MOVING) {
        solved = kept;
    }
    let replicas = spare_copies(demand, workers, &active, &solved);
    let report = report(demand, workers, &active, &worth, &solved, &replicas);
    let owners = demand.layers.iter().map(|l| l.layer).zip(solved.owners).collect();
    (Placement { workers: workers.to_vec(), owners, replicas }, report)
}

/// Whether a machine needs much longer than most for an expert that is not in its memory.
fn is_weak(demand: &Demand, workers: &[Worker], w: usize) -> bool {
    let record = demand.layers.first().and_then(|l| l.bytes.first()).copied().unwrap_or(0) as f64;
    let one_s = |w: &Worker| w.rates.dispatch_s(demand.wire_bytes) + w.rates.cold_s(record);
    let mut all: Vec<f64> = workers.iter().map(one_s).collect();
    all.sort_by(f64::total_cmp);
    one_s(&workers[w]) > all[(all.len() - 1) / 2] * WEAK
}

/// Owners of every layer, as indices into the workers.
type Owners = Vec<Vec<Option<u16>>>;

struct Solved {
    owners: Owners,
    uses: Vec<Vec<MachineUse>>,
    mean_s: f64,
    homeless: usize,
}

fn solve(demand: &Demand, workers: &[Worker], active: &[bool], known: &[Vec<Option<u16>>]) -> Solved {
    arrange(demand, workers, active, known, true)
}

fn arrange(
    demand: &Demand,
    workers: &[Worker],
    active: &[bool],
    known: &[Vec<Option<u16>>],
    improve: bool,
) -> Solved {
    let total = demand.total_bytes();
    let mut solved = Solved { owners: Vec::new(), uses: Vec::new(), mean_s: 0.0, homeless: 0 };
    let mut spent = Spent::new(workers.len());
    for (i, layer) in demand.layers.iter().enumerate() {
        let machines = machines(demand, layer, workers, active, total, &mut spent);
        let owners = known.get(i).map_or(&[][..], Vec::as_slice);
        let mut arrangement = Arrangement::new(layer, &machines, owners);
        if improve {
            arrangement.improve();
        }
        solved.owners.push(arrangement.owners());
        solved.uses.push(arrangement.machines());
        solved.mean_s += arrangement.mean_s();
    }
    solved.mean_s /= demand.layers.len().max(1) as f64;
    solved.homeless = solved.owners.iter().flatten().filter(|owner| owner.is_none()).count();
    solved
}

/// Records handed out to layers so far, so that remainders are not lost.
struct Spent {
    slots: Vec<f64>,
    capacity: Vec<f64>,
}

impl Spent {
    fn new(workers: usize) -> Self {
        Self { slots: vec![0.0; workers], capacity: vec![0.0; workers] }
    }
}

/// Whole records out of an exact share, carrying the rest over to the next layer.
fn whole(carried: &mut f64, share: f64) -> usize {
    *carried += share;
    let whole = carried.floor();
    *carried -= whole;
    whole as usize
}

fn machines(
    demand: &Demand,
    layer: &LayerDemand,
    workers: &[Worker],
    active: &[bool],
    total: u64,
    spent: &mut Spent,
) -> Vec<Machine> {
    let bytes: u64 = layer.bytes.iter().sum();
    let record = bytes as f64 / layer.bytes.len().max(1) as f64;
    let part = bytes as f64 / total.max(1) as f64 / record.max(1.0);
    let one = |(w, worker): (usize, &Worker)| {
        let slots = whole(&mut spent.slots[w], worker.ram_bytes as f64 * part);
        let capacity = match worker.disk_bytes {
            None => usize::MAX,
            Some(bytes) => whole(&mut spent.capacity[w], bytes as f64 * part),
        };
        Machine {
            resident_s: worker.rates.resident_s(1.0),
            cold_s: worker.rates.cold_s(1.0),
            dispatch_s: worker.rates.dispatch_s(demand.wire_bytes),
            slots,
            capacity: if active[w] { capacity } else { 0 },
        }
    };
    workers.iter().enumerate().map(one).collect()
}

/// The owners of an older placement in the indices of `workers`; those that are gone own nothing.
fn translate(current: &Placement, workers: &[Worker], demand: &Demand) -> Owners {
    let index = |old: u16| {
        let id = &current.workers.get(usize::from(old))?.id;
        workers.iter().position(|w| w.id == *id).map(|w| w as u16)
    };
    let layer = |l: &LayerDemand| {
        let owners = current.owners.get(&l.layer).map_or(&[][..], Vec::as_slice);
        owners.iter().map(|owner| owner.and_then(index)).collect()
    };
    demand.layers.iter().map(layer).collect()
}

/// Spare copies: of the most used experts in memory that is left over; and, where many experts have to be read, of
/// all of them on disks with plenty of room, so that a layer's reads can be spread over the disks that are idle.
fn spare_copies(
    demand: &Demand,
    workers: &[Worker],
    active: &[bool],
    solved: &Solved,
) -> Vec<(ExpertId, u16)> {
    let mut owned = vec![0u64; workers.len()];
    solved.uses.iter().flatten().zip((0..workers.len()).cycle()).for_each(|(u, w)| owned[w] += u.bytes);
    let (uses, resident) = solved
        .uses
        .iter()
        .flatten()
        .fold((0.0, 0.0), |(uses, resident), u| (uses + u.uses, resident + u.resident_uses));
    let reads = resident < uses * MOSTLY_IN_MEMORY;
    let room_of = |w: usize| {
        let worker = &workers[w];
        // What this machine's own store keeps follows its usage anyway.
        if !active[w] || worker.id == LOCAL {
            return 0;
        }
        let disk = worker.disk_bytes.map_or(u64::MAX, |bytes| bytes.saturating_sub(owned[w]));
        let memory = worker.ram_bytes.saturating_sub(owned[w]).min((owned[w] as f64 * SPARE_PART) as u64);
        if reads { (disk / 2).min(owned[w].max(memory)) } else { memory.min(disk) }
    };
    let mut room: Vec<u64> = (0..workers.len()).map(room_of).collect();
    let mut hottest: Vec<(f64, ExpertId, u64, Option<u16>)> = Vec::new();
    for (layer, owners) in demand.layers.iter().zip(&solved.owners) {
        for (e, &uses) in layer.uses.iter().enumerate() {
            let id = ExpertId { layer: layer.layer, index: e as u16 };
            hottest.push((uses, id, layer.bytes[e], owners[e]));
        }
    }
    hottest.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut copies = Vec::new();
    for (_, id, bytes, owner) in hottest {
        let others = (0..workers.len()).filter(|&w| owner != Some(w as u16) && room[w] >= bytes);
        let Some(w) = others.max_by_key(|&w| room[w]) else { continue };
        room[w] -= bytes;
        copies.push((id, w as u16));
    }
    copies.sort_unstable();
    copies
}

fn report(
    demand: &Demand,
    workers: &[Worker],
    active: &[bool],
    worth: &[f64],
    solved: &Solved,
    replicas: &[(ExpertId, u16)],
) -> PlanReport {
    let layers = demand.layers.len().max(1) as f64;
    let all: f64 = demand.layers.iter().flat_map(|l| &l.uses).sum();
    let equal =
        arrange(demand, workers, &vec![true; workers.len()], &even_owners(demand, workers.len()), false);
    let one = |(w, worker): (usize, &Worker)| {
        let mine = || solved.uses.iter().filter_map(move |layer| layer.get(w));
        let uses: f64 = mine().map(|u| u.uses).sum();
        let advice = if active[w] {
            Advice::Keep { saves: worth[w].is_finite().then_some(worth[w]) }
        } else {
            Advice::LeaveOut { slower: equal.mean_s / solved.mean_s - 1.0 }
        };
        WorkerReport {
            worker: worker.clone(),
            experts: mine().map(|u| u.experts).sum(),
            bytes: mine().map(|u| u.bytes).sum(),
            replicas: replicas.iter().filter(|(_, owner)| usize::from(*owner) == w).count(),
            share: uses / all.max(f64::MIN_POSITIVE),
            hit_rate: (uses > 0.0).then(|| mine().map(|u| u.resident_uses).sum::<f64>() / uses),
            ms_per_layer: mine().map(|u| u.busy_s).sum::<f64>() / layers * 1e3,
            straggler: mine().map(|u| u.waited_for).sum::<f64>() / layers,
            advice,
        }
    };
    PlanReport {
        workers: workers.iter().enumerate().map(one).collect(),
        ms_per_layer: solved.mean_s * 1e3,
        equal_split_ms_per_layer: equal.mean_s * 1e3,
        layers: demand.layers.len(),
        homeless: solved.homeless,
        upgrade: best_upgrade(demand, workers, active, solved),
    }
}

/// Experts dealt out in turn.
fn even_owners(demand: &Demand, workers: usize) -> Owners {
    let deal = |l: &LayerDemand| (0..l.uses.len()).map(|e| Some((e % workers.max(1)) as u16)).collect();
    demand.layers.iter().map(deal).collect()
}

/// The one change of one machine that shortens a layer most, answered on some layers.
fn best_upgrade(demand: &Demand, workers: &[Worker], active: &[bool], solved: &Solved) -> Option<Upgrade> {
    type Change = fn(&mut Worker);
    const CHANGES: [(&str, Change); 4] = [
        ("twice the RAM for experts", |w| w.ram_bytes = w.ram_bytes.saturating_mul(2)),
        ("a disk twice as fast", |w| w.rates.disk_bytes_per_s *= 2.0),
        ("memory and cores twice as fast", |w| w.rates.gemv_bytes_per_s *= 2.0),
        ("a link twice as fast", |w| {
            w.rates.link_bytes_per_s *= 2.0;
            w.rates.round_trip_s /= 2.0;
        }),
    ];
    let step = demand.layers.len().div_ceil(ASKED_LAYERS).max(1);
    let asked = Demand { layers: demand.layers.iter().step_by(step).cloned().collect(), ..demand.clone() };
    // Memory and disk are shares of the whole model; the asked layers get theirs.
    let part = asked.total_bytes() as f64 / demand.total_bytes().max(1) as f64;
    let shrunk = |worker: &Worker| Worker {
        ram_bytes: (worker.ram_bytes as f64 * part) as u64,
        disk_bytes: worker.disk_bytes.map(|b| (b as f64 * part) as u64),
        ..worker.clone()
    };
    let small: Vec<Worker> = workers.iter().map(shrunk).collect();
    let owners: Owners = solved.owners.iter().step_by(step).cloned().collect();
    let now = solve(&asked, &small, active, &owners).mean_s;
    let mut best: Option<Upgrade> = None;
    for (w, worker) in workers.iter().enumerate().filter(|(w, _)| active[*w]) {
        for (what, change) in CHANGES {
            let mut changed = small.clone();
            change(&mut changed[w]);
            let saves = 1.0 - solve(&asked, &changed, active, &owners).mean_s / now;
            if saves > WORTH_TAKING_PART && best.as_ref().is_none_or(|b| saves > b.saves) {
                best = Some(Upgrade { name: worker.name.clone(), what: what.to_owned(), saves });
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::worker::Rates;
    use super::*;
    use shimmer_common::experts::{ExpertSpec, MatrixSpec};
    use shimmer_common::quant::Format;

    fn layout(layers: u16, experts: usize) -> ExpertLayout {
        let m = MatrixSpec { format: Format::Int8Row, rows: 256, cols: 256 };
        let specs = vec![ExpertSpec { gate: m, up: m, down: m }];
        ExpertLayout {
            hidden_size: 256,
            specs,
            layers: (3..3 + layers).map(|l| (l, vec![0; experts])).collect(),
        }
    }

    fn worker(name: &str, disk: f64, ram_part: f64, layout: &ExpertLayout) -> Worker {
        let all: usize = layout.ids().filter_map(|id| layout.record_bytes(id)).sum();
        Worker {
            id: name.to_owned(),
            name: name.to_owned(),
            rates: Rates { disk_bytes_per_s: disk, ..Rates::ASSUMED },
            ram_bytes: (all as f64 * ram_part) as u64,
            disk_bytes: Some(u64::MAX / 4),
        }
    }

    #[test]
    fn every_expert_has_one_owner_and_a_plan_is_kept_while_it_is_good() {
        let layout = layout(6, 64);
        let demand = Demand::new(&layout, 4, |id| 1.0 / f64::from(id.index + 1), |_| Vec::new());
        let workers: Vec<Worker> =
            [1e8, 2e8, 3e8].map(|d| worker(&format!("n{d}"), d, 0.1, &layout)).to_vec();
        let (placement, report) = plan(&demand, &workers, None);
        let parts: Vec<Held> = workers.iter().map(|w| placement.assigned(&layout, &w.id)).collect();
        for id in layout.ids() {
            assert!(placement.owner(id).is_some());
            assert!(parts.iter().any(|p| p.contains(id)), "{id}");
        }
        assert_eq!(report.workers.iter().map(|w| w.experts).sum::<usize>(), 6 * 64);
        assert!((report.workers.iter().map(|w| w.share).sum::<f64>() - 1.0).abs() < 1e-6);
        assert!(report.ms_per_layer < report.equal_split_ms_per_layer);
        let (again, _) = plan(&demand, &workers, Some(&placement));
        assert_eq!(again.moved_since(&placement), 0);
        // One machine is gone: only its experts move.
        let (two, _) = plan(&demand, &workers[1..], Some(&placement));
        let lost = layout.ids().filter(|&id| placement.owner(id) == Some("n100000000")).count();
        assert!(two.moved_since(&placement) <= lost + 6 * 64 / 4, "{} moved", two.moved_since(&placement));
    }

    #[test]
    fn a_machine_that_only_slows_down_is_named() {
        let layout = layout(4, 64);
        let demand = Demand::new(&layout, 4, |_| 0.0, |_| Vec::new());
        let mut workers: Vec<Worker> = ["a", "b"].map(|n| worker(n, 4e8, 0.2, &layout)).to_vec();
        let mut weak = worker("laptop", 2e7, 0.01, &layout);
        weak.rates.round_trip_s = 20e-3;
        workers.push(weak);
        let (placement, report) = plan(&demand, &workers, None);
        assert!(
            matches!(report.workers[2].advice, Advice::LeaveOut { slower } if slower > 1.0),
            "{report:?}"
        );
        assert!(
            matches!(report.workers[0].advice, Advice::Keep { saves: Some(saves) } if saves > 0.3),
            "{report:?}"
        );
        assert_eq!(placement.assigned(&layout, "laptop").len(), 0);
        // It has to stay where the others have no room.
        workers[0].disk_bytes = Some(workers[0].ram_bytes);
        workers[1].disk_bytes = Some(workers[1].ram_bytes);
        let (_, report) = plan(&demand, &workers, None);
        assert!(matches!(report.workers[2].advice, Advice::Keep { .. }));
    }

    #[test]
    fn spare_memory_holds_copies_of_the_hottest() {
        let layout = layout(2, 16);
        let demand = Demand::new(&layout, 2, |id| if id.index == 3 { 50.0 } else { 1.0 }, |_| Vec::new());
        let workers: Vec<Worker> = ["a", "b"].map(|n| worker(n, 1e9, 1.0, &layout)).to_vec();
        let (placement, report) = plan(&demand, &workers, None);
        assert!(report.workers.iter().all(|w| w.hit_rate == Some(1.0)));
        for layer in [3, 4] {
            let hot = ExpertId { layer, index: 3 };
            assert!(
                workers.iter().all(|w| placement.assigned(&layout, &w.id).contains(hot)),
                "{placement:?}"
            );
        }
        let upgrade = report.upgrade.map(|u| u.what).unwrap_or_default();
        assert!(!upgrade.contains("RAM") && !upgrade.contains("disk"), "{upgrade}");
    }

    #[test]
    fn a_slow_disk_with_little_memory_is_the_upgrade() {
        let layout = layout(4, 64);
        let demand = Demand::new(&layout, 4, |_| 0.0, |_| Vec::new());
        let workers: Vec<Worker> = [worker("a", 1e8, 0.45, &layout), worker("b", 1e8, 0.1, &layout)].to_vec();
        let upgrade = plan(&demand, &workers, None).1.upgrade.expect("something helps");
        assert!(upgrade.saves > 0.1, "{upgrade:?}");
    }
}
