//! Every instruction set of this machine gives the bits of the portable kernels, for every format and any
//! shape, and a row's bits do not depend on its batch.

#![allow(clippy::unwrap_used, reason = "test helpers")]

use proptest::prelude::*;
use shimmer_common::kernels::{Activations, Isa, Kernels, QuantRows, RowsMut, RowsRef};
use shimmer_common::math;
use shimmer_common::quant::{Format, MatrixRef};

const FORMATS: [Format; 15] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Fp8Block,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Grouped { group: 64 },
    Format::Int4Grouped { group: 128 },
    Format::Int4Grouped { group: 256 },
    Format::Int4Grouped { group: 16 },
    Format::Int4Grouped { group: 32 },
    Format::Int4Grouped { group: 48 },
    Format::Int4Grouped { group: 96 },
    Format::Int3G64,
    Format::Int2Row,
];

/// A small deterministic generator, so that big inputs shrink to one number.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        // SplitMix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A finite value in about -2..2 with a varying exponent.
    fn float(&mut self) -> f32 {
        let bits = self.next();
        let unit = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * [2.0, 1.0, 0.1, 1e-4][bits as usize % 4]
    }
}

/// How extreme the weights and activations are.
#[derive(Clone, Copy, Debug)]
enum Values {
    Random,
    /// Nibbles −8, bytes −128, 2-bit −2, 3-bit −4; all activations ±127.
    Lowest,
    /// The largest magnitudes with random signs.
    Corners,
}

struct Owned {
    format: Format,
    rows: usize,
    cols: usize,
    weights: Vec<u8>,
    scales: Vec<f32>,
}

impl Owned {
    fn new(format: Format, rows: usize, cols: usize, values: Values, noise: &mut Noise) -> Self {
        let bytes = format.weight_bytes(rows, cols);
        let weights = match format {
            Format::F32 => (0..rows * cols).flat_map(|_| noise.float().to_le_bytes()).collect(),
            // A clear top exponent bit: finite, and no product overflows.
            Format::F16 | Format::Bf16 => {
                (0..rows * cols).flat_map(|_| ((noise.next() as u16) & 0xbfff).to_le_bytes()).collect()
            }
            Format::Fp8Block => (0..bytes).map(|_| (noise.next() as u8) & 0xf7).collect(),
            integer => (0..bytes).map(|_| integer_byte(integer, values, noise)).collect(),
        };
        let scales = (0..format.scale_count(rows, cols)).map(|_| noise.float().abs() + 1e-8).collect();
        Self { format, rows, cols, weights, scales }
    }

    fn view(&self) -> MatrixRef<'_> {
        MatrixRef::new(self.format, self.rows, self.cols, &self.weights, &self.scales).unwrap()
    }
}

fn integer_byte(format: Format, values: Values, noise: &mut Noise) -> u8 {
    let random = noise.next() as u8;
    match (values, format) {
        (Values::Random, _) => random,
        (Values::Lowest, Format::Int8Row) => 0x80,
        (Values::Lowest, _) => 0x00,
        (Values::Corners, Format::Int8Row) => [0x80, 0x7f, 0x81][random as usize % 3],
        (Values::Corners, _) => [0x00, 0xff, 0xf0, 0x0f][random as usize % 4],
    }
}

/// Activations with both forms; the int8 form is made directly for extreme values.
fn activations(rows: usize, cols: usize, values: Values, noise: &mut Noise) -> Activations {
    let floats: Vec<f32> = (0..rows * cols)
        .map(|_| match values {
            Values::Random => noise.float(),
            Values::Lowest => 1.0,
            Values::Corners => [1.0, -1.0][noise.next() as usize % 2],
        })
        .collect();
    Activations::from_f32(floats, cols).quantized()
}

fn all_kernels() -> Vec<Kernels> {
    Isa::available().into_iter().map(|isa| Kernels::new(isa).unwrap()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    // All NaNs are one: which NaN an operation returns is the machine's business.
    x.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

fn shapes() -> impl Strategy<Value = (usize, usize, usize)> {
    let cols = prop_oneof![
        1usize..300,
        Just(64),
        Just(128),
        Just(131),
        Just(192),
        Just(512),
        Just(640),
        1000usize..1400
    ];
    (1usize..12, cols, 1usize..12)
}

fn values() -> impl Strategy<Value = Values> {
    prop_oneof![3 => Just(Values::Random), 1 => Just(Values::Lowest), 1 => Just(Values::Corners)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_isa_and_every_batch_gives_the_portable_bits(
        format in prop::sample::select(&FORMATS[..]),
        (rows, cols, batch) in shapes(),
        values in values(),
        seed: u64,
    ) {
        let mut noise = Noise(seed);
        let w = Owned::new(format, rows, cols, values, &mut noise);
        let x = activations(batch, cols, values, &mut noise);
        let portable = Kernels::new(Isa::Portable).unwrap();
        let mut want = vec![0.0; batch * rows];
        portable.matmul(w.view(), &x, &mut want).unwrap();
        prop_assert!(want.iter().all(|v| v.is_finite()));
        prop_assert_eq!(bits(&want[..rows]), bits(&by_definition(w.view(), &x)), "{}", format);
        for kernels in all_kernels() {
            let mut got = vec![0.0; batch * rows];
            kernels.matmul(w.view(), &x, &mut got).unwrap();
            prop_assert_eq!(bits(&got), bits(&want), "{} {} batch", kernels.isa(), format);
            // Single rows, last first.
            for row in (0..batch).rev() {
                let mut got = vec![0.0; rows];
                kernels.matmul_rows(w.view(), &x, &[row], &mut got).unwrap();
                prop_assert_eq!(bits(&got), bits(&want[row * rows..][..rows]), "{} {} row", kernels.isa(), format);
            }
            // A subset with a repetition.
            let subset = [batch - 1, 0, batch - 1];
            let mut got = vec![0.0; 3 * rows];
            kernels.matmul_rows(w.view(), &x, &subset, &mut got).unwrap();
            for (row, got) in subset.iter().zip(got.chunks_exact(rows)) {
                prop_assert_eq!(bits(got), bits(&want[row * rows..][..rows]));
            }
        }
    }

    #[test]
    fn products_are_close_to_f64_over_the_dequantised_values(
        format in prop::sample::select(&FORMATS[..]),
        (rows, cols, _) in shapes(),
        values in values(),
        seed: u64,
    ) {
        let mut noise = Noise(seed);
        let w = Owned::new(format, rows, cols, values, &mut noise);
        let x = activations(1, cols, values, &mut noise);
        let mut got = vec![0.0; rows];
        Kernels::best().matmul(w.view(), &x, &mut got).unwrap();
        let inputs = input_values(&x, format.is_integer());
        let mut weights = vec![0.0; cols];
        for (row, &got) in got.iter().enumerate() {
            w.view().decode_row(row, &mut weights);
            let terms = || weights.iter().zip(&inputs).map(|(&w, &x)| f64::from(w) * x);
            let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            prop_assert!((f64::from(got) - want).abs() <= 2e-6 * size + 1e-30, "{got} against {want}");
        }
    }

    #[test]
    fn float_operations_give_the_same_bits_everywhere(
        x in prop::collection::vec(-90f32..90.0, 1..200),
        special in prop::sample::select(&[0.0, f32::NEG_INFINITY, f32::NAN, 1e30, -1e-40][..]),
        at: prop::sample::Index,
        a in -3f32..3.0,
    ) {
        let mut special_x = x.clone();
        special_x[at.index(x.len())] = special;
        let other: Vec<f32> = x.iter().rev().copied().collect();
        for x in [&x, &special_x] {
            let results = all_kernels().into_iter().map(|kernels| float_results(kernels, a, x, &other));
            let results: Vec<Vec<Vec<u32>>> = results.collect();
            for result in &results[1..] {
                prop_assert_eq!(result, &results[0]);
            }
            // The scalar functions are the definition.
            let sigmoid: Vec<f32> = x.iter().map(|&v| math::sigmoid(v)).collect();
            let silu_mul: Vec<f32> = x.iter().zip(&other).map(|(&g, &u)| math::silu(g) * u).collect();
            let axpy: Vec<f32> = x.iter().zip(&other).map(|(&x, &y)| a.mul_add(x, y)).collect();
            prop_assert_eq!(&results[0][..3], &[bits(&sigmoid), bits(&silu_mul), bits(&axpy)][..]);
        }
    }
}

/// The first activation row times the matrix, written down from rules N2 and N3 without regard to speed.
fn by_definition(w: MatrixRef<'_>, x: &Activations) -> Vec<f32> {
    let row = |row| match w.format.is_integer() {
        true => integer_row(w, row, x.quant().unwrap()),
        false => float_row(w, row, x.floats().unwrap()),
    };
    (0..w.rows).map(row).collect()
}

fn integer_row(w: MatrixRef<'_>, row: usize, x: &QuantRows) -> f32 {
    let ones = vec![1.0; w.scales.len()];
    let mut integers = vec![0.0; w.cols];
    MatrixRef { scales: &ones, ..w }.decode_row(row, &mut integers);
    let scales = w.row_scales(row);
    let mut acc = [0.0f32; 16];
    let product = |col: usize| integers.get(col).map_or(0, |&w| w as i32 * i32::from(x.values()[col]));
    for g in 0..w.cols.div_ceil(256) * 4 {
        let x_scale = x.scales().get(g).copied().unwrap_or(0.0);
        for (part, stripe) in stripes(w.format).into_iter().enumerate() {
            let sum: i32 = stripe.iter().map(|col| product(64 * g + col)).sum();
            let scale = match w.format {
                Format::Int4Grouped { group } => {
                    let at = (64 * g + stripe[0]) / group as usize;
                    scales.get(at).copied().unwrap_or(0.0) * x_scale
                }
                Format::Int3G64 => scales.get(g).copied().unwrap_or(0.0) * x_scale,
                _ => x_scale,
            };
            let lane = &mut acc[g % 4 * 4 + part % 4];
            *lane = (sum as f32).mul_add(scale, *lane);
        }
    }
    let scaled_by_row = matches!(w.format, Format::Int8Row | Format::Int4Row | Format::Int2Row);
    if scaled_by_row { tree(acc) * scales[0] } else { tree(acc) }
}

/// The columns of a group's stripes, in the order in which they join their accumulators.
fn stripes(format: Format) -> Vec<Vec<usize>> {
    let columns = |s: usize, run: usize, step: usize| -> Vec<usize> {
        (0..64).filter(|col| col % step / run == s).collect()
    };
    match format {
        Format::Int4Grouped { group } if group % 64 != 0 => {
            (0..8).map(|part| (8 * part..8 * part + 8).collect()).collect()
        }
        Format::Int4Row | Format::Int4Grouped { .. } => (0..4).map(|s| columns(s, 8, 32)).collect(),
        Format::Int8Row => (0..4).map(|s| columns(s, 4, 16)).collect(),
        _ => (0..4).map(|s| columns(s, 16, 64)).collect(),
    }
}

fn float_row(w: MatrixRef<'_>, row: usize, x: &[f32]) -> f32 {
    let mut weights = vec![0.0; w.cols];
    w.decode_row(row, &mut weights);
    let mut acc = [0.0f32; 16];
    for (j, (&w, &x)) in weights.iter().zip(x).enumerate() {
        acc[j % 16] = w.mul_add(x, acc[j % 16]);
    }
    tree(acc)
}

fn tree(mut acc: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            acc[i] += acc[i + half];
        }
    }
    acc[0]
}

/// The activations as the kernels see them.
fn input_values(x: &Activations, integer: bool) -> Vec<f64> {
    if !integer {
        return x.floats().unwrap().iter().map(|&v| f64::from(v)).collect();
    }
    let q = x.quant().unwrap();
    q.values().iter().enumerate().map(|(i, &v)| f64::from(v) * f64::from(q.scales()[i / 64])).collect()
}

fn one_row(x: &[f32]) -> RowsRef<'_> {
    RowsRef::new(x, x.len(), x.len(), 1)
}

fn float_results(kernels: Kernels, a: f32, x: &[f32], other: &[f32]) -> Vec<Vec<u32>> {
    let mut sigmoid = x.to_vec();
    kernels.sigmoid(&mut sigmoid);
    let mut silu_mul = vec![0.0; x.len()];
    kernels.silu_mul(x, other, &mut silu_mul);
    let mut axpy = other.to_vec();
    kernels.accumulate(one_row(&[a]), one_row(x), RowsMut::new(&mut axpy, x.len()));
    let mut softmax = x.to_vec();
    kernels.softmax(&mut softmax);
    let mut rms = vec![0.0; x.len()];
    kernels.rms_norm(x, other, 1e-5, &mut rms);
    let mut layer = vec![0.0; x.len()];
    kernels.layer_norm(x, other, x, 1e-6, &mut layer);
    let mut dot = vec![0.0];
    kernels.dots(one_row(x), one_row(other), 1.0, RowsMut::new(&mut dot, 1));
    [sigmoid, silu_mul, axpy, softmax, rms, layer, dot].iter().map(|v| bits(v)).collect()
}

#[test]
fn big_products_split_over_threads_give_the_same_bits() {
    let mut noise = Noise(7);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for format in [Format::Int4Grouped { group: 64 }, Format::Int8Row, Format::Bf16, Format::Fp8Block] {
        let w = Owned::new(format, 1001, 704, Values::Random, &mut noise);
        for batch in [1, 5] {
            let x = activations(batch, 704, Values::Random, &mut noise);
            let all: Vec<usize> = (0..batch).collect();
            let (mut one, mut many) = (vec![0.0; batch * 1001], vec![0.0; batch * 1001]);
            Kernels::best().matmul_rows(w.view(), &x, &all, &mut one).unwrap();
            pool.install(|| Kernels::best().matmul(w.view(), &x, &mut many)).unwrap();
            assert_eq!(bits(&one), bits(&many), "{format} batch {batch}");
        }
    }
}

#[test]
fn rows_of_big_batches_have_the_bits_of_rows_alone() {
    let mut noise = Noise(5);
    let portable = Kernels::new(Isa::Portable).unwrap();
    for format in FORMATS {
        // Neither rows nor columns are whole tiles; batches end in every way a block of rows can.
        let w = Owned::new(format, 7, 1357, Values::Random, &mut noise);
        for batch in [9, 33, 64, 65, 67, 71, 130] {
            let x = activations(batch, 1357, Values::Random, &mut noise);
            let mut want = vec![0.0; batch * 7];
            for (row, want) in want.chunks_exact_mut(7).enumerate() {
                portable.matmul_rows(w.view(), &x, &[row], want).unwrap();
            }
            for kernels in all_kernels() {
                let mut got = vec![0.0; batch * 7];
                kernels.matmul(w.view(), &x, &mut got).unwrap();
                assert_eq!(bits(&got), bits(&want), "{} {format} batch {batch}", kernels.isa());
            }
        }
    }
}

#[test]
fn integer_matrices_quantise_on_demand() {
    let mut noise = Noise(3);
    let w = Owned::new(Format::Int4Row, 9, 100, Values::Random, &mut noise);
    let both = activations(4, 100, Values::Random, &mut noise);
    let floats = Activations::from_f32(both.floats().unwrap().to_vec(), 100);
    let wire = both.quant().unwrap();
    let wire = QuantRows::from_parts(4, 100, wire.values().to_vec(), wire.scales().to_vec()).unwrap();
    let wire = Activations::from_quant(wire);
    let mut want = vec![0.0; 36];
    Kernels::best().matmul(w.view(), &both, &mut want).unwrap();
    for x in [&floats, &wire] {
        let mut got = vec![0.0; 36];
        Kernels::best().matmul(w.view(), x, &mut got).unwrap();
        assert_eq!(bits(&got), bits(&want));
    }
    let mut got = vec![0.0; 9];
    Kernels::best().matmul_rows(w.view(), &floats, &[2], &mut got).unwrap();
    assert_eq!(bits(&got), bits(&want[18..27]));
}

#[test]
fn non_finite_activations_surface_as_nan() {
    let mut noise = Noise(11);
    let mut x = vec![0.5; 131];
    x[130] = f32::INFINITY;
    for format in FORMATS {
        let w = Owned::new(format, 3, 131, Values::Random, &mut noise);
        for kernels in all_kernels() {
            let mut out = vec![0.0; 3];
            kernels.matmul(w.view(), &Activations::from_f32(x.clone(), 131), &mut out).unwrap();
            assert!(out.iter().all(|v| !v.is_finite()), "{format} on {}: {out:?}", kernels.isa());
        }
    }
}

#[test]
fn empty_shapes_are_no_work() {
    for format in FORMATS {
        let none = MatrixRef::new(format, 0, 64, &[], &[]).unwrap();
        let x = Activations::from_f32(vec![1.0; 128], 64);
        Kernels::best().matmul(none, &x, &mut []).unwrap();
        let mut noise = Noise(1);
        let w = Owned::new(format, 2, 64, Values::Random, &mut noise);
        Kernels::best().matmul_rows(w.view(), &x, &[], &mut []).unwrap();
        let no_rows = Activations::from_f32(vec![], 64);
        Kernels::best().matmul(w.view(), &no_rows, &mut []).unwrap();
    }
}
