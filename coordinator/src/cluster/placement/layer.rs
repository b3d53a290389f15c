//! One layer: an arrangement of its experts on machines, its expected time, and moves that improve it.

use super::demand::LayerDemand;
use super::rendezvous::mix;

/// A machine as one layer sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Machine {
    /// Seconds per byte of a resident expert and of one that must be read.
    pub(super) resident_s: f64,
    pub(super) cold_s: f64,
    /// Seconds a dispatch costs before any expert is computed.
    pub(super) dispatch_s: f64,
    /// Records of this layer that stay in memory, and that fit on the disk.
    pub(super) slots: usize,
    pub(super) capacity: usize,
}

/// Least relative improvement of the layer's time for which one expert is moved.
const WORTH_A_MOVE: f64 = 2e-4;
/// A move that makes the layer's time longer by less than this changes nothing, and one is worth it then when the
/// busier of two machines gets this part less busy.
const NEUTRAL: f64 = 2e-5;
const SPREADS: f64 = 0.01;
/// Passes over all experts at most.
const PASSES: usize = 6;
/// Exchanges tried per expert and pass.
const EXCHANGES: usize = 4;

/// Where an expert is.
type Seat = Option<(u16, bool)>;

/// Experts on machines: `Some((machine, resident))` per expert, `None` for one that no disk has room for.
#[derive(Clone, Debug)]
pub(super) struct Arrangement<'a> {
    demand: &'a LayerDemand,
    machines: &'a [Machine],
    seats: Vec<Seat>,
    /// Experts, the most used first, and each one's place in that order.
    order: Vec<u16>,
    rank: Vec<usize>,
    /// The routes each expert is part of.
    routes_of: Vec<Vec<u32>>,
    /// Seconds and experts of each machine, per route.
    load: Vec<f64>,
    count: Vec<u16>,
    owned: Vec<usize>,
    residents: Vec<usize>,
    /// Expected seconds of work of each machine, round trips not counted.
    work_s: Vec<f64>,
    /// Sum over routes of the slowest machine's seconds.
    total_s: f64,
}

impl<'a> Arrangement<'a> {
    /// Keeps `owners` where there are any and there is room, and gives the rest to whoever is expected to
    /// be done first.
    pub(super) fn new(demand: &'a LayerDemand, machines: &'a [Machine], owners: &[Option<u16>]) -> Self {
        let experts = demand.uses.len();
        let mut order: Vec<u16> = (0..experts as u16).collect();
        order.sort_by(|&a, &b| demand.uses[usize::from(b)].total_cmp(&demand.uses[usize::from(a)]));
        let mut rank = vec![0; experts];
        order.iter().enumerate().for_each(|(r, &e)| rank[usize::from(e)] = r);
        let mut routes_of = vec![Vec::new(); experts];
        for (r, route) in demand.routes.iter().enumerate() {
            route.iter().for_each(|&e| routes_of[usize::from(e)].push(r as u32));
        }
        let cells = demand.routes.len() * machines.len();
        let mut arrangement = Self {
            demand,
            machines,
            seats: vec![None; experts],
            order,
            rank,
            routes_of,
            load: vec![0.0; cells],
            count: vec![0; cells],
            owned: vec![0; machines.len()],
            residents: vec![0; machines.len()],
            work_s: vec![0.0; machines.len()],
            total_s: 0.0,
        };
        arrangement.fill(owners);
        arrangement
    }

    /// The most used experts first, so that they get the memory.
    fn fill(&mut self, owners: &[Option<u16>]) {
        let mut expected: Vec<f64> = vec![0.0; self.machines.len()];
        for i in 0..self.order.len() {
            let e = usize::from(self.order[i]);
            let kept = owners.get(e).copied().flatten().filter(|&w| self.has_room(w));
            let chosen = kept.or_else(|| {
                let able = (0..self.machines.len() as u16).filter(|&w| self.has_room(w));
                able.min_by(|&a, &b| {
                    let after = |w: u16| expected[usize::from(w)] + self.expected_s(e, w);
                    after(a).total_cmp(&after(b))
                })
            });
            let Some(w) = chosen else { continue };
            expected[usize::from(w)] += self.expected_s(e, w);
            let resident = self.has_slot(w);
            self.put(e, Some((w, resident)));
        }
    }

    /// What an expert adds to the expected time of a machine that gets it now.
    fn expected_s(&self, e: usize, w: u16) -> f64 {
        let machine = &self.machines[usize::from(w)];
        // A machine that is touched at all costs its round trip; spread over the experts it would have.
        let share = machine.dispatch_s * self.demand.uses[e].min(1.0);
        self.demand.uses[e] * self.seconds(e, w, self.has_slot(w)) + share
    }

    fn has_room(&self, w: u16) -> bool {
        self.owned.get(usize::from(w)).is_some_and(|&n| n < self.machines[usize::from(w)].capacity)
    }

    fn has_slot(&self, w: u16) -> bool {
        self.residents[usize::from(w)] < self.machines[usize::from(w)].slots
    }

    fn seconds(&self, e: usize, w: u16, resident: bool) -> f64 {
        let machine = &self.machines[usize::from(w)];
        let per_byte = if resident { machine.resident_s } else { machine.cold_s };
        self.demand.bytes[e] as f64 * per_byte
    }

    /// Seats an expert; everything derived follows.
    fn put(&mut self, e: usize, seat: Seat) {
        let old = std::mem::replace(&mut self.seats[e], seat);
        if let Some((w, resident)) = old {
            self.owned[usize::from(w)] -= 1;
            self.residents[usize::from(w)] -= usize::from(resident);
            self.work_s[usize::from(w)] -= self.demand.uses[e] * self.seconds(e, w, resident);
        }
        if let Some((w, resident)) = seat {
            self.owned[usize::from(w)] += 1;
            self.residents[usize::from(w)] += usize::from(resident);
            self.work_s[usize::from(w)] += self.demand.uses[e] * self.seconds(e, w, resident);
        }
        let machines = self.machines.len();
        let take = old.map(|(w, resident)| (usize::from(w), self.seconds(e, w, resident)));
        let give = seat.map(|(w, resident)| (usize::from(w), self.seconds(e, w, resident)));
        for i in 0..self.routes_of[e].len() {
            let at = self.routes_of[e][i] as usize * machines;
            let before = self.slowest(at).1;
            if let Some((w, seconds)) = take {
                self.count[at + w] -= 1;
                // Nothing is left of rounding once the machine is idle.
                self.load[at + w] = if self.count[at + w] == 0 { 0.0 } else { self.load[at + w] - seconds };
            }
            if let Some((w, seconds)) = give {
                self.count[at + w] += 1;
                self.load[at + w] += seconds;
            }
            self.total_s += self.slowest(at).1 - before;
        }
    }

    /// The machine a route waits for, and its seconds.
    fn slowest(&self, at: usize) -> (usize, f64) {
        let mut slowest = (0, 0.0);
        for (w, machine) in self.machines.iter().enumerate() {
            let seconds = self.load[at + w] + machine.dispatch_s;
            if self.count[at + w] > 0 && seconds > slowest.1 {
                slowest = (w, seconds);
            }
        }
        slowest
    }

    /// Moves an expert and lets residency follow: the most used experts of a machine are in its memory.
    /// Returns what to put back.
    fn relocate(&mut self, e: usize, to: u16) -> Vec<(usize, Seat)> {
        let mut undo = vec![(e, self.seats[e])];
        let left = self.seats[e];
        self.put(e, None);
        if let Some((from, true)) = left
            && let Some(next) = self.find(from, false, false)
        {
            undo.push((next, self.seats[next]));
            self.put(next, Some((from, true)));
        }
        let mut resident = self.has_slot(to);
        if !resident
            && let Some(coldest) = self.find(to, true, true)
            && self.rank[coldest] > self.rank[e]
        {
            undo.push((coldest, self.seats[coldest]));
            self.put(coldest, Some((to, false)));
            resident = true;
        }
        self.put(e, Some((to, resident)));
        undo
    }

    /// The most (or, with `last`, least) used expert of `w` that is (not) resident.
    fn find(&self, w: u16, resident: bool, last: bool) -> Option<usize> {
        let here = |&&e: &&u16| self.seats[usize::from(e)] == Some((w, resident));
        let found = if last { self.order.iter().rev().find(here) } else { self.order.iter().find(here) };
        found.map(|&e| usize::from(e))
    }

    fn put_back(&mut self, undo: Vec<(usize, Seat)>) {
        // Empty every changed seat first: counts never pass a limit on the way.
        undo.iter().for_each(|&(e, _)| self.put(e, None));
        undo.into_iter().rev().for_each(|(e, seat)| self.put(e, seat));
    }

    /// Moves single experts, then exchanges pairs, as long as that pays.
    pub(super) fn improve(&mut self) {
        for pass in 0..PASSES {
            let before = self.total_s;
            self.try_moves();
            self.try_exchanges(pass as u64);
            if self.total_s > before * (1.0 - 10.0 * WORTH_A_MOVE) {
                return;
            }
        }
    }

    fn try_moves(&mut self) {
        for i in 0..self.order.len() {
            let e = usize::from(self.order[i]);
            for w in 0..self.machines.len() as u16 {
                if self.seats[e].is_some_and(|(owner, _)| owner == w) || !self.has_room(w) {
                    continue;
                }
                let (before, busiest) = (self.total_s, self.busiest(e, w));
                let undo = self.relocate(e, w);
                let pays = self.total_s <= before * (1.0 - WORTH_A_MOVE);
                // Where round trips decide, work is at least spread.
                let spreads = self.total_s <= before * (1.0 + NEUTRAL)
                    && undo.first().is_some_and(|(_, old)| self.busier(*old, w) < busiest * (1.0 - SPREADS));
                if !pays && !spreads {
                    self.put_back(undo);
                }
            }
        }
    }

    /// Work of the busier of an expert's machine and `w`.
    fn busiest(&self, e: usize, w: u16) -> f64 {
        self.busier(self.seats[e], w)
    }

    fn busier(&self, seat: Seat, w: u16) -> f64 {
        let of = |w: u16| self.work_s[usize::from(w)];
        seat.map_or(f64::INFINITY, |(owner, _)| of(owner).max(of(w)))
    }

    fn try_exchanges(&mut self, pass: u64) {
        let experts = self.order.len() as u64;
        for i in 0..experts * EXCHANGES as u64 {
            let draw = mix(i ^ mix(pass + 1) ^ u64::from(self.demand.layer) << 40);
            let (a, b) = ((i % experts) as usize, (draw % experts) as usize);
            let (Some((wa, _)), Some((wb, _))) = (self.seats[a], self.seats[b]) else { continue };
            if wa == wb {
                continue;
            }
            let before = self.total_s;
            let first = self.relocate(a, wb);
            let second = self.relocate(b, wa);
            if self.total_s > before * (1.0 - WORTH_A_MOVE) {
                self.put_back(second);
                self.put_back(first);
            }
        }
    }

    /// Expected seconds of the layer.
    pub(super) fn mean_s(&self) -> f64 {
        self.total_s / self.demand.routes.len().max(1) as f64
    }

    /// Owner of each expert.
    pub(super) fn owners(&self) -> Vec<Option<u16>> {
        self.seats.iter().map(|seat| seat.map(|(w, _)| w)).collect()
    }

    /// What each machine does in this layer.
    pub(super) fn machines(&self) -> Vec<MachineUse> {
        let mut found = vec![MachineUse::default(); self.machines.len()];
        for (e, seat) in self.seats.iter().enumerate() {
            let Some((w, resident)) = *seat else { continue };
            let found = &mut found[usize::from(w)];
            found.experts += 1;
            found.bytes += self.demand.bytes[e];
            found.uses += self.demand.uses[e];
            found.resident_uses += if resident { self.demand.uses[e] } else { 0.0 };
        }
        let routes = self.demand.routes.len().max(1) as f64;
        for at in (0..self.demand.routes.len()).map(|r| r * self.machines.len()) {
            for (w, machine) in self.machines.iter().enumerate() {
                if self.count[at + w] > 0 {
                    found[w].busy_s += (self.load[at + w] + machine.dispatch_s) / routes;
                }
            }
            found[self.slowest(at).0].waited_for += 1.0 / routes;
        }
        found
    }
}

/// What one machine does in one layer, per token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MachineUse {
    pub(super) experts: usize,
    pub(super) bytes: u64,
    /// Expected uses of its experts, and those that find the expert in memory.
    pub(super) uses: f64,
    pub(super) resident_uses: f64,
    /// Expected seconds it is at work, and the share of tokens that wait for it.
    pub(super) busy_s: f64,
    pub(super) waited_for: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1_000_000;

    fn demand(experts: usize, top_k: usize, heat: impl Fn(usize) -> f64) -> LayerDemand {
        use shimmer_common::experts::{ExpertLayout, ExpertSpec, MatrixSpec};
        use shimmer_common::quant::Format;
        let m = MatrixSpec { format: Format::Int8Row, rows: 64, cols: 64 };
        let specs = vec![ExpertSpec { gate: m, up: m, down: m }];
        let layers = [(3, vec![0; experts])].into_iter().collect();
        let layout = ExpertLayout { hidden_size: 64, specs, layers };
        let heat = |id: shimmer_common::experts::ExpertId| heat(usize::from(id.index));
        let mut demand = super::super::Demand::new(&layout, top_k, heat, |_| Vec::new()).layers.remove(0);
        demand.bytes = vec![BYTES; experts];
        demand
    }

    fn machine(disk: f64, slots: usize) -> Machine {
        Machine { resident_s: 1e-10, cold_s: 1.0 / disk, dispatch_s: 3e-4, slots, capacity: usize::MAX }
    }

    /// The mean time of a layer whose experts are split by `shares`, on routes it was not made for.
    fn judge(demand: &LayerDemand, machines: &[Machine], owners: &[Option<u16>]) -> f64 {
        Arrangement::new(demand, machines, owners).mean_s()
    }

    #[test]
    fn the_bookkeeping_is_that_of_a_fresh_arrangement() {
        let demand = demand(64, 6, |e| 1.0 / (e + 1) as f64);
        let machines = [machine(1e9, 4), machine(3e9, 9), machine(2e9, 0)];
        let mut made = Arrangement::new(&demand, &machines, &[]);
        made.improve();
        let fresh = Arrangement::new(&demand, &machines, &made.owners());
        assert_eq!(fresh.seats, made.seats, "the most used experts are resident");
        assert!((fresh.mean_s() - made.mean_s()).abs() < 1e-12);
        let uses = made.machines();
        assert_eq!(uses.iter().map(|u| u.experts).sum::<usize>(), 64);
        assert!((uses.iter().map(|u| u.waited_for).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn uneven_machines_get_what_the_best_split_gives_them() {
        let seen = demand(128, 8, |_| 1.0);
        let disks = [1e9, 3e9, 3e9, 7e9];
        let machines: Vec<Machine> = disks.iter().map(|&d| machine(d, 0)).collect();
        let mut made = Arrangement::new(&seen, &machines, &[]);
        made.improve();
        // Every split into steps of a sixteenth, on the same routes.
        let mut best = f64::INFINITY;
        for a in 0..=16usize {
            for b in 0..=16 - a {
                for c in 0..=16 - a - b {
                    let cuts = [a * 8, (a + b) * 8, (a + b + c) * 8];
                    let owner =
                        |e: usize| Some(cuts.iter().filter(|&&cut| (e * 37) % 128 >= cut).count() as u16);
                    best = best.min(judge(&seen, &machines, &(0..128).map(owner).collect::<Vec<_>>()));
                }
            }
        }
        let equal = judge(&seen, &machines, &(0..128).map(|e| Some(e as u16 % 4)).collect::<Vec<_>>());
        assert!(made.mean_s() <= 1.02 * best, "{} against {best}", made.mean_s());
        assert!(equal > 2.0 * made.mean_s(), "{equal} against {}", made.mean_s());
    }

    #[test]
    fn a_full_disk_and_a_missing_one_are_respected() {
        let demand = demand(16, 2, |_| 1.0);
        let mut machines = [machine(1e9, 2), machine(9e9, 2)];
        machines[1].capacity = 3;
        let mut made = Arrangement::new(&demand, &machines, &[]);
        made.improve();
        assert_eq!(made.owned, [13, 3]);
        machines[0].capacity = 4;
        let owners = Arrangement::new(&demand, &machines, &[]).owners();
        assert_eq!(owners.iter().flatten().count(), 7, "no room for the others");
    }

    #[test]
    fn experts_stay_where_they_are_unless_a_move_pays() {
        let demand = demand(64, 4, |e| 1.0 + (e % 7) as f64);
        let machines = [machine(2e9, 8), machine(2e9, 8)];
        let mut two = Arrangement::new(&demand, &machines, &[]);
        two.improve();
        let again = {
            let mut again = Arrangement::new(&demand, &machines, &two.owners());
            again.improve();
            again.owners()
        };
        let moved = |a: &[Option<u16>], b: &[Option<u16>]| a.iter().zip(b).filter(|(a, b)| a != b).count();
        assert!(moved(&two.owners(), &again) <= 6, "{} moved for nothing", moved(&two.owners(), &again));
        let three = [machines[0], machines[1], machine(2e9, 8)];
        let mut grown = Arrangement::new(&demand, &three, &two.owners());
        grown.improve();
        let (before, after) = (two.owners(), grown.owners());
        let to_old = before.iter().zip(&after).filter(|(a, b)| a != b && **b != Some(2)).count();
        assert!(grown.owned[2] > 10, "{:?}", grown.owned);
        assert!(to_old <= 20, "{to_old} experts moved between the old machines");
    }
}
