//! How often each expert is routed to: exponentially decayed counts over three horizons.
//!
//! The clock is in tokens: it advances with the layer that has seen most rows. For every expert and horizon
//! there is a count, `Σ rows · 2^((t - now) / half-life)`; divided by the equally decayed number of tokens it
//! estimates the share of tokens that need the expert. The *heat* of an expert is the weighted mean of its
//! shares. The shortest horizon knows what the last few tokens needed, the middle one what the topic needs,
//! and the long one what the middle one is too short to know: which of the rarely used experts are used
//! least, and what other topics needed.
//!
//! Counts are stored inflated (`rows · 2^((t - base) / half-life)`), so that an expert that is not used
//! costs nothing as time passes. The weights of the horizons in the heat are fixed for one *epoch* of a
//! few tokens: within an epoch the heat of an expert changes only when it is used, which is what lets a
//! ranking be kept in a sorted set.

use super::super::ExpertId;

/// Number of horizons.
pub const HORIZONS: usize = 3;

/// A count over each horizon, the shortest first.
pub type Counts = [f64; HORIZONS];

/// Horizons and their weights; chosen by simulation (docs/performance.md).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UsageOptions {
    /// Half-lives in tokens, each at least one, ascending.
    pub half_lives: [f64; HORIZONS],
    /// Weights of the shares in the heat, none negative.
    pub weights: [f64; HORIZONS],
}

impl Default for UsageOptions {
    fn default() -> Self {
        Self { half_lives: [8.0, 180.0, 20_000.0], weights: [0.15, 0.8, 0.05] }
    }
}

impl UsageOptions {
    /// One horizon only; `half_life` at least one token, or infinite.
    pub fn single(half_life: f64) -> Self {
        Self { half_lives: [half_life; HORIZONS], weights: [0.0, 1.0, 0.0] }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Layer {
    layer: u16,
    /// Rows seen since the counts were made or loaded.
    rows: u64,
    experts: Vec<Counts>,
}

/// Decayed usage counts of every expert of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    options: UsageOptions,
    layers: Vec<Layer>,
    /// Decayed tokens, inflated like the counts.
    tokens: Counts,
    /// Tokens since `base`, and in all.
    clock: f64,
    lifetime_tokens: f64,
    /// Rows of the busiest layer.
    most_rows: u64,
    epoch: u64,
    epoch_ends: f64,
    weights: Counts,
}

impl Default for Usage {
    fn default() -> Self {
        Self::new(UsageOptions::default())
    }
}

/// Inflation beyond which counts are scaled back: far from the limits of f64 even times 2^64 rows.
const MAX_DOUBLINGS: f64 = 64.0;

impl Usage {
    /// No history.
    pub fn new(options: UsageOptions) -> Self {
        let mut usage = Self {
            options,
            layers: Vec::new(),
            tokens: Counts::default(),
            clock: 0.0,
            lifetime_tokens: 0.0,
            most_rows: 0,
            epoch: 0,
            epoch_ends: 0.0,
            weights: Counts::default(),
        };
        usage.begin_epoch();
        usage
    }

    /// Counts one layer's routed rows; `uses` are (expert, rows that chose it).
    pub fn record(&mut self, layer: u16, rows: usize, uses: impl Iterator<Item = (u16, usize)>) {
        let at = self.layer(layer);
        let Some(seen) = self.layers.get_mut(at) else { return };
        seen.rows += rows as u64;
        let new = seen.rows.saturating_sub(self.most_rows);
        self.most_rows += new;
        self.advance(new as f64);
        let inc = inflation(self.clock, &self.options);
        let Some(seen) = self.layers.get_mut(at) else { return };
        for (expert, rows) in uses {
            let expert = usize::from(expert);
            if seen.experts.len() <= expert {
                seen.experts.resize(expert + 1, Counts::default());
            }
            if let Some(counts) = seen.experts.get_mut(expert) {
                for (count, inc) in counts.iter_mut().zip(inc) {
                    *count += rows as f64 * inc;
                }
            }
        }
    }

    /// Place of a layer's counts, made where there are none.
    fn layer(&mut self, layer: u16) -> usize {
        self.layers.binary_search_by_key(&layer, |l| l.layer).unwrap_or_else(|at| {
            self.layers.insert(at, Layer { layer, rows: 0, experts: Vec::new() });
            at
        })
    }

    fn advance(&mut self, tokens: f64) {
        if tokens <= 0.0 {
            return;
        }
        // Beyond so many of the shortest half-lives counts would overflow between two epochs.
        self.clock += tokens.min(MAX_DOUBLINGS * self.shortest());
        self.lifetime_tokens += tokens;
        for (count, inc) in self.tokens.iter_mut().zip(inflation(self.clock, &self.options)) {
            *count += tokens * inc;
        }
        if self.clock >= self.epoch_ends {
            self.begin_epoch();
        }
    }

    fn shortest(&self) -> f64 {
        self.options.half_lives.into_iter().fold(f64::INFINITY, f64::min)
    }

    fn begin_epoch(&mut self) {
        if self.clock > MAX_DOUBLINGS * self.shortest() {
            self.deflate();
        }
        for ((weight, share), tokens) in self.weights.iter_mut().zip(self.options.weights).zip(self.tokens) {
            *weight = share / tokens.max(1.0);
        }
        self.epoch += 1;
        // Young shares change quickly, old ones within half of the shortest half-life by less than a half.
        self.epoch_ends = self.clock + (self.lifetime_tokens / 8.0).min(self.shortest() / 2.0).max(1.0);
    }

    /// Makes now the base.
    fn deflate(&mut self) {
        let inc = inflation(self.clock, &self.options);
        for counts in self.layers.iter_mut().flat_map(|l| &mut l.experts).chain([&mut self.tokens]) {
            *counts = divided(counts, &inc);
        }
        self.clock = 0.0;
    }

    /// Counts up whenever the heat of unused experts may have changed against that of others.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The expert's heat: about the share of tokens that need it, as of this epoch. Only comparisons within
    /// an epoch mean something. 0 for experts never used or unknown.
    pub fn heat(&self, id: ExpertId) -> f64 {
        let layer = self.layers.binary_search_by_key(&id.layer, |l| l.layer).ok();
        let counts = layer.and_then(|at| self.layers.get(at)?.experts.get(usize::from(id.index)));
        counts
            .map_or(0.0, |counts| counts.iter().zip(self.weights).map(|(count, weight)| count * weight).sum())
    }

    /// Every expert with its heat, in ascending order of ids.
    pub fn heats(&self) -> impl Iterator<Item = (ExpertId, f64)> + '_ {
        self.layers.iter().flat_map(move |l| {
            (0..l.experts.len()).map(move |index| {
                let id = ExpertId { layer: l.layer, index: index as u16 };
                (id, self.heat(id))
            })
        })
    }

    /// Tokens counted in all, undecayed.
    pub fn lifetime_tokens(&self) -> f64 {
        self.lifetime_tokens
    }
}

/// What one use counts at this time.
fn inflation(clock: f64, options: &UsageOptions) -> Counts {
    options.half_lives.map(|half_life| (clock / half_life).exp2())
}

fn divided(counts: &Counts, by: &Counts) -> Counts {
    std::array::from_fn(|i| counts.get(i).zip(by.get(i)).map_or(0.0, |(count, by)| count / by))
}

/// One layer's saved counts.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedLayer {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Decayed counts by expert.
    pub experts: Vec<Counts>,
}

/// Counts as of one moment, to be saved and taken up again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedUsage {
    /// Tokens counted in all.
    pub lifetime_tokens: f64,
    /// Decayed tokens.
    pub tokens: Counts,
    /// Layers, ascending.
    pub layers: Vec<SavedLayer>,
}

impl Usage {
    /// The counts as of now.
    pub fn save(&self) -> SavedUsage {
        let inc = inflation(self.clock, &self.options);
        let now = |counts: &Counts| divided(counts, &inc);
        let layer = |l: &Layer| SavedLayer { layer: l.layer, experts: l.experts.iter().map(now).collect() };
        SavedUsage {
            lifetime_tokens: self.lifetime_tokens,
            tokens: now(&self.tokens),
            layers: self.layers.iter().map(layer).collect(),
        }
    }

    /// Goes on from saved counts.
    pub fn resume(saved: SavedUsage, options: UsageOptions) -> Self {
        let mut usage = Self::new(options);
        usage.lifetime_tokens = saved.lifetime_tokens;
        usage.tokens = saved.tokens;
        let layer = |l: SavedLayer| Layer { layer: l.layer, rows: 0, experts: l.experts };
        usage.layers = saved.layers.into_iter().map(layer).collect();
        usage.layers.sort_by_key(|l| l.layer);
        usage.begin_epoch();
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(layer: u16, index: u16) -> ExpertId {
        ExpertId { layer, index }
    }

    fn token(usage: &mut Usage, expert: u16) {
        for layer in [1, 2] {
            usage.record(layer, 1, [(expert, 1)].into_iter());
        }
    }

    #[test]
    fn heat_is_the_share_of_tokens_that_need_the_expert() {
        let mut usage = Usage::default();
        for i in 0..20_000 {
            token(&mut usage, u16::from(i % 4 == 0));
        }
        assert_eq!(usage.lifetime_tokens(), 20_000.0);
        for layer in [1, 2] {
            let (often, seldom) = (usage.heat(id(layer, 0)), usage.heat(id(layer, 1)));
            assert!((often - 0.75).abs() < 0.05 && (seldom - 0.25).abs() < 0.05, "{often} {seldom}");
        }
        assert_eq!(usage.heat(id(9, 0)), 0.0);
    }

    #[test]
    fn a_new_topic_is_hotter_than_the_old_one_within_two_thousand_tokens() {
        let mut usage = Usage::default();
        (0..100_000).for_each(|_| token(&mut usage, 0));
        (0..2000).for_each(|_| token(&mut usage, 1));
        assert!(usage.heat(id(1, 1)) > usage.heat(id(1, 0)));
    }

    #[test]
    fn unused_experts_keep_their_heat_within_an_epoch() {
        let mut usage = Usage::default();
        (0..5000).for_each(|i| token(&mut usage, i % 3));
        let (epoch, before) = (usage.epoch(), usage.heat(id(1, 2)));
        token(&mut usage, 0);
        assert!(usage.epoch() != epoch || usage.heat(id(1, 2)) == before);
    }

    #[test]
    fn saved_counts_go_on_as_if_nothing_had_happened() {
        let mut usage = Usage::default();
        (0..1234).for_each(|i| token(&mut usage, i % 7));
        let mut again = Usage::resume(usage.save(), UsageOptions::default());
        for i in 0..900 {
            token(&mut usage, i % 5);
            token(&mut again, i % 5);
        }
        for (id, heat) in usage.heats() {
            assert!((again.heat(id) - heat).abs() < 0.02, "{id}: {heat}, again {}", again.heat(id));
        }
    }

    #[test]
    fn one_endless_step_does_not_overflow() {
        let mut usage = Usage::default();
        for _ in 0..3 {
            usage.record(1, 50_000_000, [(0, 50_000_000), (1, 1)].into_iter());
        }
        let (all, one) = (usage.heat(id(1, 0)), usage.heat(id(1, 1)));
        assert!(all.is_finite() && all > one && one >= 0.0, "{all} {one}");
    }
}
