//! `shimmer bench disk`: reads of expert size, by engine, page cache and depth.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shimmer_common::container::Container;
use shimmer_common::disk;
use shimmer_common::experts::MatrixSpec;
use shimmer_common::io::{Caching, IoMode, IoOptions};
use shimmer_common::measure::{Reads, WINDOW};
use shimmer_common::quant::Format;
use shimmer_common::size::Size;
use shimmer_common::synth::{fill_matrix, shuffled};

use super::stats::Spread;
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{parse_depth, parse_positive};
use crate::cli::output;

/// Arguments of `shimmer bench disk`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench disk --model /models/glm-5.2
  shimmer bench disk --dir /mnt/nvme --size 16GiB --depths 1,8,32 --json

With --dir a file of random bytes is written first and removed at the end. Before every measurement the page cache is
asked to forget the files. Random reads have the size of an expert and are cut by the engine; depth is the number of
pieces under way.")]
#[command(group(clap::ArgGroup::new("place").required(true).args(["dir", "model"])))]
pub struct DiskArgs {
    /// Directory on the disk to measure
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Read the experts of this model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Size of the file made in --dir
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    size: Size,

    /// Bytes per read in --dir
    #[arg(long, value_name = "SIZE", default_value = "20MiB")]
    read_size: Size,

    /// Bytes read per measurement
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    bytes: Size,

    /// Pieces under way at once
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,8,16,32", value_parser = parse_depth)]
    depths: Vec<usize>,

    /// Measurements of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_positive)]
    runs: usize,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Bytes per second of random reads of at most `limit` bytes with a fresh engine, the page cache emptied first.
///
/// # Errors
/// [`CliError`] when a read fails.
pub fn timed_reads(reads: &Reads, options: IoOptions, seed: u64, limit: u64) -> Result<f64, CliError> {
    timed(reads, options, &shuffled(reads.len(), seed), limit)
}

fn timed(reads: &Reads, options: IoOptions, order: &[usize], limit: u64) -> Result<f64, CliError> {
    reads.forget();
    Ok(reads.timed(options, order, WINDOW, limit, Duration::MAX)?)
}

/// One way to read.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    sequential: bool,
    mode: IoMode,
    caching: Caching,
    depth: usize,
}

impl Way {
    fn engine(&self) -> &'static str {
        match self.mode {
            IoMode::Auto => "auto",
            IoMode::Uring => "uring",
            IoMode::Pread => "pread",
        }
    }

    fn caching(&self) -> &'static str {
        match self.caching {
            Caching::Auto => "auto",
            Caching::Direct => "direct",
            Caching::Buffered => "buffered",
        }
    }

    fn pattern(&self) -> &'static str {
        if self.sequential { "sequential" } else { "random" }
    }
}

fn ways(depths: &[usize]) -> Vec<Way> {
    let mut ways = Vec::new();
    for mode in [IoMode::Uring, IoMode::Pread] {
        for caching in [Caching::Direct, Caching::Buffered] {
            for &depth in depths {
                ways.push(Way { sequential: false, mode, caching, depth });
            }
        }
    }
    let depth = depths.iter().copied().max().unwrap_or(1);
    for caching in [Caching::Direct, Caching::Buffered] {
        ways.push(Way { sequential: true, mode: IoMode::Pread, caching, depth });
    }
    ways
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &DiskArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    match (&args.dir, &args.model) {
        (Some(dir), _) => {
            let file = make_file(dir, args, &interrupt)?;
            let reads = Reads::of_file(file.path(), args.size.0, args.read_size.0 as usize);
            measure(args, &reads, &interrupt)
        }
        (None, Some(model)) => {
            let container = Container::open(std::slice::from_ref(model))?;
            measure(args, &Reads::of_experts(&*container.experts())?, &interrupt)
        }
        (None, None) => Err(CliError::Usage("give --dir DIR or --model DIR".into())),
    }
}

/// A file of random bytes; dropping it removes it.
fn make_file(
    dir: &Path,
    args: &DiskArgs,
    interrupt: &Interrupt,
) -> Result<tempfile::NamedTempFile, CliError> {
    let size = args.size.0;
    const LEAST_READ: u64 = 4 << 10;
    if args.read_size.0 < LEAST_READ {
        return Err(CliError::Usage(format!(
            "--read-size {} is too small; give 4KiB or more",
            args.read_size
        )));
    }
    if size / args.read_size.0 < 4 {
        let what = format!(
            "--size {} must hold at least four reads of {}; raise it or lower --read-size",
            args.size, args.read_size
        );
        return Err(CliError::Usage(what));
    }
    let cannot = |e: std::io::Error| CliError::io(format!("cannot write to {}", dir.display()), &e);
    let free = disk::free_bytes(dir).map_err(cannot)?;
    if free < size.saturating_add(64 << 20) {
        let what = format!("{} has {} free; lower --size {}", dir.display(), Size(free), args.size);
        return Err(CliError::Usage(what));
    }
    let mut file = tempfile::Builder::new().prefix(".shimmer-bench-").tempfile_in(dir).map_err(cannot)?;
    let spec = MatrixSpec { format: Format::Int8Row, rows: 1024, cols: 4096 };
    let mut piece = vec![0; spec.weight_bytes()];
    let bar = output::bytes_bar("writing", size);
    let mut written = 0;
    while written < size {
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        fill_matrix(&spec, written, &mut piece, &mut []);
        let len = piece.len().min(usize::try_from(size - written).unwrap_or(usize::MAX));
        std::io::Write::write_all(&mut file, &piece[..len]).map_err(cannot)?;
        written += len as u64;
        bar.set_position(written);
    }
    bar.finish_and_clear();
    file.as_file().sync_all().map_err(cannot)?;
    Ok(file)
}

fn measure(args: &DiskArgs, reads: &Reads, interrupt: &Interrupt) -> Result<(), CliError> {
    let total = reads.total_bytes();
    if total < args.bytes.0 {
        output::note(&format!(
            "warning: there are only {} to read, less than --bytes {}; small amounts measure caches of the device",
            Size(total),
            args.bytes
        ));
    }
    let ways = ways(&args.depths);
    let mut rates = vec![Vec::new(); ways.len()];
    let file_order = reads.in_file_order();
    for run in 0..args.runs {
        output::note(&format!("round {} of {}", run + 1, args.runs));
        for (i, way) in ways.iter().enumerate() {
            if interrupt.requested() {
                return Err(CliError::Interrupted);
            }
            let options =
                IoOptions { mode: way.mode, caching: way.caching, depth: way.depth, ..IoOptions::default() };
            let rate = if way.sequential {
                timed(reads, options, &file_order, args.bytes.0)?
            } else {
                timed_reads(reads, options, run as u64, args.bytes.0)?
            };
            rates[i].push(rate);
        }
    }
    let rates: Vec<Spread> = rates.into_iter().map(Spread::of).collect();
    report(args, &ways, &rates)
}

fn report(args: &DiskArgs, ways: &[Way], rates: &[Spread]) -> Result<(), CliError> {
    let random = ways.iter().zip(rates).filter(|(way, _)| !way.sequential);
    let best = random.max_by(|a, b| a.1.median.total_cmp(&b.1.median));
    if args.json {
        let line = |(way, rate): (&Way, &Spread)| {
            json!({
                "pattern": way.pattern(),
                "engine": way.engine(),
                "page_cache": way.caching(),
                "depth": way.depth,
                "read_bytes_per_s": rate,
            })
        };
        let lines: Vec<Value> = ways.iter().zip(rates).map(line).collect();
        return output::emit_json(&json!({
            "bytes_per_measurement": args.bytes.0,
            "runs": args.runs,
            "lines": lines,
            "best": best.map(line),
        }));
    }
    let mut text =
        format!("median of {} [smallest..largest]\npattern     engine  page cache  depth  MB/s\n", args.runs);
    for (way, rate) in ways.iter().zip(rates) {
        text += &format!(
            "{:11} {:7} {:11} {:5}  {}\n",
            way.pattern(),
            way.engine(),
            way.caching(),
            way.depth,
            rate.text(1e6)
        );
    }
    if let Some((way, rate)) = best {
        text += &format!(
            "best for experts: {:.0} MB/s ({}, {}, depth {})\n",
            rate.median / 1e6,
            way.engine(),
            way.caching(),
            way.depth
        );
    }
    output::emit(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_reads_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let reads = Reads::of_file(&path, 1 << 20, 100_000);
        assert_eq!(reads.total_bytes(), 1_000_000);
        for way in ways(&[1, 3]) {
            let options =
                IoOptions { mode: way.mode, caching: way.caching, depth: way.depth, ..IoOptions::default() };
            assert!(timed(&reads, options, &reads.in_file_order(), 500_000).unwrap() > 0.0, "{way:?}");
        }
        let gone = Reads::of_file(&dir.path().join("none"), 1 << 20, 100_000);
        assert!(timed_reads(&gone, IoOptions::default(), 0, 1).is_err());
    }
}
