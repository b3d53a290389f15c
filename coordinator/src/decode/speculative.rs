//! Speculative acceptance for drafts drawn from a known distribution (docs/model.md §7, Verification).
//!
//! The engine does not need it: its drafts are argmax proposals compared with the token drawn under rule N8,
//! which accepts exactly as often. It is the reference for draft sources with distributions of their own.

/// Probability of accepting `draft`, drawn from `q`, under the target `p`: `min(1, p/q)`. Ids outside the
/// distributions have probability 0.
pub fn accept_probability(p: &[f64], q: &[f64], draft: usize) -> f64 {
    let target = p.get(draft).copied().unwrap_or(0.0);
    let proposed = q.get(draft).copied().unwrap_or(0.0);
    if target >= proposed { if target > 0.0 { 1.0 } else { 0.0 } } else { target / proposed }
}

/// Distribution of the token that replaces a rejected draft: `max(0, p - q)` normalised, `p` if that is empty.
pub fn residual(p: &[f64], q: &[f64]) -> Vec<f64> {
    let proposed = q.iter().copied().chain(std::iter::repeat(0.0));
    let rest: Vec<f64> = p.iter().zip(proposed).map(|(p, q)| (p - q).max(0.0)).collect();
    let total: f64 = rest.iter().sum();
    if total > 0.0 { rest.iter().map(|r| r / total).collect() } else { p.to_vec() }
}

/// One verified draft: the target's distribution, the proposal's, the drafted id and the uniform number.
#[derive(Clone, Copy, Debug)]
pub struct DraftStep<'a> {
    /// Target distribution of this position.
    pub p: &'a [f64],
    /// Distribution the draft was drawn from.
    pub q: &'a [f64],
    /// The drafted id.
    pub draft: usize,
    /// Uniform number in `[0, 1)`.
    pub u: f64,
}

/// Accepts drafts in order up to the first rejection. Returns how many, and the distribution of the one token
/// emitted after them; `p_after` is the target's distribution after the last draft.
pub fn verify_chain(steps: &[DraftStep<'_>], p_after: &[f64]) -> (usize, Vec<f64>) {
    for (accepted, step) in steps.iter().enumerate() {
        if step.u >= accept_probability(step.p, step.q, step.draft) {
            return (accepted, residual(step.p, step.q));
        }
    }
    (steps.len(), p_after.to_vec())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn cases(kind: &str) -> Vec<Value> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/sampling/cases.json");
        let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        cases[kind].as_array().unwrap().clone()
    }

    fn numbers(value: &Value) -> Vec<f64> {
        serde_json::from_value(value.clone()).unwrap()
    }

    /// The inputs have 12 decimals, and a residual divides by what may be small.
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() < 1e-9, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn recorded_acceptances() {
        let cases = cases("accept");
        assert_eq!(cases.len(), 10);
        for case in cases {
            let (p, q) = (numbers(&case["p"]), numbers(&case["q"]));
            let draft = case["draft"].as_u64().unwrap() as usize;
            let probability = accept_probability(&p, &q, draft);
            assert_close(&[probability], &[case["accept_prob"].as_f64().unwrap()]);
            assert_eq!(case["u"].as_f64().unwrap() < probability, case["accepted"].as_bool().unwrap());
            assert_close(&residual(&p, &q), &numbers(&case["residual"]));
        }
    }

    #[test]
    fn recorded_chains() {
        let cases = cases("chain");
        assert_eq!(cases.len(), 6);
        for case in cases {
            let rows = |key: &str| case[key].as_array().unwrap().iter().map(numbers).collect::<Vec<_>>();
            let (p, q, u) = (rows("p"), rows("q"), numbers(&case["u"]));
            let drafts: Vec<usize> = serde_json::from_value(case["drafts"].clone()).unwrap();
            let step = |j: usize| DraftStep { p: &p[j], q: &q[j], draft: drafts[j], u: u[j] };
            let steps: Vec<DraftStep<'_>> = (0..drafts.len()).map(step).collect();
            let (accepted, last) = verify_chain(&steps, &p[drafts.len()]);
            assert_eq!(accepted as u64, case["accepted"].as_u64().unwrap());
            assert_close(&last, &numbers(&case["last_token_dist"]));
        }
    }

    #[test]
    fn impossible_drafts_are_rejected() {
        assert_eq!(accept_probability(&[0.0, 1.0], &[0.0, 1.0], 0), 0.0);
        assert_eq!(accept_probability(&[0.5, 0.5], &[0.0, 1.0], 0), 1.0);
        assert_eq!(accept_probability(&[1.0], &[1.0], 7), 0.0);
        assert_eq!(residual(&[0.5, 0.5], &[0.5, 0.5]), [0.5, 0.5]);
    }
}
