//! `shimmer bench mem`: the limits of this machine.

use clap::Args;
use serde_json::{Value, json};
use shimmer_common::machine;
use shimmer_common::mem::AlignedBuf;
use shimmer_common::size::Size;

use super::rates::{check_size, probe, thread_counts};
use super::stats::{Spread, percent};
use crate::cli::bandwidth::{huge_share, mac_rate, memory_buffer, read_rate};
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{IsaChoice, parse_positive, parse_threads};
use crate::cli::output;

/// Arguments of `shimmer bench mem`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench mem
  shimmer bench mem --threads 1,2,4 --size 4GiB --json

Reads a buffer far larger than the caches, every thread its own part, and multiplies in registers.")]
pub struct MemArgs {
    /// Numbers of threads [default: 1 and all physical cores]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_threads)]
    threads: Vec<usize>,

    /// Bytes to read through; at least four times the last-level cache
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
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

/// Rounds of the multiply-add loops per measurement: some ten milliseconds.
const MAC_ROUNDS: u64 = 20_000;
const PORTABLE_MAC_ROUNDS: u64 = 200_000;

/// Passes over the buffer per measurement.
const PASSES: usize = 2;

/// What one number of threads gives.
struct Limits {
    threads: usize,
    read: Vec<f64>,
    int8: Vec<f64>,
    f32: Vec<f64>,
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &MemArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let isa = args.isa.kernels()?.isa();
    let probe = probe(isa)?;
    check_size(args.size)?;
    let buffer = buffer(args.size.0)?;
    let rounds = match isa {
        shimmer_common::kernels::Isa::Portable => PORTABLE_MAC_ROUNDS,
        _ => MAC_ROUNDS,
    };
    let mut limits: Vec<Limits> = thread_counts(&args.threads)
        .into_iter()
        .map(|threads| Limits { threads, read: Vec::new(), int8: Vec::new(), f32: Vec::new() })
        .collect();
    for run in 0..=args.runs {
        for limit in &mut limits {
            if interrupt.requested() {
                return Err(CliError::Interrupted);
            }
            let threads = limit.threads;
            let read = read_rate(probe, &buffer, threads, PASSES);
            let int8 = mac_rate(threads, || probe.int8(rounds).count);
            let f32 = mac_rate(threads, || probe.f32(rounds).count);
            // The first round warms up.
            if run > 0 {
                limit.read.push(read);
                limit.int8.push(int8);
                limit.f32.push(f32);
            }
        }
    }
    report(args, &limits, huge_share(&buffer), &isa.to_string())
}

/// Memory of the size asked for, if the machine has it.
pub(super) fn buffer(bytes: u64) -> Result<AlignedBuf, CliError> {
    let available = machine::memory().available_bytes;
    if bytes > available {
        return Err(CliError::Usage(format!(
            "--size {} is more than the {} of memory available; lower it",
            Size(bytes),
            Size(available)
        )));
    }
    memory_buffer(usize::try_from(bytes).unwrap_or(usize::MAX))
        .map_err(|e| CliError::io(format!("cannot allocate {}", Size(bytes)), &e))
}

fn report(args: &MemArgs, limits: &[Limits], huge: Option<f64>, isa: &str) -> Result<(), CliError> {
    if args.json {
        let rows: Vec<Value> = limits
            .iter()
            .map(|limit| {
                json!({
                    "threads": limit.threads,
                    "read_bytes_per_s": Spread::of(limit.read.iter().copied()),
                    "int8_macs_per_s": Spread::of(limit.int8.iter().copied()),
                    "f32_macs_per_s": Spread::of(limit.f32.iter().copied()),
                })
            })
            .collect();
        return output::emit_json(&json!({
            "isa": isa,
            "buffer_bytes": args.size.0,
            "huge_page_share": huge,
            "runs": args.runs,
            "limits": rows,
        }));
    }
    let mut text = format!(
        "{isa}, {} on {} huge pages, median of {} [smallest..largest]\nthreads  read GB/s            int8 GMAC/s            f32 GMAC/s\n",
        args.size,
        huge.map_or("unknown".into(), percent),
        args.runs,
    );
    for limit in limits {
        let column = |values: &[f64]| Spread::of(values.iter().copied()).text(1e9);
        text += &format!(
            "{:7}  {:19}  {:21}  {}\n",
            limit.threads,
            column(&limit.read),
            column(&limit.int8),
            column(&limit.f32)
        );
    }
    output::emit(&text)
}
