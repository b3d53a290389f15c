//! The placement in force: made from what members measured, kept in the cluster directory, made anew when
//! the cluster changes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{ExpertId, ExpertLayout};

use super::here::Here;
use super::placement::{Demand, LOCAL, Placement, PlacementFile, PlanReport, Rates, Worker, plan};
use super::routes::RouteLog;
use super::state::{ClusterState, Member};
use super::{ClusterError, ExpertDemand};

/// Speeds that changed by less than this factor are the same.
const SAME: f64 = 1.5;
/// Round trips up to this factor and this much more than the quickest, and links down to one part in this factor of
/// the fastest, are as good as those.
const NEAR_FACTOR: f64 = 3.0;
const NEAR_S: f64 = 1e-3;
/// RAM for experts assumed of a node that has not told.
const ASSUMED_RAM_BYTES: u64 = 8 << 30;
/// Least time between two plans for other speeds only.
const PAUSE: Duration = Duration::from_secs(120);

/// Plans, and remembers the plan.
pub(super) struct Planner {
    state: ClusterState,
    model: Fingerprint,
    layout: ExpertLayout,
    demand: ExpertDemand,
    routes: Arc<RouteLog>,
    /// This machine, where it takes part.
    here: Option<Here>,
    settle: Settle,
    /// Read by every dispatch.
    current: RwLock<Arc<Placement>>,
    /// Held while planning, so that it is done once.
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    report: Option<PlanReport>,
    at: Option<Instant>,
    /// Machines met so far, and when the latest of them came.
    seen: BTreeSet<String>,
    last_new: Option<Instant>,
}

/// When to plan for machines that come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settle {
    /// How long after the latest newcomer.
    pub pause: Duration,
    /// At once when this many nodes are there.
    pub nodes: Option<usize>,
}

/// What a review came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Review {
    /// The placement is in force.
    Settled,
    /// More machines may be coming; what the newest should own is not decided.
    Settling,
}

impl Planner {
    /// Takes up the placement of an earlier run, if it is of this model.
    pub(super) fn new(
        state: ClusterState,
        model: Fingerprint,
        layout: ExpertLayout,
        demand: ExpertDemand,
        routes: Arc<RouteLog>,
        here: Option<Here>,
        settle: Settle,
    ) -> Result<Self, ClusterError> {
        let file = state.placement()?;
        let placement = file.as_ref().and_then(|file| file.placement(model, &layout));
        let report = placement.is_some().then(|| file.map(|file| file.report)).flatten();
        Ok(Self {
            state,
            model,
            layout,
            demand,
            routes,
            here,
            settle,
            current: RwLock::new(Arc::new(placement.unwrap_or_default())),
            made: Mutex::new(Made { report, ..Made::default() }),
        })
    }

    /// The placement in force; empty before anybody could be planned for.
    pub(super) fn placement(&self) -> Arc<Placement> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Which experts were asked for together.
    pub(super) fn routes(&self) -> &Arc<RouteLog> {
        &self.routes
    }

    /// What the planner said last.
    pub(super) fn report(&self) -> Option<PlanReport> {
        self.made().report.clone()
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plans anew if somebody came, left or turned out much faster or slower than planned for.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub(super) fn review(&self) -> Result<Review, ClusterError> {
        let mut made = self.made();
        let workers = self.workers()?;
        if workers.iter().any(|w| made.seen.insert(w.id.clone())) {
            made.last_new = Some(Instant::now());
        }
        let current = self.placement();
        let same_machines = workers.len() == current.workers.len()
            && workers.iter().all(|w| current.workers.iter().any(|c| c.id == w.id));
        let known = |w: &Worker| current.workers.iter().find(|c| c.id == w.id);
        let same_speeds = workers.iter().all(|w| known(w).is_some_and(|c| alike(c, w)));
        // A first measurement does not wait: until it came, a common PC was planned for.
        let assumed = |w: &Worker| w.rates.disk_bytes_per_s == Rates::ASSUMED.disk_bytes_per_s;
        let first = workers.iter().any(|w| !assumed(w) && known(w).is_some_and(assumed));
        let rested = first || made.at.is_none_or(|at| at.elapsed() > PAUSE);
        if workers.is_empty() || (same_machines && (same_speeds || !rested)) {
            return Ok(Review::Settled);
        }
        // Machines that join together are planned for together, so that nothing is fetched in vain.
        let nodes = workers.iter().filter(|w| w.id != LOCAL).count();
        let awaited = self.settle.nodes.is_none_or(|expected| nodes < expected);
        let fresh = made.last_new.is_some_and(|at| at.elapsed() < self.settle.pause);
        if !same_machines && fresh && awaited {
            return Ok(Review::Settling);
        }
        let (placement, report) = self.plan(&workers, &current);
        self.enforce(&mut made, placement, report)?;
        Ok(Review::Settled)
    }

    /// Plans with what is known now. Returns the report and how many experts change their owner.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub(super) fn rebalance(&self, dry_run: bool) -> Result<(PlanReport, usize), ClusterError> {
        let mut made = self.made();
        let current = self.placement();
        let (placement, report) = self.plan(&self.workers()?, &current);
        let moved = placement.moved_since(&current);
        if !dry_run {
            self.enforce(&mut made, placement, report.clone())?;
        }
        Ok((report, moved))
    }

    fn plan(&self, workers: &[Worker], current: &Placement) -> (Placement, PlanReport) {
        let heat = &self.demand.heat;
        let demand =
            Demand::new(&self.layout, self.demand.per_token, |id| heat(id), |layer| self.routes.of(layer));
        plan(&demand, workers, Some(current).filter(|c| !c.owners.is_empty()))
    }

    fn enforce(&self, made: &mut Made, placement: Placement, report: PlanReport) -> Result<(), ClusterError> {
        self.state.set_placement(&PlacementFile::new(self.model, &placement, &report))?;
        let moved = placement.moved_since(&self.placement());
        for worker in &report.workers {
            tracing::info!(
                node = worker.worker.name,
                experts = worker.experts,
                replicas = worker.replicas,
                share = worker.share,
                ms_per_layer = worker.ms_per_layer,
                "planned"
            );
        }
        tracing::info!(moved, ms_per_layer = report.ms_per_layer, "a new placement is in force");
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(placement);
        (made.report, made.at) = (Some(report), Some(Instant::now()));
        Ok(())
    }

    /// Everybody that may own experts, as measured.
    fn workers(&self) -> Result<Vec<Worker>, ClusterError> {
        workers(&self.state, self.here.as_ref().map(Here::worker))
    }
}

/// This machine and the members that take part.
fn workers(state: &ClusterState, here: Option<Worker>) -> Result<Vec<Worker>, ClusterError> {
    let members = state.members()?;
    let mut nodes: Vec<Worker> = members.iter().filter(|m| m.takes_part()).map(worker).collect();
    even_out_ways(&mut nodes);
    Ok(here.into_iter().chain(nodes).collect())
}

/// A member as a worker; what was not measured is assumed.
fn worker(member: &Member) -> Worker {
    let assumed = Rates::ASSUMED;
    let measured = member.measured.clone().unwrap_or_default();
    let rates = Rates {
        disk_bytes_per_s: measured.disk_bytes_per_s,
        gemv_bytes_per_s: measured.gemv_bytes_per_s,
        round_trip_s: measured.round_trip_us.map_or(assumed.round_trip_s, |us| us / 1e6),
        link_bytes_per_s: measured.link_bytes_per_s.unwrap_or(assumed.link_bytes_per_s),
    };
    Worker {
        id: member.id.clone(),
        name: member.name.clone(),
        rates: rates.sane(),
        ram_bytes: if measured.ram_bytes > 0 { measured.ram_bytes } else { ASSUMED_RAM_BYTES },
        disk_bytes: Some(measured.disk_bytes.unwrap_or(u64::MAX)),
    }
}

/// Round trips and links that differ by little differ by chance: those near the best count as their mean.
fn even_out_ways(nodes: &mut [Worker]) {
    let quickest = nodes.iter().map(|w| w.rates.round_trip_s).fold(f64::INFINITY, f64::min);
    let fastest = nodes.iter().map(|w| w.rates.link_bytes_per_s).fold(0.0, f64::max);
    even_out(nodes, |r| &mut r.round_trip_s, |s| s <= quickest * NEAR_FACTOR + NEAR_S);
    even_out(nodes, |r| &mut r.link_bytes_per_s, |rate| rate * NEAR_FACTOR >= fastest);
}

fn even_out(nodes: &mut [Worker], of: impl Fn(&mut Rates) -> &mut f64, near: impl Fn(f64) -> bool) {
    let mut alike: Vec<&mut f64> =
        nodes.iter_mut().map(|w| of(&mut w.rates)).filter(|value| near(**value)).collect();
    let mean = alike.iter().map(|value| **value).sum::<f64>() / alike.len().max(1) as f64;
    alike.iter_mut().for_each(|value| **value = mean);
}

fn alike(a: &Worker, b: &Worker) -> bool {
    let near = |a: f64, b: f64| a.max(b) <= a.min(b) * SAME + f64::MIN_POSITIVE;
    let (ra, rb) = (&a.rates, &b.rates);
    near(ra.disk_bytes_per_s, rb.disk_bytes_per_s)
        && near(ra.gemv_bytes_per_s, rb.gemv_bytes_per_s)
        // Below half a millisecond round trips are noise.
        && near(ra.round_trip_s.max(5e-4), rb.round_trip_s.max(5e-4))
        && near(ra.link_bytes_per_s, rb.link_bytes_per_s)
        && near(a.ram_bytes as f64, b.ram_bytes as f64)
}

/// What `shimmer plan --cluster` shows without a running coordinator: a plan for the members' last
/// measurements.
///
/// # Errors
/// [`ClusterError::State`].
pub fn plan_offline(
    state: &ClusterState,
    layout: &ExpertLayout,
    demand: &ExpertDemand,
    here: Option<Worker>,
    model: Fingerprint,
) -> Result<PlanReport, ClusterError> {
    let workers = workers(state, here)?;
    let current = state.placement()?.and_then(|file| file.placement(model, layout));
    let demand = Demand::new(layout, demand.per_token, |id: ExpertId| (demand.heat)(id), |_| Vec::new());
    Ok(plan(&demand, &workers, current.as_ref()).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_of_one_lan_are_alike_and_those_of_a_slow_way_are_not() {
        let node = |ms: f64| Worker {
            id: String::new(),
            name: String::new(),
            rates: Rates { round_trip_s: ms / 1e3, ..Rates::ASSUMED },
            ram_bytes: 0,
            disk_bytes: None,
        };
        let mut nodes = [node(0.3), node(0.5), node(1.6), node(9.0)];
        even_out_ways(&mut nodes);
        let trips = nodes.map(|n| (n.rates.round_trip_s * 1e6).round());
        assert_eq!(trips, [800.0, 800.0, 800.0, 9000.0]);
        even_out_ways(&mut []);
    }
}
