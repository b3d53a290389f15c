//! Selection with the tie rule N7: the lowest index wins. NaN ranks below every number.

use std::cmp::Ordering;

/// Indices of the `k` largest values, descending; equal values keep the lower index first (rule N7).
///
/// All indices when `k` exceeds the length; NaN is taken only when no number is left.
/// Partial selection: O(n + k log k).
pub fn top_k(values: &[f32], k: usize) -> Vec<usize> {
    let rank = |&a: &u32, &b: &u32| by_rank(values, a as usize, b as usize);
    let k = k.min(values.len());
    let len = u32::try_from(values.len()).expect("rows are far shorter than 2³²");
    let mut ids: Vec<u32> = (0..len).collect();
    if 0 < k && k < ids.len() {
        ids.select_nth_unstable_by(k - 1, rank);
    }
    ids.truncate(k);
    ids.sort_unstable_by(rank);
    ids.into_iter().map(|i| i as usize).collect()
}

/// Descending by value, NaN last, then ascending by index.
fn by_rank(values: &[f32], a: usize, b: usize) -> Ordering {
    let (x, y) = (values[a], values[b]);
    let by_value = y.partial_cmp(&x).unwrap_or_else(|| x.is_nan().cmp(&y.is_nan()));
    by_value.then(a.cmp(&b))
}

/// Index of the largest value, the lowest on a tie (rule N7). NaN never wins; 0 when nothing does.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = None;
    for (i, &v) in values.iter().enumerate() {
        if best.map_or(!v.is_nan(), |(_, max)| v > max) {
            best = Some((i, v));
        }
    }
    best.map_or(0, |(i, _)| i)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ties_go_to_the_lowest_index() {
        let values = [1.0, 3.0, 3.0, -0.0, 0.0, 3.0];
        assert_eq!(top_k(&values, 2), [1, 2]);
        assert_eq!(top_k(&values, 4), [1, 2, 5, 0]);
        assert_eq!(top_k(&values, 9), [1, 2, 5, 0, 3, 4]);
        assert_eq!(top_k(&values, 0), [0usize; 0]);
        assert_eq!(argmax(&values), 1);
    }

    #[test]
    fn nan_is_chosen_last() {
        let nan = f32::NAN;
        let values = [nan, f32::NEG_INFINITY, nan, 2.0];
        assert_eq!(top_k(&values, 3), [3, 1, 0]);
        assert_eq!(argmax(&values), 3);
        assert_eq!(argmax(&[nan, f32::NEG_INFINITY]), 1);
        assert_eq!(argmax(&[nan, nan]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    proptest! {
        #[test]
        fn top_k_is_a_prefix_of_the_full_order(values in prop::collection::vec(-4i8..4, 0..200), k in 0usize..220) {
            let values: Vec<f32> =
                values.into_iter().map(|v| if v == -4 { f32::NAN } else { f32::from(v) }).collect();
            let mut all: Vec<usize> = (0..values.len()).collect();
            all.sort_by(|&a, &b| {
                let key = |i: usize| if values[i].is_nan() { f32::NEG_INFINITY } else { values[i] };
                key(b).partial_cmp(&key(a)).unwrap().then(a.cmp(&b))
            });
            all.truncate(k);
            prop_assert_eq!(top_k(&values, k), all);
        }
    }
}
