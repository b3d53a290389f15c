//! Which parts of a range are free: extents that join their free neighbours again when they come back.

use std::collections::BTreeMap;

/// Free extents of `0..capacity`; nothing at or beyond `end` is handed out.
#[derive(Debug)]
pub(super) struct Extents {
    /// Start and length; no two touch.
    free: BTreeMap<usize, usize>,
    end: usize,
    capacity: usize,
    taken: usize,
}

impl Extents {
    /// All of it free.
    pub fn new(capacity: usize) -> Self {
        let free = if capacity == 0 { BTreeMap::new() } else { [(0, capacity)].into() };
        Self { free, end: capacity, capacity, taken: 0 }
    }

    /// Takes `len` from the smallest free extent that holds it, the lowest of several.
    pub fn take(&mut self, len: usize) -> Option<usize> {
        let room = |(&at, &extent): (&usize, &usize)| {
            let usable = (at + extent).min(self.end).checked_sub(at)?;
            (usable >= len).then_some((usable, at))
        };
        let (_, at) = self.free.iter().filter_map(room).min()?;
        self.take_at(at, len).then_some(at)
    }

    /// Takes `at..at + len` if it is free and below the end.
    pub fn take_at(&mut self, at: usize, len: usize) -> bool {
        let Some((&start, &extent)) = self.free.range(..=at).next_back() else { return false };
        let Some(to) = at.checked_add(len).filter(|&to| to <= self.end && to <= start + extent) else {
            return false;
        };
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at - start);
        }
        if to < start + extent {
            self.free.insert(to, start + extent - to);
        }
        self.taken += len;
        true
    }

    /// Gives back what was taken; returns the part of it that lies beyond the end.
    pub fn release(&mut self, at: usize, len: usize) -> std::ops::Range<usize> {
        self.taken -= len;
        let (mut start, mut stop) = (at, at + len);
        if let Some((&before, &extent)) = self.free.range(..at).next_back()
            && before + extent == at
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(extent) = self.free.remove(&stop) {
            stop += extent;
        }
        self.free.insert(start, stop - start);
        at.max(self.end).min(at + len)..at + len
    }

    /// Moves the end (at most to the capacity); returns the free parts that went out of use.
    pub fn set_end(&mut self, end: usize) -> Vec<std::ops::Range<usize>> {
        let before = std::mem::replace(&mut self.end, end.min(self.capacity));
        let lost = |(&at, &len): (&usize, &usize)| at.max(self.end)..(at + len).min(before);
        self.free.iter().map(lost).filter(|range| range.start < range.end).collect()
    }

    pub fn end(&self) -> usize {
        self.end
    }

    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Free extents below the end: start and length, ascending.
    pub fn free(&self) -> Vec<(usize, usize)> {
        let below = |(&at, &len): (&usize, &usize)| {
            let usable = (at + len).min(self.end).checked_sub(at)?;
            (usable > 0).then_some((at, usable))
        };
        self.free.iter().filter_map(below).collect()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_fit_is_taken_and_neighbours_join() {
        let mut extents = Extents::new(100);
        let taken: Vec<usize> = [30, 10, 40, 20].iter().map(|&len| extents.take(len).unwrap()).collect();
        assert_eq!(taken, [0, 30, 40, 80]);
        assert_eq!((extents.take(1), extents.taken()), (None, 100));
        extents.release(0, 30);
        extents.release(80, 20);
        assert_eq!(extents.take(15), Some(80));
        extents.release(40, 40);
        assert_eq!(extents.free(), [(0, 30), (40, 40), (95, 5)]);
        extents.release(30, 10);
        extents.release(80, 15);
        assert_eq!(extents.free(), [(0, 100)]);
        assert_eq!(extents.taken(), 0);
    }

    #[test]
    fn only_what_is_free_and_below_the_end_can_be_taken() {
        let mut extents = Extents::new(100);
        assert!(extents.take_at(20, 30));
        assert!(!extents.take_at(10, 20) && !extents.take_at(49, 2) && !extents.take_at(90, 11));
        assert!(extents.take_at(10, 10) && extents.take_at(50, 50));
        assert!(extents.set_end(60).is_empty());
        assert_eq!(extents.release(50, 50), 60..100);
        assert_eq!(extents.free(), [(0, 10), (50, 10)]);
        assert_eq!(extents.take(11), None);
        assert_eq!(extents.take(10), Some(0));
        assert_eq!(extents.set_end(55), vec![55..60]);
        assert_eq!(extents.take(10), None);
        assert!(extents.set_end(1000).is_empty());
        assert_eq!((extents.end(), extents.take(50)), (100, Some(50)));
        assert_eq!(extents.release(20, 30), 50..50);
    }
}
