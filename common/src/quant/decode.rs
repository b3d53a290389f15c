//! Element decoders: the float formats in chunks of 16 columns, the integer formats by rows.

use super::{Format, MatrixRef};
use crate::math::LANES;

/// Columns and rows that share one scale of [`Format::Fp8Block`].
pub(crate) const FP8_BLOCK: usize = 128;

/// Decodes 16 neighbouring elements of one row of a float format, exactly as [`MatrixRef::decode_row`].
///
/// `BYTES` is the size of 16 elements. All-zero bytes must decode to zeros: tails are padded so.
pub(crate) trait ChunkDecoder<const BYTES: usize>: Copy {
    /// Elements `16 · index ..` of the row, stored in `bytes`.
    fn decode(self, bytes: &[u8; BYTES], index: usize) -> [f32; LANES];
}

/// [`Format::F32`].
#[derive(Clone, Copy)]
pub(crate) struct F32;

/// [`Format::F16`].
#[derive(Clone, Copy)]
pub(crate) struct F16;

/// [`Format::Bf16`].
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

/// [`Format::Fp8Block`] with the scales of the row's blocks.
#[derive(Clone, Copy)]
pub(crate) struct Fp8<'a> {
    /// One scale per 128 columns.
    pub(crate) scales: &'a [f32],
}

impl ChunkDecoder<64> for F32 {
    #[inline(always)]
    fn decode(self, bytes: &[u8; 64], _index: usize) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        out
    }
}

impl ChunkDecoder<32> for F16 {
    #[inline(always)]
    fn decode(self, bytes: &[u8; 32], _index: usize) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f16_to_f32(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
        }
        out
    }
}

impl ChunkDecoder<32> for Bf16 {
    #[inline(always)]
    fn decode(self, bytes: &[u8; 32], _index: usize) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])) << 16);
        }
        out
    }
}

impl ChunkDecoder<16> for Fp8<'_> {
    #[inline(always)]
    fn decode(self, bytes: &[u8; 16], index: usize) -> [f32; LANES] {
        let scale = self.scales[index * LANES / FP8_BLOCK];
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = e4m3_to_f32(bytes[i]) * scale;
        }
        out
    }
}

/// IEEE half to f32, exact, without branches so that it vectorises.
#[inline(always)]
fn f16_to_f32(h: u16) -> f32 {
    let magnitude = u32::from(h & 0x7fff);
    let rebias = if magnitude >= 0x7c00 { (255 - 31) << 23 } else { (127 - 15) << 23 };
    let normal = (magnitude << 13) + rebias;
    // Subnormals: put the fraction under an implicit one, then take the one away.
    let one = (127 - 14) << 23;
    let subnormal = (f32::from_bits((magnitude << 13) + one) - f32::from_bits(one)).to_bits();
    let bits = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(bits | u32::from(h & 0x8000) << 16)
}

/// e4m3fn to f32, exact: bias 7, subnormals `m · 2⁻⁹`, 0x7F and 0xFF are NaN, no infinities.
#[inline(always)]
pub(crate) fn e4m3_to_f32(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7f);
    let normal = (magnitude << 20) + ((127 - 7) << 23);
    let one = (127 - 6) << 23;
    let subnormal = (f32::from_bits((magnitude << 20) + one) - f32::from_bits(one)).to_bits();
    let bits = if magnitude < 0x08 { subnormal } else { normal };
    let bits = if magnitude == 0x7f { 0x7fc0_0000 } else { bits };
    f32::from_bits(bits | u32::from(byte & 0x80) << 24)
}

/// Writes the decoded row into `out`, whose length is the number of columns.
#[inline(always)]
pub(crate) fn decode_chunks<const BYTES: usize>(
    decoder: impl ChunkDecoder<BYTES>,
    bytes: &[u8],
    out: &mut [f32],
) {
    let (chunks, tail) = bytes.as_chunks::<BYTES>();
    let (out_chunks, out_tail) = out.as_chunks_mut::<LANES>();
    for (i, (bytes, out)) in chunks.iter().zip(out_chunks).enumerate() {
        *out = decoder.decode(bytes, i);
    }
    if !out_tail.is_empty() {
        let mut padded = [0; BYTES];
        padded[..tail.len()].copy_from_slice(tail);
        out_tail.copy_from_slice(&decoder.decode(&padded, chunks.len())[..out_tail.len()]);
    }
}

impl<'a> MatrixRef<'a> {
    /// The weight bytes of one row.
    ///
    /// # Panics
    /// When `row >= rows`.
    pub fn row_weights(&self, row: usize) -> &'a [u8] {
        let bytes = self.format.row_bytes(self.cols);
        &self.weights[row * bytes..(row + 1) * bytes]
    }

    /// The scales that apply to one row: one (`*-row`), one per group, one per 128 columns (fp8), or none.
    ///
    /// # Panics
    /// When `row >= rows`.
    pub fn row_scales(&self, row: usize) -> &'a [f32] {
        let (index, per_row) = match self.format {
            Format::F32 | Format::F16 | Format::Bf16 => return &[],
            Format::Fp8Block => (row / FP8_BLOCK, self.cols.div_ceil(FP8_BLOCK)),
            Format::Int8Row | Format::Int4Row | Format::Int2Row => (row, 1),
            Format::Int4Grouped { group } => (row, self.cols.div_ceil(group as usize)),
            Format::Int3G64 => (row, self.cols.div_ceil(64)),
        };
        &self.scales[index * per_row..(index + 1) * per_row]
    }

    /// Writes the dequantised row `row` (`cols` values, each rounded once to f32) into `out`.
    ///
    /// # Panics
    /// When `row >= rows` or `out.len() != cols`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        decode_row_body(self, row, out);
    }
}

/// See [`MatrixRef::decode_row`]; compiled for the instruction set it is inlined into.
#[inline(always)]
pub(crate) fn decode_row_body(matrix: &MatrixRef<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), matrix.cols, "decode_row writes one row");
    let (bytes, scales) = (matrix.row_weights(row), matrix.row_scales(row));
    match matrix.format {
        Format::F32 => decode_chunks(F32, bytes, out),
        Format::F16 => decode_chunks(F16, bytes, out),
        Format::Bf16 => decode_chunks(Bf16, bytes, out),
        Format::Fp8Block => decode_chunks(Fp8 { scales }, bytes, out),
        Format::Int8Row => {
            for (out, &b) in out.iter_mut().zip(bytes) {
                *out = f32::from(b as i8) * scales[0];
            }
        }
        Format::Int4Row => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = nibble(bytes, i) * scales[0];
            }
        }
        Format::Int4Grouped { group } => {
            let group = group as usize;
            for ((g, out), &scale) in out.chunks_mut(group).enumerate().zip(scales) {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = nibble(bytes, g * group + i) * scale;
                }
            }
        }
        Format::Int3G64 => {
            for ((bytes, out), &scale) in bytes.chunks_exact(24).zip(out.chunks_mut(64)).zip(scales) {
                for (k, out) in out.iter_mut().enumerate() {
                    *out = f32::from(int3(bytes, k)) * scale;
                }
            }
        }
        Format::Int2Row => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = f32::from(int2(bytes, i)) * scales[0];
            }
        }
    }
}

/// Element `i` of a nibble row: even columns low, odd columns high, minus 8.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> f32 {
    f32::from((bytes[i / 2] >> (4 * (i % 2)) & 15) as i8 - 8)
}

/// Element `i` of an `int2-row` row.
#[inline(always)]
fn int2(bytes: &[u8], i: usize) -> i8 {
    (bytes[i / 4] >> (2 * (i % 4)) & 3) as i8 - 2
}

/// Element `k` of a 24-byte `int3-g64` group: 2 low bits in the first 16 bytes, the high bit in the rest.
#[inline(always)]
fn int3(group: &[u8], k: usize) -> i8 {
    let low = group[k / 4] >> (2 * (k % 4)) & 3;
    let high = group[16 + k / 8] >> (k % 8) & 1;
    (low + 4 * high) as i8 - 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_decodes_exactly() {
        for bits in 0..=u16::MAX {
            let (got, want) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(got == want || (got.is_nan() && want.is_nan()), "{bits:#06x}: {got} against {want}");
            assert_eq!(got.is_sign_negative(), want.is_sign_negative());
        }
    }

    #[test]
    fn every_e4m3_decodes_by_the_definition() {
        for byte in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let magnitude = match (exponent, byte & 7) {
                (15, 7) => f64::NAN,
                (0, _) => mantissa / 512.0,
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let want = if byte & 0x80 == 0 { magnitude } else { -magnitude };
            let got = f64::from(e4m3_to_f32(byte));
            assert!(got == want || (got.is_nan() && want.is_nan()), "{byte:#04x}: {got} against {want}");
        }
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
    }

    #[test]
    fn float_rows_decode_with_odd_widths() {
        let values: Vec<f32> = (0..37).map(|i| i as f32 * 0.25 - 4.0).collect();
        let f32_bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let f16_bytes: Vec<u8> = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
        let bf16_bytes: Vec<u8> =
            values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
        for (format, bytes) in
            [(Format::F32, f32_bytes), (Format::F16, f16_bytes), (Format::Bf16, bf16_bytes)]
        {
            let mut out = vec![0.0; 37];
            MatrixRef::new(format, 1, 37, &bytes, &[]).unwrap().decode_row(0, &mut out);
            assert_eq!(out, values, "{format}");
        }
    }

    #[test]
    fn fp8_scales_apply_by_block() {
        let (rows, cols) = (130, 131);
        let bytes = vec![0x38; rows * cols]; // 1.0
        let scales = [1.0, 2.0, 3.0, 4.0];
        let m = MatrixRef::new(Format::Fp8Block, rows, cols, &bytes, &scales).unwrap();
        let mut out = vec![0.0; cols];
        m.decode_row(127, &mut out);
        assert_eq!((out[0], out[127], out[128], out[130]), (1.0, 1.0, 2.0, 2.0));
        m.decode_row(128, &mut out);
        assert_eq!((out[0], out[127], out[128], out[130]), (3.0, 3.0, 4.0, 4.0));
    }
}
