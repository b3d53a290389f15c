//! The safetensors header: parsed and checked without reading a byte of tensor data (docs/formats.md §2).
//!
//! A file is `u64 header_len`, `header_len` bytes of JSON, data. The JSON maps each tensor name to
//! `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets relative to the end of the header.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer as _, Error as _, MapAccess, Visitor};

use super::file::read_exact_at;

/// Larger headers are damage: GLM-5.2's largest is under 1 MiB.
const MAX_HEADER_BYTES: u64 = 512 << 20;
/// The length field before the header.
const LENGTH_BYTES: u64 = 8;

/// Element type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Dtype {
    U8,
    I8,
    F16,
    Bf16,
    F32,
    F8E4M3,
    F8E8M0,
    I32,
    I64,
    /// Anything else, by name: fine as long as nobody needs the tensor.
    Other(Box<str>),
}

impl Dtype {
    /// From the header's spelling.
    pub fn parse(name: &str) -> Self {
        match name {
            "U8" => Self::U8,
            "I8" => Self::I8,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            "F8_E4M3" => Self::F8E4M3,
            "F8_E8M0" => Self::F8E8M0,
            "I32" => Self::I32,
            "I64" => Self::I64,
            other => Self::Other(other.into()),
        }
    }

    /// The header's spelling.
    pub fn name(&self) -> &str {
        match self {
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::Other(name) => name,
        }
    }

    /// Bytes of one element, `None` when unknown.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E8M0 => Some(1),
            Self::F16 | Self::Bf16 => Some(2),
            Self::F32 | Self::I32 => Some(4),
            Self::I64 => Some(8),
            Self::Other(name) => match &**name {
                "BOOL" | "F8_E5M2" => Some(1),
                "I16" | "U16" => Some(2),
                "U32" => Some(4),
                "F64" | "U64" => Some(8),
                _ => None,
            },
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Stored shape (flat for quantised payloads).
    pub shape: Box<[u64]>,
    /// First byte within the file.
    pub begin: u64,
    /// One past the last byte within the file.
    pub end: u64,
}

impl TensorInfo {
    /// Stored bytes.
    pub fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.begin)
    }
}

/// A parsed header. Tensors are sorted by name.
#[derive(Debug, Default)]
pub struct Header {
    /// Name and place of every tensor.
    pub tensors: Vec<(Box<str>, TensorInfo)>,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// What is wrong with it; a header with flaws must not be read from.
    pub flaws: Vec<Flaw>,
}

/// Something wrong with a file, and the tensor it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    /// The tensor, if it concerns one.
    pub tensor: Option<String>,
    /// One sentence.
    pub what: String,
}

impl Flaw {
    fn file(what: String) -> Self {
        Self { tensor: None, what }
    }

    fn tensor(name: &str, what: String) -> Self {
        Self { tensor: Some(name.to_owned()), what }
    }
}

/// Reads and checks the header of an open file of `size` bytes.
///
/// # Errors
/// The operating system's; everything wrong with the content is in [`Header::flaws`].
pub fn read_header(file: &File, size: u64) -> std::io::Result<Header> {
    read_header_with(size, |buf, offset| read_exact_at(file, buf, offset))
}

/// As [`read_header`], for anything that can fill a buffer from an offset.
///
/// # Errors
/// Those of `read`.
pub fn read_header_with(
    size: u64,
    read: impl Fn(&mut [u8], u64) -> std::io::Result<()>,
) -> std::io::Result<Header> {
    let unusable = |what: String| Ok(Header { flaws: vec![Flaw::file(what)], ..Header::default() });
    if size < LENGTH_BYTES {
        return unusable(format!("it has {size} bytes, too few for a safetensors file; download it again"));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    read(&mut length, 0)?;
    let header_len = u64::from_le_bytes(length);
    if header_len > size - LENGTH_BYTES || header_len > MAX_HEADER_BYTES {
        return unusable(format!(
            "it claims a header of {header_len} bytes, but the file has {size}; it is damaged, download it again"
        ));
    }
    let mut json = vec![0; header_len as usize];
    read(&mut json, LENGTH_BYTES)?;
    Ok(parse_header(&json, size - LENGTH_BYTES - header_len))
}

/// As [`read_header`], for a path.
///
/// # Errors
/// The operating system's.
pub fn read_header_of(path: &Path) -> std::io::Result<Header> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    read_header(&file, size)
}

/// Parses and checks a header's JSON; `data_len` bytes of data follow it. Never panics.
pub fn parse_header(json: &[u8], data_len: u64) -> Header {
    let mut parser = serde_json::Deserializer::from_slice(json);
    let raw = parser.deserialize_map(HeaderVisitor).and_then(|raw| parser.end().map(|()| raw));
    let raw = match raw {
        Ok(raw) => raw,
        Err(e) => {
            let what = format!("its header is not readable ({e}); it is damaged, download it again");
            return Header { flaws: vec![Flaw::file(what)], ..Header::default() };
        }
    };
    let mut header = Header { metadata: raw.metadata, ..Header::default() };
    // The caller only knows the data's length; the data starts behind length field and JSON.
    let data_start = LENGTH_BYTES + json.len() as u64;
    for (name, tensor) in raw.tensors {
        match place(&tensor, data_start) {
            Ok(info) => header.tensors.push((name.into_boxed_str(), info)),
            Err(what) => header.flaws.push(Flaw::tensor(&name, what)),
        }
    }
    header.tensors.sort_by(|a, b| a.0.cmp(&b.0));
    check_names(&mut header);
    check_ranges(&mut header, data_start.saturating_add(data_len));
    header
}

/// Turns a header entry into a place in the file, checking its size against its shape.
fn place(tensor: &RawTensor, data_start: u64) -> Result<TensorInfo, String> {
    let (begin, end) = tensor.data_offsets;
    let Some(bytes) = end.checked_sub(begin) else {
        return Err(format!("its data_offsets [{begin}, {end}] run backwards; the header is damaged"));
    };
    let absolute = data_start.checked_add(begin).zip(data_start.checked_add(end));
    let Some((begin, end)) = absolute else {
        return Err(format!("its data_offsets [{begin}, {end}] are beyond any file; the header is damaged"));
    };
    let dtype = Dtype::parse(&tensor.dtype);
    if let Some(element_bytes) = dtype.bytes() {
        let expected = tensor.shape.iter().try_fold(element_bytes, |product, &d| product.checked_mul(d));
        if expected != Some(bytes) {
            return Err(format!(
                "it spans {bytes} bytes, which does not fit shape {:?} of {}; the header is damaged",
                tensor.shape,
                dtype.name()
            ));
        }
    }
    Ok(TensorInfo { dtype, shape: tensor.shape.as_slice().into(), begin, end })
}

/// Names are unique within a file.
fn check_names(header: &mut Header) {
    for pair in header.tensors.windows(2) {
        let [(first, _), (second, _)] = pair else { continue };
        if first == second {
            header
                .flaws
                .push(Flaw::tensor(first, "it occurs twice in the header; the file is damaged".into()));
        }
    }
}

/// Tensors lie inside the file and do not overlap.
fn check_ranges(header: &mut Header, file_len: u64) {
    let mut by_place: Vec<&(Box<str>, TensorInfo)> =
        header.tensors.iter().filter(|t| t.1.bytes() > 0).collect();
    by_place.sort_by_key(|(_, info)| info.begin);
    let mut flaws = Vec::new();
    for pair in by_place.windows(2) {
        let [(before, a), (name, b)] = pair else { continue };
        if b.begin < a.end {
            flaws.push(Flaw::tensor(name, format!("it overlaps {before}; the header is damaged")));
        }
    }
    let cut: Vec<_> = by_place.iter().filter(|(_, info)| info.end > file_len).collect();
    if let Some((name, _)) = cut.first() {
        let needed = cut.iter().map(|(_, info)| info.end).max().unwrap_or(file_len);
        let others = match cut.len() {
            1 => String::new(),
            n => format!(" (as do {} more tensors)", n - 1),
        };
        flaws.push(Flaw::tensor(
            name,
            format!("it ends beyond the end of the file{others}: {needed} bytes are needed, {file_len} are there; the download is incomplete"),
        ));
    }
    header.flaws.append(&mut flaws);
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

/// Streams the header: a JSON map type would silently keep the last of two equal names.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut raw = RawHeader::default();
        while let Some(name) = map.next_key::<String>()? {
            let in_entry = |e: A::Error| A::Error::custom(format_args!("{name}: {e}"));
            if name == "__metadata__" {
                raw.metadata = map.next_value().map_err(in_entry)?;
            } else {
                let tensor = map.next_value().map_err(in_entry)?;
                raw.tensors.push((name, tensor));
            }
        }
        Ok(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, data_len: u64) -> Header {
        parse_header(json.as_bytes(), data_len)
    }

    #[test]
    fn entries_become_places_in_the_file() {
        let json = r#"{"__metadata__":{"a":"b"},
            "w":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
            "empty":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},
            "scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  "#;
        let header = parse(json, 16);
        assert_eq!(header.flaws, []);
        assert_eq!(header.metadata["a"], "b");
        let start = 8 + json.len() as u64;
        let places: Vec<_> =
            header.tensors.iter().map(|(n, t)| (&**n, t.begin - start, t.end - start)).collect();
        assert_eq!(places, [("empty", 4, 4), ("scalar", 0, 4), ("w", 4, 16)]);
        assert_eq!(header.tensors[2].1.dtype, Dtype::Bf16);
    }

    #[test]
    fn every_dtype_keeps_its_name() {
        for name in ["U8", "I8", "F16", "BF16", "F32", "F8_E4M3", "F8_E8M0", "I32", "I64", "BOOL", "F4"] {
            assert_eq!(Dtype::parse(name).name(), name);
        }
        assert_eq!(Dtype::parse("F64").bytes(), Some(8));
        assert_eq!(Dtype::parse("F4").bytes(), None);
    }

    #[test]
    fn malformed_entries_are_flaws() {
        for json in [
            "",
            "null",
            "[1]",
            "{} {}",
            r#"{"a":1}"#,
            r#"{"a":{"dtype":"U8","shape":[1]}}"#,
            r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
            r#"{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#,
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#,
            r#"{"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}}"#,
            r#"{"__metadata__":{"a":1}}"#,
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}}"#,
        ] {
            let header = parse(json, 100);
            assert_eq!(header.flaws.len(), 1, "{json}");
            assert!(header.tensors.is_empty(), "{json}");
        }
    }

    #[test]
    fn the_bad_entry_is_named_even_when_the_json_is_odd() {
        let header = parse(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,"x"]}}"#, 1);
        assert!(header.flaws[0].what.contains("a: invalid type"), "{:?}", header.flaws);
    }
}
