//! Guesses of the experts that coming layers will use, and how good they were.
//!
//! A guess is the coming layer's own router on today's hidden state. It is a hint for whoever reads experts
//! from a disk and never changes a result.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::routed::Routes;

/// Layers looked ahead at most.
pub const LOOKAHEAD_DEPTH: usize = 3;

/// Rows whose routers are run ahead at most, spread evenly over a step: enough to rank the experts of a long
/// prefill, of which nearly all are used anyway.
const ROWS_MAX: usize = 64;

/// How well guesses did at one distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recall {
    /// Experts guessed.
    pub guessed: u64,
    /// Experts used by layers that were guessed.
    pub used: u64,
    /// Experts used that had been guessed.
    pub hits: u64,
}

impl Recall {
    /// The share of used experts that had been guessed; `None` before anything was.
    pub fn ratio(&self) -> Option<f64> {
        (self.used > 0).then(|| self.hits as f64 / self.used as f64)
    }
}

/// Recall by distance: one layer ahead first.
pub type LookaheadStats = [Recall; LOOKAHEAD_DEPTH];

/// Counters behind [`LookaheadStats`].
#[derive(Debug, Default)]
pub(super) struct LookaheadCounters([[AtomicU64; 3]; LOOKAHEAD_DEPTH]);

impl LookaheadCounters {
    /// Counts so far.
    pub fn stats(&self) -> LookaheadStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.0.each_ref().map(|[guessed, used, hits]| Recall {
            guessed: read(guessed),
            used: read(used),
            hits: read(hits),
        })
    }

    fn add(&self, distance: usize, recall: Recall) {
        if let Some(counters) = self.0.get(distance - 1) {
            for (counter, by) in counters.iter().zip([recall.guessed, recall.used, recall.hits]) {
                counter.fetch_add(by, Ordering::Relaxed);
            }
        }
    }
}

/// The guesses of one step that have not been judged yet.
#[derive(Debug, Default)]
pub(super) struct Guesses(BTreeMap<u16, Vec<(usize, Vec<u16>)>>);

impl Guesses {
    /// Remembers the experts guessed for `layer`, `distance` layers before it.
    pub fn remember(&mut self, layer: u16, distance: usize, experts: Vec<u16>) {
        self.0.entry(layer).or_default().push((distance, experts));
    }

    /// Counts how good the guesses for `layer` were, now that its experts are known.
    pub fn judge(&mut self, layer: u16, routes: &Routes, counters: &LookaheadCounters) {
        let Some(guesses) = self.0.remove(&layer) else { return };
        let used = routes.experts();
        for (distance, experts) in guesses {
            let hits = experts.iter().filter(|expert| used.binary_search(expert).is_ok()).count() as u64;
            let recall = Recall { guessed: experts.len() as u64, used: used.len() as u64, hits };
            counters.add(distance, recall);
        }
    }
}

/// The rows that are looked ahead with.
pub(super) fn sampled_rows(rows: usize) -> impl Iterator<Item = usize> {
    let taken = rows.min(ROWS_MAX);
    (0..taken).map(move |i| i * rows / taken)
}

/// The experts of `routes`, those with the largest weights over all rows first.
pub(super) fn by_weight(routes: &Routes) -> Vec<u16> {
    let mut weights: BTreeMap<u16, f32> = BTreeMap::new();
    for (&expert, &gate) in routes.ids.iter().zip(&routes.gates) {
        *weights.entry(expert).or_default() += gate;
    }
    let mut experts: Vec<(u16, f32)> = weights.into_iter().collect();
    experts.sort_by(|a, b| b.1.total_cmp(&a.1));
    experts.into_iter().map(|(expert, _)| expert).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_ranked_by_their_weight_over_all_rows() {
        let routes = Routes { ids: vec![1, 4, 2, 4, 1, 3], gates: vec![0.5, 0.4, 0.9, 0.6, 0.1, 0.9] };
        assert_eq!(by_weight(&routes), [4, 2, 3, 1]);
    }

    #[test]
    fn a_long_step_is_sampled_evenly() {
        assert_eq!(sampled_rows(3).collect::<Vec<_>>(), [0, 1, 2]);
        let rows: Vec<usize> = sampled_rows(512).collect();
        assert_eq!((rows.len(), rows[0], rows[1], rows[63]), (ROWS_MAX, 0, 8, 504));
        assert_eq!(sampled_rows(0).count(), 0);
    }

    #[test]
    fn guesses_are_judged_once_and_by_distance() {
        let counters = LookaheadCounters::default();
        let mut guesses = Guesses::default();
        guesses.remember(5, 2, vec![1, 2]);
        guesses.remember(5, 1, vec![2, 3]);
        let routes = Routes { ids: vec![2, 3, 3, 7], gates: vec![1.0; 4] };
        guesses.judge(4, &routes, &counters);
        guesses.judge(5, &routes, &counters);
        guesses.judge(5, &routes, &counters);
        let stats = counters.stats();
        assert_eq!(stats[0], Recall { guessed: 2, used: 3, hits: 2 });
        assert_eq!(stats[1], Recall { guessed: 2, used: 3, hits: 1 });
        assert_eq!((stats[2], stats[2].ratio()), (Recall::default(), None));
    }
}
