//! Selection with the tie rule N7: the lowest index wins. NaN ranks below every number.

use super::reduce::LANES;

/// Indices of the `k` largest values, descending; equal values keep the lower index first (rule N7).
///
/// All indices when `k` exceeds the length; NaN is taken only when no number is left. O(n + k log k).
pub fn top_k(values: &[f32], k: usize) -> Vec<usize> {
    let mut ids = largest(values, k);
    ids.sort_unstable_by_key(|&i| (!rank_key(values[i as usize]), i));
    ids.into_iter().map(|i| i as usize).collect()
}

/// The indices of [`top_k`] in ascending order. O(n): the k-th largest value is found first, then everything
/// above it and the first of its equals.
pub fn largest(values: &[f32], k: usize) -> Vec<u32> {
    let len = u32::try_from(values.len()).expect("rows are far shorter than 2³²");
    if k >= values.len() {
        return (0..len).collect();
    }
    if k == 0 {
        return Vec::new();
    }
    let mut keys: Vec<u32> = values.iter().map(|&v| rank_key(v)).collect();
    let (above, &mut kth, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    let mut equals_left = k - above.iter().filter(|&&key| key > kth).count();
    let mut ids = Vec::with_capacity(k);
    for (i, &v) in (0..len).zip(values) {
        let key = rank_key(v);
        if key > kth {
            ids.push(i);
        } else if key == kth && equals_left > 0 {
            equals_left -= 1;
            ids.push(i);
        }
    }
    ids
}

/// A number that orders like the value: equal for equal values, least for NaN.
#[inline(always)]
fn rank_key(value: f32) -> u32 {
    // Adding +0 makes the zeros one.
    let bits = (value + 0.0).to_bits();
    let key = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    if value.is_nan() { 0 } else { key }
}

/// Values compared before one of them is looked for.
const ARGMAX_BLOCK: usize = 512;

/// Index of the largest value, the lowest on a tie (rule N7). NaN never wins; 0 when nothing does.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = None;
    for (block, values) in values.chunks(ARGMAX_BLOCK).enumerate() {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, tail) = values.as_chunks::<LANES>();
        for chunk in chunks.iter().copied().chain((!tail.is_empty()).then(|| padded(tail))) {
            for (max, v) in lanes.iter_mut().zip(chunk) {
                *max = if v > *max { v } else { *max };
            }
        }
        let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        if best.is_none_or(|(_, best)| max > best)
            && let Some(i) = values.iter().position(|&v| v == max)
        {
            best = Some((block * ARGMAX_BLOCK + i, max));
        }
    }
    best.map_or(0, |(i, _)| i)
}

/// Up to 16 values, padded with −infinity.
fn padded(values: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
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
        fn argmax_is_the_first_of_the_largest(values in prop::collection::vec(-9i8..9, 0..2000)) {
            let mut values: Vec<f32> =
                values.into_iter().map(|v| if v == -9 { f32::NAN } else { f32::from(v) }).collect();
            prop_assert_eq!(argmax(&values), top_k(&values, 1).first().copied().unwrap_or(0));
            values.iter_mut().for_each(|v| *v = if *v > 0.0 { f32::NEG_INFINITY } else { f32::NAN });
            let first = values.iter().position(|v| !v.is_nan()).unwrap_or(0);
            prop_assert_eq!(argmax(&values), first);
        }

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
            prop_assert_eq!(&top_k(&values, k), &all);
            all.sort_unstable();
            let ids: Vec<usize> = largest(&values, k).into_iter().map(|i| i as usize).collect();
            prop_assert_eq!(ids, all);
        }
    }
}
