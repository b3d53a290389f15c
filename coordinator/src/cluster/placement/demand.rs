//! What tokens ask for: how often each expert is used, and which are used together.

use shimmer_common::experts::{ExpertId, ExpertLayout};

use super::rendezvous::mix;

/// Routes a layer is judged by.
const ROUTES: usize = 384;
/// Share of the tokens that go anywhere: usage is an estimate, and topics change.
const UNIFORM_PART: f64 = 0.05;

/// One layer's part of a [`Demand`].
#[derive(Clone, Debug, PartialEq)]
pub struct LayerDemand {
    /// Layer index in the model.
    pub layer: u16,
    /// Bytes of each expert's record.
    pub bytes: Vec<u64>,
    /// Expected uses of each expert per token; they add up to the experts per token.
    pub uses: Vec<f64>,
    /// Sets of experts used by one token: those seen, then others drawn by `uses`.
    pub routes: Vec<Vec<u16>>,
}

/// What a token asks of all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// Ascending.
    pub layers: Vec<LayerDemand>,
    /// Bytes of a dispatch and its answer, for one token.
    pub wire_bytes: f64,
}

impl Demand {
    /// Demand of one token that uses `top_k` experts per layer. `heat` is the learned usage in any unit
    /// (0 everywhere before anything was learned), `seen` the recent routes of a layer.
    pub fn new(
        layout: &ExpertLayout,
        top_k: usize,
        heat: impl Fn(ExpertId) -> f64,
        seen: impl Fn(u16) -> Vec<Vec<u16>>,
    ) -> Self {
        let layers = layout
            .layers
            .iter()
            .filter(|(_, specs)| !specs.is_empty())
            .map(|(&layer, specs)| {
                let ids = (0..specs.len() as u16).map(|index| ExpertId { layer, index });
                let bytes = ids.clone().map(|id| layout.record_bytes(id).unwrap_or(0) as u64).collect();
                let uses = uses(&ids.map(&heat).collect::<Vec<_>>(), top_k);
                let mut routes = seen(layer);
                routes.retain(|route| route.iter().all(|&e| usize::from(e) < specs.len()));
                let known = routes.len().saturating_sub(ROUTES);
                routes.drain(..known);
                let drawn =
                    (routes.len()..ROUTES).map(|i| draw(&uses, top_k, u64::from(layer) << 32 | i as u64));
                let drawn: Vec<_> = drawn.collect();
                routes.extend(drawn);
                LayerDemand { layer, bytes, uses, routes }
            })
            .collect();
        let hidden = layout.hidden_size as f64;
        // int8 with a scale per 64 columns goes out, sums of about 3.5 bytes come back (rules N1, N5).
        Self { layers, wire_bytes: hidden * (1.0 + 4.0 / 64.0) + hidden * 3.5 + 200.0 }
    }

    /// Bytes of all records.
    pub fn total_bytes(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.bytes).sum()
    }
}

/// Expected uses per token from heats: proportional, none above one, with a uniform part.
fn uses(heat: &[f64], top_k: usize) -> Vec<f64> {
    let k = top_k.min(heat.len()) as f64;
    let even = k / heat.len() as f64;
    let heat: Vec<f64> = heat.iter().map(|h| if h.is_finite() { h.max(0.0) } else { 0.0 }).collect();
    if heat.iter().sum::<f64>() <= 0.0 {
        return vec![even; heat.len()];
    }
    let shares = capped_shares(&heat, k);
    shares.into_iter().map(|share| (1.0 - UNIFORM_PART) * share + UNIFORM_PART * even).collect()
}

/// Parts of `k` in proportion to `heat`, none above one; what the hottest leave goes to the others.
fn capped_shares(heat: &[f64], k: f64) -> Vec<f64> {
    let mut full = vec![false; heat.len()];
    loop {
        let filled = full.iter().filter(|&&f| f).count() as f64;
        let rest: f64 = heat.iter().zip(&full).filter(|(_, full)| !**full).map(|(h, _)| h).sum();
        let share = |h: f64| if rest > 0.0 { h / rest * (k - filled) } else { 0.0 };
        let over: Vec<usize> = (0..heat.len()).filter(|&e| !full[e] && share(heat[e]) > 1.0).collect();
        if over.is_empty() {
            return heat.iter().zip(&full).map(|(&h, &full)| if full { 1.0 } else { share(h) }).collect();
        }
        over.into_iter().for_each(|e| full[e] = true);
    }
}

/// A set of `top_k` experts: the largest of `uses`-weighted random keys (Efraimidis and Spirakis 2006).
fn draw(uses: &[f64], top_k: usize, seed: u64) -> Vec<u16> {
    let mut keys: Vec<(f64, u16)> = uses
        .iter()
        .enumerate()
        .map(|(e, &weight)| {
            let unit = ((mix(seed ^ mix(e as u64 + 1)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            (unit.ln() / weight.max(1e-12), e as u16)
        })
        .collect();
    keys.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut route: Vec<u16> = keys.into_iter().take(top_k).map(|(_, e)| e).collect();
    route.sort_unstable();
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_uses() {
        let uses = uses(&[8.0, 1.0, 1.0, 1.0, 1.0, 0.0], 2);
        assert!((uses.iter().sum::<f64>() - 2.0).abs() < 1e-9, "{uses:?}");
        assert!(uses[5] > 0.0, "nothing is impossible");
        let mut counts = [0usize; 6];
        for seed in 0..4000 {
            let route = draw(&uses, 2, seed);
            assert!(route.len() == 2 && route[0] < route[1], "{route:?}");
            route.iter().for_each(|&e| counts[usize::from(e)] += 1);
        }
        assert!(counts[0] > 2 * counts[1] && counts[1] > 3 * counts[5], "{counts:?}");
    }

    #[test]
    fn without_history_all_experts_are_alike() {
        assert_eq!(uses(&[0.0; 4], 2), [0.5; 4]);
        assert_eq!(uses(&[f64::NAN, 1.0], 1).len(), 2);
    }
}
