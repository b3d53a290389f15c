//! The task that aims at what the coordinator wants and keeps a worker per source busy.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use shimmer_common::experts::pack::PackError;
use shimmer_common::experts::{ExpertId, ExpertSource as _};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::progress::SyncReport;
use super::receive::{FetchError, blocking};
use super::room::{check_room, store_problem};
use super::work::SourceId;
use super::worker::{Ended, locate, work_for};
use super::{Context, Target, lock};

/// How often the state of things is looked at while fetching.
const TICK: Duration = Duration::from_millis(250);
/// How often the coordinator is told of new records; at the beginning with every tick, so that the
/// first ones are used at once.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How often `progress.json` is written.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// The task that keeps the workers at work.
pub(super) struct Manager {
    context: Arc<Context>,
    target: Option<Target>,
    workers: JoinSet<Ended>,
    /// Since when records are being fetched.
    since: Option<Instant>,
    /// The shard cannot be written: nothing is begun before the next heartbeat.
    halted: bool,
    told: Instant,
    reported: Option<(Instant, SyncReport)>,
    /// Drawn on a terminal only.
    bar: indicatif::ProgressBar,
}

impl Manager {
    pub(super) fn new(context: Arc<Context>) -> Self {
        let workers = JoinSet::new();
        let (told, bar) = (Instant::now(), indicatif::ProgressBar::hidden());
        Self { context, target: None, workers, since: None, halted: false, told, reported: None, bar }
    }

    pub(super) async fn run(mut self, mut targets: watch::Receiver<Option<Target>>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = targets.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.target = targets.borrow_and_update().clone();
                    self.aim().await;
                }
                Some(ended) = self.workers.join_next() => self.ended(ended).await,
                _ = ticks.tick(), if self.since.is_some() => {}
            }
            if self.since.is_some() {
                self.employ();
                self.tell();
                self.finish_if_done().await;
            }
            self.report();
        }
    }

    /// Compares what should be here with what is, and begins to fetch when there is room for the rest.
    async fn aim(&mut self) {
        let Some(target) = self.target.clone() else { return };
        let context = self.context.clone();
        context.bytes_per_s.store(target.bytes_per_s, Ordering::Relaxed);
        let mut missing = context.plan(&target);
        if self.since.is_none() && !missing.is_empty() {
            if let Err(error) = take_up_partials(&context).await {
                self.complain(error.to_string());
                return;
            }
            missing = context.plan(&target);
        }
        context.shared.set_syncing(!missing.is_empty());
        if context.records.has_adopted() {
            // What is adopted is compared too, assigned or not: it is served all the same.
            let all: Vec<ExpertId> = context.records.layout().ids().collect();
            locate(&context, &target, &all).await;
        } else if !target.peers.is_empty() {
            locate(&context, &target, &missing).await;
        }
        self.halted = false;
        if missing.is_empty() {
            context.progress().set_problem(String::new());
        } else if self.since.is_none() {
            self.begin(&missing);
        }
    }

    fn begin(&mut self, missing: &[ExpertId]) {
        let context = self.context.clone();
        let (records, bytes) = context.size_of(missing);
        let here = lock(&context.work).partial_bytes();
        if let Err(problem) = check_room(&context, bytes.saturating_sub(here)) {
            self.complain(problem);
            return;
        }
        context.progress().set_problem(String::new());
        tracing::info!(records, bytes, here, "fetching records");
        self.since = Some(Instant::now());
        self.bar = indicatif::ProgressBar::new(context.progress().to_wire().wanted_bytes);
    }

    /// Says what is in the way, in the log only once.
    fn complain(&self, problem: String) {
        if self.context.progress().to_wire().problem != problem {
            tracing::warn!(problem, "records cannot be fetched, trying again");
        }
        self.context.progress().set_problem(problem);
    }

    /// Gives every idle source something to do.
    fn employ(&mut self) {
        if self.halted {
            return;
        }
        let Some(target) = &self.target else { return };
        let idle = lock(&self.context.work).idle_sources();
        for source in idle {
            let first = self.context.take(&source);
            if first.is_empty() {
                continue;
            }
            let peer = match &source {
                SourceId::Coordinator => None,
                SourceId::Peer(id) => target.peers.iter().find(|peer| peer.id == *id).cloned(),
            };
            let coordinator = target.coordinator.clone();
            self.workers.spawn(work_for(self.context.clone(), source, coordinator, peer, first));
        }
    }

    /// Takes note of how a worker ended.
    async fn ended(&mut self, ended: Result<Ended, tokio::task::JoinError>) {
        let context = self.context.clone();
        let Ok(Ended { source, name, outcome }) = ended else { return };
        // What of a record has arrived is asked for no more, whoever sends the rest.
        let store = context.records.store().clone();
        if let (Err(_), Ok(partials)) = (&outcome, blocking(move || store.partials()).await) {
            lock(&context.work).set_partials(partials);
        }
        let mut work = lock(&context.work);
        match outcome {
            Ok(()) => work.released(&source),
            Err(FetchError::Store(error)) => {
                work.released(&source);
                drop(work);
                self.halted = true;
                self.complain(store_problem(&context, &error));
            }
            Err(error) => {
                let wrong = match error {
                    FetchError::Damaged { id, alone: true, .. } => Some(id),
                    _ => None,
                };
                work.failed(&source, wrong);
                drop(work);
                tracing::warn!(source = name, %error, "fetching from this source stopped");
                if source == SourceId::Coordinator {
                    context.progress().set_problem(format!("the coordinator {error}"));
                }
            }
        }
    }

    /// Tells the coordinator of new records.
    fn tell(&mut self) {
        self.bar.set_position(self.context.progress().to_wire().held_bytes);
        let young = self.since.is_some_and(|since| since.elapsed() < TELL_EVERY);
        let due = young || self.told.elapsed() >= TELL_EVERY;
        if due && self.context.news.swap(false, Ordering::Relaxed) {
            self.told = Instant::now();
            self.context.shared.held_changed.send_modify(|n| *n += 1);
        }
    }

    /// Ends fetching when everything is here, or when nothing can be written.
    async fn finish_if_done(&mut self) {
        let done = lock(&self.context.work).is_done();
        if !self.workers.is_empty() || !(done || self.halted) {
            return;
        }
        let store = self.context.records.store().clone();
        if let Err(error) = blocking(move || store.flush()).await {
            self.complain(error.to_string());
        } else if done {
            let elapsed_ms = self.since.map_or(0, |since| since.elapsed().as_millis() as u64);
            tracing::info!(elapsed_ms, "all records are here");
            self.context.progress().set_problem(String::new());
            self.context.shared.set_syncing(false);
        }
        self.since = None;
        self.bar.finish_and_clear();
        self.context.news.store(false, Ordering::Relaxed);
        self.context.shared.held_changed.send_modify(|n| *n += 1);
    }

    /// Writes `progress.json` when it would say something new.
    fn report(&mut self) {
        let busy = self.since.is_some();
        if busy && self.reported.as_ref().is_some_and(|(at, _)| at.elapsed() < REPORT_EVERY) {
            return;
        }
        let report = SyncReport::from(self.context.shared.sync_progress());
        if self.reported.as_ref().is_some_and(|(_, last)| *last == report) {
            return;
        }
        if let Err(error) = report.write(&self.context.data_dir) {
            tracing::debug!(%error, "progress.json cannot be written");
        }
        self.reported = Some((Instant::now(), report));
    }
}

/// Looks at the beginnings of records on the disk; complete ones become records.
async fn take_up_partials(context: &Arc<Context>) -> Result<(), FetchError> {
    let store = context.records.store().clone();
    let partials = blocking(move || {
        let mut open = Vec::new();
        for info in store.partials()? {
            if store.layout().record_bytes(info.id).is_none_or(|bytes| bytes as u64 > info.bytes) {
                open.push(info);
                continue;
            }
            // Killed between its last byte and its place in the shard.
            match store.open_partial(info.id, info.hash, info.bytes)?.finish(&store) {
                Ok(_) | Err(PackError::WrongRecord { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(open)
    });
    let partials = partials.await?;
    lock(&context.work).set_partials(partials);
    Ok(())
}
