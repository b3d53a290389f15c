//! The latest values of something.

/// At most `KEPT` values; a new one takes the place of the oldest.
#[derive(Clone, Debug)]
pub(super) struct Ring<T, const KEPT: usize> {
    values: Vec<T>,
    next: usize,
}

impl<T, const KEPT: usize> Default for Ring<T, KEPT> {
    fn default() -> Self {
        Self { values: Vec::new(), next: 0 }
    }
}

impl<T, const KEPT: usize> Ring<T, KEPT> {
    pub(super) fn push(&mut self, value: T) {
        if self.values.len() < KEPT {
            self.values.push(value);
        } else if let Some(slot) = self.values.get_mut(self.next) {
            *slot = value;
        }
        self.next = (self.next + 1) % KEPT;
    }

    /// The values, in no order.
    pub(super) fn values(&self) -> &[T] {
        &self.values
    }
}

impl<T: Ord + Clone, const KEPT: usize> Ring<T, KEPT> {
    pub(super) fn percentile(&self, percent: usize) -> Option<T> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.into_iter().nth(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept() {
        let mut ring = Ring::<u32, 4>::default();
        assert_eq!((ring.percentile(50), ring.values().len()), (None, 0));
        (0..10).for_each(|value| ring.push(value));
        let mut kept = ring.values().to_vec();
        kept.sort_unstable();
        assert_eq!(kept, [6, 7, 8, 9]);
        assert_eq!(
            (ring.percentile(0), ring.percentile(50), ring.percentile(100)),
            (Some(6), Some(8), Some(9))
        );
    }
}
