//! Every storage format against the recorded values of the sample container.

#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use shimmer_common::quant::{Format, MatrixRef, encode};

/// A tensor's payload bytes by name, from one safetensors file.
type Tensors = BTreeMap<String, Vec<u8>>;

fn sample_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/colibri-container")
}

fn read_tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, entry)| {
            let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            (name.clone(), data[offset(0)..offset(1)].to_vec())
        })
        .collect()
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(sample_dir().join("expected.json")).unwrap()).unwrap()
}

/// The format the sample's label stands for; labels carry notes after the registry name.
fn format_of(label: &str) -> Format {
    let starts = [
        ("int8-row", Format::Int8Row),
        ("int4-row", Format::Int4Row),
        ("int4-g64", Format::Int4Grouped { group: 64 }),
        ("int4-g128", Format::Int4Grouped { group: 128 }),
        ("int2-row", Format::Int2Row),
        ("int3-g64", Format::Int3G64),
        ("fp8-e4m3-b128", Format::Fp8Block),
    ];
    starts.into_iter().find(|(name, _)| label.starts_with(name)).map(|(_, format)| format).unwrap()
}

/// Checks every tensor of `records` found in `tensors`; returns how many there were.
fn check(records: &Value, tensors: &Tensors) -> usize {
    let mut checked = 0;
    for (name, record) in records.as_object().unwrap() {
        let Some(weights) = tensors.get(name) else { continue };
        let scales = f32s(&tensors[&format!("{name}.qs")]);
        let format = format_of(record["format"].as_str().unwrap());
        let (rows, cols) = shape(record);
        let values = decode(MatrixRef::new(format, rows, cols, weights, &scales).expect(name));
        let digest = Sha256::digest(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, record["sha256_f32le"].as_str().unwrap(), "{name}");
        if format != Format::Fp8Block {
            check_writer(name, format, (rows, cols), weights, &scales, &values);
        }
        checked += 1;
    }
    checked
}

/// Writing the dequantised values again gives the same payload, padding included, and the same scales but
/// for the rounding of `7 · s / 7`.
fn check_writer(
    name: &str,
    format: Format,
    (rows, cols): (usize, usize),
    weights: &[u8],
    scales: &[f32],
    values: &[f32],
) {
    let (again, again_scales) = encode(format, rows, cols, values).unwrap();
    assert_eq!(again, weights, "payload of {name}");
    for (a, b) in again_scales.iter().zip(scales) {
        assert!((a - b).abs() <= b * f32::EPSILON, "scales of {name}");
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn shape(record: &Value) -> (usize, usize) {
    let dim = |i: usize| record["shape"][i].as_u64().unwrap() as usize;
    (dim(0), dim(1))
}

fn decode(m: MatrixRef<'_>) -> Vec<f32> {
    let mut values = vec![0.0; m.rows * m.cols];
    for (row, out) in values.chunks_exact_mut(m.cols).enumerate() {
        m.decode_row(row, out);
    }
    values
}

#[test]
fn one_tensor_of_every_format_decodes_to_the_recorded_digest() {
    let tensors = read_tensors(&sample_dir().join("formats.safetensors.sample"));
    assert_eq!(check(&expected()["formats_file"], &tensors), 12);
}

#[test]
fn the_model_tensors_decode_to_the_recorded_digests() {
    let mut tensors = Tensors::new();
    for shard in ["out-00000", "out-00001", "out-mtp-00000", "out-idx-00000"] {
        tensors.extend(read_tensors(&sample_dir().join(format!("{shard}.safetensors"))));
    }
    let expected = expected();
    let records = &expected["tensors"];
    assert_eq!(check(records, &tensors), records.as_object().unwrap().len());
}
