//! Matrix kernels at the shapes of GLM-5.2's experts, weights far larger than any cache:
//! `cargo bench -p shimmer-common --bench kernels [-- FILTER]`.
//!
//! Each benchmark is named `format/shape/rows`; the throughput is weight bytes per second for one row and
//! multiply-adds per second ("elements") for more.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shimmer_common::kernels::{Activations, Kernels};
use shimmer_common::mem::AlignedBuf;
use shimmer_common::quant::{Format, MatrixRef};

/// Weights gone through before the same ones come again.
const WEIGHT_BYTES: usize = 256 << 20;

const FORMATS: [Format; 9] = [
    Format::Int4Grouped { group: 64 },
    Format::Int4Grouped { group: 32 },
    Format::Int4Row,
    Format::Int8Row,
    Format::Int3G64,
    Format::Int2Row,
    Format::Fp8Block,
    Format::Bf16,
    Format::F32,
];

/// Gate and up, then down.
const SHAPES: [(usize, usize); 2] = [(2048, 6144), (6144, 2048)];

const ROWS: [usize; 6] = [1, 2, 4, 8, 32, 128];

fn matmul(c: &mut Criterion) {
    let weights = noise(WEIGHT_BYTES);
    let kernels = Kernels::best();
    for (format, (rows, cols)) in FORMATS.into_iter().flat_map(|f| SHAPES.map(|shape| (f, shape))) {
        let scales = vec![0.01; format.scale_count(rows, cols)];
        let bytes = format.weight_bytes(rows, cols);
        let mut matrices = weights.chunks_exact(bytes).cycle().map(|weights| {
            MatrixRef::new(format, rows, cols, weights, &scales).expect("lengths fit the format")
        });
        let mut group = c.benchmark_group(format!("{format}/{rows}x{cols}"));
        for n in ROWS {
            let x = (0..n * cols).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
            let x = Activations::from_f32(x, cols).quantized();
            let mut out = vec![0.0; n * rows];
            group.throughput(match n {
                1 => Throughput::Bytes((bytes + 4 * scales.len()) as u64),
                n => Throughput::Elements((n * rows * cols) as u64),
            });
            group.bench_function(BenchmarkId::from_parameter(n), |b| {
                b.iter(|| {
                    let w = matrices.next().expect("a cycle never ends");
                    kernels.matmul(w, &x, &mut out).expect("both forms of the activations are there");
                });
            });
        }
    }
}

/// Bytes that are moderate numbers in every format.
fn noise(len: usize) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len).expect("memory for the weights");
    let mut state = 1u64;
    for word in buf.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Exponents of f16, bf16 and f32 stay clear of infinity and of subnormal numbers.
        let bits = state & 0x3f7f_3f7f_3f7f_3f7f | 0x3000_3000_3000_3000;
        word.copy_from_slice(&bits.to_le_bytes());
    }
    buf
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = matmul
}
criterion_main!(benches);
