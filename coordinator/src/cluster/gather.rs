//! The second half of a call: computing what is ours, taking answers in, doing something about late ones.
//!
//! The engine thread does one thing at a time: answers that have arrived come first, then what time asks
//! for, then experts to be computed here, a few at a time, and only then does it wait.

use std::time::{Duration, Instant};

use prost::Message as _;
use shimmer_common::experts::{ExpertError, ExpertWork};
use shimmer_common::fixed::FixedRows;
use shimmer_node::wire::decode_sums;
use shimmer_proto::v1;

use super::call::Call;
use super::group::Part;
use super::owed::Event;
use super::times::{Doing, RoundTrip};

/// Experts computed here before answers are looked at again, while nodes work.
const PORTION: usize = 8;
/// The same for a second attempt, which an answer may make useless, unless experts have many rows.
const HEDGE_PORTION: usize = 1;
const MANY_ROWS: usize = 32;

impl<'a> Call<'a> {
    /// Computes our share, then waits for every answer, redoing what fails.
    pub(super) fn gather(&mut self) -> Result<(), ExpertError> {
        loop {
            // What has arrived is never late.
            while let Ok(event) = self.events.try_recv() {
                self.take(event, None)?;
            }
            self.act_on_late(Instant::now())?;
            if self.compute_some()? {
                continue;
            }
            let Some(until) = self.groups.values().map(|group| group.next_step()).min() else {
                return Ok(());
            };
            self.wait(until)?;
        }
    }

    fn wait(&mut self, until: Instant) -> Result<(), ExpertError> {
        self.times.was(Doing::Handling);
        let event = self.events.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        let waited = self.times.was(Doing::Waiting);
        if let Some(event) = event {
            return self.take(event, Some(waited));
        }
        let late = self.groups.values().min_by_key(|group| group.next_step());
        let node = late.map(|group| group.original.node.clone());
        self.times.waited_in_vain(node.as_deref(), waited);
        Ok(())
    }

    /// Takes an answer in. What we gave up on, or know nothing of, changes nothing.
    fn take(&mut self, event: Event, waited: Option<Duration>) -> Result<(), ExpertError> {
        let Event { id, round_trip, outcome } = event;
        let of = self.hedges.get(&id).copied().unwrap_or(id);
        let sent = self.groups.get(&of).and_then(|group| {
            let Some(index) = group.backup_index(id) else {
                return (group.original.id == id).then_some((&group.original, group.work.len()));
            };
            match group.backup.as_ref()?.get(index)? {
                Part::Sent { sent, work } => Some((sent, work.len())),
                Part::Done { .. } | Part::Local { .. } => None,
            }
        });
        let Some((sent, experts)) = sent else {
            if let Some(waited) = waited {
                self.times.waited_in_vain(None, waited);
            }
            return Ok(());
        };
        let (node, rows) = (sent.node.clone(), sent.rows.clone());
        let sums = match outcome {
            Err(why) => {
                if let Some(waited) = waited {
                    self.times.waited_in_vain(Some(&node), waited);
                }
                Err(why)
            }
            Ok(reply) => {
                let trip = RoundTrip::of(round_trip, &reply);
                self.times.received(&node, reply.encoded_len());
                if let Some(waited) = waited {
                    self.times.waited_for(&node, waited, trip);
                }
                let sums = self.sums_of(&reply, rows.len());
                match &sums {
                    Ok(_) => self.times.used(&node, trip, &reply, experts),
                    Err(_) if matches!(reply.outcome, Some(v1::reply::Outcome::Sums(_))) => {
                        node.count_failure();
                    }
                    Err(_) => {}
                }
                sums
            }
        };
        match sums {
            Ok(sums) => self.take_sums(of, id, sums, rows),
            Err(why) => {
                tracing::warn!(node = node.name(), layer = self.batch.layer, why, "computing elsewhere");
                self.times.failed(&node);
                self.attempt_failed(of, id, node.id.clone())
            }
        }
    }

    fn sums_of(&self, reply: &v1::Reply, rows: usize) -> Result<FixedRows, String> {
        match &reply.outcome {
            Some(v1::reply::Outcome::Sums(bytes)) => {
                let bits = self.dispatcher.fraction_bits;
                decode_sums(bytes, rows, &self.dispatcher.layout, bits).map_err(|e| e.to_string())
            }
            Some(v1::reply::Outcome::Failure(failure)) => Err(failure.sentence.clone()),
            None => Err("it sent an empty reply".to_owned()),
        }
    }

    fn take_sums(&mut self, of: u64, id: u64, sums: FixedRows, rows: Vec<usize>) -> Result<(), ExpertError> {
        if of == id {
            if let Some(group) = self.groups.remove(&of) {
                self.original_won(group, &sums);
            }
            return Ok(());
        }
        self.hedges.remove(&id);
        let Some(group) = self.groups.get_mut(&of) else { return Ok(()) };
        let index = group.backup_index(id);
        if let Some(part) = index.and_then(|index| group.backup.as_mut()?.get_mut(index)) {
            if let Part::Sent { sent, work } = &part {
                sent.node.count_served(work.len());
            }
            *part = Part::Done { sums, rows: Some(rows) };
        }
        if group.backup_is_done() {
            self.backup_won(of);
        }
        Ok(())
    }

    /// Dispatch `id` of group `of` failed.
    fn attempt_failed(&mut self, of: u64, id: u64, node: String) -> Result<(), ExpertError> {
        if of == id {
            return self.dissolve(of, false);
        }
        self.failed.push(node);
        self.hedge_anew(of);
        Ok(())
    }

    /// A second attempt failed: others are asked at once, if there are any.
    fn hedge_anew(&mut self, of: u64) {
        self.drop_backup(of);
        if let Some(group) = self.groups.get_mut(&of) {
            group.hedge_at = Some(Instant::now());
            group.must_hedge = true;
        }
    }

    fn act_on_late(&mut self, now: Instant) -> Result<(), ExpertError> {
        let due: Vec<u64> =
            self.groups.iter().filter(|(_, g)| g.next_step() <= now).map(|(&id, _)| id).collect();
        for id in due {
            let Some(group) = self.groups.get(&id) else { continue };
            let late: Vec<_> = group.backup_sent().filter(|sent| sent.until <= now).collect();
            let (is_missed, is_late) =
                (group.original.until <= now, group.hedge_at.is_some_and(|at| at <= now));
            let mut late_nodes = Vec::new();
            for sent in late {
                sent.node.missed(sent.id, sent.wait);
                late_nodes.push(sent.node.clone());
            }
            for node in &late_nodes {
                self.times.failed(node);
                self.failed.push(node.id.clone());
            }
            if !late_nodes.is_empty() {
                self.hedge_anew(id);
            }
            if is_missed {
                self.original_missed(id)?;
            } else if is_late {
                self.hedge(id)?;
            }
        }
        Ok(())
    }

    /// Computes some experts here; false when there are none.
    fn compute_some(&mut self) -> Result<bool, ExpertError> {
        if !self.share.is_empty() || !self.fallback.is_empty() {
            self.compute_ours()?;
            return Ok(true);
        }
        let with_work = self.groups.iter().find_map(|(&id, group)| {
            let is_open = |part: &Part<'_>| matches!(part, Part::Local { todo, .. } if !todo.is_empty());
            let index = group.backup.as_ref()?.iter().position(is_open)?;
            Some((id, index))
        });
        let Some((id, index)) = with_work else { return Ok(false) };
        self.compute_part(id, index)?;
        Ok(true)
    }

    /// Computes some of what only we can do, or have chosen to.
    fn compute_ours(&mut self) -> Result<(), ExpertError> {
        let limit = if self.groups.is_empty() { usize::MAX } else { PORTION };
        let by_share = self.share.len().min(limit);
        let mut work: Vec<&ExpertWork> = self.share.drain(..by_share).collect();
        let fallback = self.fallback.len().min(limit - by_share);
        work.extend(self.fallback.drain(..fallback));
        match self.compute_here(&work, by_share, fallback) {
            Ok(sums) => {
                self.sums.merge(&sums);
                Ok(())
            }
            Err(error) => self.give_away(work, error),
        }
    }

    /// This machine cannot compute: nodes that hold the experts shall.
    fn give_away(&mut self, mut work: Vec<&'a ExpertWork>, error: ExpertError) -> Result<(), ExpertError> {
        if !is_of_the_disk(&error) {
            return Err(error);
        }
        tracing::warn!(%error, "this machine cannot compute experts, asking nodes");
        self.broken = Some(error);
        work.append(&mut self.share);
        work.append(&mut self.fallback);
        self.hand_out(work, false)
    }

    /// Computes some experts of a second attempt.
    fn compute_part(&mut self, id: u64, index: usize) -> Result<(), ExpertError> {
        let part = self.groups.get_mut(&id).and_then(|group| group.backup.as_mut()?.get_mut(index));
        let Some(Part::Local { todo, .. }) = part else { return Ok(()) };
        let many = todo.first().is_some_and(|work| work.rows.len() > MANY_ROWS);
        let portion = if many { PORTION } else { HEDGE_PORTION };
        let work: Vec<&ExpertWork> = todo.drain(..todo.len().min(portion)).collect();
        match self.compute_here(&work, 0, work.len()) {
            Ok(new) => {
                let group = self.groups.get_mut(&id);
                let Some(group) = group else { return Ok(()) };
                if let Some(Part::Local { sums, .. }) = group.backup.as_mut().and_then(|p| p.get_mut(index)) {
                    match sums {
                        Some(sums) => sums.merge(&new),
                        None => *sums = Some(new),
                    }
                }
                if group.backup_is_done() {
                    self.backup_won(id);
                }
                Ok(())
            }
            Err(error) if is_of_the_disk(&error) => {
                tracing::warn!(%error, "this machine cannot compute experts, waiting for nodes");
                self.broken = Some(error);
                self.drop_backup(id);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn compute_here(
        &mut self,
        work: &[&ExpertWork],
        by_share: usize,
        fallback: usize,
    ) -> Result<FixedRows, ExpertError> {
        self.times.was(Doing::Handling);
        let local = self.dispatcher.local()?;
        let mut work: Vec<ExpertWork> = work.iter().map(|&work| work.clone()).collect();
        work.sort_by_key(|work| work.expert);
        let result = local.compute_tallied(self.batch.layer, &self.batch.x, &work, &mut || {});
        self.times.was(Doing::Local);
        let (sums, tally) = result?;
        self.times.computed_here(&tally, by_share, fallback);
        self.dispatcher.count_local(by_share, fallback);
        Ok(sums)
    }

    /// Computes the whole batch here, reading while the caller's own work runs.
    pub(super) fn compute_all(&mut self, meanwhile: &mut dyn FnMut()) -> Result<(), ExpertError> {
        self.times.was(Doing::Handling);
        let local = self.dispatcher.local()?;
        let (by_share, fallback) = (self.share.len(), self.fallback.len());
        let mut own = Duration::ZERO;
        let mut timed = || {
            let begun = Instant::now();
            meanwhile();
            own = begun.elapsed();
        };
        let result = local.compute_tallied(self.batch.layer, &self.batch.x, &self.batch.work, &mut timed);
        self.times.was(Doing::Local);
        self.times.sums.local_s -= own.as_secs_f64();
        let work: Vec<&ExpertWork> = self.share.drain(..).chain(self.fallback.drain(..)).collect();
        match result {
            Ok((sums, tally)) => {
                self.times.computed_here(&tally, by_share, fallback);
                self.dispatcher.count_local(by_share, fallback);
                self.sums = sums;
                Ok(())
            }
            Err(error) => {
                self.give_away(work, error)?;
                self.gather()
            }
        }
    }
}

/// Whether another machine may have what this one could not read.
fn is_of_the_disk(error: &ExpertError) -> bool {
    matches!(error, ExpertError::Missing { .. } | ExpertError::Read { .. } | ExpertError::Damaged { .. })
}
