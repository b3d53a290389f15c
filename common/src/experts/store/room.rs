//! Where the next record goes: which neighbouring slots are cheapest to give up.
//!
//! Record sizes differ (an int8 MTP expert is nearly twice an int4 one), so a slot is an extent of the
//! arena as long as its record. A record of the same size takes a slot over as it is, which in a model of
//! one size is all that ever happens and wastes nothing. Another size takes the cheapest *run*: free
//! extents and slots that lie side by side and are long enough together. What a run has too much stays
//! free and joins its neighbours when they are given up. Nothing is ever moved.

/// A free extent or a slot that could be given up, in ascending order of place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Segment<K> {
    /// Offset in the arena.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// Who lies there and what giving it up costs; `None` is free.
    pub slot: Option<(K, u64)>,
}

/// Neighbouring segments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run<K> {
    /// Offset of the first.
    pub offset: usize,
    /// Who is to be given up.
    pub victims: Vec<K>,
}

/// The run of at least `need` bytes with the least cost, the shortest and then the lowest of several.
pub(super) fn cheapest_run<K: Copy>(segments: &[Segment<K>], need: usize) -> Option<Run<K>> {
    // Cost and length, first and last segment.
    let mut best: Option<(u64, usize, usize, usize)> = None;
    for first in 0..segments.len() {
        let mut end = segments[first].offset;
        let (mut len, mut cost) = (0usize, 0u64);
        for (last, segment) in segments.iter().enumerate().skip(first) {
            if segment.offset != end {
                break;
            }
            end += segment.len;
            len += segment.len;
            cost = cost.saturating_add(segment.slot.map_or(0, |(_, cost)| cost));
            if best.is_some_and(|(least, ..)| cost > least) {
                break;
            }
            if len >= need {
                if best.is_none_or(|(least, shortest, ..)| (cost, len) < (least, shortest)) {
                    best = Some((cost, len, first, last));
                }
                break;
            }
        }
    }
    let (_, _, first, last) = best?;
    let run = segments.get(first..=last)?;
    let victims = run.iter().filter_map(|s| Some(s.slot?.0)).collect();
    Some(Run { offset: run.first()?.offset, victims })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(parts: &[(usize, Option<u64>)]) -> Vec<Segment<usize>> {
        let mut offset = 0;
        let mut all = Vec::new();
        for (i, &(len, cost)) in parts.iter().enumerate() {
            all.push(Segment { offset, len, slot: cost.map(|cost| (i, cost)) });
            offset += len;
        }
        all
    }

    #[test]
    fn free_room_costs_nothing_and_the_closest_fit_wins() {
        let all = segments(&[(10, Some(1)), (30, None), (10, Some(1)), (20, None)]);
        assert_eq!(cheapest_run(&all, 15), Some(Run { offset: 50, victims: vec![] }));
        assert_eq!(cheapest_run(&all, 25), Some(Run { offset: 10, victims: vec![] }));
        assert_eq!(cheapest_run(&all, 35), Some(Run { offset: 0, victims: vec![0] }));
        assert_eq!(cheapest_run(&all, 71), None);
    }

    #[test]
    fn the_sum_of_what_is_given_up_decides() {
        let all = segments(&[(10, Some(5)), (10, Some(1)), (10, Some(3)), (20, Some(6))]);
        assert_eq!(cheapest_run(&all, 20), Some(Run { offset: 10, victims: vec![1, 2] }));
        assert_eq!(cheapest_run(&all, 10), Some(Run { offset: 10, victims: vec![1] }));
    }

    #[test]
    fn a_gap_is_no_neighbour() {
        let mut all = segments(&[(10, Some(1)), (10, Some(1))]);
        all[1].offset += 10;
        assert_eq!(cheapest_run(&all, 20), None);
        assert_eq!(cheapest_run::<usize>(&[], 1), None);
    }
}
