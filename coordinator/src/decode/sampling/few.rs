//! The usual case: a handful of tokens has nearly all of the mass.
//!
//! One pass weighs the vocabulary in f32. Only tokens above a threshold are weighed as the definition does; what
//! lies below is known up to the error of the f32 weights, and the cut counts only where that error cannot move it.

use rayon::prelude::*;
use shimmer_common::kernels::Kernels;
use shimmer_common::math::{MASS_STEPS, Masses};

use super::{Candidate, Distribution, WEIGHED_PER_TASK, sort_descending, sum, top_k, within_mass};
use crate::decode::SamplingParams;

/// Relative error of an f32 weight: three roundings of an argument down to −104 and one unit of `exp` are below
/// 2·10⁻⁵, summing adds less than 10⁻⁵.
const WEIGHT_ERROR: f64 = 5e-5;

/// Relative error of f64 sums over a vocabulary, whatever their order.
pub(super) const SUM_ERROR: f64 = 1e-9;

/// Temperatures whose reciprocal and quotients are ordinary f32 numbers.
const TEMPERATURES: std::ops::RangeInclusive<f64> = 1e-3..=1e3;

/// With more tokens than this share of the vocabulary above the threshold, weighing all is as fast.
const SHARE_MAX: usize = 8;

/// What [`super::by_definition`] would find, if few tokens decide it.
pub(super) fn process(logits: &[f32], largest: f64, params: &SamplingParams) -> Option<Distribution> {
    let cuts = top_k(params, logits.len()) > 0 || params.top_p < 1.0 || params.min_p > 0.0;
    if !cuts || !TEMPERATURES.contains(&params.temperature) {
        return None;
    }
    let mut weights = vec![0.0; logits.len()];
    let inverse_temperature = (1.0 / params.temperature) as f32;
    let parts = weights.par_chunks_mut(WEIGHED_PER_TASK).zip(logits.par_chunks(WEIGHED_PER_TASK));
    let masses = parts
        .map(|(weights, logits)| {
            Kernels::best().approximate_weights(logits, largest as f32, inverse_temperature, weights)
        })
        .reduce(Masses::default, |mut all, part| {
            all.add(&part);
            all
        });
    let few = Few { logits, largest, weights, masses, params, top_k: top_k(params, logits.len()) };
    (0..MASS_STEPS).filter(|&step| few.promising(step)).find_map(|step| few.above(step))
}

struct Few<'a> {
    logits: &'a [f32],
    largest: f64,
    /// Approximate.
    weights: Vec<f32>,
    masses: Masses,
    params: &'a SamplingParams,
    top_k: usize,
}

impl Few<'_> {
    /// Whether the tokens above the threshold of `step` look enough and few.
    fn promising(&self, step: usize) -> bool {
        let Masses { below, total, count } = self.masses;
        let enough = if self.top_k > 0 {
            count[step] >= self.top_k
        } else if self.params.top_p < 1.0 {
            total - below[step] >= self.params.top_p * total
        } else {
            f64::from(Masses::threshold(step)) <= self.params.min_p
        };
        enough && count[step] <= (self.logits.len() / SHARE_MAX).max(1)
    }

    /// The distribution, if the tokens above the threshold of `step` decide it.
    fn above(&self, step: usize) -> Option<Distribution> {
        let threshold = f64::from(Masses::threshold(step));
        let mut below = self.masses.below[step];
        let lowest = (threshold * (1.0 - WEIGHT_ERROR)) as f32;
        let mut kept = Vec::new();
        for (id, &weight) in (0_u32..).zip(&self.weights) {
            if weight >= lowest {
                if f64::from(weight) < threshold {
                    below -= f64::from(weight);
                }
                kept.push(id);
            }
        }
        let mut kept = self.weigh(&kept);
        sort_descending(&mut kept, 0);
        // Every token that weighs at least the threshold is among them.
        let complete = kept.partition_point(|candidate| candidate.weight >= threshold);
        let SamplingParams { top_p, min_p, .. } = *self.params;
        if self.top_k > 0 {
            if complete < self.top_k {
                return None;
            }
            kept.truncate(self.top_k);
            if top_p < 1.0 {
                let mass = top_p * sum(&kept);
                kept.truncate(within_mass(&kept, mass, 0.0).unwrap_or(kept.len()).max(1));
            }
        } else if top_p < 1.0 {
            let total = sum(&kept) + below;
            let error = WEIGHT_ERROR * self.masses.below[step] + SUM_ERROR * total;
            let least = within_mass(&kept, top_p * (total - error), 0.0)?.max(1);
            let most = within_mass(&kept, top_p * (total + error), 0.0)?.max(1);
            if least != most || most > complete {
                return None;
            }
            kept.truncate(most);
        }
        kept.retain(|candidate| min_p <= 0.0 || candidate.weight >= min_p);
        Some(Distribution::new(kept))
    }

    /// The tokens `ids` with the weights of the definition.
    fn weigh(&self, ids: &[u32]) -> Vec<Candidate> {
        let logit = |&id: &u32| f64::from(self.logits.get(id as usize).copied().unwrap_or(f32::NAN));
        let mut weights: Vec<f64> = ids.iter().map(logit).collect();
        Kernels::best().sampling_weights(&mut weights, self.largest, self.params.temperature);
        ids.iter().zip(weights).map(|(&id, weight)| Candidate { id, weight }).collect()
    }
}
