//! Writing one output file: rows are streamed, encoded in parallel, and read back for comparison.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

use rayon::prelude::*;

use super::ConvertError;
use super::plan::{OutputFile, Region, Tensor};
use crate::container::Container;
use crate::container::load::scale_flaw;
use crate::container::resolve::Span;
use crate::disk;
use crate::io::{SharedFile, Trail, forget};
use crate::mem::AlignedBuf;
use crate::quant::{Format, MatrixRef, encode_row};

/// f32 values decoded at a time: 16 MB.
const CHUNK_VALUES: usize = 4 << 20;

/// Chunks start at multiples of this, so that an fp8 chunk starts with a whole block of scales.
const ROW_ALIGN: usize = 128;

/// Rows per parallel task.
const TASK_ROWS: usize = 16;

/// Bytes read back at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Writes `output` to `path` (a temporary name), reads it back and returns its BLAKE3. `progress` is
/// told the source bytes consumed since the last call.
pub(super) fn write(
    source: &Container,
    output: &OutputFile,
    path: &Path,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<blake3::Hash, ConvertError> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(ConvertError::io("create", path))?;
    let written = |result: std::io::Result<()>| result.map_err(ConvertError::io("write", path));
    written(disk::write_all_at(&file, &output.head, 0))?;
    let head = Region { offset: 0, bytes: output.head.len() as u64 };
    let mut regions = vec![(head, "the header", blake3::hash(&output.head))];
    for tensor in &output.tensors {
        let (mut weights, mut scales) = (Sink::new(&file, tensor.weights), Sink::new(&file, tensor.scales));
        convert(source, tensor, &mut |chunk: &Encoded, consumed| {
            written(weights.write(&chunk.weights))?;
            written(scales.write(bytemuck::cast_slice(&chunk.scales)))?;
            if progress(consumed).is_break() { Err(ConvertError::Cancelled) } else { Ok(()) }
        })?;
        regions.push((tensor.weights, &tensor.name, weights.hasher.finalize()));
        regions.push((tensor.scales, &tensor.name, scales.hasher.finalize()));
    }
    written(file.sync_all())?;
    forget(&file, 0, output.bytes);
    drop(file);
    verify(path, regions)
}

/// Part of an encoded matrix.
#[derive(Default)]
struct Encoded {
    weights: Vec<u8>,
    scales: Vec<f32>,
}

/// One region of the output file, filled front to back.
struct Sink<'a> {
    file: &'a File,
    offset: u64,
    hasher: blake3::Hasher,
    trail: Trail,
}

impl<'a> Sink<'a> {
    fn new(file: &'a File, region: Region) -> Self {
        Self { file, offset: region.offset, hasher: blake3::Hasher::new(), trail: Trail::default() }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        disk::write_all_at(self.file, bytes, self.offset)?;
        self.trail.wrote(self.file, self.offset, bytes.len() as u64)?;
        self.offset += bytes.len() as u64;
        self.hasher.update(bytes);
        Ok(())
    }
}

/// Streams one tensor from the source through the encoder. `sink` gets the pieces in order, each with
/// the number of source bytes it was made from.
fn convert(
    source: &Container,
    tensor: &Tensor,
    sink: &mut dyn FnMut(&Encoded, u64) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let spec = tensor.source;
    let row_bytes = spec.format.row_bytes(spec.cols);
    let chunk_rows = (CHUNK_VALUES / spec.cols.max(1) / ROW_ALIGN * ROW_ALIGN).max(ROW_ALIGN);
    let block_scales = read_scales(source, tensor)?;
    let scales_per_block_row = spec.cols.div_ceil(ROW_ALIGN);
    let mut raw = AlignedBuf::zeroed(chunk_rows.min(spec.rows) * row_bytes)
        .map_err(|error| ConvertError::Source(format!("no memory for a part of {}: {error}", tensor.name)))?;
    for first in (0..spec.rows).step_by(chunk_rows) {
        let rows = chunk_rows.min(spec.rows - first);
        let raw = &mut raw[..rows * row_bytes];
        read(source, tensor, tensor.source_weights, (first * row_bytes) as u64, raw)?;
        let scales = match spec.format {
            Format::Fp8Block => {
                let begin = first / ROW_ALIGN * scales_per_block_row;
                &block_scales[begin..begin + rows.div_ceil(ROW_ALIGN) * scales_per_block_row]
            }
            _ => &[],
        };
        let part = MatrixRef::new(spec.format, rows, spec.cols, raw, scales)
            .expect("the chunk was cut to the format's row and block sizes");
        let encoded = encode_rows(part, tensor, first)?;
        sink(&encoded, raw.len() as u64)?;
    }
    Ok(())
}

/// Encodes every row of `part`, which starts at row `first` of `tensor`.
fn encode_rows(part: MatrixRef<'_>, tensor: &Tensor, first: usize) -> Result<Encoded, ConvertError> {
    let tasks: Vec<usize> = (0..part.rows).step_by(TASK_ROWS).collect();
    let pieces: Vec<Encoded> = tasks
        .into_par_iter()
        .map(|begin| {
            let mut piece = Encoded::default();
            let mut row = vec![0.0; part.cols];
            for i in begin..part.rows.min(begin + TASK_ROWS) {
                part.decode_row(i, &mut row);
                encode_row(tensor.format, &row, &mut piece.weights, &mut piece.scales).map_err(|error| {
                    ConvertError::Weight { name: tensor.name.clone(), row: first + i, error }
                })?;
            }
            Ok(piece)
        })
        .collect::<Result<_, ConvertError>>()?;
    let mut all = Encoded::default();
    for piece in pieces {
        all.weights.extend_from_slice(&piece.weights);
        all.scales.extend_from_slice(&piece.scales);
    }
    Ok(all)
}

/// The block scales of an fp8 tensor, checked; empty for other formats.
fn read_scales(source: &Container, tensor: &Tensor) -> Result<Vec<f32>, ConvertError> {
    let Some(span) = tensor.source_scales else { return Ok(Vec::new()) };
    let mut scales = vec![0f32; tensor.source.format.scale_count(tensor.source.rows, tensor.source.cols)];
    read(source, tensor, span, 0, bytemuck::cast_slice_mut(&mut scales))?;
    match scale_flaw(&scales) {
        Some(flaw) => Err(ConvertError::Source(format!("scales of {}: {flaw}", tensor.name))),
        None => Ok(scales),
    }
}

fn read(
    source: &Container,
    tensor: &Tensor,
    span: Span,
    skip: u64,
    buf: &mut [u8],
) -> Result<(), ConvertError> {
    let shard = source
        .shards()
        .get(span.shard as usize)
        .ok_or_else(|| ConvertError::Source(format!("{}: its shard is gone", tensor.name)))?;
    shard.read_exact_at(buf, span.offset + skip).map_err(|source| ConvertError::Read {
        path: shard.path().to_owned(),
        name: tensor.name.clone(),
        source,
    })
}

/// Reads the whole file back, from the disk where the system lets us, and compares region by region.
fn verify(path: &Path, mut regions: Vec<(Region, &str, blake3::Hash)>) -> Result<blake3::Hash, ConvertError> {
    // Past the page cache, so that the disk is compared and nothing is left behind.
    let file = SharedFile::new(path, true);
    // The regions fill the file without a gap, so the same pass gives the hash of the whole.
    regions.sort_by_key(|(region, ..)| (region.offset, region.bytes));
    let mut whole = blake3::Hasher::new();
    for (region, name, expected) in regions {
        let mut hasher = blake3::Hasher::new();
        for_each_piece(&file, region, &mut |piece| {
            hasher.update(piece);
            whole.update(piece);
        })
        .map_err(ConvertError::io("read back", path))?;
        if hasher.finalize() != expected {
            return Err(ConvertError::Verify { path: path.to_owned(), name: name.to_owned() });
        }
    }
    Ok(whole.finalize())
}

/// BLAKE3 of a file that is there already.
pub(super) fn hash_file(path: &Path) -> std::io::Result<blake3::Hash> {
    let all = Region { offset: 0, bytes: std::fs::metadata(path)?.len() };
    let file = SharedFile::new(path, true);
    let mut hasher = blake3::Hasher::new();
    for_each_piece(&file, all, &mut |piece| {
        hasher.update_rayon(piece);
    })?;
    Ok(hasher.finalize())
}

fn for_each_piece(file: &SharedFile, region: Region, f: &mut dyn FnMut(&[u8])) -> std::io::Result<()> {
    let mut buf = vec![0; PIECE_BYTES.min(usize::try_from(region.bytes).unwrap_or(PIECE_BYTES))];
    let mut done = 0;
    while done < region.bytes {
        let len = buf.len().min(usize::try_from(region.bytes - done).unwrap_or(usize::MAX));
        file.read_exact_at(&mut buf[..len], region.offset + done)?;
        f(&buf[..len]);
        done += len as u64;
    }
    Ok(())
}
