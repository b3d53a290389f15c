//! Writers of the storage formats, byte for byte as the container's converter (docs/formats.md §4.2).
//!
//! All arithmetic is f32: `s = max(amax / q, 1e-8)` with `q` = 127, 7, 3, 1 for 8, 4, 3, 2 bits and
//! `amax` over the row or group; `v = clip(round_half_even(w / s), −q−1, q)`.

use super::Format;

/// Why a row cannot be written in a format.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EncodeError {
    /// There is no writer for the format.
    #[error("matrices cannot be written as {format}; choose an integer format, bf16, f16 or f32")]
    Unsupported {
        /// The refused format.
        format: Format,
    },
    /// A weight is NaN or infinite.
    #[error("the weight in column {col} is not finite; the source matrix is damaged")]
    NotFinite {
        /// Column of the first bad weight.
        col: usize,
    },
}

/// Appends one row to a matrix under construction: payload to `weights`, scales to `scales`.
///
/// # Errors
/// [`EncodeError`]; nothing is appended then.
pub fn encode_row(
    format: Format,
    row: &[f32],
    weights: &mut Vec<u8>,
    scales: &mut Vec<f32>,
) -> Result<(), EncodeError> {
    if format == Format::Fp8Block {
        return Err(EncodeError::Unsupported { format });
    }
    if let Some(col) = row.iter().position(|v| !v.is_finite()) {
        return Err(EncodeError::NotFinite { col });
    }
    weights.reserve(format.row_bytes(row.len()));
    match format {
        Format::F32 => weights.extend(row.iter().flat_map(|v| v.to_le_bytes())),
        Format::F16 => weights.extend(row.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes())),
        Format::Bf16 => weights.extend(row.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())),
        Format::Fp8Block => unreachable!("refused above"),
        Format::Int8Row => {
            let scale = Scale::of(row, 127);
            scales.push(scale.scale);
            weights.extend(row.iter().map(|&w| scale.quantize(w) as u8));
        }
        Format::Int4Row => encode_nibbles(row, row.len().max(1), weights, scales),
        Format::Int4Grouped { group } => encode_nibbles(row, group as usize, weights, scales),
        Format::Int3G64 => encode_int3(row, weights, scales),
        Format::Int2Row => {
            let scale = Scale::of(row, 1);
            scales.push(scale.scale);
            weights.extend(row.chunks(4).map(|chunk| {
                // Bits of missing columns are 0.
                let value = |i: usize| chunk.get(i).map_or(0, |&w| (scale.quantize(w) + 2) as u8);
                value(0) | value(1) << 2 | value(2) << 4 | value(3) << 6
            }));
        }
    }
    Ok(())
}

/// Encodes a whole `[rows, cols]` matrix: its weight payload and scales.
///
/// # Errors
/// [`EncodeError`].
///
/// # Panics
/// When `values.len() != rows * cols`.
pub fn encode(
    format: Format,
    rows: usize,
    cols: usize,
    values: &[f32],
) -> Result<(Vec<u8>, Vec<f32>), EncodeError> {
    assert_eq!(values.len(), rows * cols, "a matrix has rows · cols values");
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    for row in 0..rows {
        encode_row(format, &values[row * cols..(row + 1) * cols], &mut weights, &mut scales)?;
    }
    Ok((weights, scales))
}

/// One scale and the range it serves.
struct Scale {
    scale: f32,
    max: f32,
}

impl Scale {
    /// The scale of `values` for integers up to `max`.
    fn of(values: &[f32], max: u8) -> Self {
        let max = f32::from(max);
        let amax = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        Self { scale: (amax / max).max(1e-8), max }
    }

    /// The nearest integer (ties to even) in `-max-1..=max`.
    fn quantize(&self, w: f32) -> i8 {
        (w / self.scale).round_ties_even().clamp(-self.max - 1.0, self.max) as i8
    }
}

/// Nibbles with one scale per `group` columns; the bits of a missing last column are 0.
fn encode_nibbles(row: &[f32], group: usize, weights: &mut Vec<u8>, scales: &mut Vec<f32>) {
    let groups: Vec<Scale> = row.chunks(group).map(|values| Scale::of(values, 7)).collect();
    scales.extend(groups.iter().map(|g| g.scale));
    let nibble = |i: usize| row.get(i).map_or(0, |&w| (groups[i / group].quantize(w) + 8) as u8);
    weights.extend((0..row.len().div_ceil(2)).map(|k| nibble(2 * k) | nibble(2 * k + 1) << 4));
}

/// 24 bytes per 64 columns: 16 of low bits, 8 of high bits; missing columns are written as the value 0.
fn encode_int3(row: &[f32], weights: &mut Vec<u8>, scales: &mut Vec<f32>) {
    for values in row.chunks(64) {
        let scale = Scale::of(values, 3);
        scales.push(scale.scale);
        let mut bytes = [0u8; 24];
        for k in 0..64 {
            let u = (values.get(k).map_or(0, |&w| scale.quantize(w)) + 4) as u8;
            bytes[k / 4] |= (u & 3) << (2 * (k % 4));
            bytes[16 + k / 8] |= (u >> 2) << (k % 8);
        }
        weights.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::MatrixRef;
    use super::*;

    /// Irregular weights with large and tiny values.
    fn sample(len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * if i % 50 == 0 { 3.0 } else { 0.4 })
            .collect()
    }

    const INTEGER: [Format; 6] = [
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Grouped { group: 64 },
        Format::Int4Grouped { group: 48 },
        Format::Int3G64,
        Format::Int2Row,
    ];

    #[test]
    fn decoding_is_within_half_a_step() {
        for format in INTEGER {
            for cols in [1, 64, 131, 256] {
                let values = sample(3 * cols);
                let (weights, scales) = encode(format, 3, cols, &values).unwrap();
                let m = MatrixRef::new(format, 3, cols, &weights, &scales).expect("lengths fit the format");
                let mut out = vec![0.0; cols];
                for row in 0..3 {
                    m.decode_row(row, &mut out);
                    let step = m.row_scales(row).iter().fold(0.0f32, |a, &b| a.max(b));
                    for (i, &got) in out.iter().enumerate() {
                        let want = values[row * cols + i];
                        assert!((got - want).abs() <= step * 0.5001, "{format} row {row} column {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn float_formats_round_to_nearest_even() {
        let (weights, scales) = encode(Format::Bf16, 1, 2, &[1.0, 1.003_906_3]).unwrap();
        assert_eq!((weights, scales), (vec![0x80, 0x3f, 0x80, 0x3f], vec![]));
        let (weights, _) = encode(Format::F32, 1, 1, &[-2.5]).unwrap();
        assert_eq!(weights, (-2.5f32).to_le_bytes());
        let (weights, _) = encode(Format::F16, 1, 1, &[65504.0]).unwrap();
        assert_eq!(weights, 0x7bffu16.to_le_bytes());
    }

    #[test]
    fn zero_rows_get_the_floor_scale_and_bad_input_is_refused() {
        let (weights, scales) = encode(Format::Int4Row, 1, 3, &[0.0; 3]).unwrap();
        assert_eq!((weights, scales), (vec![0x88, 0x08], vec![1e-8]));
        let bad = [0.0, f32::NAN];
        assert_eq!(encode(Format::Int8Row, 1, 2, &bad), Err(EncodeError::NotFinite { col: 1 }));
        let fp8 = Format::Fp8Block;
        assert_eq!(encode(fp8, 1, 1, &[0.0]), Err(EncodeError::Unsupported { format: fp8 }));
    }

    #[test]
    fn ties_round_to_even_and_clip() {
        // amax 254 makes the scale exactly 2.
        let (weights, scales) = encode(Format::Int8Row, 1, 5, &[254.0, 1.0, 3.0, -1.0, -5.0]).unwrap();
        assert_eq!(scales, [2.0]);
        assert_eq!(weights.iter().map(|&b| b as i8).collect::<Vec<_>>(), [127, 0, 2, 0, -2]);
    }
}
