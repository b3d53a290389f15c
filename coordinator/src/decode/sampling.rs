//! From logits to a token: temperature, top-k, top-p, min-p, renormalise, draw (docs/model.md §9).
//!
//! Everything that decides is f64 with our own `exp` and sums in a fixed order, so that every machine draws the
//! same token (rule N4); the draw itself is keyed by seed and position (rule N8).
//!
//! The definition weighs and sorts the whole vocabulary ([`by_definition`]). [`few`] and [`buckets`] find the same
//! tokens sooner: they bound the sums the definition would compute, and leave to it what the bounds do not decide.

mod buckets;
mod few;

use rayon::prelude::*;
use shimmer_common::kernels::Kernels;

use super::philox::uniform;
use super::{DecodeError, SamplingParams};

/// The tokens that may be drawn, ascending by id, with unnormalised weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    kept: Vec<Candidate>,
    total: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    id: u32,
    weight: f64,
}

impl Distribution {
    fn new(mut kept: Vec<Candidate>) -> Self {
        kept.sort_unstable_by_key(|candidate| candidate.id);
        let total = kept.iter().map(|candidate| candidate.weight).sum();
        Distribution { kept, total }
    }

    /// The token whose share of the unit interval, in ascending id order, holds `u` (in `[0, 1)`).
    pub fn pick(&self, u: f64) -> u32 {
        let target = u * self.total;
        let mut passed = 0.0;
        for candidate in &self.kept {
            passed += candidate.weight;
            if passed > target {
                return candidate.id;
            }
        }
        // Rounding may leave the sum a hair below the target.
        self.kept.last().map_or(0, |candidate| candidate.id)
    }

    /// Probabilities of all ids below `vocab_size`.
    pub fn probabilities(&self, vocab_size: usize) -> Vec<f64> {
        let mut probabilities = vec![0.0; vocab_size];
        for candidate in &self.kept {
            if let Some(p) = probabilities.get_mut(candidate.id as usize) {
                *p = candidate.weight / self.total;
            }
        }
        probabilities
    }
}

/// Logits of either precision.
pub trait Logit: Copy + Into<f64> + PartialOrd + Sync {
    /// Less than every logit.
    const LOWEST: Self;

    /// The same as f32, where that is what they are.
    fn singles(logits: &[Self]) -> Option<&[f32]>;
}

impl Logit for f32 {
    const LOWEST: Self = Self::NEG_INFINITY;

    fn singles(logits: &[Self]) -> Option<&[f32]> {
        Some(logits)
    }
}

impl Logit for f64 {
    const LOWEST: Self = Self::NEG_INFINITY;

    fn singles(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

/// Logits compared before one of them is looked for; also lanes that are compared side by side.
const ARGMAX_BLOCK: usize = 1024;
const ARGMAX_LANES: usize = 16;

/// Id of the largest logit, the lowest on a tie; `None` if a logit is NaN or infinite, or there is none.
pub fn argmax<T: Logit>(logits: &[T]) -> Option<u32> {
    let mut best: Option<(usize, T)> = None;
    for (block, logits) in logits.chunks(ARGMAX_BLOCK).enumerate() {
        let max = largest_finite(logits)?;
        if best.is_none_or(|(_, best)| max > best) {
            let id = logits.iter().position(|&logit| logit == max)?;
            best = Some((block * ARGMAX_BLOCK + id, max));
        }
    }
    best.and_then(|(id, _)| u32::try_from(id).ok())
}

/// The largest value; `None` if one is NaN or infinite.
fn largest_finite<T: Logit>(logits: &[T]) -> Option<T> {
    let &first = logits.first()?;
    let (mut largest, mut smallest) = ([first; ARGMAX_LANES], [first; ARGMAX_LANES]);
    let mut numbers = true;
    let (chunks, tail) = logits.as_chunks::<ARGMAX_LANES>();
    for chunk in chunks {
        for i in 0..ARGMAX_LANES {
            largest[i] = if chunk[i] > largest[i] { chunk[i] } else { largest[i] };
            smallest[i] = if chunk[i] < smallest[i] { chunk[i] } else { smallest[i] };
            numbers &= chunk[i] >= T::LOWEST;
        }
    }
    let (mut max, mut min) = (first, first);
    for &logit in largest.iter().chain(&smallest).chain(tail) {
        max = if logit > max { logit } else { max };
        min = if logit < min { logit } else { min };
        numbers &= logit >= T::LOWEST;
    }
    let finite = |x: T| x.into().is_finite();
    (numbers && finite(max) && finite(min)).then_some(max)
}

/// Logits weighed by one task (some 30 µs).
const WEIGHED_PER_TASK: usize = 8192;

/// The distribution a token is drawn from; `None` if a logit is NaN or infinite, or there is none.
pub fn process<T: Logit>(logits: &[T], params: &SamplingParams) -> Option<Distribution> {
    let best = argmax(logits)?;
    if params.temperature == 0.0 {
        return Some(Distribution::new(vec![Candidate { id: best, weight: 1.0 }]));
    }
    let largest: f64 = logits.get(best as usize).copied()?.into();
    if let Some(found) = T::singles(logits).and_then(|logits| few::process(logits, largest, params)) {
        return Some(found);
    }
    let weights = weigh(logits, largest, params.temperature);
    Some(buckets::process(&weights, params).unwrap_or_else(|| by_definition(&weights, params)))
}

/// `exp((logit − largest) / temperature)`: the largest logit's weight is 1 exactly, so weights need no
/// normalising before the cuts.
fn weigh<T: Logit>(logits: &[T], largest: f64, temperature: f64) -> Vec<f64> {
    let mut weights = vec![0.0; logits.len()];
    let parts = weights.par_chunks_mut(WEIGHED_PER_TASK).zip(logits.par_chunks(WEIGHED_PER_TASK));
    parts.for_each(|(weights, logits)| {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = logit.into();
        }
        Kernels::best().sampling_weights(weights, largest, temperature);
    });
    weights
}

/// The top-k that cuts something, else 0.
fn top_k(params: &SamplingParams, vocabulary: usize) -> usize {
    if params.top_k < vocabulary { params.top_k } else { 0 }
}

/// The cuts over all weights: the definition.
fn by_definition(weights: &[f64], params: &SamplingParams) -> Distribution {
    let top_k = top_k(params, weights.len());
    let mut kept = candidates(weights, |weight| weight > 0.0 || top_k > 0 || params.top_p < 1.0);
    if top_k > 0 || params.top_p < 1.0 {
        sort_descending(&mut kept, top_k);
    }
    if params.top_p < 1.0 {
        let total = if top_k > 0 { sum(&kept) } else { weights.iter().sum() };
        kept.truncate(within_mass(&kept, params.top_p * total, 0.0).unwrap_or(kept.len()).max(1));
    }
    kept.retain(|candidate| params.min_p <= 0.0 || candidate.weight >= params.min_p);
    Distribution::new(kept)
}

/// The token at `position`: drawn with the number that belongs to the seed and the position.
///
/// # Errors
/// [`DecodeError::NotFinite`].
pub fn draw(logits: &[f32], params: &SamplingParams, position: usize) -> Result<u32, DecodeError> {
    let not_finite = DecodeError::NotFinite { position };
    if params.temperature == 0.0 {
        return argmax(logits).ok_or(not_finite);
    }
    let distribution = process(logits, params).ok_or(not_finite)?;
    Ok(distribution.pick(uniform(params.seed, position as u64)))
}

fn candidates(weights: &[f64], keep: impl Fn(f64) -> bool) -> Vec<Candidate> {
    let all = (0_u32..).zip(weights).map(|(id, &weight)| Candidate { id, weight });
    all.filter(|candidate| keep(candidate.weight)).collect()
}

/// The most probable `count` candidates (0: all) in descending order, equal ones by id.
fn sort_descending(kept: &mut Vec<Candidate>, count: usize) {
    let descending = |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id));
    if count > 0 && count < kept.len() {
        kept.select_nth_unstable_by(count - 1, descending);
        kept.truncate(count);
    }
    kept.sort_unstable_by(descending);
}

fn sum(kept: &[Candidate]) -> f64 {
    kept.iter().map(|candidate| candidate.weight).sum()
}

/// How many of the candidates (descending) have less than `mass` before them, `before` included; `None` if
/// all have.
fn within_mass(kept: &[Candidate], mass: f64, mut before: f64) -> Option<usize> {
    kept.iter().position(|candidate| {
        let reached = before >= mass;
        before += candidate.weight;
        reached
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use shimmer_common::math::exp_f64;

    use super::*;

    fn params(json: &Value) -> SamplingParams {
        let number = |key: &str, default: f64| json.get(key).map_or(default, |v| v.as_f64().unwrap());
        SamplingParams {
            temperature: number("temperature", 1.0),
            top_k: number("top_k", 0.0) as usize,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            seed: 0,
        }
    }

    /// Logits of many shapes: flat, peaked, with exact ties, with a long tail.
    fn some_logits(round: u64) -> Vec<f32> {
        let len = [1, 37, 500, 20_000][round as usize % 4];
        let draw = |i: usize| uniform(round, i as u64);
        match round / 4 % 5 {
            0 => (0..len).map(|i| (draw(i) * 40.0).floor() as f32 * 0.5).collect(),
            1 => (0..len).map(|i| (draw(i) * 40.0).floor() as f32 * 0.01).collect(),
            2 => (0..len)
                .map(|i| (-2.0 * draw(i).ln()).sqrt() as f32 * 3.0 * (draw(i + len) * 6.3).cos() as f32)
                .collect(),
            3 => (0..len).map(|i| 12.0 - (i as f32 + 1.0).ln() * 1.1).collect(),
            _ => (0..len).map(|i| if draw(i) < 0.001 { 20.0 } else { draw(i) as f32 }).collect(),
        }
    }

    #[test]
    fn short_cuts_find_what_the_definition_finds() {
        let mut few_found = 0;
        let mut buckets_found = 0;
        let rounds = 80;
        for round in 0..rounds {
            let logits = some_logits(round);
            let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
            for temperature in [1.0, 0.6, 1.7, 1e-4, 1e5] {
                let weights = weigh(&logits, largest, temperature);
                for (&logit, &weight) in logits.iter().zip(&weights) {
                    assert_eq!(weight, exp_f64((f64::from(logit) - largest) / temperature));
                }
                for (top_k, top_p, min_p) in [
                    (0, 0.95, 0.0),
                    (0, 0.5, 0.03),
                    (0, 0.999_999, 0.0),
                    (40, 1.0, 0.0),
                    (40, 0.9, 0.01),
                    (1, 0.0, 1.0),
                    (0, 0.0, 0.0),
                    (0, 1.0, 0.05),
                    (0, 1.0, 1e-7),
                    (0, 1.0, 0.0),
                    (1500, 0.99, 0.0),
                ] {
                    let params = SamplingParams { temperature, top_k, top_p, min_p, seed: 1 };
                    let want = by_definition(&weights, &params);
                    if let Some(found) = few::process(&logits, largest, &params) {
                        assert!(found == want, "round {round} {params:?}");
                        few_found += 1;
                    }
                    if let Some(found) = buckets::process(&weights, &params) {
                        assert!(found == want, "round {round} {params:?}");
                        buckets_found += 1;
                    }
                    assert!(process(&logits, &params).unwrap() == want, "round {round} {params:?}");
                }
            }
        }
        assert!(few_found > 500 && buckets_found > 1000, "{few_found} {buckets_found}");
    }

    /// The definition with a full sort.
    fn process_slowly(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let weight = |id: &usize| exp_f64(f64::from(logits[*id] - largest) / params.temperature);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.cmp(b)));
        if params.top_k > 0 {
            order.truncate(params.top_k);
        }
        let total: f64 = order.iter().map(weight).sum();
        let mut before = 0.0;
        let mut kept = Vec::new();
        for id in &order {
            if before >= params.top_p * total && !kept.is_empty() {
                break;
            }
            before += weight(id);
            if weight(id) >= params.min_p {
                kept.push(*id as u32);
            }
        }
        kept.sort_unstable();
        kept
    }

    #[test]
    fn recorded_distributions() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/sampling/cases.json");
        let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let cases = cases["process"].as_array().unwrap();
        assert_eq!(cases.len(), 15);
        for case in cases {
            let logits: Vec<f64> = serde_json::from_value(case["logits"].clone()).unwrap();
            let expected: Vec<f64> = serde_json::from_value(case["probs"].clone()).unwrap();
            let found = process(&logits, &params(&case["params"])).unwrap().probabilities(logits.len());
            for (a, b) in found.iter().zip(&expected) {
                // The file has 12 decimals.
                assert!((a - b).abs() <= 6e-13 && (*a == 0.0) == (*b == 0.0), "{case}: {found:?}");
            }
        }
    }

    #[test]
    fn selection_equals_a_full_sort() {
        for round in 0..60_u64 {
            // Coarse steps make many exact ties.
            let logits: Vec<f32> = (0..500)
                .map(|i| (uniform(round, i) * 40.0).floor() as f32 * if round % 2 == 0 { 0.5 } else { 0.01 })
                .collect();
            for (top_k, top_p, min_p) in [
                (0, 0.9, 0.0),
                (7, 1.0, 0.0),
                (40, 0.5, 0.0),
                (0, 0.999, 0.02),
                (0, 1.0, 0.1),
                (500, 0.3, 0.0),
                (1, 0.0, 1.0),
            ] {
                let params = SamplingParams { temperature: 0.8, top_k, top_p, min_p, seed: 1 };
                let kept: Vec<u32> = process(&logits, &params).unwrap().kept.iter().map(|c| c.id).collect();
                assert_eq!(kept, process_slowly(&logits, &params), "{params:?}");
            }
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [1.0_f32, 3.0, 2.0, -9.0];
        let params = SamplingParams { temperature: 1.0, top_k: 3, top_p: 1.0, min_p: 0.0, seed: 5 };
        let expected = process(&logits, &params).unwrap().probabilities(4);
        let mut counts = [0.0; 4];
        for position in 0..20_000 {
            counts[draw(&logits, &params, position).unwrap() as usize] += 1.0 / 20_000.0;
        }
        for (found, expected) in counts.iter().zip(expected) {
            assert!((found - expected).abs() < 0.02, "{counts:?}");
        }
        assert_eq!(counts[3], 0.0);
    }

    #[test]
    fn extremes() {
        let greedy = SamplingParams::greedy();
        assert_eq!(draw(&[1.0, 5.0, 5.0], &greedy, 0).unwrap(), 1);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for temperature in [0.0, 1.0] {
                let params = SamplingParams { temperature, ..SamplingParams::greedy() };
                let error = draw(&[1.0, bad, 2.0], &params, 9).unwrap_err();
                assert!(matches!(error, DecodeError::NotFinite { position: 9 }));
            }
        }
        assert!(process::<f32>(&[], &greedy).is_none());
        // A tiny temperature is argmax in the limit, a huge one uniform; neither overflows.
        for (temperature, top_p) in [(1e-300, 1.0), (5e-324, 0.5), (1e300, 1.0)] {
            let params = SamplingParams { temperature, top_p, ..SamplingParams::greedy() };
            let p = process(&[1.0_f32, 80.0, -80.0], &params).unwrap().probabilities(3);
            assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{p:?}");
            assert!(if temperature < 1.0 { p[1] == 1.0 } else { (p[0] - p[1]).abs() < 1e-12 });
        }
    }
}
