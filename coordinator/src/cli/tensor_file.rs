//! A deterministic safetensors writer: the same tensors always give the same bytes.
//!
//! Tensors are written in name order, F32 and I32 alike; the header is padded with spaces so that data
//! starts at a multiple of 64. The file appears under its name only when it is complete; what is no
//! regular file (a device, a pipe) is written to and stays what it is.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::CliError;

/// Header lengths are multiples of this, less the eight length bytes.
const DATA_ALIGNMENT: usize = 64;

/// One tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// f32 `[rows, width]`.
    F32 {
        /// Row length.
        width: usize,
        /// Values, row after row.
        data: Vec<f32>,
    },
    /// i32 rows, padded with -1 to the longest.
    I32 {
        /// Rows.
        rows: Vec<Vec<i32>>,
    },
}

impl Tensor {
    fn dtype(&self) -> &'static str {
        match self {
            Self::F32 { .. } => "F32",
            Self::I32 { .. } => "I32",
        }
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32 { width, data } => [data.len().checked_div(*width).unwrap_or(0), *width],
            Self::I32 { rows } => [rows.len(), rows.iter().map(Vec::len).max().unwrap_or(0)],
        }
    }

    fn bytes(&self) -> usize {
        let [rows, width] = self.shape();
        rows * width * 4
    }

    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Self::F32 { data, .. } => data.iter().try_for_each(|v| out.write_all(&v.to_le_bytes())),
            Self::I32 { rows } => {
                let [_, width] = self.shape();
                rows.iter().try_for_each(|row| {
                    let padding = std::iter::repeat_n(&-1, width - row.len());
                    row.iter().chain(padding).try_for_each(|v| out.write_all(&v.to_le_bytes()))
                })
            }
        }
    }
}

/// Refuses places that [`write`] could not use, before hours of work, and the model's own directories:
/// a `.safetensors` file there would be read as a part of the model.
///
/// # Errors
/// [`CliError::Usage`] naming the place.
pub fn check_place(path: &Path, model: &[PathBuf]) -> Result<(), CliError> {
    let refuse = |what: &str| Err(CliError::Usage(format!("cannot write {}: {what}", path.display())));
    if path.is_dir() {
        return refuse("it is a directory; name a file in it");
    }
    let Ok(dir) = std::fs::canonicalize(directory(path)) else {
        return refuse("its directory does not exist; make it first");
    };
    if model.iter().any(|model| std::fs::canonicalize(model).is_ok_and(|model| model == dir)) {
        return refuse("it lies in the model directory, which is never written to; name another place");
    }
    Ok(())
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes `tensors` to `path`: atomically, unless it is a device or a pipe.
///
/// # Errors
/// [`CliError::Failed`] naming the file; nothing is left behind.
pub fn write(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::io(format!("cannot write {}", path.display()), &e);
    // A link stays a link; the file it names is replaced.
    let place = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if std::fs::metadata(&place).is_ok_and(|meta| !meta.is_file()) {
        let mut file = std::fs::File::options().write(true).open(&place).map_err(failed)?;
        return write_to(&mut file, tensors).map_err(failed);
    }
    let mut file =
        tempfile::Builder::new().prefix(".shimmer-").tempfile_in(directory(&place)).map_err(failed)?;
    write_to(file.as_file_mut(), tensors).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    keep_default_mode(file.as_file()).map_err(failed)?;
    file.persist(&place).map_err(|e| failed(e.error))?;
    Ok(())
}

fn write_to(file: &mut std::fs::File, tensors: &BTreeMap<String, Tensor>) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(file);
    out.write_all(&header(tensors))?;
    tensors.values().try_for_each(|tensor| tensor.write(&mut out))?;
    out.flush()
}

/// Temporary files are private; a result is an ordinary file.
fn keep_default_mode(file: &std::fs::File) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

fn header(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut offset = 0usize;
    for (name, tensor) in tensors {
        let end = offset + tensor.bytes();
        entries.insert(
            name.clone(),
            serde_json::json!({ "dtype": tensor.dtype(), "shape": tensor.shape(), "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let json = serde_json::Value::Object(entries).to_string();
    let length = (8 + json.len()).next_multiple_of(DATA_ALIGNMENT) - 8;
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(8 + length, b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> BTreeMap<String, Tensor> {
        BTreeMap::from([
            ("logits".to_owned(), Tensor::F32 { width: 3, data: vec![1.0, 2.0, 3.0, -0.0, f32::MIN, 6.5] }),
            ("index_topk.0".to_owned(), Tensor::I32 { rows: vec![vec![0], vec![0, 1], vec![]] }),
        ])
    }

    #[test]
    fn files_are_deterministic_and_aligned() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.safetensors"), dir.path().join("b.safetensors"));
        write(&a, &sample()).unwrap();
        write(&b, &sample()).unwrap();
        let bytes = std::fs::read(&a).unwrap();
        assert_eq!(bytes, std::fs::read(&b).unwrap());
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!((8 + header) % DATA_ALIGNMENT, 0);
        assert_eq!(bytes.len(), 8 + header + 6 * 4 + 6 * 4);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn headers_list_names_in_order_and_rows_are_padded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        write(&path, &sample()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        assert_eq!(header["index_topk.0"]["shape"], serde_json::json!([3, 2]));
        assert_eq!(header["index_topk.0"]["data_offsets"], serde_json::json!([0, 24]));
        assert_eq!(header["logits"]["data_offsets"], serde_json::json!([24, 48]));
        let ints: Vec<i32> =
            bytes[8 + length..][..24].chunks(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect();
        assert_eq!(ints, [0, -1, 0, 1, -1, -1]);
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_links_and_pipes_stay_pipes() {
        use std::os::unix::fs::FileTypeExt;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("old"), b"old").unwrap();
        std::os::unix::fs::symlink(at("old"), at("link")).unwrap();
        write(&at("link"), &sample()).unwrap();
        assert!(std::fs::symlink_metadata(at("link")).unwrap().is_symlink());
        let bytes = std::fs::read(at("old")).unwrap();
        assert!(bytes.len() > 64);

        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = at("pipe");
            move || std::fs::read(pipe).unwrap()
        });
        write(&at("pipe"), &sample()).unwrap();
        assert!(std::fs::metadata(at("pipe")).unwrap().file_type().is_fifo());
        assert_eq!(reader.join().unwrap(), bytes);
    }

    #[test]
    fn unusable_places_and_the_model_itself_are_refused_up_front() {
        let dir = tempfile::tempdir().unwrap();
        let (model, other) = (dir.path().join("model"), dir.path().join("other"));
        std::fs::create_dir_all(&model).unwrap();
        std::fs::create_dir_all(&other).unwrap();
        let models = [model.clone()];
        assert!(check_place(&other.join("x.safetensors"), &models).is_ok());
        let refused = |place: &Path| check_place(place, &models).unwrap_err().to_string();
        assert!(refused(&other).contains("is a directory"));
        assert!(refused(&other.join("none/x.safetensors")).contains("does not exist"));
        assert!(refused(&other.join("../model/x.safetensors")).contains("model directory"));
    }

    #[test]
    fn a_bad_place_is_an_error_naming_the_file() {
        let error = write(Path::new("/nonexistent-dir/x.safetensors"), &sample()).unwrap_err().to_string();
        assert!(error.contains("/nonexistent-dir/x.safetensors"), "{error}");
    }
}
