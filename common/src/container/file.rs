//! Model shards: open files, or paths that are opened on demand.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use crate::disk::read_exact_at;
use crate::io::SharedFile;

/// Shards beyond this number are reopened for every read, so that a model of thousands of shards does
/// not exhaust the usual limit of 1024 open files (a shard may be open twice, for direct reads too).
pub(crate) const MAX_OPEN_SHARDS: usize = 256;

/// One file of the model, opened read-only.
#[derive(Debug)]
pub(crate) struct Shard {
    file: Arc<SharedFile>,
}

impl Shard {
    /// Keeps `file` open, or only its path.
    pub(crate) fn new(path: PathBuf, file: Option<File>) -> Self {
        let file = match file {
            Some(file) => SharedFile::opened(&path, file),
            None => SharedFile::new(&path, false),
        };
        Self { file: Arc::new(file) }
    }

    /// A shard with further copies of it.
    pub(crate) fn of(file: SharedFile) -> Self {
        Self { file: Arc::new(file) }
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// For reads through an engine.
    pub(crate) fn file(&self) -> &Arc<SharedFile> {
        &self.file
    }

    /// Fills `buf` from byte `offset`.
    pub(crate) fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.file.read_exact_at(buf, offset)
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
