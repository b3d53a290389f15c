//! Which experts somebody holds: one bit per expert, in the layout's order.

use std::collections::BTreeMap;

use shimmer_common::experts::{ExpertId, ExpertLayout};

use super::WireError;

/// A set of experts of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Number of the first expert of each layer, and the layer's expert count.
    starts: BTreeMap<u16, (usize, usize)>,
    bits: Vec<u8>,
    experts: usize,
}

impl Held {
    /// The empty set.
    pub fn none(layout: &ExpertLayout) -> Self {
        let mut starts = BTreeMap::new();
        let mut experts = 0usize;
        for (&layer, specs) in &layout.layers {
            starts.insert(layer, (experts, specs.len()));
            experts += specs.len();
        }
        Self { starts, bits: vec![0; experts.div_ceil(8)], experts }
    }

    /// Reads the wire form.
    ///
    /// # Errors
    /// [`WireError`] when the length is not that of the layout or a bit past the last expert is set.
    pub fn from_wire(layout: &ExpertLayout, bytes: &[u8]) -> Result<Self, WireError> {
        Self::none(layout).another(bytes)
    }

    /// Reads the wire form of another set of the same model.
    ///
    /// # Errors
    /// As [`Held::from_wire`].
    pub fn another(&self, bytes: &[u8]) -> Result<Self, WireError> {
        let mut held = self.clone();
        if bytes.len() != held.bits.len() {
            let what = format!("{} bytes for {} experts", bytes.len(), held.experts);
            return Err(WireError::new("expert set", what));
        }
        let used = held.experts % 8;
        if used != 0 && bytes.last().is_some_and(|&b| b >> used != 0) {
            return Err(WireError::new("expert set", "bits past the last expert are set"));
        }
        held.bits.copy_from_slice(bytes);
        Ok(held)
    }

    /// The wire form.
    pub fn to_wire(&self) -> bytes::Bytes {
        bytes::Bytes::copy_from_slice(&self.bits)
    }

    fn number(&self, id: ExpertId) -> Option<usize> {
        let &(start, count) = self.starts.get(&id.layer)?;
        (usize::from(id.index) < count).then(|| start + usize::from(id.index))
    }

    /// Adds an expert; unknown experts are ignored.
    pub fn insert(&mut self, id: ExpertId) {
        if let Some(n) = self.number(id)
            && let Some(byte) = self.bits.get_mut(n / 8)
        {
            *byte |= 1 << (n % 8);
        }
    }

    /// Removes an expert.
    pub fn remove(&mut self, id: ExpertId) {
        if let Some(n) = self.number(id)
            && let Some(byte) = self.bits.get_mut(n / 8)
        {
            *byte &= !(1 << (n % 8));
        }
    }

    /// Whether the set has `id`.
    pub fn contains(&self, id: ExpertId) -> bool {
        self.number(id).and_then(|n| Some(self.bits.get(n / 8)? >> (n % 8) & 1 == 1)).unwrap_or(false)
    }

    /// Number of experts in the set.
    pub fn len(&self) -> usize {
        self.bits.iter().map(|b| b.count_ones() as usize).sum()
    }

    /// Whether the set has no expert.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|&b| b == 0)
    }

    /// Whether some expert is in both sets.
    pub fn meets(&self, other: &Held) -> bool {
        self.bits.iter().zip(&other.bits).any(|(&a, &b)| a & b != 0)
    }

    /// Whether every expert of `other` is in this set.
    pub fn covers(&self, other: &Held) -> bool {
        self.bits.len() == other.bits.len() && self.bits.iter().zip(&other.bits).all(|(&a, &b)| a & b == b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;

    #[test]
    fn sets_survive_the_wire_and_bad_lengths_do_not() {
        let layout = synthetic_layout(64, 64, &[1, 2], 5);
        let mut held = Held::none(&layout);
        let id = ExpertId { layer: 2, index: 4 };
        held.insert(id);
        held.insert(ExpertId { layer: 9, index: 0 });
        held.insert(ExpertId { layer: 1, index: 1 });
        held.remove(ExpertId { layer: 1, index: 1 });
        assert_eq!(held.len(), 1);
        let wire = held.to_wire();
        let back = Held::from_wire(&layout, &wire).unwrap();
        assert!(back.meets(&held) && !back.meets(&Held::none(&layout)));
        assert!(back.contains(id) && back.covers(&held) && held.covers(&Held::none(&layout)));
        assert!(!back.contains(ExpertId { layer: 2, index: 5 }));
        assert!(Held::from_wire(&layout, &wire[..1]).is_err());
        assert!(Held::from_wire(&layout, &[0, 0x04]).is_err(), "bit 10 of ten experts");
    }
}
