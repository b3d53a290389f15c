//! Layers over the cluster: what all calls share.
//!
//! The engine thread runs this; it meets the wire thread in channels only. Sums are integers (rule
//! N5), so it does not matter who computes an expert, nor in which order answers come. The course of one
//! layer is in `call` and `gather`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use shimmer_common::experts::{
    Ahead, ExpertCompute as _, ExpertError, ExpertId, ExpertLayout, ExpertTimes, ExpertWork, LocalStore,
    Lookahead, RoutedBatch, RoutedRow,
};
use shimmer_common::fixed::FixedRows;
use shimmer_node::pace::Activity;
use shimmer_proto::v1;

use super::LocalShare;
use super::call::Call;
use super::choose::{Choice, Here, Place, Preferred};
use super::hedging::Budget;
use super::hints::Hints;
use super::latency::{Cost, Patience};
use super::membership::Membership;
use super::node::Node;
use super::pace::Expected;
use super::placement::{self, LOCAL, Placement};
use super::planner::Planner;
use super::routes::RouteLog;
use super::times::Doing;

/// What dispatching needs to know; shared by all calls.
pub(super) struct Dispatcher {
    pub(super) membership: Arc<Membership>,
    pub(super) planner: Arc<Planner>,
    routes: Arc<RouteLog>,
    pub(super) layout: ExpertLayout,
    pub(super) fraction_bits: u8,
    local: Option<Arc<LocalStore>>,
    local_share: LocalShare,
    fixed_deadline: Option<Duration>,
    fixed_hedge: Option<Duration>,
    /// Records are sent more slowly while layers are dispatched.
    activity: Activity,
    next_id: AtomicU64,
    /// Experts computed here by choice, and because nobody else did.
    by_share: AtomicU64,
    by_fallback: AtomicU64,
    budget: Mutex<Budget>,
    hints: Mutex<Hints>,
    times: Mutex<ExpertTimes>,
    preferred: RwLock<Option<Preferred>>,
}

/// No statement under these locks leaves anything half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dispatcher {
    pub(super) fn new(
        membership: Arc<Membership>,
        planner: Arc<Planner>,
        layout: ExpertLayout,
        fraction_bits: u8,
        local: Option<Arc<LocalStore>>,
        activity: Activity,
        options: &super::ClusterOptions,
    ) -> Self {
        Self {
            routes: planner.routes().clone(),
            membership,
            planner,
            layout,
            fraction_bits,
            local_share: options.local_share,
            local,
            fixed_deadline: options.deadline,
            fixed_hedge: options.hedge,
            activity,
            next_id: AtomicU64::new(1),
            by_share: AtomicU64::new(0),
            by_fallback: AtomicU64::new(0),
            budget: Mutex::default(),
            hints: Mutex::default(),
            times: Mutex::default(),
            preferred: RwLock::new(None),
        }
    }

    /// Computes `batch`, see [`shimmer_common::experts::ExpertCompute::compute`].
    pub(super) fn compute(
        &self,
        batch: &RoutedBatch,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<FixedRows, ExpertError> {
        let _working = self.activity.begin();
        let _span =
            tracing::debug_span!("dispatch", layer = batch.layer, experts = batch.work.len()).entered();
        self.routes.record(batch);
        lock(&self.hints).call_begins(batch.layer);
        let mut call = Call::new(self, batch);
        let sent = call.send_all();
        let computed = if sent.is_ok() && call.groups.is_empty() && self.local.is_some() {
            call.compute_all(meanwhile)
        } else {
            call.times.was(Doing::Handling);
            meanwhile();
            call.times.was(Doing::Meanwhile);
            sent.and_then(|()| call.gather())
        };
        call.abandon();
        let Call { sums, times, .. } = call;
        lock(&self.times).add(&times.end());
        computed.map(|()| sums)
    }

    /// Splits a guess by who would compute its experts: this machine reads its part ahead, the others'
    /// ride on the next dispatch.
    pub(super) fn prefetch(&self, ahead: &Lookahead) {
        let work: Vec<ExpertWork> = ahead
            .experts
            .iter()
            .map(|&expert| ExpertWork { expert, rows: vec![RoutedRow { row: 0, gate: 0.0 }] })
            .collect();
        let placement = self.planner.placement();
        let choice = Choice { desperate: false, ..self.choice(ahead.layer, &placement) };
        let mut ours = Vec::new();
        let mut theirs: Vec<(Arc<Node>, Vec<u16>)> = Vec::new();
        for (&index, place) in ahead.experts.iter().zip(choice.places(&work.iter().collect::<Vec<_>>())) {
            match place {
                _ if self.is_ours(ExpertId { layer: ahead.layer, index }) => ours.push(index),
                Place::Here | Place::Local => ours.push(index),
                Place::Node(node) => match theirs.iter_mut().find(|(n, _)| Arc::ptr_eq(n, &node)) {
                    Some((_, experts)) => experts.push(index),
                    None => theirs.push((node, vec![index])),
                },
                Place::LastHope(_) | Place::Nobody => {}
            }
        }
        if let Some(local) = &self.local {
            local.prefetch(&Lookahead { layer: ahead.layer, experts: ours });
        }
        let wanted = theirs.into_iter().filter(|(node, _)| node.wants_hints());
        let wanted: HashMap<String, Vec<u16>> =
            wanted.map(|(node, experts)| (node.id.clone(), experts)).collect();
        lock(&self.hints).replace(ahead.layer, wanted);
    }

    /// What a choice for `layer` is made from, nobody excluded.
    pub(super) fn choice<'a>(&'a self, layer: u16, placement: &'a Placement) -> Choice<'a> {
        Choice {
            layer,
            nodes: self.membership.all(),
            excluded: &[],
            record_bytes: self.layout.max_record_bytes(),
            has_local: Box::new(|id| self.has_local(id)),
            here: self.here(placement),
            preferred: self.preferred(),
            placement,
            desperate: true,
        }
    }

    /// This machine as one among others, where the planner gave it a part.
    fn here(&self, placement: &Placement) -> Option<Here<'_>> {
        let local = self.local.as_deref().filter(|_| self.local_share == LocalShare::Planned)?;
        let rates = placement.workers.iter().find(|w| w.id == LOCAL)?.rates;
        let bytes = self.layout.max_record_bytes() as f64;
        let expected = Expected { wire_s: 0.0, warm_s: rates.resident_s(bytes), cold_s: rates.cold_s(bytes) };
        Some(Here { local, expected })
    }

    /// Guesses are worth making while this machine or a node reads from its disk; in the latter case before
    /// sending, so that they ride on the layer's own dispatches.
    pub(super) fn lookahead(&self) -> Ahead {
        if self.membership.all().iter().any(|node| node.wants_hints()) {
            return Ahead { depth: usize::MAX, before_sending: true };
        }
        self.local.as_ref().map_or(Ahead::NONE, |local| local.lookahead())
    }

    /// What `node` should be told about coming layers, if it takes hints.
    pub(super) fn hints_for(&self, node: &Node) -> Vec<v1::Hint> {
        let hints = lock(&self.hints).take(&node.id);
        // It will have them in memory, or on the way there: no reason to read them anywhere else.
        hints.iter().for_each(|hint| node.will_hold(hint));
        hints
    }

    /// Whether this machine keeps an expert for itself.
    pub(super) fn is_ours(&self, id: ExpertId) -> bool {
        match self.local_share {
            LocalShare::Fixed(share) => placement::is_local(id, share) && self.has_local(id),
            // One choice among others.
            LocalShare::Planned => false,
        }
    }

    /// Whether this machine can compute an expert.
    pub(super) fn has_local(&self, id: ExpertId) -> bool {
        self.local.as_ref().is_some_and(|local| local.source().contains(id))
    }

    pub(super) fn local(&self) -> Result<&LocalStore, ExpertError> {
        let nothing = || ExpertError::Unreachable("this machine computes no experts".to_owned());
        self.local.as_deref().ok_or_else(nothing)
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn patience(&self, node: &Node, cost: Cost) -> Patience {
        let measured = node.patience(cost);
        let deadline = self.fixed_deadline.unwrap_or(measured.deadline);
        Patience { hedge: self.fixed_hedge.unwrap_or(measured.hedge).min(deadline), deadline }
    }

    pub(super) fn note_sent(&self) {
        lock(&self.budget).sent();
    }

    pub(super) fn may_hedge(&self, must: bool) -> bool {
        lock(&self.budget).take(must)
    }

    fn preferred(&self) -> Option<Preferred> {
        self.preferred.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_preferred(&self, preferred: Preferred) {
        *self.preferred.write().unwrap_or_else(PoisonError::into_inner) = Some(preferred);
    }

    pub(super) fn count_local(&self, by_share: usize, fallback: usize) {
        self.by_share.fetch_add(by_share as u64, Ordering::Relaxed);
        self.by_fallback.fetch_add(fallback as u64, Ordering::Relaxed);
    }

    /// Experts computed here: by choice and because nobody else did.
    pub(super) fn local_counts(&self) -> (u64, u64) {
        (self.by_share.load(Ordering::Relaxed), self.by_fallback.load(Ordering::Relaxed))
    }

    pub(super) fn times(&self) -> ExpertTimes {
        lock(&self.times).clone()
    }

    /// Names an expert nobody can compute, its owner, since when it is lost and what to do.
    pub(super) fn nobody_has(&self, id: ExpertId) -> String {
        let nodes = self.membership.all();
        // Who held it when last seen, before who should.
        let owner = nodes.iter().max_by_key(|node| (node.held(id), node.seed.score(id)));
        let owner = owner.map_or_else(
            || "no node has joined".to_owned(),
            |node| format!("its owner is {}", node.describe()),
        );
        let here = if self.local.is_some() {
            "this machine does not hold it"
        } else {
            "this machine may not compute it (--experts cluster)"
        };
        format!(
            "{id} cannot be computed: {owner}, no other ready node holds it and {here}; start the node again, or run with --experts auto on a machine that has the model"
        )
    }
}
