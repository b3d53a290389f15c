//! Writing safetensors files: header first, then data streamed in order, visible only when complete.

use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::safetensors::Dtype;
use crate::io::Behind;

/// Headers are padded with spaces, so that the data starts on a multiple of this: direct reads of tensors
/// that are whole blocks, written first, then need no copy.
const DATA_ALIGN_BYTES: usize = 4096;
/// The length field before the header.
const LENGTH_BYTES: usize = 8;
const BUFFER_BYTES: usize = 1 << 20;

/// One tensor of a file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Tensor name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape; quantised payloads are flat.
    pub shape: Vec<u64>,
}

impl TensorHeader {
    /// Bytes of data, `None` when the element size is unknown or the product overflows.
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes()?, |product, &d| product.checked_mul(d))
    }
}

/// Writes one safetensors file.
///
/// The tensors are named up front, their data follows in the same order. Everything goes to
/// `NAME.partial` beside the target; [`SafetensorsWriter::finish`] syncs it and renames it into place.
/// A writer dropped before that removes its partial file.
#[derive(Debug)]
pub struct SafetensorsWriter {
    target: PathBuf,
    partial: PathBuf,
    out: Option<BufWriter<Behind>>,
    remaining: u64,
    renamed: bool,
}

impl SafetensorsWriter {
    /// Creates the partial file and writes the header.
    ///
    /// # Errors
    /// The operating system's, or `InvalidInput` for two equal names or a size that overflows.
    pub fn create(
        target: &Path,
        tensors: &[TensorHeader],
        metadata: &[(&str, &str)],
    ) -> std::io::Result<Self> {
        let (header, data_bytes) = header_json(tensors, metadata)?;
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let partial = target.with_file_name(name);
        let out = BufWriter::with_capacity(BUFFER_BYTES, Behind::new(File::create(&partial)?));
        let mut writer = Self {
            target: target.to_owned(),
            partial,
            out: Some(out),
            remaining: data_bytes,
            renamed: false,
        };
        let out = writer.out()?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        Ok(writer)
    }

    /// Appends data: any number of calls, tensors in the order given to [`SafetensorsWriter::create`].
    ///
    /// # Errors
    /// The operating system's, or `InvalidInput` when more bytes are written than the header promised.
    pub fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let Some(remaining) = self.remaining.checked_sub(bytes.len() as u64) else {
            return Err(invalid("more data than the header promised"));
        };
        self.out()?.write_all(bytes)?;
        self.remaining = remaining;
        Ok(())
    }

    /// Syncs the file to disk and renames it to its target.
    ///
    /// # Errors
    /// The operating system's, or `InvalidInput` when data is missing.
    pub fn finish(mut self) -> std::io::Result<()> {
        if self.remaining > 0 {
            return Err(invalid(&format!("{} bytes of data were not written", self.remaining)));
        }
        let Some(out) = self.out.take() else { return Err(invalid("the file is already finished")) };
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.finish()?;
        std::fs::rename(&self.partial, &self.target)?;
        self.renamed = true;
        sync_parent(&self.target)
    }

    fn out(&mut self) -> std::io::Result<&mut BufWriter<Behind>> {
        self.out.as_mut().ok_or_else(|| invalid("the file is already finished"))
    }
}

impl Drop for SafetensorsWriter {
    fn drop(&mut self) {
        if !self.renamed {
            drop(self.out.take());
            // Best effort: a left-over partial file is never read and is overwritten next time.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// Makes a rename survive a power cut.
fn sync_parent(path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    if let Some(parent) = path.parent() {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        File::open(parent)?.sync_all()?;
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

/// Header JSON, padded, and the number of data bytes it promises.
pub(crate) fn header_json(
    tensors: &[TensorHeader],
    metadata: &[(&str, &str)],
) -> std::io::Result<(Vec<u8>, u64)> {
    let mut map = Map::new();
    if !metadata.is_empty() {
        let strings: Map<String, Value> =
            metadata.iter().map(|(k, v)| ((*k).to_owned(), Value::from(*v))).collect();
        map.insert("__metadata__".into(), strings.into());
    }
    let mut end = 0u64;
    for tensor in tensors {
        let begin = end;
        end = tensor
            .bytes()
            .and_then(|bytes| begin.checked_add(bytes))
            .ok_or_else(|| invalid(&format!("{}: its size overflows", tensor.name)))?;
        let entry =
            json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [begin, end]});
        if map.insert(tensor.name.clone(), entry).is_some() {
            return Err(invalid(&format!("{}: named twice", tensor.name)));
        }
    }
    let mut json = serde_json::to_vec(&map)?;
    json.resize((LENGTH_BYTES + json.len()).next_multiple_of(DATA_ALIGN_BYTES) - LENGTH_BYTES, b' ');
    Ok((json, end))
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::safetensors::read_header_of;

    fn tensors() -> Vec<TensorHeader> {
        let tensor = |name: &str, dtype, shape: &[u64]| TensorHeader {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        };
        vec![tensor("b", Dtype::F32, &[2]), tensor("a", Dtype::U8, &[3]), tensor("c", Dtype::Bf16, &[1, 2])]
    }

    #[test]
    fn a_written_file_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let mut writer = SafetensorsWriter::create(&path, &tensors(), &[("made", "here")]).unwrap();
        writer.write(&[1; 10]).unwrap();
        assert!(!path.exists(), "nothing is visible before it is complete");
        writer.write(&[2; 5]).unwrap();
        writer.finish().unwrap();
        let header = read_header_of(&path).unwrap();
        assert_eq!(header.flaws, []);
        assert_eq!(header.metadata["made"], "here");
        let bytes = std::fs::read(&path).unwrap();
        let data = |name: &str| {
            let (_, info) = header.tensors.iter().find(|(n, _)| &**n == name).unwrap();
            bytes[info.begin as usize..info.end as usize].to_vec()
        };
        assert_eq!((data("b"), data("a"), data("c")), (vec![1; 8], vec![1, 1, 2], vec![2; 4]));
        assert_eq!(header.tensors[1].1.begin % 4096, 0, "the data starts aligned");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no partial file is left");
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let mut writer = SafetensorsWriter::create(&path, &tensors(), &[]).unwrap();
        assert!(writer.write(&[0; 16]).is_err(), "one byte too many");
        assert!(writer.finish().is_err(), "data is missing");
        let mut twice = tensors();
        twice.push(twice[0].clone());
        assert!(SafetensorsWriter::create(&path, &twice, &[]).is_err());
        twice[3] = TensorHeader { name: "d".into(), dtype: Dtype::F32, shape: vec![1 << 62, 8] };
        assert!(SafetensorsWriter::create(&path, &twice, &[]).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
