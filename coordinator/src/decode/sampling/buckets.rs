//! Top-p over flat distributions without sorting them: weights are counted by their leading bits, and only the
//! bucket in which the cut falls is put in order.

use super::few::SUM_ERROR;
use super::{Distribution, candidates, sort_descending, top_k, within_mass};
use crate::decode::SamplingParams;

/// Bits of the mantissa that tell buckets apart.
const MANTISSA_BITS: u32 = 5;

/// 64 binary orders of magnitude down from 1; the last bucket holds the rest.
const BUCKETS: usize = 64 << MANTISSA_BITS;

/// The bucket of a weight in 0..=1; larger weights have lower buckets.
fn bucket_of(weight: f64) -> usize {
    let leading = |weight: f64| (weight.to_bits() >> (52 - MANTISSA_BITS)) as usize;
    leading(1.0).saturating_sub(leading(weight)).min(BUCKETS - 1)
}

/// What [`super::by_definition`] would find, if only a top-p cuts and the order of sums does not matter.
pub(super) fn process(weights: &[f64], params: &SamplingParams) -> Option<Distribution> {
    if params.top_p >= 1.0 || top_k(params, weights.len()) > 0 {
        return None;
    }
    let mut masses = vec![0.0; BUCKETS];
    for &weight in weights {
        masses[bucket_of(weight)] += weight;
    }
    let total: f64 = masses.iter().sum();
    let (least, most) = (params.top_p * total - SUM_ERROR * total, params.top_p * total + SUM_ERROR * total);
    // The cut falls into the first bucket whose end may reach the mass.
    let (mut bucket, mut before) = (0, 0.0);
    while bucket < BUCKETS - 1 && before + masses[bucket] < least {
        before += masses[bucket];
        bucket += 1;
    }
    let mut cut = candidates(weights, |weight| bucket_of(weight) == bucket);
    sort_descending(&mut cut, 0);
    // The mass may be reached with the bucket's last token.
    let reached_at_end = |mass| (before + masses[bucket] >= mass).then_some(cut.len());
    let within = |mass| within_mass(&cut, mass, before).or_else(|| reached_at_end(mass));
    let at = within(least)?;
    if within(most) != Some(at) || (at == 0 && bucket == 0) {
        return None;
    }
    cut.truncate(at);
    let mut kept = candidates(weights, |weight| bucket_of(weight) < bucket);
    kept.append(&mut cut);
    kept.retain(|candidate| params.min_p <= 0.0 || candidate.weight >= params.min_p);
    Some(Distribution::new(kept))
}
