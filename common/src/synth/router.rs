//! Routers whose choices follow a chosen distribution.
//!
//! The rows of a router are random, so for a normed activation the logits of its experts are independent
//! standard normal numbers `z`; expert `e` is among the chosen ones about when `sigmoid(z) + b_e` exceeds
//! a common threshold. With `b_e = -sigmoid(Φ⁻¹(1 - π_e))` and threshold 0 that happens with probability
//! `π_e`, and as the `π_e` add up to the number of experts chosen, taking the best ones instead of all above
//! the threshold changes the frequencies by about a hundredth.
//!
//! Zipf with exponent S means: experts are drawn one after the other with probability proportional to
//! `rank^-S` until `k` different ones are drawn. If every expert arrives at random with rate `rank^-S`, those
//! are the first `k` arrivals; an expert has arrived by time `t` with probability `1 - exp(-t · rank^-S)`, and
//! `t` is where these add up to `k`.
//!
//! With S = 1.25 and 8 of 64 experts, the best fixed quarter of the experts serves 71 % of the choices, and a
//! cache of that size that evicts the least recently used one 56 %.

use super::random::{Stream, normal_quantile};
use crate::math::{exp_f64, ln_f64};

/// How often the experts of a layer are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterSkew {
    /// All about equally often.
    Uniform,
    /// By Zipf's law with this exponent; every layer has its own order of experts.
    Zipf(f64),
}

/// Exponent of [`RouterSkew::Zipf`] when none is given.
pub const DEFAULT_ZIPF_EXPONENT: f64 = 1.25;

/// Beyond this the most frequent experts cannot be told apart.
const MAX_ZIPF_EXPONENT: f64 = 8.0;

impl std::str::FromStr for RouterSkew {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, exponent) = text.split_once(':').map_or((text, None), |(kind, s)| (kind, Some(s)));
        match (kind, exponent) {
            ("uniform", None) => Ok(Self::Uniform),
            ("zipf", None) => Ok(Self::Zipf(DEFAULT_ZIPF_EXPONENT)),
            ("zipf", Some(exponent)) => match exponent.parse::<f64>() {
                Ok(s) if s > 0.0 && s <= MAX_ZIPF_EXPONENT => Ok(Self::Zipf(s)),
                _ => Err(format!("the exponent in {text:?} must be above 0 and at most {MAX_ZIPF_EXPONENT}")),
            },
            _ => Err(format!("{text:?} is not a router; write uniform, zipf or zipf:S such as zipf:1.25")),
        }
    }
}

impl std::fmt::Display for RouterSkew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
        }
    }
}

impl RouterSkew {
    /// Probability that the expert of each rank is among the `k` chosen of `experts`, descending.
    pub fn frequencies(self, experts: usize, k: usize) -> Vec<f64> {
        let Self::Zipf(exponent) = self else { return vec![k as f64 / experts as f64; experts] };
        let rates: Vec<f64> = (1..=experts).map(|rank| exp_f64(-exponent * ln_f64(rank as f64))).collect();
        let arrived = |t: f64| rates.iter().map(|rate| 1.0 - exp_f64(-t * rate)).sum::<f64>();
        let (mut low, mut high) = (0.0, 1.0);
        // With k = experts no time is late enough; the frequencies are 1 to within rounding then.
        while arrived(high) < k as f64 && high < 1e12 {
            high *= 2.0;
        }
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            *(if arrived(middle) < k as f64 { &mut low } else { &mut high }) = middle;
        }
        rates.iter().map(|rate| 1.0 - exp_f64(-high * rate)).collect()
    }

    /// `e_score_correction_bias` of one layer; `random` decides the order of the experts.
    pub(super) fn bias(self, experts: usize, k: usize, random: &mut Stream) -> Vec<f32> {
        let sigmoid = |x: f64| 1.0 / (1.0 + exp_f64(-x));
        let of_rank = self.frequencies(experts, k);
        let mut bias: Vec<f32> = of_rank.iter().map(|p| -sigmoid(normal_quantile(1.0 - p)) as f32).collect();
        for i in (1..bias.len()).rev() {
            bias.swap(i, random.below(i + 1));
        }
        bias
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of_best_quarter(frequencies: &[f64]) -> f64 {
        frequencies[..frequencies.len() / 4].iter().sum::<f64>() / frequencies.iter().sum::<f64>()
    }

    #[test]
    fn frequencies_add_up_and_descend() {
        for (experts, k) in [(64, 8), (256, 8), (4, 4), (1, 1)] {
            let f = RouterSkew::Zipf(1.25).frequencies(experts, k);
            assert!((f.iter().sum::<f64>() - k as f64).abs() < 1e-6, "{experts} {k}: {f:?}");
            assert!(f.windows(2).all(|pair| pair[0] >= pair[1]) && f[0] <= 1.0);
        }
        assert!((share_of_best_quarter(&RouterSkew::Zipf(1.25).frequencies(64, 8)) - 0.711).abs() < 0.002);
        assert_eq!(RouterSkew::Uniform.frequencies(64, 8), [0.125; 64]);
    }

    #[test]
    fn the_best_of_normal_logits_are_chosen_that_often() {
        let (experts, k, draws) = (64, 8, 4000);
        let skew = RouterSkew::Zipf(DEFAULT_ZIPF_EXPONENT);
        let mut random = Stream::new(3, "draws");
        let mut bias = skew.bias(experts, k, &mut random);
        bias.sort_by(|a, b| b.total_cmp(a));
        let mut counts = vec![0usize; experts];
        for _ in 0..draws {
            let choice: Vec<f32> = bias
                .iter()
                .map(|b| {
                    let uniform = (f64::from(random.symmetric()) + 1.0) / 2.0;
                    crate::math::sigmoid(normal_quantile(uniform) as f32) + b
                })
                .collect();
            crate::math::top_k(&choice, k).into_iter().for_each(|e| counts[e] += 1);
        }
        for (rank, (count, want)) in counts.iter().zip(skew.frequencies(experts, k)).enumerate() {
            let got = *count as f64 / draws as f64;
            assert!((got - want).abs() < 0.035, "rank {rank}: {got} instead of {want}");
        }
    }

    #[test]
    fn routers_are_written_as_they_are_read() {
        for skew in [RouterSkew::Uniform, RouterSkew::Zipf(0.5)] {
            assert_eq!(skew.to_string().parse(), Ok(skew));
        }
        assert_eq!("zipf".parse(), Ok(RouterSkew::Zipf(DEFAULT_ZIPF_EXPONENT)));
        for bad in ["", "zip", "zipf:", "zipf:0", "zipf:-1", "zipf:nan", "zipf:inf", "zipf:9", "uniform:2"] {
            assert!(bad.parse::<RouterSkew>().is_err(), "{bad}");
        }
    }
}
