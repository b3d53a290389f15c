//! Random payloads at memory speed: one 64-bit counter mix per eight bytes, corrected so that every format's
//! values have mean zero.
//!
//! A mean other than zero would be a common component of all rows, and a product of many matrices amplifies
//! it until every token looks the same to the router. So the one value without a counterpart of the other
//! sign (-128, -8, -4, -2) is replaced by 0, as rounding to symmetric scales never produces it either.

use crate::math::ln_f64;
use crate::quant::Format;
use crate::quant::decode::e4m3_to_f32;

/// Weyl increment of SplitMix64 (Steele, Lea, Flood 2014): 2⁶⁴ / golden ratio.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random words that depends on a seed and a name only.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    state: u64,
}

impl Stream {
    /// The stream called `name`.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        let mut key = [0; 8];
        hasher.finalize_xof().fill(&mut key);
        Self { state: u64::from_le_bytes(key) }
    }

    /// The next word (SplitMix64).
    #[inline(always)]
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(INCREMENT);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `[-1, 1)`.
    #[inline(always)]
    pub fn symmetric(&mut self) -> f32 {
        // The upper 24 bits as a signed integer are exact in f32.
        ((self.word() as i64) >> 40) as f32 / (1 << 23) as f32
    }

    /// A number below `bound` (at least 1); the bias of the remainder is far below anything measurable.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound.max(1) as u64) as usize
    }
}

/// Random elements of one storage format.
#[derive(Clone, Debug)]
pub(super) struct Payload {
    format: Format,
    /// Encoded elements by random byte, for the formats that are not plain bits.
    table: Vec<u16>,
    /// Standard deviation of the stored integers (or table values) before scales.
    deviation: f64,
}

/// Payload bytes are made in pieces of a multiple of this: whole words and whole int3 groups.
pub(super) const PIECE_ALIGN_BYTES: usize = 48;

impl Payload {
    /// Elements of `format`; float formats carry the deviation `sigma` themselves, the others in their scales.
    pub fn new(format: Format, sigma: f64) -> Self {
        // A byte as i8, -128 replaced by 0.
        let value = |byte: usize| f64::from((byte as u8 as i8).checked_neg().map_or(0, |v| -v));
        let mut table = Vec::new();
        let deviation = match format {
            Format::Int8Row => BYTE_DEVIATION,
            Format::Int4Row | Format::Int4Grouped { .. } => 17.5f64.sqrt(),
            Format::Int3G64 => 3.5f64.sqrt(),
            Format::Int2Row => 0.5f64.sqrt(),
            Format::F32 => sigma,
            Format::Bf16 | Format::F16 => {
                let scaled = |byte: usize| (value(byte) * sigma / BYTE_DEVIATION) as f32;
                let bits = |v: f32| match format {
                    Format::Bf16 => half::bf16::from_f32(v).to_bits(),
                    _ => half::f16::from_f32(v).to_bits(),
                };
                table = (0..256).map(|byte| bits(scaled(byte))).collect();
                sigma
            }
            Format::Fp8Block => {
                table = (0..256).map(|byte| nearest_e4m3(value(byte) as f32)).collect();
                let squares: f64 = table.iter().map(|&code| f64::from(e4m3_to_f32(code as u8)).powi(2)).sum();
                (squares / 256.0).sqrt()
            }
        };
        Self { format, table, deviation }
    }

    /// The mean scale that gives decoded weights the deviation `sigma`.
    pub fn scale(&self, sigma: f64) -> f32 {
        (sigma / self.deviation / SCALE_RMS) as f32
    }

    /// Fills `out`, whose length is a multiple of [`PIECE_ALIGN_BYTES`] but for the last piece of a tensor.
    pub fn fill(&self, random: &mut Stream, out: &mut [u8]) {
        match self.format {
            Format::Int8Row => words(random, out, without_lowest_bytes),
            Format::Int4Row | Format::Int4Grouped { .. } => words(random, out, without_lowest_nibbles),
            Format::Int2Row => words(random, out, without_lowest_pairs),
            Format::Int3G64 => out.chunks_exact_mut(24).for_each(|group| int3_group(random, group)),
            Format::F32 => {
                // Uniform in ±√3 σ.
                let factor = self.deviation as f32 * 3f32.sqrt();
                for value in out.chunks_exact_mut(4) {
                    value.copy_from_slice(&(random.symmetric() * factor).to_le_bytes());
                }
            }
            Format::Fp8Block => {
                random_bytes(random, out);
                out.iter_mut().for_each(|byte| *byte = self.table[usize::from(*byte)] as u8);
            }
            Format::Bf16 | Format::F16 => {
                for eight in out.chunks_mut(16) {
                    let bytes = random.word().to_le_bytes();
                    for (element, byte) in eight.chunks_exact_mut(2).zip(bytes) {
                        element.copy_from_slice(&self.table[usize::from(byte)].to_le_bytes());
                    }
                }
            }
        }
    }
}

/// Scales vary by a quarter to either side, so that a kernel that mixes them up is found out.
pub(super) const SCALE_SPREAD: f32 = 0.25;

/// Root of the mean square of `1 ± SCALE_SPREAD`, uniform: `√(1 + spread²/3)`.
const SCALE_RMS: f64 = 1.010_362_971_081_845_7;

/// Of a uniform random byte as i8 with -128 replaced by 0: `√(2 · Σ_{1..127} i² / 256)`.
const BYTE_DEVIATION: f64 = 73.467_679_968_813_5;

fn random_bytes(random: &mut Stream, out: &mut [u8]) {
    words(random, out, |word| word);
}

/// Fills `out` with mapped random words; the last one may be cut.
#[inline(always)]
fn words(random: &mut Stream, out: &mut [u8], map: impl Fn(u64) -> u64) {
    let mut chunks = out.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&map(random.word()).to_le_bytes());
    }
    let rest = chunks.into_remainder();
    let last = map(random.word()).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Every byte 0x80 (-128) becomes 0.
#[inline(always)]
fn without_lowest_bytes(word: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The top bit of a byte is set where its low seven bits are not all zero.
    let nonzero = ((word & LOW) + LOW) & !LOW;
    word & (nonzero | LOW)
}

/// Every nibble 0 (-8) becomes 8 (0).
#[inline(always)]
fn without_lowest_nibbles(word: u64) -> u64 {
    const ONES: u64 = 0x1111_1111_1111_1111;
    let any = word | (word >> 1) | (word >> 2) | (word >> 3);
    word | ((!any & ONES) << 3)
}

/// Every pair of bits 0 (-2) becomes 2 (0).
#[inline(always)]
fn without_lowest_pairs(word: u64) -> u64 {
    const ONES: u64 = 0x5555_5555_5555_5555;
    word | ((!(word | (word >> 1)) & ONES) << 1)
}

/// 64 values `low + 4 · high`, of which 0 (-4) becomes 4 (0).
fn int3_group(random: &mut Stream, group: &mut [u8]) {
    let low = [random.word(), random.word()];
    let [first, second] = low.map(|word| even_bits(!(word | (word >> 1))));
    let high = random.word() | first | (second << 32);
    for (part, word) in group.chunks_exact_mut(8).zip([low[0], low[1], high]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
}

/// Gathers the even bits of `word` in its lower half.
fn even_bits(word: u64) -> u64 {
    let mut x = word & 0x5555_5555_5555_5555;
    for (shift, mask) in [
        (1, 0x3333_3333_3333_3333),
        (2, 0x0f0f_0f0f_0f0f_0f0f),
        (4, 0x00ff_00ff_00ff_00ff),
        (8, 0x0000_ffff_0000_ffff),
        (16, 0x0000_0000_ffff_ffff),
    ] {
        x = (x | (x >> shift)) & mask;
    }
    x
}

/// The finite code whose value is nearest to `value`; ties go to the lower code.
fn nearest_e4m3(value: f32) -> u16 {
    let distance = |code: u8| (e4m3_to_f32(code) - value).abs();
    let finite = (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f);
    finite.min_by(|&a, &b| distance(a).total_cmp(&distance(b))).map_or(0, u16::from)
}

/// The argument at which the standard normal distribution function is `p`, relative error below 1.2e-9
/// (P. J. Acklam's rational approximation); `p` is clamped to `[1e-9, 1 - 1e-9]`.
pub(super) fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
        1.0,
    ];
    const LOW: f64 = 0.02425;
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let p = p.clamp(1e-9, 1.0 - 1e-9);
    let tail = |p: f64| {
        let q = (-2.0 * ln_f64(p)).sqrt();
        polynomial(&C, q) / polynomial(&D, q)
    };
    if p < LOW {
        tail(p)
    } else if p > 1.0 - LOW {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        polynomial(&A, r) * q / polynomial(&B, r)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::MatrixRef;

    const FORMATS: [Format; 9] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Fp8Block,
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Grouped { group: 64 },
        Format::Int3G64,
        Format::Int2Row,
    ];

    #[test]
    fn every_format_has_mean_zero_and_the_deviation_asked_for() {
        const ROWS: usize = 128;
        const COLS: usize = 1024;
        for format in FORMATS {
            let sigma = 0.03;
            let payload = Payload::new(format, sigma);
            let mut bytes = vec![0; format.weight_bytes(ROWS, COLS)];
            payload.fill(&mut Stream::new(7, "weights"), &mut bytes);
            let scales = vec![payload.scale(sigma) * SCALE_RMS as f32; format.scale_count(ROWS, COLS)];
            let matrix = MatrixRef::new(format, ROWS, COLS, &bytes, &scales).unwrap();
            let mut row = vec![0.0; COLS];
            let (mut sum, mut squares) = (0.0, 0.0);
            for r in 0..ROWS {
                matrix.decode_row(r, &mut row);
                sum += row.iter().map(|&v| f64::from(v)).sum::<f64>();
                squares += row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
            }
            let n = (ROWS * COLS) as f64;
            let deviation = (squares / n).sqrt();
            assert!((deviation / sigma - 1.0).abs() < 0.02, "{format}: {deviation}");
            // Four standard errors.
            assert!((sum / n).abs() < 4.0 * sigma / n.sqrt(), "{format}: mean {}", sum / n);
        }
    }

    #[test]
    fn the_lowest_value_of_every_integer_format_is_replaced_by_zero() {
        assert_eq!(without_lowest_bytes(0x80_81_00_7f_ff_80_01_80), 0x00_81_00_7f_ff_00_01_00);
        assert_eq!(without_lowest_nibbles(0x0123_4567_89ab_cdef), 0x8123_4567_89ab_cdef);
        assert_eq!(without_lowest_nibbles(0), 0x8888_8888_8888_8888);
        assert_eq!(without_lowest_pairs(0b00_01_10_11), 0xaaaa_aaaa_aaaa_aa00 | 0b10_01_10_11);
        assert_eq!(even_bits(0b01_00_11_10_01), 0b1_0_1_0_1);
    }

    #[test]
    fn streams_depend_on_seed_and_name_only() {
        let first = |seed, name: &str| Stream::new(seed, name).word();
        assert_eq!(first(1, "a"), first(1, "a"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_ne!(first(1, "a"), first(1, "b"));
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (p, x) in [(0.5, 0.0), (0.975, 1.959_963_985), (0.841_344_746, 1.0), (0.001, -3.090_232_306)] {
            assert!((normal_quantile(p) - x).abs() < 1e-7, "{p}: {}", normal_quantile(p));
            assert!((normal_quantile(1.0 - p) + x).abs() < 1e-7);
        }
        assert!(normal_quantile(0.0).is_finite() && normal_quantile(1.0).is_finite());
    }
}
