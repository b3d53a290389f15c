//! One layer's call: send to every node, compute our own share, gather, hedge what is late, redo what failed.
//!
//! Work is in one of three places: in a [`Group`] on its way to a node, in `ours` (to be computed here
//! because we chose to or nobody else can), or in the sums. A group that fails or misses its deadline is
//! dissolved, and its open work handed out again.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use shimmer_common::experts::{ExpertError, ExpertId, ExpertWork, RoutedBatch};
use shimmer_common::fixed::FixedRows;
use shimmer_node::wire::dispatch_to_wire;

use super::choose::{Choice, Place};
use super::dispatch::Dispatcher;
use super::group::{Group, Part, Sent};
use super::latency::Cost;
use super::node::Node;
use super::owed::Event;
use super::times::CallTimes;

/// How long to wait for a late node when nobody else can compute its experts.
const LAST_RESORT: Duration = Duration::from_secs(15);

/// Work by who computes it.
#[derive(Default)]
struct Split<'a> {
    /// By this machine, as one among others, and because nobody else can.
    share: Vec<&'a ExpertWork>,
    here: Vec<&'a ExpertWork>,
    /// With whether the node is a last hope.
    there: Vec<(Arc<Node>, bool, Vec<&'a ExpertWork>)>,
    nowhere: Vec<&'a ExpertWork>,
}

impl<'a> Split<'a> {
    fn of(work: Vec<&'a ExpertWork>, places: Vec<Place>) -> Self {
        let mut split = Self::default();
        for (work, place) in work.into_iter().zip(places) {
            let (node, last_hope) = match place {
                Place::Node(node) => (node, false),
                Place::LastHope(node) => (node, true),
                Place::Here => {
                    split.share.push(work);
                    continue;
                }
                Place::Local => {
                    split.here.push(work);
                    continue;
                }
                Place::Nobody => {
                    split.nowhere.push(work);
                    continue;
                }
            };
            match split.there.iter_mut().find(|(n, ..)| Arc::ptr_eq(n, &node)) {
                Some((.., part)) => part.push(work),
                None => split.there.push((node, last_hope, vec![work])),
            }
        }
        split
    }
}

/// One layer's work in progress.
pub(super) struct Call<'a> {
    pub(super) dispatcher: &'a Dispatcher,
    pub(super) batch: &'a RoutedBatch,
    /// By the id of the first attempt.
    pub(super) groups: HashMap<u64, Group<'a>>,
    /// The group of every dispatch of a second attempt.
    pub(super) hedges: HashMap<u64, u64>,
    pub(super) events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    /// For us by choice, and because nobody else is left.
    pub(super) share: Vec<&'a ExpertWork>,
    pub(super) fallback: Vec<&'a ExpertWork>,
    /// Nodes that failed this call.
    pub(super) failed: Vec<String>,
    /// Why this machine cannot compute, once it could not.
    pub(super) broken: Option<ExpertError>,
    pub(super) sums: FixedRows,
    pub(super) times: CallTimes,
}

impl<'a> Call<'a> {
    pub(super) fn new(dispatcher: &'a Dispatcher, batch: &'a RoutedBatch) -> Self {
        let (sender, events) = mpsc::channel();
        let sums = FixedRows::zeroed(batch.x.rows(), dispatcher.layout.hidden_size, dispatcher.fraction_bits);
        Self {
            dispatcher,
            batch,
            groups: HashMap::new(),
            hedges: HashMap::new(),
            events,
            sender,
            share: Vec::new(),
            fallback: Vec::new(),
            failed: Vec::new(),
            broken: None,
            sums,
            times: CallTimes::begin(batch.layer),
        }
    }

    fn id(&self, work: &ExpertWork) -> ExpertId {
        ExpertId { layer: self.batch.layer, index: work.expert }
    }

    /// Whether this machine can compute `work`.
    pub(super) fn has_local(&self, work: &ExpertWork) -> bool {
        self.broken.is_none() && self.dispatcher.has_local(self.id(work))
    }

    /// Splits the batch into our share and the nodes' and sends the latter.
    pub(super) fn send_all(&mut self) -> Result<(), ExpertError> {
        let (ours, theirs) = self.batch.work.iter().partition(|work| self.dispatcher.is_ours(self.id(work)));
        self.share = ours;
        self.hand_out(theirs, false)
    }

    /// A place for every expert of `work`, nodes that failed this call left out.
    fn places(&self, work: &[&ExpertWork], excluded: &[String], desperate: bool) -> Vec<Place> {
        let dispatcher = self.dispatcher;
        let placement = dispatcher.planner.placement();
        let choice = dispatcher.choice(self.batch.layer, &placement);
        // A machine whose disk failed takes no further part in this call.
        let here = choice.here.filter(|_| self.broken.is_none());
        let has_local = Box::new(|id| self.broken.is_none() && dispatcher.has_local(id));
        Choice { excluded, here, has_local, desperate, ..choice }.places(work)
    }

    /// Sends `work` to the best nodes that have not failed this call; what nobody takes is ours. Work that
    /// is `overdue`, a deadline having been missed, is begun here at once as well: there is no second one.
    pub(super) fn hand_out(&mut self, work: Vec<&'a ExpertWork>, overdue: bool) -> Result<(), ExpertError> {
        let places = self.places(&work, &self.failed, true);
        let split = Split::of(work, places);
        if let Some(work) = split.nowhere.first() {
            return Err(self.nobody_has(self.id(work)));
        }
        self.share.extend(split.share);
        self.fallback.extend(split.here);
        for (node, last_hope, group) in split.there {
            self.send_group(node, last_hope, group, overdue)?;
        }
        Ok(())
    }

    fn send_group(
        &mut self,
        node: Arc<Node>,
        last_hope: bool,
        work: Vec<&'a ExpertWork>,
        overdue: bool,
    ) -> Result<(), ExpertError> {
        let Some((mut sent, hedge)) = self.send(node.clone(), &work, false)? else {
            self.failed.push(node.id.clone());
            return self.hand_out(work, overdue);
        };
        let now = Instant::now();
        if last_hope {
            sent.until = now + LAST_RESORT.max(sent.wait);
        }
        let hedge_at = if overdue { now } else { now + hedge };
        let group = Group {
            work,
            hedge_at: (!last_hope && hedge_at < sent.until).then_some(hedge_at),
            must_hedge: overdue,
            last_hope,
            backup: None,
            original: sent,
        };
        self.groups.insert(group.original.id, group);
        Ok(())
    }

    /// Sends one dispatch; `None` when the node went away meanwhile. Comes with the time after which
    /// others are to be asked.
    fn send(
        &mut self,
        node: Arc<Node>,
        work: &[&'a ExpertWork],
        is_hedge: bool,
    ) -> Result<Option<(Sent, Duration)>, ExpertError> {
        let dispatcher = self.dispatcher;
        let cost = self.cost(work);
        let patience = dispatcher.patience(&node, cost);
        let wait = patience.deadline;
        let id = dispatcher.next_id();
        // A node's answer may turn out to be the only one to be had; what nobody wants is cancelled.
        let millis = u32::try_from(wait.max(LAST_RESORT).as_millis()).unwrap_or(u32::MAX);
        let message = dispatch_to_wire(&dispatcher.layout, self.batch, work, id, millis);
        let (mut message, rows) = message.ok_or_else(|| ExpertError::Unfit {
            layer: self.batch.layer,
            what: "its rows do not have the form this layer's experts take".to_owned(),
        })?;
        message.hints = dispatcher.hints_for(&node);
        let hinted = message.hints.iter().map(|hint| hint.experts.len()).sum();
        let until = Instant::now() + wait;
        let bytes = node.send(self.batch.layer, message, cost, patience, &self.sender);
        Ok(bytes.map(|bytes| {
            self.times.sent(&node, bytes, hinted, is_hedge);
            if !is_hedge {
                dispatcher.note_sent();
            }
            (Sent { id, node, rows, wait, until }, patience.hedge)
        }))
    }

    fn cost(&self, work: &[&ExpertWork]) -> Cost {
        let mut cost = Cost { experts: work.len(), ..Cost::default() };
        for work in work {
            let bytes = self.dispatcher.layout.record_bytes(self.id(work)).unwrap_or(0);
            cost.entries += work.rows.len();
            cost.record_bytes = cost.record_bytes.saturating_add(bytes);
            cost.touched_bytes = cost.touched_bytes.saturating_add(bytes.saturating_mul(work.rows.len()));
        }
        cost
    }

    /// Names the expert, its owner, since when it is lost and what to do.
    fn nobody_has(&mut self, id: ExpertId) -> ExpertError {
        if self.dispatcher.has_local(id)
            && let Some(error) = self.broken.take()
        {
            return error;
        }
        ExpertError::Unreachable(self.dispatcher.nobody_has(id))
    }

    /// Asks others for the work of a late group, if they can do all of it.
    pub(super) fn hedge(&mut self, id: u64) -> Result<(), ExpertError> {
        let Some(group) = self.groups.get_mut(&id) else { return Ok(()) };
        group.hedge_at = None;
        let must = group.must_hedge || group.original.node.is_suspect();
        let work = group.work.clone();
        let mut excluded = self.failed.clone();
        excluded.push(group.original.node.id.clone());
        let name = group.original.node.name();
        // After a missed deadline there is no waiting for a third machine.
        let overdue = group.must_hedge && work.iter().all(|work| self.has_local(work));
        let places =
            if overdue { vec![Place::Local; work.len()] } else { self.places(&work, &excluded, false) };
        let experts = work.len();
        let split = Split::of(work, places);
        if !split.nowhere.is_empty() {
            return Ok(());
        }
        if !self.dispatcher.may_hedge(must) {
            self.times.sums.hedges.withheld += 1;
            return Ok(());
        }
        tracing::debug!(node = name, layer = self.batch.layer, experts, "late, asking others too");
        self.times.sums.hedges.begun += 1;
        self.begin_backup(id, split)
    }

    /// Sends the parts of a second attempt.
    fn begin_backup(&mut self, id: u64, split: Split<'a>) -> Result<(), ExpertError> {
        let mut parts = Vec::new();
        for (node, _, work) in split.there {
            match self.send(node.clone(), &work, true)? {
                Some((sent, _)) => {
                    self.hedges.insert(sent.id, id);
                    parts.push(Part::Sent { sent, work });
                }
                None => {
                    self.failed.push(node.id.clone());
                    self.times.sums.hedges.lost += 1;
                    parts.iter().for_each(|part| self.cancel(part));
                    if let Some(group) = self.groups.get_mut(&id) {
                        group.hedge_at = Some(Instant::now());
                    }
                    return Ok(());
                }
            }
        }
        let here: Vec<_> = split.share.into_iter().chain(split.here).collect();
        if !here.is_empty() {
            parts.push(Part::Local { todo: here, sums: None });
        }
        if let Some(group) = self.groups.get_mut(&id) {
            group.backup = Some(parts);
        }
        Ok(())
    }

    /// Takes a dispatch of a second attempt back.
    fn cancel(&mut self, part: &Part<'a>) {
        if let Part::Sent { sent, .. } = part {
            self.hedges.remove(&sent.id);
            sent.node.cancel(sent.id);
        }
    }

    /// The call ends with an error: nobody waits for anything any more.
    pub(super) fn abandon(&mut self) {
        for (id, group) in std::mem::take(&mut self.groups) {
            group.original.node.cancel(id);
            group.backup_sent().for_each(|sent| sent.node.cancel(sent.id));
        }
    }

    /// The first attempt of a group was answered: the second one is thrown away.
    pub(super) fn original_won(&mut self, group: Group<'a>, sums: &FixedRows) {
        self.sums.merge_rows(sums, &group.original.rows);
        group.original.node.count_served(group.work.len());
        if let Some(parts) = &group.backup {
            self.times.sums.hedges.lost += 1;
            parts.iter().for_each(|part| self.cancel(part));
        }
    }

    /// The second attempt is complete: the first one is taken back.
    pub(super) fn backup_won(&mut self, id: u64) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.times.sums.hedges.won += 1;
        group.original.node.cancel(group.original.id);
        group.backup.iter().flatten().for_each(|part| part.add_to(&mut self.sums));
    }

    /// The second attempt cannot be completed: the first is waited for as if there had never been one.
    pub(super) fn drop_backup(&mut self, id: u64) {
        let Some(parts) = self.groups.get_mut(&id).and_then(|group| group.backup.take()) else { return };
        self.times.sums.hedges.lost += 1;
        parts.iter().for_each(|part| self.cancel(part));
    }

    /// The first attempt will not be answered in time: what the second has not computed yet is handed out
    /// as if it were new, all of it where there is no second. `overdue`: see [`Call::hand_out`].
    pub(super) fn dissolve(&mut self, id: u64, overdue: bool) -> Result<(), ExpertError> {
        let Some(group) = self.groups.remove(&id) else { return Ok(()) };
        self.failed.push(group.original.node.id.clone());
        let Some(parts) = group.backup else { return self.hand_out(group.work, overdue) };
        self.times.sums.hedges.won += 1;
        for part in parts {
            part.add_to(&mut self.sums);
            match part {
                Part::Done { .. } => {}
                Part::Local { todo, .. } => self.fallback.extend(todo),
                Part::Sent { sent, work } => {
                    self.hedges.remove(&sent.id);
                    let can_hedge = work.iter().all(|work| self.has_local(work));
                    let group = Group {
                        work,
                        hedge_at: can_hedge.then(Instant::now),
                        must_hedge: true,
                        last_hope: false,
                        backup: None,
                        original: sent,
                    };
                    self.groups.insert(group.original.id, group);
                }
            }
        }
        Ok(())
    }

    /// Whether somebody else could compute a group.
    fn has_others(&self, group: &Group<'a>) -> bool {
        let mut excluded = self.failed.clone();
        excluded.push(group.original.node.id.clone());
        let places = self.places(&group.work, &excluded, true);
        !places.iter().any(|place| matches!(place, Place::Nobody))
    }

    /// The first attempt of a group missed its deadline.
    pub(super) fn original_missed(&mut self, id: u64) -> Result<(), ExpertError> {
        let Some(group) = self.groups.get(&id) else { return Ok(()) };
        let Sent { node, wait, .. } = &group.original;
        node.missed(id, *wait);
        self.times.failed(node);
        let waited_ms = wait.as_millis() as u64;
        if group.last_hope || self.has_others(group) {
            tracing::warn!(
                node = node.name(),
                layer = self.batch.layer,
                waited_ms,
                "no answer in time, computing elsewhere"
            );
            node.cancel(id);
            return self.dissolve(id, true);
        }
        tracing::warn!(
            node = node.name(),
            layer = self.batch.layer,
            waited_ms,
            "late, but nobody else has its experts: waiting up to {} s",
            LAST_RESORT.as_secs()
        );
        if let Some(group) = self.groups.get_mut(&id) {
            group.original.until += LAST_RESORT.saturating_sub(group.original.wait);
            group.last_hope = true;
        }
        Ok(())
    }
}
