//! Positional reads of open files, and model shards that are open or reopened on demand.

use std::fs::File;
use std::path::{Path, PathBuf};

pub(crate) use crate::disk::read_exact_at;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_and_reopened_shards_read_alike_and_never_short() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, b"0123456789").unwrap();
        for file in [Some(File::open(&path).unwrap()), None] {
            let shard = Shard::new(path.clone(), file);
            let mut buf = [0; 4];
            shard.read_exact_at(&mut buf, 3).unwrap();
            assert_eq!(&buf, b"3456");
            let error = shard.read_exact_at(&mut buf, 7).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
        }
    }
}
