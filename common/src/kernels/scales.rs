//! Weight scales of one row in the order the integer kernels take them.

use super::activations::GROUP;
use super::arrange::QUAD_GROUPS;
use crate::math::LANES;
use crate::quant::{Format, MatrixRef};

/// The scales of one row, one per 64 columns.
#[derive(Default)]
pub(super) struct GroupScales {
    repeated: Vec<f32>,
}

impl GroupScales {
    /// The scales of a row of `w` whose groups are 64 columns or a multiple of that.
    #[inline(always)]
    pub(super) fn of_row<'a>(&'a mut self, w: MatrixRef<'_>, scales: &'a [f32]) -> &'a [f32] {
        if columns_per_scale(w.format) == GROUP {
            return scales;
        }
        self.repeat(w, scales);
        &self.repeated
    }

    fn repeat(&mut self, w: MatrixRef<'_>, scales: &[f32]) {
        let repeat = columns_per_scale(w.format) / GROUP;
        self.repeated.clear();
        for &scale in scales {
            self.repeated.extend(std::iter::repeat_n(scale, repeat));
        }
        self.repeated.truncate(w.cols.div_ceil(GROUP));
    }
}

/// Columns per scale of a format with scales in groups of a multiple of 64.
fn columns_per_scale(format: Format) -> usize {
    match format {
        Format::Int4Grouped { group } => group as usize,
        _ => GROUP,
    }
}

/// The scales of one row with groups of a multiple of 32 columns: those of the first halves of the groups of 64,
/// and of the last.
#[derive(Default)]
pub(super) struct HalfScales {
    halves: [Vec<[f32; LANES]>; 2],
}

impl HalfScales {
    /// 16 groups of 64 at a time; zero beyond the last scale.
    pub(super) fn of_row(&mut self, scales: &[f32], group: usize, cols: usize) -> [&[[f32; LANES]]; 2] {
        let groups = cols.div_ceil(GROUP);
        let per_scale = group / (GROUP / 2);
        for (half, padded) in self.halves.iter_mut().enumerate() {
            padded.clear();
            padded.resize(groups.div_ceil(LANES), [0.0; LANES]);
            let padded = &mut padded.as_flattened_mut()[..groups];
            if per_scale == 1 {
                for (padded, pair) in padded.iter_mut().zip(scales.chunks(2)) {
                    *padded = pair.get(half).copied().unwrap_or(0.0);
                }
            } else {
                for (g, padded) in padded.iter_mut().enumerate() {
                    *padded = scales.get((2 * g + half) / per_scale).copied().unwrap_or(0.0);
                }
            }
        }
        [&self.halves[0], &self.halves[1]]
    }
}

/// The scales of one nibble row, one per stripe of 8 columns.
#[derive(Default)]
pub(super) struct StripeScales {
    /// In column order.
    columns: Vec<f32>,
    quads: Vec<[[f32; LANES]; 2]>,
}

impl StripeScales {
    /// Per quad and half of its groups, the scale of stripe `s` of group `g` in lane `4·g + s`; zero beyond the
    /// last scale. `group` is a multiple of 8.
    pub(super) fn of_row(&mut self, scales: &[f32], group: usize, quads: usize) -> &[[[f32; LANES]; 2]] {
        self.columns.clear();
        for &scale in scales {
            self.columns.extend(std::iter::repeat_n(scale, group / 8));
        }
        self.columns.resize(quads * QUAD_GROUPS * 8, 0.0);
        self.quads.clear();
        self.quads.extend(self.columns.as_chunks::<{ QUAD_GROUPS * 8 }>().0.iter().map(|columns| {
            let mut quad = [[0.0; LANES]; 2];
            for (i, stripes) in columns.as_chunks::<4>().0.iter().enumerate() {
                quad[i % 2][i / 2 * 4..i / 2 * 4 + 4].copy_from_slice(stripes);
            }
            quad
        }));
        &self.quads
    }
}
