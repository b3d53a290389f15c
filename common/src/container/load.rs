//! Reading tensors into memory, checking what cannot be checked from headers.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::{ContainerError, Problem};
use super::file::Shard;
use super::resolve::{MatrixPlace, Span, VectorPlace};
use crate::io::{Class, Done, IoEngine, IoOptions, Read, ReadError, Segment};
use crate::mem::AlignedBuf;
use crate::quant::{Format, Matrix};

/// Payloads from this size on are read by an engine, in pieces, several at once: drives gain from depth.
const ENGINE_BYTES: u64 = 1 << 20;

/// Values checked at once: whole blocks are tested without branches, only a bad one is searched.
const BLOCK: usize = 1024;

/// What is wrong with some scales, if anything: they must be finite and not negative.
pub(crate) fn scale_flaw(scales: &[f32]) -> Option<String> {
    stored_scale_flaw(bytemuck::cast_slice(scales))
}

/// As [`scale_flaw`], for scales as stored: little-endian, at any alignment.
pub(crate) fn stored_scale_flaw(scales: &[u8]) -> Option<String> {
    let good = |scale: f32| (0.0..=f32::MAX).contains(&scale);
    let (scales, _) = scales.as_chunks::<4>();
    for (block, values) in scales.chunks(BLOCK).enumerate() {
        if !values.iter().fold(true, |ok, bytes| ok & good(f32::from_le_bytes(*bytes))) {
            let bad =
                values.iter().map(|bytes| f32::from_le_bytes(*bytes)).enumerate().find(|(_, s)| !good(*s));
            let (index, scale) = bad.unwrap_or((0, f32::NAN));
            let index = block * BLOCK + index;
            return Some(format!("scale {index} is {scale}; scales must be finite and not negative"));
        }
    }
    None
}

/// What is wrong with a weight payload, if anything: floats must be finite, and fp8 (e4m3fn) has NaN
/// codes, which are refused. Integer formats have nothing that could be wrong.
pub(crate) fn weight_flaw(format: Format, weights: &[u8]) -> Option<String> {
    let bad = match format {
        Format::Fp8Block => first_bad::<1>(weights, |b| b[0] & 0x7f != 0x7f),
        Format::Bf16 => first_bad::<2>(weights, |b| u16::from_le_bytes(b) & 0x7f80 != 0x7f80),
        Format::F16 => first_bad::<2>(weights, |b| u16::from_le_bytes(b) & 0x7c00 != 0x7c00),
        Format::F32 => first_bad::<4>(weights, |b| u32::from_le_bytes(b) & 0x7f80_0000 != 0x7f80_0000),
        _ => None,
    }?;
    Some(format!("element {bad} is NaN or infinite; weights must be finite"))
}

/// Index of the first element that is not `good`. Whole blocks are tested without branches.
fn first_bad<const N: usize>(bytes: &[u8], good: impl Fn([u8; N]) -> bool) -> Option<usize> {
    let (elements, _) = bytes.as_chunks::<N>();
    let block = elements.chunks(BLOCK).position(|block| !block.iter().fold(true, |ok, &e| ok & good(e)))?;
    let start = block * BLOCK;
    elements[start..].iter().position(|&e| !good(e)).map(|index| start + index)
}

/// The engine that reads large payloads; started at the first one, stopped when loading is over.
#[derive(Default)]
pub(super) struct Loader {
    engine: Mutex<Option<Arc<IoEngine>>>,
}

impl Loader {
    fn engine(&self) -> Arc<IoEngine> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(engine.get_or_insert_with(|| Arc::new(IoEngine::start(IoOptions::default()))))
    }

    /// Gives threads and buffers back.
    pub(super) fn stop(&self) {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(engine);
    }
}

/// Reads one matrix; `name` is for messages.
pub(super) fn matrix(
    shards: &[Shard],
    loader: &Loader,
    name: &str,
    place: &MatrixPlace,
) -> Result<Matrix, ContainerError> {
    let spec = place.spec;
    let weights = begin(shards, loader, &place.weights)?;
    let mut scales = vec![0f32; spec.format.scale_count(spec.rows, spec.cols)];
    if let Some(span) = &place.scales {
        // While the weights come.
        read(shards, span, bytemuck::cast_slice_mut(&mut scales))?;
    }
    let weights = weights.finish(shards, &place.weights)?;
    if let Some(what) = weight_flaw(spec.format, &weights) {
        return Err(damaged(shards, &place.weights, name, what));
    }
    if let Some(span) = &place.scales
        && let Some(what) = scale_flaw(&scales)
    {
        return Err(damaged(shards, span, &format!("scales of {name}"), what));
    }
    Ok(Matrix { format: spec.format, rows: spec.rows, cols: spec.cols, weights, scales })
}

/// Reads one float vector as f32.
pub(super) fn vector(
    shards: &[Shard],
    loader: &Loader,
    name: &str,
    place: &VectorPlace,
) -> Result<Vec<f32>, ContainerError> {
    let bytes = begin(shards, loader, &place.span)?.finish(shards, &place.span)?;
    let values = floats(place.format, &bytes);
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(i) => {
            let what = format!("element {i} is {}; only finite numbers are usable", values[i]);
            Err(damaged(shards, &place.span, name, what))
        }
    }
}

/// Decodes a float payload; other formats give nothing.
fn floats(format: Format, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter().copied();
    match format {
        Format::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Format::F16 => pairs().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        Format::Bf16 => pairs().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        _ => Vec::new(),
    }
}

/// A payload that has been read or is on its way.
enum Payload {
    Here(AlignedBuf),
    Coming(Receiver<(AlignedBuf, Result<(), ReadError>)>),
}

/// Begins to read a whole span into page-aligned memory; short ones are read at once.
fn begin(shards: &[Shard], loader: &Loader, span: &Span) -> Result<Payload, ContainerError> {
    let too_large =
        |_| std::io::Error::new(std::io::ErrorKind::OutOfMemory, "it is larger than the address space");
    let mut buf = usize::try_from(span.bytes)
        .map_err(too_large)
        .and_then(AlignedBuf::zeroed)
        .map_err(|source| io_error(shards, span, source))?;
    if span.bytes < ENGINE_BYTES {
        read(shards, span, &mut buf)?;
        return Ok(Payload::Here(buf));
    }
    let file = Arc::clone(find(shards, span)?.file());
    let segments = vec![Segment { file, offset: span.offset, len: buf.len(), at: 0 }];
    let (sender, receiver) = sync_channel(1);
    let done: Done<AlignedBuf> = Box::new(move |buf, result| {
        // Nobody listens when reading the scales failed.
        let _ = sender.send((buf, result));
    });
    loader.engine().submit(Read { buf, segments, class: Class::Demand, done });
    Ok(Payload::Coming(receiver))
}

impl Payload {
    fn finish(self, shards: &[Shard], span: &Span) -> Result<AlignedBuf, ContainerError> {
        let receiver = match self {
            Self::Here(buf) => return Ok(buf),
            Self::Coming(receiver) => receiver,
        };
        match receiver.recv() {
            Ok((buf, Ok(()))) => Ok(buf),
            Ok((_, Err(ReadError::Failed { path, source, .. }))) => Err(ContainerError::Io { path, source }),
            other => {
                let why = other.ok().and_then(|(_, result)| result.err()).unwrap_or(ReadError::Stopped);
                Err(io_error(shards, span, std::io::Error::other(why)))
            }
        }
    }
}

fn find<'a>(shards: &'a [Shard], span: &Span) -> Result<&'a Shard, ContainerError> {
    shards.get(span.shard as usize).ok_or_else(|| {
        io_error(shards, span, std::io::Error::new(std::io::ErrorKind::NotFound, "no such shard"))
    })
}

/// Fills `buf`, which is at most as long as the span, on this thread.
fn read(shards: &[Shard], span: &Span, buf: &mut [u8]) -> Result<(), ContainerError> {
    let read = find(shards, span)?.read_exact_at(buf, span.offset);
    read.map_err(|source| io_error(shards, span, source))
}

/// Reads at most `limit` bytes from the start of a span.
pub(super) fn read_start(shards: &[Shard], span: &Span, limit: u64) -> Result<Vec<u8>, ContainerError> {
    let mut start = vec![0; span.bytes.min(limit) as usize];
    read(shards, span, &mut start)?;
    Ok(start)
}

fn io_error(shards: &[Shard], span: &Span, source: std::io::Error) -> ContainerError {
    let path = shards.get(span.shard as usize).map(|s| s.path().to_owned()).unwrap_or_default();
    ContainerError::Io { path, source }
}

fn damaged(shards: &[Shard], span: &Span, tensor: &str, what: String) -> ContainerError {
    let file = shards.get(span.shard as usize).map(|s| s.path().to_owned());
    ContainerError::Damaged(vec![Problem {
        file,
        tensor: Some(tensor.to_owned()),
        what: format!("{what}; restore the file"),
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_scales_are_found_wherever_they_are() {
        let mut scales = vec![0.25f32; 3000];
        scales[7] = 0.0;
        scales[8] = -0.0;
        assert_eq!(scale_flaw(&scales), None);
        for (index, bad) in [(0, f32::NAN), (1023, -1e-30), (1024, f32::INFINITY), (2999, f32::NEG_INFINITY)]
        {
            let mut scales = scales.clone();
            scales[index] = bad;
            let flaw = scale_flaw(&scales).unwrap();
            assert!(flaw.starts_with(&format!("scale {index} is {bad};")), "{flaw}");
        }
    }

    #[test]
    fn fp8_nans_are_found_and_other_formats_have_none() {
        let mut weights = vec![0x7e; 2500];
        assert_eq!(weight_flaw(Format::Fp8Block, &weights), None);
        weights[2100] = 0xff;
        assert!(weight_flaw(Format::Fp8Block, &weights).unwrap().starts_with("element 2100 is"));
        assert_eq!(weight_flaw(Format::Int8Row, &weights), None);
    }

    #[test]
    fn floats_that_are_not_finite_are_found_wherever_they_are() {
        let bytes = |format, value: f32| match format {
            Format::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            Format::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        for format in [Format::Bf16, Format::F16, Format::F32] {
            let largest = bytes(format, 65504.0);
            let good = largest.repeat(2500);
            assert_eq!(weight_flaw(format, &good), None);
            for (index, value) in
                [(0, f32::NAN), (1023, f32::INFINITY), (1024, -f32::NAN), (2499, f32::NEG_INFINITY)]
            {
                let mut weights = good.clone();
                weights.splice(index * largest.len()..(index + 1) * largest.len(), bytes(format, value));
                let flaw = weight_flaw(format, &weights).unwrap();
                assert!(flaw.starts_with(&format!("element {index} is")), "{flaw}");
            }
        }
    }

    #[test]
    fn float_payloads_decode_exactly() {
        assert_eq!(floats(Format::F32, &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(floats(Format::Bf16, &[0xc0, 0x3f]), [1.5]);
        assert_eq!(floats(Format::F16, &[0x00, 0x3e]), [1.5]);
    }
}
