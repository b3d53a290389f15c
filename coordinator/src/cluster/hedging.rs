//! How often work may be given out twice, so that a slow moment does not become a flood.

use std::collections::VecDeque;

/// Dispatches looked back at.
const WINDOW: usize = 200;
/// Of these, the part that may have been given out twice.
const SHARE: usize = 10;

/// Remembers which of the last dispatches were hedged.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Ids, oldest first, with whether they were hedged.
    recent: VecDeque<bool>,
    hedged: usize,
}

impl Budget {
    /// A dispatch was sent.
    pub(super) fn sent(&mut self) {
        self.push(false);
    }

    /// Whether one more may be hedged; it then counts as such. `must` overrides the limit.
    pub(super) fn take(&mut self, must: bool) -> bool {
        let may = must || self.hedged < WINDOW / SHARE;
        if may {
            self.push(true);
        }
        may
    }

    fn push(&mut self, hedge: bool) {
        self.recent.push_back(hedge);
        self.hedged += usize::from(hedge);
        while self.recent.len() > WINDOW {
            self.hedged -= usize::from(self.recent.pop_front() == Some(true));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_last_two_hundred_may_be_hedged() {
        let mut budget = Budget::default();
        assert_eq!((0..50).filter(|_| budget.take(false)).count(), 20);
        assert!(budget.take(true), "where it must be");
        (0..WINDOW).for_each(|_| budget.sent());
        assert_eq!((0..50).filter(|_| budget.take(false)).count(), 20);
    }
}
