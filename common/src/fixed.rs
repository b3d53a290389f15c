//! Fixed-point sums of expert outputs (rule N5) and their lossless wire form.
//!
//! Packed form: rows one after another; within a row, blocks of 64 values (the last block of a row
//! may be shorter); a block is one byte with the width w, one of 2, 3, 4, 5 or 8, and then its values
//! as w-byte little-endian two's complement. The writer picks the narrowest width that holds all.

use std::sync::{Mutex, PoisonError};

/// Values per packed block.
const BLOCK: usize = 64;

/// Bytes per packed value, narrowest first.
const WIDTHS: [usize; 5] = [2, 3, 4, 5, 8];

/// A single term is clamped to ±2⁵⁵ so that 128 of them cannot overflow an i64 sum.
const MAX_TERM: f64 = (1u64 << 55) as f64;

/// Adding and subtracting this rounds an f64 of magnitude up to 2⁵¹ to the nearest even integer.
const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²

/// `[rows, cols]` partial sums, each an i64 with `fraction_bits` fractional bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedRows {
    rows: usize,
    cols: usize,
    fraction_bits: u8,
    values: Vec<i64>,
}

/// What is wrong with fixed-point data.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FixedError {
    /// An expert produced NaN or infinity.
    #[error("the expert output is not finite at column {col}")]
    NotFinite {
        /// Column of the first bad value.
        col: usize,
    },
    /// Packed bytes do not decode to the promised shape.
    #[error("packed fixed-point block {block} is malformed")]
    Malformed {
        /// Index of the bad block of 64 values.
        block: usize,
    },
}

impl FixedRows {
    /// All-zero sums.
    pub fn zeroed(rows: usize, cols: usize, fraction_bits: u8) -> Self {
        Self { rows, cols, fraction_bits, values: vec![0; rows * cols] }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Fractional bits of every value.
    pub fn fraction_bits(&self) -> u8 {
        self.fraction_bits
    }

    /// The raw sums of one row.
    pub fn row(&self, row: usize) -> &[i64] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// Adds `gate · y` to `row`: f32 product, then one rounding (nearest even) to fixed point.
    ///
    /// A term beyond ±2⁵⁵ units is clamped; sums wrap (they stay associative whatever happens).
    ///
    /// # Errors
    /// [`FixedError::NotFinite`]; the row is unchanged then.
    ///
    /// # Panics
    /// When `row >= rows` or `y.len() != cols`.
    pub fn add_weighted(&mut self, row: usize, gate: f32, y: &[f32]) -> Result<(), FixedError> {
        assert_eq!(y.len(), self.cols, "an expert output has one value per column");
        // Both factors are finite in the common case; a product may still overflow.
        if !y.iter().fold(true, |finite, &y| finite & (gate * y).is_finite()) {
            let col = y.iter().position(|&y| !(gate * y).is_finite()).unwrap_or(0);
            return Err(FixedError::NotFinite { col });
        }
        let unit = power_of_two(i64::from(self.fraction_bits));
        let sums = &mut self.values[row * self.cols..(row + 1) * self.cols];
        for (sum, &y) in sums.iter_mut().zip(y) {
            *sum = sum.wrapping_add(round_term(f64::from(gate * y) * unit));
        }
        Ok(())
    }

    /// Adds another partial sum of the same shape.
    ///
    /// # Panics
    /// When shapes or fraction bits differ.
    pub fn merge(&mut self, other: &FixedRows) {
        let shape = |s: &FixedRows| (s.rows, s.cols, s.fraction_bits);
        assert_eq!(shape(self), shape(other), "partial sums to merge have one shape");
        for (sum, &term) in self.values.iter_mut().zip(&other.values) {
            *sum = sum.wrapping_add(term);
        }
    }

    /// Adds row `i` of `other` to row `rows[i]`: a node's sums for the rows it was sent.
    ///
    /// # Panics
    /// When columns or fraction bits differ, or `rows` does not fit both.
    pub fn merge_rows(&mut self, other: &FixedRows, rows: &[usize]) {
        assert_eq!((self.cols, self.fraction_bits), (other.cols, other.fraction_bits), "sums of one model");
        assert_eq!(rows.len(), other.rows, "one target per row");
        for (i, &row) in rows.iter().enumerate() {
            let sums = &mut self.values[row * self.cols..(row + 1) * self.cols];
            for (sum, &term) in sums.iter_mut().zip(other.row(i)) {
                *sum = sum.wrapping_add(term);
            }
        }
    }

    /// Writes row `row` as f32 into `out` (one rounding to nearest even).
    ///
    /// # Panics
    /// When `row >= rows` or `out.len() != cols`.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "row_to_f32 writes one row");
        // The conversion rounds once; scaling by a power of two this close to one is exact.
        let unit = power_of_two(-i64::from(self.fraction_bits)) as f32;
        for (out, &value) in out.iter_mut().zip(self.row(row)) {
            *out = value as f32 * unit;
        }
    }

    /// Packs every block of 64 values to the narrowest of 2, 3, 4, 5 or 8 bytes per value.
    pub fn pack(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.values.len() * 3 + self.rows * self.cols.div_ceil(BLOCK));
        for row in self.values.chunks(self.cols.max(1)) {
            for block in row.chunks(BLOCK) {
                match width_of(block) {
                    2 => pack_block::<2>(block, &mut bytes),
                    3 => pack_block::<3>(block, &mut bytes),
                    4 => pack_block::<4>(block, &mut bytes),
                    5 => pack_block::<5>(block, &mut bytes),
                    _ => pack_block::<8>(block, &mut bytes),
                }
            }
        }
        bytes
    }

    /// Reverses [`FixedRows::pack`].
    ///
    /// # Errors
    /// [`FixedError::Malformed`] on any length or width that does not fit; never panics.
    pub fn unpack(rows: usize, cols: usize, fraction_bits: u8, bytes: &[u8]) -> Result<Self, FixedError> {
        // No shape may make us allocate more than a small multiple of what was sent.
        let count = rows.checked_mul(cols).filter(|&n| n <= bytes.len() / WIDTHS[0]);
        let Some(count) = count else {
            return Err(FixedError::Malformed { block: 0 });
        };
        let mut values = Vec::with_capacity(count);
        let mut rest = bytes;
        let mut block = 0;
        while values.len() < count {
            let left_in_row = cols - values.len() % cols;
            rest = unpack_block(rest, left_in_row.min(BLOCK), &mut values)
                .ok_or(FixedError::Malformed { block })?;
            block += 1;
        }
        if !rest.is_empty() {
            return Err(FixedError::Malformed { block });
        }
        Ok(Self { rows, cols, fraction_bits, values })
    }
}

/// [`FixedRows`] that many threads add to: one lock per row, held for one addition.
#[derive(Debug)]
pub(crate) struct SharedRows {
    /// Empty until something is added.
    rows: Vec<Mutex<FixedRows>>,
    cols: usize,
    fraction_bits: u8,
}

impl SharedRows {
    /// All-zero sums; a row takes memory when something is added to it.
    pub(crate) fn zeroed(rows: usize, cols: usize, fraction_bits: u8) -> Self {
        let rows = (0..rows).map(|_| Mutex::new(FixedRows::zeroed(0, cols, fraction_bits))).collect();
        Self { rows, cols, fraction_bits }
    }

    /// See [`FixedRows::add_weighted`].
    pub(crate) fn add_weighted(&self, row: usize, gate: f32, y: &[f32]) -> Result<(), FixedError> {
        let mut sums = self.rows[row].lock().unwrap_or_else(PoisonError::into_inner);
        if sums.rows == 0 {
            *sums = FixedRows::zeroed(1, self.cols, self.fraction_bits);
        }
        sums.add_weighted(0, gate, y)
    }

    /// The sums so far, which are taken out.
    pub(crate) fn take(&self) -> FixedRows {
        let mut values = Vec::with_capacity(self.rows.len() * self.cols);
        for (i, row) in self.rows.iter().enumerate() {
            let mut row = row.lock().unwrap_or_else(PoisonError::into_inner);
            let sums = std::mem::replace(&mut *row, FixedRows::zeroed(0, self.cols, self.fraction_bits));
            values.extend(sums.values);
            values.resize((i + 1) * self.cols, 0);
        }
        FixedRows { rows: self.rows.len(), cols: self.cols, fraction_bits: self.fraction_bits, values }
    }
}

/// `2ⁿ` for the exponents of normal numbers.
fn power_of_two(n: i64) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The nearest integer (ties to even) of a finite value, clamped to ±2⁵⁵.
#[inline(always)]
fn round_term(v: f64) -> i64 {
    if v.abs() <= (1u64 << 51) as f64 {
        (v + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i64
    } else {
        // An f32 product scaled by a power of two: an integer at this size.
        v.clamp(-MAX_TERM, MAX_TERM) as i64
    }
}

/// The narrowest width that holds every value of the block.
fn width_of(block: &[i64]) -> usize {
    // For two's complement, v and !v need the same number of bits.
    let bits = block.iter().fold(0, |bits, &v| bits | (v ^ (v >> 63)) as u64);
    let needed_bits = 65 - bits.leading_zeros() as usize;
    WIDTHS.into_iter().find(|w| 8 * w >= needed_bits).unwrap_or(8)
}

/// Appends one block with `WIDTH` bytes per value.
fn pack_block<const WIDTH: usize>(block: &[i64], bytes: &mut Vec<u8>) {
    bytes.push(WIDTH as u8);
    let start = bytes.len();
    bytes.resize(start + block.len() * WIDTH, 0);
    for (packed, value) in bytes[start..].as_chunks_mut::<WIDTH>().0.iter_mut().zip(block) {
        packed.copy_from_slice(&value.to_le_bytes()[..WIDTH]);
    }
}

/// Reads one block of `count` values and returns what follows it.
fn unpack_block<'a>(bytes: &'a [u8], count: usize, values: &mut Vec<i64>) -> Option<&'a [u8]> {
    let (&width, rest) = bytes.split_first()?;
    let width = usize::from(width);
    let (packed, rest) = rest.split_at_checked(count * width)?;
    match width {
        2 => unpack_values::<2>(packed, values),
        3 => unpack_values::<3>(packed, values),
        4 => unpack_values::<4>(packed, values),
        5 => unpack_values::<5>(packed, values),
        8 => unpack_values::<8>(packed, values),
        _ => return None,
    }
    Some(rest)
}

/// Appends values of `WIDTH` bytes each.
fn unpack_values<const WIDTH: usize>(packed: &[u8], values: &mut Vec<i64>) {
    values.extend(packed.as_chunks::<WIDTH>().0.iter().map(|packed| {
        let mut bytes = [0; 8];
        bytes[8 - WIDTH..].copy_from_slice(packed);
        // The arithmetic shift extends the sign.
        i64::from_le_bytes(bytes) >> (64 - 8 * WIDTH)
    }));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn from_values(rows: usize, cols: usize, values: Vec<i64>) -> FixedRows {
        assert_eq!(values.len(), rows * cols);
        FixedRows { rows, cols, fraction_bits: 24, values }
    }

    #[test]
    fn terms_round_half_to_even() {
        let mut sums = FixedRows::zeroed(1, 6, 0);
        sums.add_weighted(0, 1.0, &[0.5, 1.5, 2.5, -0.5, -1.5, 2.4999998]).unwrap();
        assert_eq!(sums.row(0), [0, 2, 2, 0, -2, 2]);
        sums.add_weighted(0, 0.5, &[1.0, 2.0, 3.0, 4.0, 5.0, 1e30]).unwrap();
        assert_eq!(sums.row(0), [0, 3, 4, 2, 0, 2 + (1 << 55)]);
    }

    #[test]
    fn non_finite_terms_are_refused_and_leave_the_row_alone() {
        let mut sums = FixedRows::zeroed(2, 2, 24);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(sums.add_weighted(1, 1.0, &[1.0, bad]), Err(FixedError::NotFinite { col: 1 }));
        }
        assert_eq!(sums.add_weighted(1, 2.0, &[f32::MAX, 0.0]), Err(FixedError::NotFinite { col: 0 }));
        assert_eq!(sums, FixedRows::zeroed(2, 2, 24));
    }

    #[test]
    fn conversion_back_rounds_once() {
        let sums = from_values(1, 3, vec![1 << 24, -(3 << 23), (1 << 40) + 1]);
        let mut out = [0.0; 3];
        sums.row_to_f32(0, &mut out);
        assert_eq!(out, [1.0, -1.5, 65536.0]);
    }

    #[test]
    fn widths_are_the_narrowest() {
        let cases = [
            (0, 2),
            (32767, 2),
            (-32768, 2),
            (32768, 3),
            (-32769, 3),
            (-(1 << 23), 3),
            (1 << 23, 4),
            (i64::from(i32::MIN), 4),
            (1 << 31, 5),
            ((1 << 39) - 1, 5),
            (1 << 39, 8),
            (i64::MIN, 8),
        ];
        for (value, width) in cases {
            assert_eq!(width_of(&[0, value]), width, "{value}");
        }
    }

    #[test]
    fn absurd_shapes_are_refused_without_allocating() {
        for (rows, cols) in [(usize::MAX, 2), (usize::MAX, usize::MAX), (1 << 40, 1), (1, 3)] {
            assert!(FixedRows::unpack(rows, cols, 24, &[2, 0, 0]).is_err());
        }
        assert!(FixedRows::unpack(0, 64, 24, &[]).is_ok());
        assert!(FixedRows::unpack(0, 64, 24, &[2]).is_err());
        assert!(FixedRows::unpack(3, 0, 24, &[]).is_ok());
    }

    #[test]
    fn shared_rows_are_the_same_sums() {
        let (mut alone, shared) = (FixedRows::zeroed(3, 2, 24), SharedRows::zeroed(3, 2, 24));
        for (row, gate) in [(2, 0.5), (0, 2.0), (2, -1.25)] {
            alone.add_weighted(row, gate, &[1.5, -0.3]).unwrap();
            shared.add_weighted(row, gate, &[1.5, -0.3]).unwrap();
        }
        assert!(shared.add_weighted(1, 1.0, &[f32::NAN, 0.0]).is_err());
        assert_eq!(shared.take(), alone);
        assert_eq!(shared.take(), FixedRows::zeroed(3, 2, 24));
    }

    proptest! {
        #[test]
        fn packing_is_lossless(
            rows in 0usize..4,
            cols in 0usize..150,
            seeds in prop::collection::vec((any::<i64>(), 0u32..64), 600),
        ) {
            let values = seeds.iter().map(|&(v, shift)| v >> shift).take(rows * cols).collect();
            let sums = from_values(rows, cols, values);
            let packed = sums.pack();
            prop_assert_eq!(FixedRows::unpack(rows, cols, 24, &packed).unwrap(), sums);
            if let Some(short) = packed.len().checked_sub(1) {
                prop_assert!(FixedRows::unpack(rows, cols, 24, &packed[..short]).is_err());
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            rows in 0usize..5,
            cols in 0usize..200,
            bytes in prop::collection::vec(prop_oneof![Just(2u8), Just(3), Just(8), any::<u8>()], 0..400),
        ) {
            if let Ok(sums) = FixedRows::unpack(rows, cols, 24, &bytes) {
                prop_assert_eq!((sums.rows(), sums.cols()), (rows, cols));
                prop_assert!(sums.pack().len() <= bytes.len());
            }
        }

        #[test]
        fn the_order_of_terms_does_not_matter(
            terms in prop::collection::vec((-4f32..4.0, prop::collection::vec(-1e4f32..1e4, 5)), 1..12),
        ) {
            let add = |order: &mut dyn Iterator<Item = &(f32, Vec<f32>)>| {
                let mut sums = FixedRows::zeroed(1, 5, 24);
                for (gate, y) in order {
                    sums.add_weighted(0, *gate, y).unwrap();
                }
                sums
            };
            let forward = add(&mut terms.iter());
            prop_assert_eq!(&forward, &add(&mut terms.iter().rev()));
            let (a, b) = terms.split_at(terms.len() / 2);
            let mut merged = add(&mut b.iter());
            merged.merge(&add(&mut a.iter()));
            prop_assert_eq!(forward, merged);
        }
    }
}
