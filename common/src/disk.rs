//! Small file-system helpers: writes that are there whole or not at all, positional I/O, free space.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::Path;

/// Writes `bytes` to `path` so that after a crash at any moment either the old file or the new one
/// is there: temporary file in the same directory, fsync, rename, fsync of the directory.
///
/// # Errors
/// The operating system's error; the temporary file is removed.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = parent(path);
    let mut temp = tempfile::Builder::new().prefix(".tmp-").tempfile_in(dir)?;
    // Files of the model are as readable as the user's umask lets any new file be; the temporary
    // file's 0600 would lock out a service that runs as another user.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        temp.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    temp.write_all(bytes)?;
    temp.as_file().sync_all()?;
    temp.persist(path).map_err(|error| error.error)?;
    sync_dir(dir)
}

/// Whether writing a file that begins with `magic` to `path` destroys nothing else: there is no file, an empty
/// one, or one of that kind.
///
/// # Errors
/// The operating system's error.
pub fn may_replace(path: &Path, magic: &[u8]) -> Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    // A device or a pipe keeps nothing, and reading it may never end.
    if !file.metadata()?.is_file() {
        return Ok(true);
    }
    let mut head = Vec::new();
    file.take(magic.len() as u64).read_to_end(&mut head)?;
    Ok(head.is_empty() || head == magic)
}

/// Reads a whole file that should be small. A pipe or a device is refused instead of waited for, and
/// never more than `limit` bytes are taken, whatever a file system says about sizes.
///
/// # Errors
/// The operating system's error; [`ErrorKind::InvalidInput`] for what is no regular file,
/// [`ErrorKind::FileTooLarge`] beyond `limit`.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(path)?;
    if meta.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !meta.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    (&file).take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    // Tokenizers of large vocabularies have some 20 MB, read once.
    crate::io::forget(&file, 0, bytes.len() as u64);
    if bytes.len() as u64 > limit {
        let what =
            format!("it has {} bytes, more than the {limit} allowed", meta.len().max(bytes.len() as u64));
        return Err(Error::new(ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// Makes renames and removals inside `dir` durable, where the system has a way to say so.
///
/// # Errors
/// The operating system's error.
pub fn sync_dir(dir: &Path) -> Result<()> {
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

/// Fills `buf` from byte `offset` of `file`; a short file is [`std::io::ErrorKind::UnexpectedEof`].
///
/// # Errors
/// The operating system's error.
pub fn read_exact_at(file: &File, buf: &mut [u8], offset: u64) -> Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, buf, offset);
    #[cfg(windows)]
    return {
        let (mut buf, mut offset) = (buf, offset);
        while !buf.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(file, buf, offset)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => (buf, offset) = (&mut buf[n..], offset + n as u64),
            }
        }
        Ok(())
    };
}

/// Writes all of `bytes` at byte `offset` of `file`.
///
/// # Errors
/// The operating system's error.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::write_all_at(file, bytes, offset);
    #[cfg(windows)]
    return {
        let (mut bytes, mut offset) = (bytes, offset);
        while !bytes.is_empty() {
            match std::os::windows::fs::FileExt::seek_write(file, bytes, offset)? {
                0 => return Err(std::io::ErrorKind::WriteZero.into()),
                n => (bytes, offset) = (&bytes[n..], offset + n as u64),
            }
        }
        Ok(())
    };
}

/// Bytes an unprivileged user may still write to the file system that holds `path`, which need not
/// exist yet. Where the system is not asked (Windows) the answer is `u64::MAX`.
///
/// # Errors
/// The operating system's error.
pub fn free_bytes(path: &Path) -> Result<u64> {
    #[cfg(unix)]
    {
        let existing = path.ancestors().find(|p| p.exists()).unwrap_or_else(|| Path::new("."));
        let stat = rustix::fs::statvfs(existing).map_err(Error::from)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        Ok(u64::MAX)
    }
}

/// The directory that holds `path` (`.` for a bare name).
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_atomic_write_replaces_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn small_files_are_read_whole_and_anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_small(&path, 5).unwrap(), b"12345");
        assert_eq!(read_small(&path, 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_small(dir.path(), 4).unwrap_err().kind(), ErrorKind::IsADirectory);
        let missing = read_small(&dir.path().join("none"), 4).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        #[cfg(unix)]
        assert_eq!(read_small(Path::new("/dev/zero"), 4).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn free_space_of_a_path_to_be_made_is_that_of_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(&dir.path().join("not/yet")).unwrap() > 0);
    }
}
