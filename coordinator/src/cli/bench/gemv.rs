//! `shimmer bench gemv`: weight matrices times a few activation rows.
//!
//! The matrices lie one after the other in one buffer on huge pages and are together far larger than the
//! caches; each is used once per pass. Between passes the same buffer is read as `bench mem` does it.

use std::str::FromStr;
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};
use shimmer_common::experts::MatrixSpec;
use shimmer_common::kernels::{Activations, Kernels, Probe};
use shimmer_common::mem::AlignedBuf;
use shimmer_common::quant::MatrixRef;
use shimmer_common::size::Size;
use shimmer_common::synth::{fill_matrix, random_values};

use super::rates::{self, check_size, thread_counts};
use super::stats::{Spread, percent};
use crate::cli::bandwidth::{huge_share, read_rate};
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{IsaChoice, parse_positive, parse_threads};
use crate::cli::open::compute_pool;
use crate::cli::output;
use crate::cli::synth::FormatArg;

/// Parses a number of activation rows.
fn parse_rows(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n @ 1..=65_536) => Ok(n),
        _ => Err("write a number of rows from 1 to 65536".to_owned()),
    }
}

/// Output rows and input columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    rows: usize,
    cols: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint =
            || format!("{text:?} is not a shape; write output rows x input columns, such as 2048x6144");
        let (rows, cols) = text.split_once('x').ok_or_else(hint)?;
        let side = |text: &str| text.parse::<usize>().ok().filter(|n| (1..=1 << 20).contains(n));
        Ok(Self { rows: side(rows).ok_or_else(hint)?, cols: side(cols).ok_or_else(hint)? })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// Arguments of `shimmer bench gemv`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench gemv
  shimmer bench gemv --formats int4-row,int2 --shape 6144x16384 --rows 1,2,4,8 --json

The shares are of what the same threads read from the same memory, and of the int8 multiply-adds they do in
registers, both measured between the passes.")]
pub struct GemvArgs {
    /// Storage formats
    #[arg(long, value_name = "FORMAT,…", value_delimiter = ',', default_value = "int4-g64,int8")]
    formats: Vec<FormatArg>,

    /// Activation rows, each up to 65536
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,8,128", value_parser = parse_rows)]
    rows: Vec<usize>,

    /// Numbers of threads [default: 1 and all physical cores]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_threads)]
    threads: Vec<usize>,

    /// Output rows x input columns; the default is GLM-5.2's expert
    #[arg(
        long = "shape",
        value_name = "OxI,…",
        value_delimiter = ',',
        default_value = "2048x6144,6144x2048"
    )]
    shapes: Vec<Shape>,

    /// Bytes of all matrices together; at least four times the last-level cache
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    size: Size,

    /// Measurements of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_positive)]
    runs: usize,

    /// Instruction set
    #[arg(long, value_enum, value_name = "ISA", default_value_t)]
    isa: IsaChoice,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Matrices one after the other.
struct Matrices {
    spec: MatrixSpec,
    buffer: AlignedBuf,
    count: usize,
}

/// Weights and scales start on cache lines.
const ALIGN_BYTES: usize = 64;

impl Matrices {
    fn new(spec: MatrixSpec, size: u64) -> Result<Self, CliError> {
        let count = (size as usize).div_ceil(Self::stride(&spec)).max(1);
        let mut buffer = super::mem::buffer((count * Self::stride(&spec)) as u64)?;
        for (i, slot) in buffer.chunks_exact_mut(Self::stride(&spec)).enumerate() {
            let (weights, scales) = slot.split_at_mut(spec.weight_bytes().next_multiple_of(ALIGN_BYTES));
            let scales = bytemuck::cast_slice_mut(&mut scales[..spec.scale_bytes()]);
            fill_matrix(&spec, i as u64, &mut weights[..spec.weight_bytes()], scales);
        }
        Ok(Self { spec, buffer, count })
    }

    fn stride(spec: &MatrixSpec) -> usize {
        spec.weight_bytes().next_multiple_of(ALIGN_BYTES) + spec.scale_bytes().next_multiple_of(ALIGN_BYTES)
    }

    /// Bytes a pass reads.
    fn bytes(&self) -> usize {
        self.count * self.spec.bytes()
    }

    fn iter(&self) -> impl Iterator<Item = MatrixRef<'_>> {
        let spec = &self.spec;
        self.buffer.chunks_exact(Self::stride(spec)).filter_map(move |slot| {
            let (weights, scales) = slot.split_at(spec.weight_bytes().next_multiple_of(ALIGN_BYTES));
            let scales = bytemuck::cast_slice(&scales[..spec.scale_bytes()]);
            MatrixRef::new(spec.format, spec.rows, spec.cols, &weights[..spec.weight_bytes()], scales)
        })
    }
}

/// One line of the result.
struct Line {
    spec: MatrixSpec,
    rows: usize,
    threads: usize,
    bytes_per_s: Spread,
    macs_per_s: Spread,
    read_bytes_per_s: Spread,
    int8_macs_per_s: Spread,
    /// Medians of the ratios of neighbouring measurements.
    read_share: Spread,
    int8_share: Spread,
    huge: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &GemvArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let kernels = args.isa.kernels()?;
    let isa = kernels.isa();
    let probe = rates::probe(isa)?;
    check_size(args.size)?;
    let mut lines = Vec::new();
    for shape in &args.shapes {
        for format in &args.formats {
            let spec = MatrixSpec { format: format.0, rows: shape.rows, cols: shape.cols };
            let matrices = Matrices::new(spec, args.size.0)?;
            for threads in thread_counts(&args.threads) {
                let pool = compute_pool(Some(threads))?;
                for &rows in &args.rows {
                    if interrupt.requested() {
                        return Err(CliError::Interrupted);
                    }
                    output::note(&format!("{}, {shape}, {rows} rows, {threads} threads", spec.format));
                    let bench = Bench { kernels, probe, matrices: &matrices, pool: &pool, rows, threads };
                    lines.push(bench.measure(args.runs));
                }
            }
        }
    }
    report(args, &lines, &isa.to_string())
}

struct Bench<'a> {
    kernels: Kernels,
    probe: Probe,
    matrices: &'a Matrices,
    pool: &'a rayon::ThreadPool,
    rows: usize,
    threads: usize,
}

impl Bench<'_> {
    fn measure(&self, runs: usize) -> Line {
        let spec = self.matrices.spec;
        let x = Activations::from_f32(random_values(self.rows * spec.cols, 1), spec.cols);
        let x = if spec.format.is_integer() { x.quantized() } else { x };
        let mut out = vec![0.0; self.rows * spec.rows];
        let macs = (self.matrices.count * self.rows * spec.rows * spec.cols) as f64;
        let (mut seconds, mut reads, mut int8s) = (Vec::new(), Vec::new(), Vec::new());
        for run in 0..=runs {
            let read = read_rate(self.probe, &self.matrices.buffer, self.threads, 2);
            let int8 = rates::int8(self.probe, self.threads);
            let took = self.pass(&x, &mut out);
            // The first one warms up.
            if run > 0 {
                reads.push(read);
                int8s.push(int8);
                seconds.push(took);
            }
        }
        let bytes = self.matrices.bytes() as f64;
        Line {
            spec,
            rows: self.rows,
            threads: self.threads,
            bytes_per_s: Spread::of(seconds.iter().map(|s| bytes / s)),
            macs_per_s: Spread::of(seconds.iter().map(|s| macs / s)),
            read_share: Spread::of(seconds.iter().zip(&reads).map(|(s, read)| bytes / s / read)),
            int8_share: Spread::of(seconds.iter().zip(&int8s).map(|(s, int8)| macs / s / int8)),
            read_bytes_per_s: Spread::of(reads),
            int8_macs_per_s: Spread::of(int8s),
            huge: huge_share(&self.matrices.buffer),
        }
    }

    /// Seconds of one pass over all matrices.
    fn pass(&self, x: &Activations, out: &mut [f32]) -> f64 {
        self.pool.install(|| {
            let started = Instant::now();
            for w in self.matrices.iter() {
                // Shapes and forms were made to fit above.
                let _ = self.kernels.matmul(w, x, out);
                std::hint::black_box(&mut *out);
            }
            started.elapsed().as_secs_f64()
        })
    }
}

fn report(args: &GemvArgs, lines: &[Line], isa: &str) -> Result<(), CliError> {
    if args.json {
        let lines: Vec<Value> = lines
            .iter()
            .map(|line| {
                json!({
                    "format": line.spec.format.to_string(),
                    "weight_rows": line.spec.rows,
                    "weight_cols": line.spec.cols,
                    "activation_rows": line.rows,
                    "threads": line.threads,
                    "weight_bytes_per_s": line.bytes_per_s,
                    "macs_per_s": line.macs_per_s,
                    "read_bytes_per_s": line.read_bytes_per_s,
                    "int8_peak_macs_per_s": line.int8_macs_per_s,
                    "share_of_read": line.read_share,
                    "share_of_int8_peak": line.int8_share,
                    "huge_page_share": line.huge,
                })
            })
            .collect();
        return output::emit_json(&json!({
            "isa": isa, "matrices_bytes": args.size.0, "runs": args.runs, "lines": lines,
        }));
    }
    let mut text = format!(
        "{isa}, median of {} [smallest..largest]\nformat        shape       rows threads  weights GB/s           of read   GMAC/s                 of int8 peak\n",
        args.runs
    );
    for line in lines {
        text += &format!(
            "{:13} {:11} {:4} {:7}  {:21}  {:>7}   {:21}  {:>6}\n",
            line.spec.format.to_string(),
            format!("{}x{}", line.spec.rows, line.spec.cols),
            line.rows,
            line.threads,
            line.bytes_per_s.text(1e9),
            percent(line.read_share.median),
            line.macs_per_s.text(1e9),
            percent(line.int8_share.median),
        );
    }
    output::emit(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_common::quant::Format;

    #[test]
    fn shapes_are_rows_times_columns() {
        assert_eq!("2048x6144".parse(), Ok(Shape { rows: 2048, cols: 6144 }));
        for bad in ["2048", "x", "0x5", "5x-1", "99999999x1"] {
            assert!(bad.parse::<Shape>().unwrap_err().contains("2048x6144"), "{bad}");
        }
    }

    #[test]
    fn every_matrix_of_the_buffer_is_there_and_differs() {
        let spec = MatrixSpec { format: Format::Int4Grouped { group: 64 }, rows: 3, cols: 70 };
        let matrices = Matrices::new(spec, 1000).unwrap();
        let all: Vec<MatrixRef<'_>> = matrices.iter().collect();
        assert_eq!(all.len(), matrices.count);
        assert_eq!(all.len(), 1000_usize.div_ceil(Matrices::stride(&spec)));
        assert!(all.len() > 2);
        assert_ne!(all[0].weights, all[1].weights);
        assert!(all.iter().all(|m| m.scales.iter().all(|s| *s > 0.0)));
    }
}
