//! Who owns which expert: the planner.
//!
//! The time of a layer is the time of its slowest machine (docs/architecture.md §5, docs/cluster.md):
//! `E[max over machines of (round trip + wire + Σ over its routed experts of their time there)]`. An expert
//! takes `bytes / memory rate` where it is resident and `bytes / disk rate` more where it is not; a machine
//! keeps its hottest experts resident. The planner minimises that expectation over routes seen and routes
//! drawn from the learned usage, so that experts which fire together end up apart.
//!
//! Rooms: `worker` (what a machine can do), `demand` (what tokens ask for), `layer` (the expected time of
//! one layer's arrangement and moves that improve it), `plan` (all layers, who is left out, replicas,
//! the report), `file` (the plan in the cluster directory), `rendezvous` (the order among equals).

mod demand;
mod file;
mod layer;
mod plan;
mod rendezvous;
mod worker;

pub use demand::Demand;
pub use file::PlacementFile;
pub use plan::{Advice, Placement, PlanReport, Upgrade, WorkerReport, plan};
pub(super) use rendezvous::{Seed, is_local};
pub use worker::{LOCAL, Rates, Worker};
