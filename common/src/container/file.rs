//! Positional reads of open files, and model shards that are open or reopened on demand.

use std::fs::File;
use std::path::{Path, PathBuf};

/// Fills `buf` from byte `offset`; a short file is [`std::io::ErrorKind::UnexpectedEof`].
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buf, offset)
}

/// Fills `buf` from byte `offset`; a short file is [`std::io::ErrorKind::UnexpectedEof`].
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut buf: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    use std::io::{Error, ErrorKind};
    use std::os::windows::fs::FileExt;
    while !buf.is_empty() {
        match file.seek_read(buf, offset) {
            Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "the file is shorter than expected")),
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Shards beyond this number are reopened for every read, so that a model of thousands of shards does
/// not exhaust the usual limit of 1024 open files.
pub(crate) const MAX_OPEN_SHARDS: usize = 256;

/// One file of the model, opened read-only.
#[derive(Debug)]
pub(crate) struct Shard {
    path: PathBuf,
    file: Option<File>,
}

impl Shard {
    /// Keeps `file` open, or only its path.
    pub(crate) fn new(path: PathBuf, file: Option<File>) -> Self {
        Self { path, file }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `buf` from byte `offset`.
    pub(crate) fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        match &self.file {
            Some(file) => read_exact_at(file, buf, offset),
            None => read_exact_at(&File::open(&self.path)?, buf, offset),
        }
    }
}
