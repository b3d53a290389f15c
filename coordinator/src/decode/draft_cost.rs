//! What drafting costs and brings, estimated from the rounds of a session: how often the draft at each position
//! is accepted, and how long a round with `k` drafts takes.

use super::drafts::MAX_DRAFTS;

/// Acceptance assumed for a position before anything was measured there.
const INITIAL_ACCEPTANCE: f64 = 0.65;
/// Observations that the assumption weighs.
const PRIOR_WEIGHT: f64 = 2.0;
/// How much older outcomes of a position count with every new one: a memory of about 25 outcomes.
const MEMORY: f64 = 0.96;

/// Chance that draft `j` is accepted given that all before it were.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    /// Per position, decayed: outcomes and accepted ones.
    counts: [(f64, f64); MAX_DRAFTS],
}

impl Acceptance {
    /// Records a round. Drafts after the first rejected one say nothing.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        let judged = drafted.min(accepted + 1);
        for (j, (outcomes, successes)) in self.counts.iter_mut().enumerate().take(judged) {
            *outcomes = *outcomes * MEMORY + 1.0;
            *successes = *successes * MEMORY + f64::from(u8::from(j < accepted));
        }
    }

    /// The chance at every position; where little was seen it leans on the position before.
    pub fn chances(&self) -> [f64; MAX_DRAFTS] {
        let mut before = INITIAL_ACCEPTANCE;
        self.counts.map(|(outcomes, successes)| {
            before = (PRIOR_WEIGHT * before + successes) / (PRIOR_WEIGHT + outcomes);
            before
        })
    }

    /// Tokens a round with `k` drafts gives: `1 + a₁ + a₁a₂ + …`.
    pub fn tokens(&self, k: usize) -> f64 {
        let mut all = 1.0;
        let mut tokens = 1.0;
        for chance in &self.chances()[..k.min(MAX_DRAFTS)] {
            all *= chance;
            tokens += all;
        }
        tokens
    }
}

/// A single round weighs at least this much in the running mean, so that a mean follows a cache that warms up
/// and a context that grows.
const LEAST_WEIGHT: f64 = 1.0 / 16.0;
/// Up to so many rounds their lower median stands for the mean; after that a round counts at most as `OUTLIER`
/// times the mean. A scheduling hiccup is common, and one of them must not decide.
const FEW_ROUNDS: usize = 3;
const OUTLIER: f64 = 1.5;
/// Share of a round's time that one more draft is assumed to cost where only one number of drafts was measured.
const ASSUMED_STEP: f64 = 0.1;

/// Seconds of a round, per number of drafts.
#[derive(Clone, Debug, Default)]
pub(super) struct RoundTime {
    means: [Mean; MAX_DRAFTS + 1],
}

#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    seconds: f64,
    rounds: usize,
    first: [f64; FEW_ROUNDS],
}

impl Mean {
    fn observe(&mut self, seconds: f64) {
        self.rounds += 1;
        if let Some(place) = self.first.get_mut(self.rounds - 1) {
            *place = seconds;
            let mut seen = self.first;
            let seen = &mut seen[..self.rounds];
            seen.sort_by(f64::total_cmp);
            self.seconds = seen[(self.rounds - 1) / 2];
        } else {
            let weight = (1.0 / self.rounds as f64).max(LEAST_WEIGHT);
            self.seconds += weight * (seconds.min(self.seconds * OUTLIER) - self.seconds);
        }
    }
}

impl RoundTime {
    /// Records a round with `k` drafts.
    pub fn observe(&mut self, k: usize, seconds: f64) {
        if let Some(mean) = self.means.get_mut(k) {
            mean.observe(seconds);
        }
    }

    /// Mean seconds with `k` drafts, if at least two such rounds were measured: one may have been a hiccup.
    pub fn measured(&self, k: usize) -> Option<f64> {
        self.means.get(k).filter(|mean| mean.rounds >= 2).map(|mean| mean.seconds)
    }

    /// Whether a round with `k` drafts was timed.
    pub fn seen(&self, k: usize) -> bool {
        self.means.get(k).is_some_and(|mean| mean.rounds > 0)
    }

    /// The largest number of drafts measured.
    pub fn largest(&self) -> Option<usize> {
        (0..=MAX_DRAFTS).rev().find(|&k| self.measured(k).is_some())
    }

    /// Seconds with `k` drafts: measured, else on the line through the two nearest measured numbers, or less
    /// where the one round seen took less; `None` before anything was measured.
    pub fn expected(&self, k: usize) -> Option<f64> {
        if let Some(seconds) = self.measured(k) {
            return Some(seconds);
        }
        let once = self.means.get(k).filter(|mean| mean.rounds > 0).map(|mean| mean.seconds);
        let line = self.line(k);
        match (once, line) {
            (Some(once), Some(line)) => Some(once.min(line)),
            _ => once.or(line),
        }
    }

    fn line(&self, k: usize) -> Option<f64> {
        let mut known: Vec<usize> = (0..=MAX_DRAFTS).filter(|&i| self.measured(i).is_some()).collect();
        known.sort_by_key(|i| i.abs_diff(k));
        let at = |i: usize| self.measured(i).unwrap_or_default();
        let nearest = *known.first()?;
        let step = match known.get(1) {
            Some(&other) => ((at(nearest) - at(other)) / (nearest as f64 - other as f64)).max(0.0),
            None => at(nearest) * ASSUMED_STEP,
        };
        Some((at(nearest) + step * (k as f64 - nearest as f64)).max(at(nearest) * ASSUMED_STEP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_is_learned_per_position() {
        let mut acceptance = Acceptance::default();
        let close = |a: f64, b: f64| (a - b).abs() < 0.1;
        assert!(close(acceptance.tokens(2), 1.0 + 0.65 + 0.65 * 0.65));
        for _ in 0..200 {
            acceptance.observe(3, 1);
        }
        let chances = acceptance.chances();
        assert!(close(chances[0], 1.0) && close(chances[1], 0.0), "{chances:?}");
        // The third was never judged: it leans on the second.
        assert!(chances[2] <= chances[1] + 1e-9);
        assert!(close(acceptance.tokens(3), 2.0));
    }

    #[test]
    fn times_are_means_and_lines_between_them() {
        let mut time = RoundTime::default();
        let twice = |time: &mut RoundTime, k, seconds| (0..2).for_each(|_| time.observe(k, seconds));
        assert_eq!(time.expected(2), None);
        time.observe(1, 2.0);
        assert_eq!((time.expected(1), time.measured(1), time.expected(2)), (Some(2.0), None, None));
        time.observe(1, 2.0);
        assert!(time.expected(2) > Some(2.0));
        twice(&mut time, 0, 1.0);
        assert_eq!(time.expected(3), Some(4.0));
        twice(&mut time, 3, 2.5);
        assert_eq!(time.expected(2), Some(2.25));
        // A single slow round is not believed.
        time.observe(2, 9.0);
        assert_eq!(time.expected(2), Some(2.25));
        assert_eq!((time.measured(2), time.largest()), (None, Some(3)));
        // Beyond the table nothing is kept.
        twice(&mut time, MAX_DRAFTS + 1, 1.0);
        assert_eq!(time.largest(), Some(3));
    }

    #[test]
    fn one_hiccup_does_not_spoil_a_mean_and_a_lasting_change_moves_it() {
        let mut time = RoundTime::default();
        for _ in 0..20 {
            time.observe(1, 1.0);
        }
        time.observe(1, 1000.0);
        assert!(time.measured(1) < Some(1.1));
        for _ in 0..100 {
            time.observe(1, 2.0);
        }
        assert!(time.measured(1) > Some(1.9));
    }
}
