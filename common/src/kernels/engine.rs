//! What an instruction set has to offer the integer kernels of [`super::integer`].

use super::integer::IntTask;
use crate::math::{LANES, Stripes, load_lanes};

/// One way to compute a task.
pub(super) trait Kernel {
    /// Computes the task with the instructions enabled where this is inlined.
    fn run<E: Engine>(e: E, task: IntTask<'_, '_>);
}

/// Vectors of codes and their products, beside the vectors of 16 floats of [`Stripes`].
///
/// Weight codes are unsigned and at most 15, except where `bytes` is set: then they are the bytes of int8
/// weights in whatever form [`Engine::int8`] makes. `bytes` is a constant wherever it is passed.
pub(super) trait Engine: Stripes {
    /// 64 codes.
    type Codes: Copy;
    /// Sums of products on their way to 16 stripe sums.
    type Sums: Copy;

    /// Runs a kernel in a function of its own. Together they would need more than 4 KiB of stack, and processors
    /// tell by the lower 12 bits of an address whether a load wants what was stored a moment ago: that costs a
    /// few dozen cycles each time two places on the stack are 4 KiB apart.
    #[inline(always)]
    fn apart<K: Kernel>(self, task: IntTask<'_, '_>) {
        K::run(self, task);
    }

    /// The codes of a quad of nibbles (see [`super::arrange`] for their places, here and below).
    fn int4(self, bytes: &[u8; 128]) -> [Self::Codes; 4];
    /// The codes of a quad of int8.
    fn int8(self, bytes: &[u8; 256]) -> [Self::Codes; 4];
    /// The codes of a quad of bit pairs.
    fn int2(self, bytes: &[u8; 64]) -> [Self::Codes; 4];
    /// The codes of a quad of 3-bit values.
    fn int3(self, bytes: &[u8; 96]) -> [Self::Codes; 4];
    /// Reads codes back.
    fn load_codes(self, codes: &[u8; 64]) -> Self::Codes;
    /// Stores codes.
    fn store_codes(self, codes: Self::Codes, out: &mut [u8; 64]);
    /// The same code 64 times.
    fn splat_code(self, code: u8) -> Self::Codes;

    /// Sums that will be finished with the same offsets.
    fn begin(self, offsets: &[i32; LANES]) -> Self::Sums;
    /// Adds 64 products; at most four times.
    fn add(self, bytes: bool, codes: Self::Codes, x: &[i8; 64], sums: Self::Sums) -> Self::Sums;
    /// The sums of a whole quad.
    #[inline(always)]
    fn add_quad(
        self,
        bytes: bool,
        codes: &[Self::Codes; 4],
        x: &[[i8; 64]; 4],
        offsets: &[i32; LANES],
    ) -> Self::Sums {
        let sums = self.add(bytes, codes[0], &x[0], self.begin(offsets));
        let sums = self.add(bytes, codes[1], &x[1], sums);
        let sums = self.add(bytes, codes[2], &x[2], sums);
        self.add(bytes, codes[3], &x[3], sums)
    }
    /// The exact stripe sums of values (not codes) as floats.
    fn finish(self, bytes: bool, sums: Self::Sums, offsets: &[i32; LANES]) -> Self::Acc;

    /// The first 16 floats; as many as there are and zeros where there are fewer.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::Acc {
        match x.first_chunk() {
            Some(x) => self.load(x),
            None => self.load(&load_lanes(x)),
        }
    }

    /// Lanes `4k .. 4k + 4` of a vector of group scales, each to the four stripes of its group.
    fn spread(self, scales: Self::Acc, k: usize) -> Self::Acc;
}
