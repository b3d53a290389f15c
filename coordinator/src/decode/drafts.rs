//! How many tokens to draft in a round. Decides speed only: verification makes the tokens the same.

use super::DraftPolicy;

/// Most drafts per round in `Auto`: MTP layers are trained one step ahead, and acceptance falls with every
/// chained step.
const MAX_AUTO_DRAFTS: usize = 4;
/// A draft is worth a row of the verification batch (on a streaming machine: the reads of its experts) when it
/// is accepted at least this often.
const WORTHWHILE: f64 = 0.4;
/// Weight of the newest observation in the running acceptance.
const LEARNING_RATE: f64 = 0.1;
/// Acceptance assumed before anything was measured: gives two drafts.
const INITIAL_ACCEPTANCE: f64 = 0.65;
/// With drafting switched off by bad acceptance, one draft is tried again every so many rounds.
const PROBE_EVERY: usize = 16;

/// Chooses the number of drafts per round.
///
/// `Auto` keeps a running estimate `a` of the chance that a draft is accepted given that those before it were,
/// and drafts the largest `k` up to 4 with `aᵏ ≥ 0.4`; with `a` below 0.4 it drafts nothing but a probe every
/// 16 rounds. The estimate depends on tokens only, never on time, so a run can be repeated exactly.
#[derive(Clone, Debug)]
pub struct DraftLength {
    policy: DraftPolicy,
    acceptance: f64,
    idle_rounds: usize,
}

impl DraftLength {
    /// Starts a generation.
    pub fn new(policy: DraftPolicy) -> Self {
        DraftLength { policy, acceptance: INITIAL_ACCEPTANCE, idle_rounds: 0 }
    }

    /// Drafts for the next round. At most `room` tokens fit the context after the next one, and `wanted` more
    /// tokens are asked for after it (what exceeds that would be thrown away; `Fixed` drafts it all the same,
    /// so that its counts can be compared with a reference).
    pub fn next(&mut self, room: usize, wanted: usize) -> usize {
        match self.policy {
            DraftPolicy::Off => 0,
            DraftPolicy::Fixed(k) => k.min(room),
            DraftPolicy::Auto => self.auto().min(room).min(wanted),
        }
    }

    /// Records how a round went. Drafts after the first rejected one say nothing.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        let judged = drafted.min(accepted + 1);
        for j in 0..judged {
            let outcome = if j < accepted { 1.0 } else { 0.0 };
            self.acceptance += LEARNING_RATE * (outcome - self.acceptance);
        }
    }

    fn auto(&mut self) -> usize {
        let mut chance = self.acceptance;
        let mut k = 0;
        while k < MAX_AUTO_DRAFTS && chance >= WORTHWHILE {
            chance *= self.acceptance;
            k += 1;
        }
        if k > 0 {
            self.idle_rounds = 0;
            return k;
        }
        self.idle_rounds += 1;
        usize::from(self.idle_rounds.is_multiple_of(PROBE_EVERY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_follows_the_acceptance() {
        let mut drafts = DraftLength::new(DraftPolicy::Auto);
        assert_eq!(drafts.next(100, 100), 2);
        for _ in 0..50 {
            let k = drafts.next(100, 100);
            drafts.observe(k, k);
        }
        assert_eq!(drafts.next(100, 100), MAX_AUTO_DRAFTS);
        assert_eq!((drafts.next(1, 100), drafts.next(100, 3)), (1, 3));
        let mut tried = 0;
        for _ in 0..100 {
            let k = drafts.next(100, 100);
            tried += k;
            drafts.observe(k, 0);
        }
        // A few rounds to learn, then only probes.
        assert!(tried < 40, "{tried}");
        assert!((0..PROBE_EVERY).any(|_| drafts.next(100, 100) == 1));
    }

    #[test]
    fn fixed_and_off_do_not_adapt() {
        let mut fixed = DraftLength::new(DraftPolicy::Fixed(3));
        fixed.observe(3, 0);
        assert_eq!((fixed.next(9, 0), fixed.next(2, 9)), (3, 2));
        assert_eq!(DraftLength::new(DraftPolicy::Off).next(9, 9), 0);
    }
}
