//! What the rows of one step share: their positions, angles and visible keys.

use shimmer_common::math::{Rope, RopeAngles};

use super::lookahead::Guesses;

/// Rows at consecutive positions on their way through the layers.
pub(super) struct Step {
    /// Position of the first row.
    pub start: usize,
    /// Rotary angles of every row.
    pub angles: Vec<RopeAngles>,
    /// The cached positions each row attends to.
    pub selection: Selection,
    /// Experts guessed for coming layers.
    pub guesses: Guesses,
    /// `0..start + rows`, so that "everything up to me" is a slice like any other selection.
    positions: Vec<u32>,
}

impl Step {
    /// `rows` rows from position `start` on, each seeing everything up to itself.
    pub fn new(rope: &Rope, start: usize, rows: usize) -> Self {
        let end = start + rows;
        Self {
            start,
            angles: (start..end).map(|p| rope.angles(p)).collect(),
            selection: Selection::all(rows),
            guesses: Guesses::default(),
            positions: (0..end as u32).collect(),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.angles.len()
    }

    /// The cached positions row `r` attends to, ascending.
    pub fn visible(&self, r: usize) -> &[u32] {
        match &self.selection.rows[r] {
            Some(selected) => selected,
            None => &self.positions[..=self.start + r],
        }
    }

    /// Keys visible to all rows together, at most: the size of the attention's work.
    pub fn visible_total(&self) -> usize {
        (0..self.rows()).map(|r| self.visible(r).len()).sum()
    }
}

/// Per row, the selected positions in ascending order; `None` is every position up to the row itself.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Selection {
    /// One entry per row.
    pub rows: Vec<Option<Vec<u32>>>,
}

impl Selection {
    /// Everything visible for each of `rows` rows.
    pub fn all(rows: usize) -> Self {
        Self { rows: vec![None; rows] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_sees_itself_and_what_precedes_it_unless_positions_were_selected() {
        let mut step = Step::new(&Rope { inv_freq: vec![1.0] }, 2, 3);
        assert_eq!(step.visible(0), [0, 1, 2]);
        assert_eq!(step.visible_total(), 3 + 4 + 5);
        step.selection.rows[2] = Some(vec![1, 4]);
        assert_eq!(step.visible(2), [1, 4]);
    }
}
