//! How many tokens to draft in a round. Decides speed only: verification makes the tokens the same.
//!
//! A round with `k` drafts takes `T(k)` seconds and gives `E(k) = 1 + a₁ + a₁a₂ + …` tokens, `aⱼ` being the chance
//! that draft `j` is accepted when those before it were. Both are measured while the session runs: the reads of
//! more experts, the dense weights read once for several rows, and the drafting itself are all in `T(k)`. The
//! controller drafts the `k` with the least `T(k) / E(k)`; it tries others rarely, and only as long as the time
//! lost with trying stays a small share of all.

use serde::Serialize;

use super::DraftPolicy;
use super::draft_cost::{Acceptance, RoundTime};

/// Most drafts per round in `Auto`: MTP layers are trained one step ahead, and acceptance falls with every
/// chained step.
pub(super) const MAX_DRAFTS: usize = 8;
/// The first rounds. The very first one is not timed: it meets cold caches and a cold pool.
const OPENING: [usize; 4] = [1, 1, 0, 2];
/// Another number must promise this much less time per token than the present one to take its place.
const HYSTERESIS: f64 = 0.02;
/// Share of the decoding time that may be lost with trying numbers that turn out worse.
const TRIAL_SHARE: f64 = 0.005;
/// Rounds until a number that was not best is tried again; doubles with every try, and is longer for a number
/// far behind the best.
const FIRST_INTERVAL: usize = 16;
const FAR_BEHIND: f64 = 1.15;
const FAR_BEHIND_INTERVALS: usize = 4;
/// After so many rounds without drafts the MTP layer has rows to catch up on: the first round with drafts is
/// not what the next ones will cost, so it is not timed, and a second one follows.
const IDLE_ROUNDS: usize = 4;

/// Chooses the number of drafts per round of one session.
#[derive(Clone, Debug, Default)]
pub struct DraftControl {
    acceptance: Acceptance,
    time: RoundTime,
    /// Rounds, and of these the ones with `k` drafts.
    rounds: usize,
    rounds_with: [usize; MAX_DRAFTS + 1],
    last_try: [usize; MAX_DRAFTS + 1],
    tries: [u32; MAX_DRAFTS + 1],
    /// What is best so far.
    chosen: usize,
    /// The number being tried instead, and for how many rounds more.
    trial: Option<(usize, usize)>,
    idle_rounds: usize,
    /// Seconds of all rounds, and of these the ones lost with trials.
    total_s: f64,
    lost_s: f64,
}

/// A finished round.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Drafts made.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Seconds of drafting, verifying and drawing.
    pub seconds: f64,
}

/// What the controller chose and what it was chosen from.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DraftReport {
    /// Drafts per round at the end.
    pub chosen: usize,
    /// The reason in words.
    pub why: String,
    /// One entry per number of drafts that was tried.
    pub tried: Vec<DraftEstimate>,
    /// Share of the decoding time lost with trials that were worse.
    pub trial_loss: f64,
}

/// The estimates for one number of drafts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DraftEstimate {
    /// Drafts per round.
    pub drafts: usize,
    /// Rounds run so.
    pub rounds: usize,
    /// Chance that the last of these drafts is accepted when those before it were; `None` without drafts.
    pub acceptance: Option<f64>,
    /// Milliseconds of a round.
    pub round_ms: f64,
    /// Milliseconds per token.
    pub token_ms: f64,
}

impl DraftControl {
    /// Drafts for the next round. At most `room` tokens fit the context after the next one, and `wanted` more
    /// tokens are asked for after it (what exceeds that would be thrown away; `Fixed` drafts it all the same,
    /// so that its counts can be compared with a reference).
    pub fn next(&mut self, policy: DraftPolicy, room: usize, wanted: usize) -> usize {
        match policy {
            DraftPolicy::Off => 0,
            DraftPolicy::Fixed(k) => k.min(room),
            DraftPolicy::Auto => self.auto().min(room).min(wanted),
        }
    }

    /// Records how a round went.
    pub fn observe(&mut self, round: Round) {
        let Round { drafted, accepted, seconds } = round;
        self.acceptance.observe(drafted, accepted);
        let catching_up = drafted > 0 && self.idle_rounds >= IDLE_ROUNDS;
        if self.rounds > 0 && !catching_up {
            self.time.observe(drafted, seconds);
        }
        self.rounds += 1;
        self.total_s += seconds;
        self.idle_rounds = if drafted == 0 { self.idle_rounds + 1 } else { 0 };
        if let Some(count) = self.rounds_with.get_mut(drafted) {
            *count += 1;
            self.last_try[drafted] = self.rounds;
        }
        if let Some((_, left)) = &mut self.trial {
            *left = left.saturating_sub(1);
            if let Some(best) = self.time.measured(self.chosen) {
                let fair = best / self.acceptance.tokens(self.chosen) * (accepted + 1) as f64;
                self.lost_s = (self.lost_s + seconds - fair).max(0.0);
            }
            self.trial.take_if(|(_, left)| *left == 0);
        }
        self.choose();
    }

    /// Whether drafting was tried and found not to pay.
    pub fn drafts_nothing(&self) -> bool {
        self.chosen == 0 && self.rounds >= FIRST_INTERVAL
    }

    /// The present choice and its reasons.
    pub fn report(&self) -> DraftReport {
        let chances = self.acceptance.chances();
        let estimate = |drafts: usize| {
            let round = self.time.expected(drafts).filter(|_| self.rounds_with[drafts] > 0)?;
            Some(DraftEstimate {
                drafts,
                rounds: self.rounds_with[drafts],
                acceptance: drafts.checked_sub(1).map(|last| chances[last]),
                round_ms: round * 1e3,
                token_ms: round / self.acceptance.tokens(drafts) * 1e3,
            })
        };
        let tried: Vec<DraftEstimate> = (0..=MAX_DRAFTS).filter_map(estimate).collect();
        let trial_loss = if self.total_s > 0.0 { self.lost_s / self.total_s } else { 0.0 };
        DraftReport { chosen: self.chosen, why: self.why(&tried), tried, trial_loss }
    }

    fn why(&self, tried: &[DraftEstimate]) -> String {
        let Some(chosen) = tried.iter().find(|e| e.drafts == self.chosen) else {
            return "no round was measured yet".to_owned();
        };
        let others = tried.iter().filter(|e| e.drafts != self.chosen);
        match others.min_by(|a, b| a.token_ms.total_cmp(&b.token_ms)) {
            Some(next) => format!(
                "{} drafts take {:.2} ms per token, the next best, {}, {:.2} ms",
                chosen.drafts, chosen.token_ms, next.drafts, next.token_ms
            ),
            None => format!("{} drafts take {:.2} ms per token", chosen.drafts, chosen.token_ms),
        }
    }

    fn auto(&mut self) -> usize {
        if let Some(&k) = OPENING.get(self.rounds)
            && (k < 2 || self.promises(k))
        {
            return k;
        }
        if self.trial.is_none() {
            self.trial = self.next_trial();
        }
        self.trial.map_or(self.chosen, |(k, _)| k)
    }

    /// Expected seconds per token with `k` drafts.
    fn token_s(&self, k: usize) -> Option<f64> {
        Some(self.time.expected(k)? / self.acceptance.tokens(k))
    }

    /// Whether `k` is expected to beat what was measured so far.
    fn promises(&self, k: usize) -> bool {
        match (self.token_s(k), self.token_s(self.chosen)) {
            (Some(expected), Some(best)) => expected < best,
            _ => true,
        }
    }

    /// Takes the number with the least time per token of those seen.
    fn choose(&mut self) {
        let seen =
            (0..=MAX_DRAFTS).filter(|&k| self.time.seen(k)).filter_map(|k| Some((k, self.token_s(k)?)));
        let Some((best, time)) = seen.min_by(|(_, a), (_, b)| a.total_cmp(b)) else { return };
        let now = self.token_s(self.chosen).filter(|_| self.time.seen(self.chosen));
        if now.is_none_or(|now| time < now * (1.0 - HYSTERESIS)) {
            self.chosen = best;
        }
    }

    /// A number worth trying, and for how many rounds: the next larger one where the line through the measured
    /// ones says it would pay, else one that was not tried for long and whose trial the budget allows.
    fn next_trial(&mut self) -> Option<(usize, usize)> {
        let best = self.token_s(self.chosen)?;
        let reach = self.time.largest()?.saturating_add(1).min(MAX_DRAFTS);
        let budget = self.total_s * TRIAL_SHARE - self.lost_s;
        let mut candidate: Option<(usize, f64)> = None;
        for k in (0..=reach).filter(|&k| k != self.chosen) {
            let Some(token) = self.token_s(k) else { continue };
            let rounds = self.trial_rounds(k);
            let loss = (token - best).max(0.0) * self.acceptance.tokens(k) * rounds as f64;
            let unknown = self.time.measured(k).is_none();
            let due =
                unknown && loss == 0.0 || self.rounds - self.last_try[k] >= self.interval(k, token / best);
            let affordable = loss <= budget.max(0.0);
            if due && affordable && candidate.is_none_or(|(_, least)| loss < least) {
                candidate = Some((k, loss));
            }
        }
        let (k, _) = candidate?;
        self.tries[k] += 1;
        Some((k, self.trial_rounds(k)))
    }

    /// Rounds until `k`, whose time per token is `behind` times the best, may be tried again.
    fn interval(&self, k: usize, behind: f64) -> usize {
        let intervals = if behind > FAR_BEHIND { FAR_BEHIND_INTERVALS } else { 1 };
        (FIRST_INTERVAL * intervals) << self.tries[k].min(6)
    }

    /// One round, or two where the first one has to catch up.
    fn trial_rounds(&self, k: usize) -> usize {
        if k > 0 && self.idle_rounds >= IDLE_ROUNDS { 2 } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::philox::uniform;

    /// A machine on which a round with `k` drafts takes `time(k)` and draft `j` is accepted with `chance(j)`.
    struct Machine<T, A> {
        time: T,
        chance: A,
        noise: f64,
        draws: u64,
    }

    impl<T: Fn(usize) -> f64, A: Fn(usize) -> f64> Machine<T, A> {
        fn uniform(&mut self) -> f64 {
            self.draws += 1;
            uniform(7, self.draws)
        }

        /// Seconds per token over `tokens` tokens.
        fn run(&mut self, control: &mut DraftControl, policy: DraftPolicy, tokens: usize) -> f64 {
            let (mut made, mut seconds) = (0, 0.0);
            while made < tokens {
                let drafted = control.next(policy, usize::MAX, usize::MAX);
                let mut accepted = 0;
                while accepted < drafted && self.uniform() < (self.chance)(accepted) {
                    accepted += 1;
                }
                let hiccup = if self.uniform() < 0.02 { 3.0 } else { 1.0 };
                let round = (self.time)(drafted) * (1.0 + self.noise * (self.uniform() - 0.5)) * hiccup;
                control.observe(Round { drafted, accepted, seconds: round });
                made += accepted + 1;
                seconds += round;
            }
            seconds / made as f64
        }
    }

    /// The controller's time per token against the best fixed number's, and against none.
    fn against_fixed(
        time: impl Fn(usize) -> f64,
        chance: impl Fn(usize) -> f64,
        tokens: usize,
    ) -> (f64, f64) {
        let mut machine = Machine { time, chance, noise: 0.2, draws: 0 };
        let mut fixed = |k| machine.run(&mut DraftControl::default(), DraftPolicy::Fixed(k), 20_000);
        let fixed: Vec<f64> = (0..=MAX_DRAFTS).map(&mut fixed).collect();
        let best = fixed.iter().copied().fold(f64::INFINITY, f64::min);
        let runs: Vec<f64> =
            (0..20).map(|_| machine.run(&mut DraftControl::default(), DraftPolicy::Auto, tokens)).collect();
        let auto = runs.iter().sum::<f64>() / runs.len() as f64;
        (auto / best, auto / fixed[0])
    }

    #[test]
    fn cheap_rows_are_used_and_dear_ones_left() {
        // Everything resident: another row costs a twelfth.
        let (best, off) = against_fixed(|k| 1.0 + 0.08 * k as f64, |_| 0.92, 300);
        assert!(best < 1.12 && off < 0.45, "{best} of the best fixed, {off} of none");
        // Disk-bound: a row costs nearly as much as a round.
        for chance in [0.3, 0.6, 0.8] {
            let (best, off) = against_fixed(|k| 1.0 + 0.9 * k as f64, |_| chance, 300);
            assert!(best < 1.03 && off < 1.03, "{chance}: {best} of the best fixed, {off} of none");
        }
        // In between: one or two drafts pay.
        let (best, off) = against_fixed(|k| 1.0 + 0.35 * k as f64, |j| 0.85 - 0.15 * j as f64, 600);
        assert!(best < 1.06 && off < 0.95, "{best} of the best fixed, {off} of none");
    }

    #[test]
    fn a_change_is_noticed() {
        let mut control = DraftControl::default();
        let mut good = Machine { time: |k| 1.0 + 0.1 * k as f64, chance: |_| 0.9, noise: 0.1, draws: 0 };
        good.run(&mut control, DraftPolicy::Auto, 500);
        assert!(control.report().chosen >= 4, "{:?}", control.report());
        let mut bad = Machine { time: |k| 1.0 + 0.1 * k as f64, chance: |_| 0.05, noise: 0.1, draws: 0 };
        let after = bad.run(&mut control, DraftPolicy::Auto, 500);
        assert!(control.report().chosen <= 1 && after < 1.2, "{after}: {:?}", control.report());
        let again = good.run(&mut control, DraftPolicy::Auto, 2000);
        assert!(control.report().chosen >= 3 && again < 0.4, "{again}: {:?}", control.report());
    }

    #[test]
    fn limits_and_other_policies_are_kept() {
        let mut control = DraftControl::default();
        assert_eq!(control.next(DraftPolicy::Fixed(3), 9, 0), 3);
        assert_eq!(control.next(DraftPolicy::Fixed(3), 2, 9), 2);
        assert_eq!(control.next(DraftPolicy::Off, 9, 9), 0);
        for _ in 0..100 {
            let drafted = control.next(DraftPolicy::Auto, 3, 2);
            assert!(drafted <= 2);
            control.observe(Round { drafted, accepted: drafted, seconds: 1.0 });
        }
        assert_eq!(control.next(DraftPolicy::Auto, 0, 5), 0);
    }

    #[test]
    fn the_report_names_the_choice_and_its_reason() {
        let mut control = DraftControl::default();
        assert_eq!(control.report().tried, []);
        for _ in 0..50 {
            let drafted = control.next(DraftPolicy::Auto, 9, 9);
            control.observe(Round { drafted, accepted: 0, seconds: 0.010 + 0.010 * drafted as f64 });
        }
        let report = control.report();
        assert_eq!(report.chosen, 0);
        assert!(report.why.starts_with("0 drafts take 10.00 ms per token, the next best, 1, "), "{report:?}");
        assert_eq!(report.tried.iter().map(|e| e.rounds).sum::<usize>(), 50);
    }
}
