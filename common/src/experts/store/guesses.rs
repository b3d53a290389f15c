//! What became of guesses, and whether the next one is worth a read.
//!
//! A read on a guess that is right with probability p saves p reads somebody would wait for. It costs the
//! record that gives way, if that is asked for again before it would have been given up anyway (*regret*),
//! and time of a disk that turns out not to be idle for long enough (*price*). So a guess is read while
//! `p > regret + PRICE`. Two are measured here: p by how far down the list the guess stands (lists are sorted
//! by probability), whether it was read or not, among guesses that were not in RAM anyway; regret as the share
//! of given-up records that were missed soon after, within as many evictions as there were records in RAM.

use std::collections::{HashMap, HashSet, VecDeque};

use super::super::ExpertId;
use super::stats::StoreStats;

/// What a guess costs besides regret, in reads. With 0.5 a model whose next experts are half predictable runs
/// 6 % faster from a disk than with 0.1, one that mostly hits its cache as fast (docs/performance.md).
const PRICE: f64 = 0.5;

/// Counts are halved when they reach this, so that they follow the topic.
const MEMORY: f64 = 512.0;

/// What is assumed at first: this many right guesses of `PRIOR_TRIALS`.
const PRIOR_RIGHT: f64 = 3.0;
const PRIOR_TRIALS: f64 = 4.0;

/// A share measured over a sliding past.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    hits: f64,
    trials: f64,
}

impl Share {
    fn note(&mut self, hit: bool) {
        self.hits += f64::from(u8::from(hit));
        self.trials += 1.0;
        if self.trials >= MEMORY {
            self.hits /= 2.0;
            self.trials /= 2.0;
        }
    }
}

#[derive(Default)]
pub(super) struct Guesses {
    /// The guess for each layer to come.
    live: HashMap<u16, Vec<ExpertId>>,
    /// By place in the list: how often it was right where it was not in RAM anyway. Experts that are often
    /// asked for are, so that the others are guessed less well than all.
    by_rank: Vec<Share>,
    /// Of the live guesses, those that were in RAM already.
    known: HashSet<ExpertId>,
    regret: Share,
    /// Given up lately, oldest first.
    given_up: VecDeque<ExpertId>,
    missed_soon: HashSet<ExpertId>,
    /// Read or being read on a guess and not asked for so far, with their bytes.
    unused: HashMap<ExpertId, usize>,
    resident: usize,
    issued_bytes: u64,
    used_bytes: u64,
    wasted_bytes: u64,
    cancelled_bytes: u64,
    guessed: u64,
    guessed_right: u64,
    guessable: u64,
}

impl Guesses {
    /// Puts a new guess in the place of the layer's old one; returns what is no longer guessed.
    pub fn replace(
        &mut self,
        layer: u16,
        ids: &[ExpertId],
        is_resident: impl Fn(&ExpertId) -> bool,
    ) -> Vec<ExpertId> {
        let old = self.live.insert(layer, ids.to_vec()).unwrap_or_default();
        self.known.retain(|id| id.layer != layer);
        let known = ids.iter().filter(|id| is_resident(id) && !self.unused.contains_key(*id)).copied();
        self.known.extend(known);
        old.into_iter().filter(|id| !ids.contains(id)).collect()
    }

    /// Compares the layer's guess with what it asks for and ends it; returns what was guessed wrongly.
    pub fn layer_begins(&mut self, layer: u16, asked: &[u16]) -> Vec<ExpertId> {
        let Some(guess) = self.live.remove(&layer) else { return Vec::new() };
        if guess.len() > self.by_rank.len() {
            self.by_rank.resize(guess.len(), Share { hits: PRIOR_RIGHT, trials: PRIOR_TRIALS });
        }
        self.guessable += asked.len() as u64;
        let mut wrong = Vec::new();
        for (id, share) in guess.into_iter().zip(&mut self.by_rank) {
            let right = asked.contains(&id.index);
            if !self.known.remove(&id) {
                share.note(right);
            }
            self.guessed += 1;
            self.guessed_right += u64::from(right);
            if !right {
                wrong.push(id);
            }
        }
        wrong
    }

    /// The layers with a guess.
    pub fn layers(&self) -> Vec<u16> {
        self.live.keys().copied().collect()
    }

    /// Whether a coming layer is expected to ask for `id`.
    pub fn is_live(&self, id: &ExpertId) -> bool {
        self.live.get(&id.layer).is_some_and(|guess| guess.contains(id))
    }

    /// Whether the guess at this place of its list is worth a read.
    pub fn pays(&self, rank: usize) -> bool {
        let p = match self.by_rank.get(rank) {
            Some(share) => share.hits / share.trials,
            None => PRIOR_RIGHT / PRIOR_TRIALS,
        };
        let regret = self.regret.hits / self.regret.trials.max(PRIOR_TRIALS);
        p > regret + PRICE
    }

    /// Bytes read or being read on guesses that nobody has asked for.
    pub fn outstanding_bytes(&self) -> usize {
        self.unused.iter().filter(|(id, _)| self.is_live(id)).map(|(_, bytes)| bytes).sum()
    }

    /// A read was begun on a guess.
    pub fn issued(&mut self, id: ExpertId, bytes: usize) {
        self.issued_bytes += bytes as u64;
        self.unused.insert(id, bytes);
    }

    /// A call asked for `id`, which is in RAM or coming.
    pub fn used(&mut self, id: ExpertId) {
        if let Some(bytes) = self.unused.remove(&id) {
            self.used_bytes += bytes as u64;
        }
    }

    /// A call asked for `id`, which has to be read.
    pub fn missed(&mut self, id: ExpertId) {
        if self.missed_soon.remove(&id) {
            self.regret.hits += 1.0;
        }
    }

    /// `id` became resident.
    pub fn arrived(&mut self, id: ExpertId) {
        self.resident += 1;
        self.missed_soon.remove(&id);
    }

    /// `id` was given up, or (`was_resident` false) could not be read.
    pub fn lost(&mut self, id: ExpertId, was_resident: bool) {
        if let Some(bytes) = self.unused.remove(&id) {
            self.wasted_bytes += bytes as u64;
        }
        if !was_resident {
            return;
        }
        self.resident = self.resident.saturating_sub(1);
        self.regret.note(false);
        self.given_up.push_back(id);
        self.missed_soon.insert(id);
        while self.given_up.len() > self.resident.max(1) {
            if let Some(old) = self.given_up.pop_front()
                && !self.given_up.contains(&old)
            {
                self.missed_soon.remove(&old);
            }
        }
    }

    /// The read of `id` was taken back.
    pub fn called_off(&mut self, id: ExpertId, bytes: usize) {
        if self.unused.remove(&id).is_some() {
            self.cancelled_bytes += bytes as u64;
        }
    }

    pub fn count(&self, stats: &mut StoreStats) {
        stats.prefetch_issued_bytes = self.issued_bytes;
        stats.prefetch_used_bytes = self.used_bytes;
        stats.prefetch_wasted_bytes = self.wasted_bytes;
        stats.prefetch_cancelled_bytes = self.cancelled_bytes;
        stats.guessed = self.guessed;
        stats.guessed_right = self.guessed_right;
        stats.guessable = self.guessable;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u16) -> ExpertId {
        ExpertId { layer: 3, index }
    }

    #[test]
    fn recall_is_measured_by_place_and_bad_places_are_not_read() {
        let mut guesses = Guesses::default();
        assert!(guesses.pays(0) && guesses.pays(7));
        for _ in 0..60 {
            assert!(guesses.replace(3, &[id(1), id(2)], |_| false).is_empty());
            assert!(guesses.is_live(&id(2)) && !guesses.is_live(&id(3)));
            assert_eq!(guesses.layer_begins(3, &[1, 5]), [id(2)]);
            assert!(!guesses.is_live(&id(1)));
        }
        assert!(guesses.pays(0) && !guesses.pays(1));
        let mut stats = StoreStats::default();
        guesses.count(&mut stats);
        assert_eq!((stats.guessed, stats.guessed_right, stats.guessable), (120, 60, 120));
    }

    #[test]
    fn records_missed_soon_after_they_were_given_up_make_guesses_dearer() {
        let mut guesses = Guesses::default();
        for index in 0..40 {
            guesses.arrived(id(index));
        }
        for index in 0..20 {
            guesses.lost(id(index), true);
        }
        assert!(guesses.pays(0));
        for index in 0..20 {
            guesses.missed(id(index));
            guesses.missed(id(index));
        }
        assert!(!guesses.pays(0), "every record given up was missed");
    }

    #[test]
    fn every_byte_read_on_a_guess_ends_in_one_count() {
        let mut guesses = Guesses::default();
        guesses.replace(3, &[id(0), id(1), id(2), id(3)], |_| false);
        for index in 0..4 {
            guesses.issued(id(index), 10);
        }
        assert_eq!(guesses.outstanding_bytes(), 40);
        guesses.used(id(0));
        guesses.used(id(0));
        guesses.called_off(id(1), 10);
        guesses.lost(id(2), true);
        let mut stats = StoreStats::default();
        guesses.count(&mut stats);
        let counts = (stats.prefetch_used_bytes, stats.prefetch_cancelled_bytes, stats.prefetch_wasted_bytes);
        assert_eq!(
            (counts, stats.prefetch_issued_bytes, guesses.outstanding_bytes()),
            ((10, 10, 10), 40, 10)
        );
    }
}
