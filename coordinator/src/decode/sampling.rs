//! From logits to a token: temperature, top-k, top-p, min-p, renormalise, draw (docs/model.md §9).
//!
//! Everything is f64 with our own `exp` and sums in a fixed order, so that every machine draws the same token
//! (rule N4); the draw itself is keyed by seed and position (rule N8). Nothing sorts the vocabulary: weights are
//! first counted by their binary exponent, and only the exponents that can matter are sorted.

use rayon::prelude::*;
use shimmer_common::math::exp_f64;

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

/// Id of the largest logit, the lowest on a tie; `None` if a logit is NaN or infinite, or there is none.
pub fn argmax<T: Copy + Into<f64>>(logits: &[T]) -> Option<u32> {
    let mut best: Option<(u32, f64)> = None;
    for (id, &logit) in (0_u32..).zip(logits) {
        let logit: f64 = logit.into();
        if !logit.is_finite() {
            return None;
        }
        if best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id)
}

/// Logits per thread below which a vocabulary is not worth splitting (some 0.2 ms of `exp`).
const MIN_PARALLEL: usize = 8192;

/// The distribution a token is drawn from; `None` if a logit is NaN or infinite, or there is none.
pub fn process<T: Copy + Into<f64> + Sync>(logits: &[T], params: &SamplingParams) -> Option<Distribution> {
    let best = argmax(logits)?;
    if params.temperature == 0.0 {
        return Some(Distribution::new(vec![Candidate { id: best, weight: 1.0 }]));
    }
    let largest: f64 = logits.get(best as usize).copied()?.into();
    // The largest logit's weight is 1 exactly, so weights need no normalising before the cuts.
    let weight_of = |&logit: &T| exp_f64((logit.into() - largest) / params.temperature);
    let weights: Vec<f64> = logits.par_iter().with_min_len(MIN_PARALLEL).map(weight_of).collect();
    let mut kept = if params.top_k > 0 && params.top_k < weights.len() {
        most_probable(&weights, Wanted::Count(params.top_k))
    } else if params.top_p < 1.0 {
        most_probable(&weights, Wanted::Mass(params.top_p))
    } else {
        candidates(&weights, |weight| weight > 0.0)
    };
    if params.top_p < 1.0 {
        let total = if params.top_k > 0 && params.top_k < weights.len() {
            kept.iter().map(|candidate| candidate.weight).sum()
        } else {
            weights.iter().sum::<f64>()
        };
        cut_mass(&mut kept, params.top_p * total);
    }
    if params.min_p > 0.0 {
        kept.retain(|candidate| candidate.weight >= params.min_p);
    }
    Some(Distribution::new(kept))
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

/// How far down the order of probability to go.
#[derive(Clone, Copy)]
enum Wanted {
    /// This many tokens.
    Count(usize),
    /// At least this share of the whole mass.
    Mass(f64),
}

/// Weights are in 0..=1: their binary exponents.
const EXPONENTS: usize = 1024;

fn exponent_of(weight: f64) -> usize {
    EXPONENTS.saturating_sub(1).saturating_sub((weight.to_bits() >> 52) as usize)
}

/// The most probable tokens, descending, equal ones by id: exactly `Count`, or somewhat more than `Mass`.
fn most_probable(weights: &[f64], wanted: Wanted) -> Vec<Candidate> {
    let mut counts = [0_usize; EXPONENTS];
    let mut masses = [0.0_f64; EXPONENTS];
    for &weight in weights {
        counts[exponent_of(weight)] += 1;
        masses[exponent_of(weight)] += weight;
    }
    let enough: &dyn Fn(usize, f64) -> bool = match wanted {
        Wanted::Count(k) => &move |count, _| count >= k,
        Wanted::Mass(share) => {
            // These sums round differently from the exact cut's: keep a margin.
            let mass = share * masses.iter().sum::<f64>() * (1.0 + 1e-9);
            &move |_, found| found >= mass
        }
    };
    let (mut count, mut mass, mut last) = (0, 0.0, EXPONENTS - 1);
    for exponent in 0..EXPONENTS {
        count += counts[exponent];
        mass += masses[exponent];
        if enough(count, mass) {
            last = exponent;
            break;
        }
    }
    let mut kept = candidates(weights, |weight| exponent_of(weight) <= last);
    let descending = |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id));
    if let Wanted::Count(k) = wanted
        && k > 0
        && k < kept.len()
    {
        kept.select_nth_unstable_by(k - 1, descending);
        kept.truncate(k);
    }
    kept.sort_unstable_by(descending);
    kept
}

/// Keeps tokens (descending) while the mass before them is below `mass`; at least one.
fn cut_mass(kept: &mut Vec<Candidate>, mass: f64) {
    let mut before = 0.0;
    let enough = kept.iter().position(|candidate| {
        let reached = before >= mass;
        before += candidate.weight;
        reached
    });
    kept.truncate(enough.unwrap_or(kept.len()).max(1));
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

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
