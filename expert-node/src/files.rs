//! State files: written whole or not at all, readable by their owner only.

use std::io::{self, Write as _};
use std::path::Path;

/// Makes `dir` and its parents; the last directory is for its owner only (mode 0700).
///
/// # Errors
/// The operating system's error.
pub fn create_private_dir(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Replaces `path` by `bytes` atomically and durably, with mode 0600: after a crash the file is the
/// old one or the new one.
///
/// # Errors
/// The operating system's error.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Temporary files are made with mode 0600 and keep it when renamed.
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    #[cfg(unix)]
    std::fs::File::open(dir)?.sync_all()?;
    Ok(())
}

/// Reads a private key, which nobody but its owner may be able to read.
///
/// # Errors
/// The operating system's error, or `PermissionDenied` with the remedy.
pub fn read_private(path: &Path) -> io::Result<String> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        if std::fs::metadata(path)?.permissions().mode() & 0o077 != 0 {
            let what = format!("others can read this private key; run `chmod 600 {}`", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
    }
    std::fs::read_to_string(path)
}

/// A lock held on a file until dropped or the process ends, however it ends.
#[derive(Debug)]
pub struct FileLock {
    _file: std::fs::File,
}

impl FileLock {
    /// Locks `path`; `None` when another process (or another lock of this one) holds it.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        let file = open_lock(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            Err(std::fs::TryLockError::Error(e)) => Err(e),
        }
    }

    /// Locks `path`, waiting for whoever holds it (use for short critical sections only).
    ///
    /// # Errors
    /// The operating system's error.
    pub fn acquire(path: &Path) -> io::Result<Self> {
        let file = open_lock(path)?;
        file.lock()?;
        Ok(Self { _file: file })
    }
}

fn open_lock(path: &Path) -> io::Result<std::fs::File> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).truncate(false).write(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn files_are_private_and_replaced_whole() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        create_private_dir(&dir).unwrap();
        let file = dir.join("key");
        write_private(&file, b"one").unwrap();
        write_private(&file, b"two").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "no temporary file is left");

        assert_eq!(read_private(&file).unwrap(), "two");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        let refused = read_private(&file).unwrap_err().to_string();
        assert!(refused.contains("chmod 600 ") && refused.contains("key"), "{refused}");
    }

    #[test]
    fn a_lock_excludes_until_dropped() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("lock");
        let first = FileLock::try_acquire(&path).unwrap();
        assert!(first.is_some());
        assert!(FileLock::try_acquire(&path).unwrap().is_none());
        drop(first);
        assert!(FileLock::try_acquire(&path).unwrap().is_some());
    }
}
