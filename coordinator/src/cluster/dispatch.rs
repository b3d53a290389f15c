//! One layer over the cluster: send to every node, compute our own share, gather, redo what failed.
//!
//! The engine thread runs this; it meets the wire thread in channels only. Sums are integers (rule
//! N5), so it does not matter who computes an expert, nor in which order answers come. An expert that
//! got no answer (connection lost, deadline missed, failure) goes to another node that holds it, then
//! to the local store; late answers find nobody waiting.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use shimmer_common::experts::{
    ExpertCompute as _, ExpertError, ExpertId, ExpertLayout, ExpertWork, LocalStore, Lookahead, RoutedBatch,
};
use shimmer_common::fixed::FixedRows;
use shimmer_node::pace::Activity;
use shimmer_node::wire::{decode_sums, dispatch_to_wire};
use shimmer_proto::v1;

use super::latency::Cost;
use super::membership::Membership;
use super::node::{Event, Node};
use super::placement;

/// What dispatching needs to know; shared by all calls.
pub(super) struct Dispatcher {
    pub(super) membership: Arc<Membership>,
    pub(super) layout: ExpertLayout,
    pub(super) fraction_bits: u8,
    pub(super) local: Option<Arc<LocalStore>>,
    pub(super) local_share: f64,
    pub(super) fixed_deadline: Option<Duration>,
    /// Records are sent more slowly while layers are dispatched.
    pub(super) activity: Activity,
    pub(super) next_id: AtomicU64,
    /// Experts computed here by choice.
    pub(super) by_share: AtomicU64,
    /// Experts computed here because nobody else did.
    pub(super) by_fallback: AtomicU64,
}

impl Dispatcher {
    /// Computes `batch`, see [`shimmer_common::experts::ExpertCompute::compute`].
    pub(super) fn compute(
        &self,
        batch: &RoutedBatch,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<FixedRows, ExpertError> {
        let _working = self.activity.begin();
        let mut call = Call::new(self, batch);
        let sent = call.send_all();
        if call.in_flight.is_empty()
            && let (Ok(()), Some(local)) = (&sent, &self.local)
        {
            self.count_local(&call);
            return local.compute(batch, meanwhile);
        }
        meanwhile();
        sent?;
        call.gather()
    }

    /// Passes on what of a guess this machine would compute itself.
    pub(super) fn prefetch(&self, ahead: &Lookahead) {
        let Some(local) = &self.local else { return };
        let places = self.membership.place(ahead.layer, &ahead.experts, &[]);
        let ours = |(&index, place): (&u16, Option<Arc<Node>>)| {
            let id = ExpertId { layer: ahead.layer, index };
            (place.is_none() || placement::is_local(id, self.local_share)).then_some(index)
        };
        let experts = ahead.experts.iter().zip(places).filter_map(ours).collect();
        local.prefetch(&Lookahead { layer: ahead.layer, experts });
    }

    fn count_local(&self, call: &Call<'_>) {
        self.by_share.fetch_add(call.share.len() as u64, Ordering::Relaxed);
        self.by_fallback.fetch_add(call.fallback.len() as u64, Ordering::Relaxed);
    }
}

/// How long to wait for a late node when nobody else can compute its experts.
const LAST_RESORT: Duration = Duration::from_secs(15);

/// A dispatch nobody has answered yet.
struct InFlight<'a> {
    node: Arc<Node>,
    work: Vec<&'a ExpertWork>,
    /// Batch row behind each row of the dispatch.
    rows: Vec<usize>,
    wait: Duration,
    until: Instant,
    /// Its deadline was put off because there is nobody else.
    only_hope: bool,
}

/// One layer's work in progress.
struct Call<'a> {
    dispatcher: &'a Dispatcher,
    batch: &'a RoutedBatch,
    in_flight: HashMap<u64, InFlight<'a>>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    /// For us by choice, and because nobody else is left.
    share: Vec<&'a ExpertWork>,
    fallback: Vec<&'a ExpertWork>,
    /// Nodes that failed this call.
    failed: Vec<String>,
    sums: FixedRows,
}

impl<'a> Call<'a> {
    fn new(dispatcher: &'a Dispatcher, batch: &'a RoutedBatch) -> Self {
        let (sender, events) = mpsc::channel();
        let sums = FixedRows::zeroed(batch.x.rows(), dispatcher.layout.hidden_size, dispatcher.fraction_bits);
        Self {
            dispatcher,
            batch,
            in_flight: HashMap::new(),
            events,
            sender,
            share: Vec::new(),
            fallback: Vec::new(),
            failed: Vec::new(),
            sums,
        }
    }

    fn id(&self, work: &ExpertWork) -> ExpertId {
        ExpertId { layer: self.batch.layer, index: work.expert }
    }

    /// Splits the batch into our share and the nodes' and sends the latter.
    fn send_all(&mut self) -> Result<(), ExpertError> {
        let share = if self.dispatcher.local.is_some() { self.dispatcher.local_share } else { 0.0 };
        let (ours, theirs) =
            self.batch.work.iter().partition(|work| placement::is_local(self.id(work), share));
        self.share = ours;
        self.hand_out(theirs)
    }

    /// Sends `work` to the best nodes that have not failed this call; what nobody takes is ours.
    fn hand_out(&mut self, work: Vec<&'a ExpertWork>) -> Result<(), ExpertError> {
        let experts: Vec<u16> = work.iter().map(|w| w.expert).collect();
        let places = self.dispatcher.membership.place(self.batch.layer, &experts, &self.failed);
        let mut groups: Vec<(Arc<Node>, Vec<&'a ExpertWork>)> = Vec::new();
        for (work, place) in work.into_iter().zip(places) {
            match place {
                None => self.keep(work)?,
                Some(node) => match groups.iter_mut().find(|(n, _)| Arc::ptr_eq(n, &node)) {
                    Some((_, group)) => group.push(work),
                    None => groups.push((node, vec![work])),
                },
            }
        }
        for (node, group) in groups {
            self.send(node, group)?;
        }
        Ok(())
    }

    fn send(&mut self, node: Arc<Node>, work: Vec<&'a ExpertWork>) -> Result<(), ExpertError> {
        let cost = self.cost(&work);
        let wait = self.dispatcher.fixed_deadline.unwrap_or_else(|| node.deadline(cost));
        let id = self.dispatcher.next_id.fetch_add(1, Ordering::Relaxed);
        let millis = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let message = dispatch_to_wire(&self.dispatcher.layout, self.batch, &work, id, millis);
        let (message, rows) = message.ok_or_else(|| ExpertError::Unfit {
            layer: self.batch.layer,
            what: "its rows do not have the form this layer's experts take".to_owned(),
        })?;
        if node.send(self.batch.layer, message, cost, &self.sender) {
            let until = Instant::now() + wait;
            self.in_flight.insert(id, InFlight { node, work, rows, wait, until, only_hope: false });
            return Ok(());
        }
        self.failed.push(node.id.clone());
        self.hand_out(work)
    }

    fn cost(&self, work: &[&ExpertWork]) -> Cost {
        let mut cost = Cost { entries: 0, record_bytes: 0, touched_bytes: 0 };
        for work in work {
            let bytes = self.dispatcher.layout.record_bytes(self.id(work)).unwrap_or(0);
            cost.entries += work.rows.len();
            cost.record_bytes = cost.record_bytes.saturating_add(bytes);
            cost.touched_bytes = cost.touched_bytes.saturating_add(bytes.saturating_mul(work.rows.len()));
        }
        cost
    }

    /// Takes over an expert that no node computes.
    fn keep(&mut self, work: &'a ExpertWork) -> Result<(), ExpertError> {
        let id = self.id(work);
        let local = self.dispatcher.local.as_ref();
        if local.is_some_and(|local| local.source().contains(id)) {
            self.fallback.push(work);
            return Ok(());
        }
        Err(ExpertError::Unreachable(self.nobody_has(id)))
    }

    /// Names the expert, its owner, since when it is lost and what to do.
    fn nobody_has(&self, id: ExpertId) -> String {
        let nodes = self.dispatcher.membership.all();
        // Who held it when last seen, before who should.
        let owner = nodes.iter().max_by_key(|node| (node.held(id), node.seed.score(id)));
        let owner = owner.map_or_else(
            || "no node has joined".to_owned(),
            |node| format!("its owner is {}", node.describe()),
        );
        let here = if self.dispatcher.local.is_some() {
            "this machine does not hold it"
        } else {
            "this machine may not compute it (--experts cluster)"
        };
        format!(
            "{id} cannot be computed: {owner}, no other ready node holds it and {here}; start the node again, or run with --experts auto on a machine that has the model"
        )
    }

    /// Computes our share, then waits for every answer, redoing what fails.
    fn gather(mut self) -> Result<FixedRows, ExpertError> {
        loop {
            self.compute_ours()?;
            let Some(until) = self.in_flight.values().map(|f| f.until).min() else { break };
            // What has arrived while we computed is never late.
            let event = match self.events.try_recv() {
                Ok(event) => Some(event),
                Err(_) => self.events.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
            };
            match event {
                Some(event) => self.take(event)?,
                None => self.give_up_on_late()?,
            }
        }
        Ok(self.sums)
    }

    fn compute_ours(&mut self) -> Result<(), ExpertError> {
        if self.share.is_empty() && self.fallback.is_empty() {
            return Ok(());
        }
        self.dispatcher.count_local(self);
        let mut work: Vec<ExpertWork> =
            self.share.drain(..).chain(self.fallback.drain(..)).cloned().collect();
        work.sort_by_key(|w| w.expert);
        let Some(local) = &self.dispatcher.local else { return Ok(()) };
        self.sums.merge(&local.compute_work(self.batch.layer, &self.batch.x, &work)?);
        Ok(())
    }

    fn take(&mut self, event: Event) -> Result<(), ExpertError> {
        // A dispatch we gave up on is no longer in flight.
        let Some(sent) = self.in_flight.remove(&event.id) else { return Ok(()) };
        let sums = event.outcome.and_then(|reply| match reply.outcome {
            Some(v1::reply::Outcome::Sums(bytes)) => {
                let bits = self.dispatcher.fraction_bits;
                decode_sums(&bytes, sent.rows.len(), &self.dispatcher.layout, bits).map_err(|e| {
                    sent.node.count_failure();
                    e.to_string()
                })
            }
            Some(v1::reply::Outcome::Failure(failure)) => Err(failure.sentence),
            None => Err("it sent an empty reply".to_owned()),
        });
        match sums {
            Ok(sums) => {
                self.sums.merge_rows(&sums, &sent.rows);
                sent.node.count_served(sent.work.len());
                Ok(())
            }
            Err(why) => {
                tracing::warn!(node = sent.node.name(), layer = self.batch.layer, why, "computing elsewhere");
                self.redo(sent)
            }
        }
    }

    fn give_up_on_late(&mut self) -> Result<(), ExpertError> {
        let now = Instant::now();
        let late: Vec<u64> =
            self.in_flight.iter().filter(|(_, f)| f.until <= now).map(|(&id, _)| id).collect();
        for id in late {
            if self.wait_longer(id) {
                continue;
            }
            if let Some(sent) = self.in_flight.remove(&id) {
                sent.node.missed(id, sent.wait);
                tracing::warn!(
                    node = sent.node.name(),
                    layer = self.batch.layer,
                    waited_ms = sent.wait.as_millis() as u64,
                    "no answer in time, computing elsewhere"
                );
                self.redo(sent)?;
            }
        }
        Ok(())
    }

    /// Puts a deadline off, once, when giving up on the node would leave an expert to nobody: a slow
    /// answer is better than none.
    fn wait_longer(&mut self, id: u64) -> bool {
        let Some(sent) = self.in_flight.get(&id).filter(|sent| !sent.only_hope) else { return false };
        let local = self.dispatcher.local.as_ref();
        let mut excluded = self.failed.clone();
        excluded.push(sent.node.id.clone());
        let experts: Vec<u16> = sent.work.iter().map(|w| w.expert).collect();
        let places = self.dispatcher.membership.place(self.batch.layer, &experts, &excluded);
        let lacking = sent.work.iter().zip(places).any(|(work, place)| {
            place.is_none() && !local.is_some_and(|local| local.source().contains(self.id(work)))
        });
        if !lacking || sent.wait >= LAST_RESORT {
            return false;
        }
        tracing::warn!(
            node = sent.node.name(),
            layer = self.batch.layer,
            "late, but nobody else has its experts: waiting up to {} s",
            LAST_RESORT.as_secs()
        );
        if let Some(sent) = self.in_flight.get_mut(&id) {
            sent.until += LAST_RESORT - sent.wait;
            sent.wait = LAST_RESORT;
            sent.only_hope = true;
        }
        true
    }

    fn redo(&mut self, sent: InFlight<'a>) -> Result<(), ExpertError> {
        self.failed.push(sent.node.id.clone());
        self.hand_out(sent.work)
    }
}
