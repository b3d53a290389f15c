//! Made-up traces: skewed popularity, independent draws, layer after layer as in decoding.

use std::io::Write;
use std::str::FromStr;

use super::trace::{LayerShape, RouteBatch, TraceError, TraceEvent, TraceShape, TraceWriter};

/// A model whose experts have Zipf popularity: the one of rank `r` (from 0) weighs `(r + 1)^-s`. Every layer
/// draws its own ranks. A token's experts are drawn without replacement in proportion to their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Skew; 0 is uniform.
    pub skew: f64,
    /// Layers with routed experts.
    pub layers: u16,
    /// Experts per layer.
    pub experts: u16,
    /// Experts per token and layer.
    pub topk: u16,
    /// Tokens per phase.
    pub tokens: u32,
    /// Probability that an expert of the token before is kept (temporal locality).
    pub locality: f64,
    /// Random seed.
    pub seed: u64,
}

impl FromStr for Synthetic {
    type Err = String;

    /// `zipf:SKEW,LAYERS,EXPERTS,TOPK,TOKENS,SEED[,LOCALITY]`.
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write zipf:SKEW,LAYERS,EXPERTS,TOPK,TOKENS,SEED[,LOCALITY]";
        let fields = text.strip_prefix("zipf:").ok_or(FORM)?;
        let fields: Vec<f64> =
            fields.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| FORM.to_owned())?;
        let (main, locality) = match fields.as_slice() {
            [main @ .., locality] if fields.len() == 7 => (main, *locality),
            main => (main, 0.0),
        };
        let [skew, layers, experts, topk, tokens, seed] = *main else { return Err(FORM.to_owned()) };
        let whole = |value: f64, name: &str, max: f64| {
            let fits = (1.0..=max).contains(&value) && value.fract() == 0.0;
            if fits { Ok(value) } else { Err(format!("{name} must be a whole number from 1 to {max}")) }
        };
        if !(0.0..=10.0).contains(&skew) || !(0.0..1.0).contains(&locality) {
            return Err("the skew goes from 0 to 10, the locality from 0 to below 1".to_owned());
        }
        let experts = whole(experts, "EXPERTS", 65535.0)?;
        Ok(Self {
            skew,
            layers: whole(layers, "LAYERS", 4096.0)? as u16,
            experts: experts as u16,
            topk: whole(topk, "TOPK", experts)? as u16,
            tokens: whole(tokens, "TOKENS", 1e8)? as u32,
            locality,
            seed: seed as u64,
        })
    }
}

impl Synthetic {
    /// The shape of the model.
    pub fn shape(&self) -> TraceShape {
        let layer = |layer| LayerShape { layer, experts: self.experts.into(), record_bytes: 1 << 20 };
        TraceShape { model: String::new(), layers: (0..self.layers).map(layer).collect() }
    }

    /// Calls `event` for a first session, a second one of the same kind, and a change of topic (new ranks)
    /// within it.
    ///
    /// # Errors
    /// Those of `event`.
    pub fn events<E>(&self, event: &mut dyn FnMut(TraceEvent) -> Result<(), E>) -> Result<(), E> {
        let mut random = Random(self.seed);
        let mut weights = self.popularity(&mut random);
        for (mark, new_topic) in [("session", false), ("session", false), ("topic", true)] {
            if new_topic {
                weights = self.popularity(&mut random);
            }
            event(TraceEvent::Mark(mark.to_owned()))?;
            let mut last = vec![Vec::new(); usize::from(self.layers)];
            for _ in 0..self.tokens {
                for (layer, (weights, last)) in weights.iter().zip(&mut last).enumerate() {
                    *last = self.draw(weights, last, &mut random);
                    event(TraceEvent::Batch(RouteBatch { layer: layer as u16, rows: vec![last.clone()] }))?;
                }
            }
        }
        Ok(())
    }

    /// Writes the events as a trace.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn write<W: Write>(&self, out: W) -> Result<W, TraceError> {
        let mut writer = TraceWriter::new(out, &self.shape())?;
        self.events(&mut |event| writer.write(&event))?;
        writer.finish()
    }

    /// Per layer and expert the weight.
    fn popularity(&self, random: &mut Random) -> Vec<Vec<f64>> {
        let layer = |random: &mut Random| {
            let mut weights: Vec<f64> =
                (0..self.experts).map(|rank| (f64::from(rank) + 1.0).powf(-self.skew)).collect();
            for i in (1..weights.len()).rev() {
                weights.swap(i, (random.unit() * (i + 1) as f64) as usize);
            }
            weights
        };
        (0..self.layers).map(|_| layer(random)).collect()
    }

    /// The experts with the largest `log weight + Gumbel noise`: successive draws without replacement.
    fn draw(&self, weights: &[f64], last: &[u16], random: &mut Random) -> Vec<u16> {
        let mut keys: Vec<(f64, u16)> = weights
            .iter()
            .enumerate()
            .map(|(expert, weight)| {
                let expert = expert as u16;
                let gumbel = -(-random.unit().ln()).ln();
                let kept = last.contains(&expert) && random.unit() < self.locality;
                (if kept { f64::MAX } else { weight.ln() + gumbel }, expert)
            })
            .collect();
        let topk = usize::from(self.topk);
        if topk < keys.len() {
            keys.select_nth_unstable_by(topk, |a, b| b.0.total_cmp(&a.0));
            keys.truncate(topk);
        }
        let mut row: Vec<u16> = keys.into_iter().map(|(_, expert)| expert).collect();
        row.sort_unstable();
        row
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    /// Evenly distributed in 0 to 1, both excluded.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popular_experts_are_drawn_more_often_and_everything_repeats() {
        let synthetic: Synthetic = "zipf:1.2,2,16,4,500,7".parse().unwrap();
        let mut uses = [0u32; 16];
        let mut events = Vec::new();
        synthetic
            .events::<()>(&mut |event| {
                events.push(event);
                Ok(())
            })
            .unwrap();
        assert_eq!(events.len(), 3 + 3 * 2 * 500);
        let first_session = events.iter().skip(1).take(1000);
        for event in first_session {
            let TraceEvent::Batch(batch) = event else { panic!("a mark") };
            assert!(batch.rows[0].len() == 4 && batch.rows[0].is_sorted());
            for &id in batch.rows.iter().flatten().filter(|_| batch.layer == 0) {
                uses[usize::from(id)] += 1;
            }
        }
        uses.sort_unstable();
        // Drawn first with probability 1 of 2.6 and hardly ever left out by four draws; the last, seldom.
        assert!(uses[15] > 440 && uses[0] < 60, "{uses:?}");
        let bytes = synthetic.write(Vec::new()).unwrap();
        assert_eq!(bytes, synthetic.write(Vec::new()).unwrap());
    }

    #[test]
    fn descriptions_are_checked() {
        for bad in ["zipf", "zipf:1,2,3", "zipf:1,2,8,9,5,1", "zipf:99,2,8,2,5,1", "zipf:1,2.5,8,2,5,1"] {
            assert!(bad.parse::<Synthetic>().is_err(), "{bad}");
        }
    }
}
