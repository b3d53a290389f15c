//! A group of experts that one node was asked to compute, and the second attempt if it is late.
//!
//! A node's answer holds the sums of its whole group, so that one attempt counts and the other is thrown
//! away: the parts of the second attempt are kept apart until all of them are there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shimmer_common::experts::ExpertWork;
use shimmer_common::fixed::FixedRows;

use super::node::Node;

/// A dispatch under way.
pub(super) struct Sent {
    pub(super) id: u64,
    pub(super) node: Arc<Node>,
    /// Batch row behind each row of the dispatch.
    pub(super) rows: Vec<usize>,
    /// How long it may take, and when that ends.
    pub(super) wait: Duration,
    pub(super) until: Instant,
}

/// A part of a second attempt.
pub(super) enum Part<'a> {
    Sent {
        sent: Sent,
        work: Vec<&'a ExpertWork>,
    },
    /// The sums, and the batch row behind each of their rows where these are not the batch's.
    Done {
        sums: FixedRows,
        rows: Option<Vec<usize>>,
    },
    /// To be computed here.
    Local {
        todo: Vec<&'a ExpertWork>,
        sums: Option<FixedRows>,
    },
}

impl Part<'_> {
    fn is_done(&self) -> bool {
        match self {
            Part::Done { .. } => true,
            Part::Sent { .. } => false,
            Part::Local { todo, .. } => todo.is_empty(),
        }
    }

    /// Adds what the part has computed so far.
    pub(super) fn add_to(&self, total: &mut FixedRows) {
        match self {
            Part::Done { sums, rows: Some(rows) } => total.merge_rows(sums, rows),
            Part::Done { sums, rows: None } | Part::Local { sums: Some(sums), .. } => total.merge(sums),
            Part::Sent { .. } | Part::Local { sums: None, .. } => {}
        }
    }
}

/// See the module's documentation.
pub(super) struct Group<'a> {
    pub(super) work: Vec<&'a ExpertWork>,
    pub(super) original: Sent,
    /// When others are asked as well; `None` when they have been, or cannot be.
    pub(super) hedge_at: Option<Instant>,
    /// Others are asked then, however often that happened lately.
    pub(super) must_hedge: bool,
    /// Its deadline was put off because there is nobody else.
    pub(super) last_hope: bool,
    pub(super) backup: Option<Vec<Part<'a>>>,
}

impl Group<'_> {
    /// Whether the second attempt is complete.
    pub(super) fn backup_is_done(&self) -> bool {
        self.backup.as_ref().is_some_and(|parts| parts.iter().all(Part::is_done))
    }

    /// When something has to be done about it, unless an answer comes.
    pub(super) fn next_step(&self) -> Instant {
        let parts = self.backup.iter().flatten().filter_map(|part| match part {
            Part::Sent { sent, .. } => Some(sent.until),
            Part::Done { .. } | Part::Local { .. } => None,
        });
        parts.chain(self.hedge_at).chain([self.original.until]).min().unwrap_or(self.original.until)
    }

    /// The dispatch `id` of the second attempt.
    pub(super) fn backup_index(&self, id: u64) -> Option<usize> {
        let parts = self.backup.as_ref()?;
        parts.iter().position(|part| matches!(part, Part::Sent { sent, .. } if sent.id == id))
    }

    /// Every dispatch of the second attempt.
    pub(super) fn backup_sent(&self) -> impl Iterator<Item = &Sent> {
        self.backup.iter().flatten().filter_map(|part| match part {
            Part::Sent { sent, .. } => Some(sent),
            Part::Done { .. } | Part::Local { .. } => None,
        })
    }
}
