//! A plain safetensors reader for expected values and for what `score` writes.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// Values of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// f32.
    F32(Vec<f32>),
    /// i32.
    I32(Vec<i32>),
}

/// One tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Shape.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub values: Values,
}

impl Tensor {
    /// The f32 values.
    ///
    /// # Panics
    /// When the tensor holds integers.
    pub fn floats(&self) -> &[f32] {
        match &self.values {
            Values::F32(v) => v,
            Values::I32(_) => panic!("expected an f32 tensor"),
        }
    }

    /// The i32 values.
    ///
    /// # Panics
    /// When the tensor holds floats.
    pub fn ints(&self) -> &[i32] {
        match &self.values {
            Values::I32(v) => v,
            Values::F32(_) => panic!("expected an i32 tensor"),
        }
    }

    /// Index of the largest value of every row (lowest index on a tie).
    pub fn argmax_rows(&self) -> Vec<usize> {
        let width = *self.shape.last().expect("a matrix has a width");
        let best = |row: &[f32]| (1..row.len()).fold(0, |b, i| if row[i] > row[b] { i } else { b });
        self.floats().chunks(width).map(best).collect()
    }
}

/// Reads every F32 and I32 tensor of a safetensors file.
///
/// # Panics
/// On anything malformed: these are our own test files.
pub fn read(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("a JSON header");
    let data = &bytes[8 + header_len..];
    let mut tensors = BTreeMap::new();
    for (name, entry) in header.as_object().expect("an object") {
        if name == "__metadata__" {
            continue;
        }
        let number = |v: &Value| v.as_u64().expect("a number") as usize;
        let shape = entry["shape"].as_array().expect("a shape").iter().map(number).collect();
        let raw = &data[number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1])];
        let words = raw.chunks_exact(4).map(|c| [c[0], c[1], c[2], c[3]]);
        let values = match entry["dtype"].as_str() {
            Some("F32") => Values::F32(words.map(f32::from_le_bytes).collect()),
            Some("I32") => Values::I32(words.map(i32::from_le_bytes).collect()),
            _ => continue,
        };
        tensors.insert(name.clone(), Tensor { shape, values });
    }
    tensors
}

/// Asserts the oracle's comparison rule: `|a - b| <= 1e-4 · max(1, max|b|)` over the tensor.
/// Expected values below -1e29 mark positions that are hidden by causality and are skipped.
///
/// # Panics
/// When the rule does not hold.
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.shape, want.shape, "{what}: shape");
    let visible = |b: &&f32| **b > -1e29;
    let scale = want.floats().iter().filter(visible).fold(1.0f32, |m, b| m.max(b.abs()));
    let limit = 1e-4 * f64::from(scale);
    for (i, (a, b)) in got.floats().iter().zip(want.floats()).enumerate() {
        if *b > -1e29 {
            let error = (f64::from(*a) - f64::from(*b)).abs();
            assert!(error <= limit, "{what}[{i}]: {a} differs from {b} by {error:.3e}, allowed {limit:.3e}");
        }
    }
}

/// Rewrites the header of a safetensors file; the data stays as it is.
///
/// # Panics
/// When the file is not one of our well-formed test files.
pub fn edit_header(path: &Path, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let bytes = std::fs::read(path).expect("a readable shard");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let (header, data) = bytes[8..].split_at(header_len);
    let mut header: Value = serde_json::from_slice(header).expect("a JSON header");
    edit(header.as_object_mut().expect("an object"));
    let header = header.to_string().into_bytes();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(&header);
    out.extend_from_slice(data);
    std::fs::write(path, out).expect("a writable shard");
}

/// Changes the bytes of one tensor in place.
///
/// # Panics
/// When the tensor is not there.
pub fn edit_data(path: &Path, tensor: &str, edit: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(path).expect("a readable shard");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("a JSON header");
    let offset = |i: usize| header[tensor]["data_offsets"][i].as_u64().expect("an offset") as usize;
    let (begin, end) = (8 + header_len + offset(0), 8 + header_len + offset(1));
    edit(&mut bytes[begin..end]);
    std::fs::write(path, bytes).expect("a writable shard");
}
