//! Which record comes from which source.
//!
//! Sources help themselves: each takes as many records as it sends in about two seconds, so that the
//! fast ones get more. A record whose hash the coordinator has told may come from any peer that holds it;
//! the coordinator itself sends what no peer can, and helps with the rest while all of them are at work.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use shimmer_common::experts::pack::PartialInfo;
use shimmer_common::experts::{ExpertId, ExpertLayout, RecordHashes};

use super::assembler::Wanted;
use crate::wire::Held;

/// Most records of one call: a call that breaks costs little, and the rest can go to others.
const RECORDS_PER_CALL: usize = 32;
/// A source gets what it sends in this time.
const CALL_SECONDS: f64 = 2.0;
/// What a source of unknown rate gets.
const FIRST_CALL_BYTES: f64 = (32 << 20) as f64;
/// Pause of a source that failed once, doubled for every further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause of a peer, and of the coordinator, which may be the only one to have a record.
const LONGEST_PAUSES: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(10)];

/// A source: a node by its id, or the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SourceId {
    Peer(String),
    Coordinator,
}

/// What is known of a source.
#[derive(Debug)]
struct Source {
    /// `None` for the coordinator, which has everything.
    held: Option<Held>,
    /// Whether a worker serves it.
    working: bool,
    /// Whether the coordinator names it still.
    known: bool,
    bytes_per_s: Option<f64>,
    failures: u32,
    not_before: Instant,
    /// Records it sent that were not what they should be.
    wrong: HashSet<ExpertId>,
}

impl Source {
    fn new(held: Option<Held>) -> Self {
        Self {
            held,
            working: false,
            known: true,
            bytes_per_s: None,
            failures: 0,
            not_before: Instant::now(),
            wrong: HashSet::new(),
        }
    }

    fn is_ready(&self, now: Instant) -> bool {
        self.known && now >= self.not_before
    }

    fn can_send(&self, id: ExpertId, hashes: &RecordHashes) -> bool {
        match &self.held {
            None => true,
            Some(held) => held.contains(id) && !self.wrong.contains(&id) && hashes.get(id).is_some(),
        }
    }
}

/// Experts layer by layer would leave the last layers without any for long: by index first.
type Order = (u16, u16);

fn order(id: ExpertId) -> Order {
    (id.index, id.layer)
}

/// What is missing and who is fetching it.
#[derive(Debug, Default)]
pub(super) struct Work {
    pending: BTreeSet<Order>,
    in_flight: HashMap<ExpertId, SourceId>,
    partials: HashMap<ExpertId, PartialInfo>,
    sources: BTreeMap<SourceId, Source>,
}

impl Work {
    /// Takes over what is missing now; what is in flight stays there.
    pub(super) fn set_missing(&mut self, missing: &[ExpertId]) {
        let open = missing.iter().filter(|id| !self.in_flight.contains_key(id));
        self.pending = open.map(|&id| order(id)).collect();
    }

    /// Takes over which records have begun to arrive.
    pub(super) fn set_partials(&mut self, partials: Vec<PartialInfo>) {
        self.partials = partials.into_iter().map(|partial| (partial.id, partial)).collect();
    }

    /// Bytes of missing records that are here already.
    pub(super) fn partial_bytes(&self) -> u64 {
        let missing = self.partials.values().filter(|p| self.pending.contains(&order(p.id)));
        missing.map(|p| p.bytes).sum()
    }

    /// Takes over who can send, besides the coordinator.
    pub(super) fn set_sources(&mut self, peers: impl IntoIterator<Item = (String, Held)>) {
        for (id, source) in &mut self.sources {
            source.known = *id == SourceId::Coordinator;
        }
        let coordinator = self.sources.entry(SourceId::Coordinator).or_insert_with(|| Source::new(None));
        // It has just answered a heartbeat.
        coordinator.not_before = Instant::now();
        for (id, held) in peers {
            let source = self.sources.entry(SourceId::Peer(id)).or_insert_with(|| Source::new(None));
            (source.held, source.known) = (Some(held), true);
        }
        // What is known of a peer that is away for a moment (its failures, its rate) is kept.
        self.sources.retain(|_, s| s.known || s.working || s.failures > 0 || !s.wrong.is_empty());
    }

    /// Whether nothing is missing and nothing on its way.
    pub(super) fn is_done(&self) -> bool {
        self.pending.is_empty() && self.in_flight.is_empty()
    }

    /// Peers first: then the coordinator sees what they have taken.
    pub(super) fn idle_sources(&self) -> Vec<SourceId> {
        let now = Instant::now();
        let idle = self.sources.iter().filter(|(_, source)| !source.working && source.is_ready(now));
        idle.map(|(id, _)| id.clone()).collect()
    }

    /// Hands out the next records of a source; empty when there is nothing for it.
    pub(super) fn take(
        &mut self,
        from: &SourceId,
        hashes: &RecordHashes,
        layout: &ExpertLayout,
    ) -> Vec<Wanted> {
        let Some(source) = self.sources.get(from).filter(|source| source.known) else { return Vec::new() };
        let room = source.bytes_per_s.map_or(FIRST_CALL_BYTES, |rate| rate * CALL_SECONDS);
        let now = Instant::now();
        let peers: Vec<&Source> =
            self.sources.values().filter(|s| s.held.is_some() && s.is_ready(now)).collect();
        let only_here = |id| !peers.iter().any(|peer| peer.can_send(id, hashes));
        let no_idle_peer = |id| !peers.iter().any(|peer| !peer.working && peer.can_send(id, hashes));
        let mut ids = Vec::new();
        if *from == SourceId::Coordinator {
            ids = self.next(room, layout, only_here);
            if ids.is_empty() {
                ids = self.next(room, layout, no_idle_peer);
            }
        } else {
            ids.extend(self.next(room, layout, |id| source.can_send(id, hashes)));
        }
        for &id in &ids {
            self.pending.remove(&order(id));
            self.in_flight.insert(id, from.clone());
        }
        if let Some(source) = self.sources.get_mut(from) {
            source.working = !ids.is_empty();
        }
        ids.into_iter().map(|id| self.wanted(id, hashes)).collect()
    }

    fn next(&self, room: f64, layout: &ExpertLayout, fits: impl Fn(ExpertId) -> bool) -> Vec<ExpertId> {
        let mut ids = Vec::new();
        let mut bytes = 0.0;
        for &(index, layer) in &self.pending {
            let id = ExpertId { layer, index };
            if !fits(id) {
                continue;
            }
            bytes += layout.record_bytes(id).unwrap_or(0) as f64;
            if !ids.is_empty() && (bytes > room || ids.len() >= RECORDS_PER_CALL) {
                break;
            }
            ids.push(id);
        }
        ids
    }

    /// A record with what is here of it: a beginning counts when it belongs to the right record.
    fn wanted(&self, id: ExpertId, hashes: &RecordHashes) -> Wanted {
        let known = hashes.get(id);
        match self.partials.get(&id) {
            Some(partial) if known.is_none_or(|hash| hash == partial.hash) => {
                Wanted { id, offset: partial.bytes, hash: Some(partial.hash) }
            }
            _ => Wanted { id, offset: 0, hash: known },
        }
    }

    /// A record is here.
    pub(super) fn stored(&mut self, id: ExpertId) {
        self.in_flight.remove(&id);
        self.partials.remove(&id);
    }

    /// The beginning of a record turned out to be of no use.
    pub(super) fn forget_partial(&mut self, id: ExpertId) {
        self.partials.remove(&id);
    }

    /// A call was answered in full.
    pub(super) fn succeeded(&mut self, from: &SourceId, bytes: u64, took: Duration) {
        let Some(source) = self.sources.get_mut(from) else { return };
        source.failures = 0;
        let rate = bytes as f64 / took.as_secs_f64().max(1e-6);
        source.bytes_per_s = Some(source.bytes_per_s.map_or(rate, |old| (old + rate) / 2.0));
    }

    /// A source has nothing to do, or is given up on: what it had is free again.
    pub(super) fn released(&mut self, from: &SourceId) {
        let back: Vec<ExpertId> =
            self.in_flight.iter().filter(|(_, by)| *by == from).map(|(id, _)| *id).collect();
        for id in back {
            self.in_flight.remove(&id);
            self.pending.insert(order(id));
        }
        if let Some(source) = self.sources.get_mut(from) {
            source.working = false;
        }
    }

    /// A source failed, with this record if it was a wrong one: it pauses, for longer every time.
    pub(super) fn failed(&mut self, from: &SourceId, wrong: Option<ExpertId>) {
        self.released(from);
        let Some(source) = self.sources.get_mut(from) else { return };
        if source.held.is_some() {
            source.wrong.extend(wrong);
        }
        let longest = LONGEST_PAUSES[usize::from(source.held.is_none())];
        let pause = FIRST_PAUSE.saturating_mul(1 << source.failures.min(10)).min(longest);
        source.failures = source.failures.saturating_add(1);
        source.not_before = Instant::now() + pause;
        // It gets less when it comes back.
        source.bytes_per_s = source.bytes_per_s.map(|rate| rate / 2.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;

    fn id(layer: u16, index: u16) -> ExpertId {
        ExpertId { layer, index }
    }

    fn peer(name: &str) -> SourceId {
        SourceId::Peer(name.to_owned())
    }

    fn set(layout: &ExpertLayout, ids: &[ExpertId]) -> Held {
        let mut held = Held::none(layout);
        ids.iter().for_each(|&id| held.insert(id));
        held
    }

    fn ids(wanted: &[Wanted]) -> Vec<ExpertId> {
        wanted.iter().map(|wanted| wanted.id).collect()
    }

    /// Everything is missing; `a` holds all of it; hashes of index 0 to 2 are known.
    fn work(layout: &ExpertLayout) -> (Work, RecordHashes) {
        let mut hashes = RecordHashes::default();
        layout.ids().filter(|id| id.index < 3).for_each(|id| assert!(hashes.insert(id, [1; 32])));
        let all: Vec<ExpertId> = layout.ids().collect();
        let mut work = Work::default();
        work.set_missing(&all);
        work.set_sources([("a".to_owned(), set(layout, &all))]);
        (work, hashes)
    }

    #[test]
    fn the_coordinator_sends_what_nobody_else_can_and_then_helps() {
        let layout = synthetic_layout(64, 64, &[1, 2], 4);
        let (mut work, hashes) = work(&layout);
        assert_eq!(work.idle_sources(), [peer("a"), SourceId::Coordinator]);
        let first = work.take(&SourceId::Coordinator, &hashes, &layout);
        assert_eq!(ids(&first), [id(1, 3), id(2, 3)], "no hash is known");
        assert!(first.iter().all(|w| w.hash.is_none() && w.offset == 0));
        assert!(work.take(&SourceId::Coordinator, &hashes, &layout).is_empty(), "it leaves the rest to a");
        work.sources.get_mut(&peer("a")).unwrap().bytes_per_s = Some(1.0);
        let theirs = work.take(&peer("a"), &hashes, &layout);
        assert_eq!(ids(&theirs), [id(1, 0)], "a slow one gets one record, by index before layer");
        let help = work.take(&SourceId::Coordinator, &hashes, &layout);
        assert_eq!(help.len(), 5);
        help.iter().chain(&theirs).chain(&first).for_each(|w| work.stored(w.id));
        assert!(work.is_done());
    }

    #[test]
    fn a_source_that_fails_pauses_and_its_records_go_elsewhere() {
        let layout = synthetic_layout(64, 64, &[1], 3);
        let (mut work, hashes) = work(&layout);
        let taken = work.take(&peer("a"), &hashes, &layout);
        assert_eq!(taken.len(), 3);
        assert!(work.take(&SourceId::Coordinator, &hashes, &layout).is_empty());
        work.stored(id(1, 0));
        work.failed(&peer("a"), Some(id(1, 1)));
        assert_eq!(work.idle_sources(), [SourceId::Coordinator]);
        assert_eq!(ids(&work.take(&SourceId::Coordinator, &hashes, &layout)), [id(1, 1), id(1, 2)]);
        work.released(&SourceId::Coordinator);
        // Back from its pause it is not asked again for what it got wrong.
        work.sources.get_mut(&peer("a")).unwrap().not_before = Instant::now();
        assert_eq!(ids(&work.take(&peer("a"), &hashes, &layout)), [id(1, 2)]);
        let pauses: Vec<Duration> = (0..12)
            .map(|_| {
                work.failed(&peer("a"), None);
                work.sources[&peer("a")].not_before - Instant::now()
            })
            .collect();
        assert!(pauses.windows(2).all(|p| p[1] + Duration::from_secs(1) > p[0]));
        assert!(pauses[11] > Duration::from_secs(50) && pauses[11] <= Duration::from_secs(60));
    }

    #[test]
    fn a_new_plan_leaves_alone_what_is_here_or_on_its_way() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let (mut work, hashes) = work(&layout);
        let taken = ids(&work.take(&peer("a"), &hashes, &layout));
        assert_eq!(taken, [id(1, 0), id(1, 1), id(1, 2)]);
        work.stored(id(1, 0));
        work.set_missing(&[id(1, 1), id(1, 2)]);
        assert!(work.pending.is_empty(), "both are on their way, and expert 3 is wanted no more");
        work.set_sources([]);
        assert!(work.take(&peer("a"), &hashes, &layout).is_empty(), "it is not named any more");
        work.released(&peer("a"));
        assert_eq!(ids(&work.take(&SourceId::Coordinator, &hashes, &layout)), [id(1, 1), id(1, 2)]);
    }

    #[test]
    fn beginnings_count_when_they_belong_to_the_record() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let (mut work, hashes) = work(&layout);
        let partial = |index, hash| PartialInfo { id: id(1, index), hash: [hash; 32], bytes: 100 };
        work.set_partials(vec![partial(0, 1), partial(1, 2), partial(3, 3)]);
        assert_eq!(work.partial_bytes(), 300);
        let wanted = |index| work.wanted(id(1, index), &hashes);
        assert_eq!(wanted(0), Wanted { id: id(1, 0), offset: 100, hash: Some([1; 32]) });
        assert_eq!(wanted(1), Wanted { id: id(1, 1), offset: 0, hash: Some([1; 32]) });
        assert_eq!(wanted(3), Wanted { id: id(1, 3), offset: 100, hash: Some([3; 32]) });
    }
}
