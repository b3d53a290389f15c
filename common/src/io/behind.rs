//! Writing without leaving the page cache full of what was written.

use std::fs::File;
use std::io::{Result, Write};

use super::os::forget;

/// The system is asked to begin writing back whenever this much has come together.
const STEP_BYTES: u64 = 8 << 20;

/// At most this much is in the page cache and not on disk.
const WINDOW_BYTES: u64 = 32 << 20;

/// A part of a file that is written front to back, and how much of it the page cache may still hold.
#[derive(Debug, Default)]
pub struct Trail {
    begin: u64,
    end: u64,
    stepped: u64,
}

impl Trail {
    /// Notes that `len` bytes were written to `file` at `offset`. Waits for the disk now and then.
    ///
    /// # Errors
    /// The operating system's: the disk did not take what was written.
    pub fn wrote(&mut self, file: &File, offset: u64, len: u64) -> Result<()> {
        if self.end != offset {
            self.clear(file)?;
            (self.begin, self.stepped) = (offset, offset);
        }
        self.end = offset.saturating_add(len);
        if self.end - self.begin >= WINDOW_BYTES {
            self.clear(file)?;
        } else if self.end - self.stepped >= STEP_BYTES {
            // Changed pages are not dropped but begin their way to the disk.
            forget(file, self.stepped, self.end - self.stepped);
            self.stepped = self.end;
        }
        Ok(())
    }

    /// Waits until everything noted is on disk, and drops it from the page cache.
    ///
    /// # Errors
    /// As [`Trail::wrote`].
    pub fn clear(&mut self, file: &File) -> Result<()> {
        if self.end > self.begin {
            file.sync_data()?;
            forget(file, self.begin, self.end - self.begin);
        }
        (self.begin, self.stepped) = (self.end, self.end);
        Ok(())
    }
}

/// A file written front to back.
#[derive(Debug)]
pub struct Behind {
    file: File,
    at: u64,
    trail: Trail,
}

impl Behind {
    /// Writes from the start of `file`, which must be empty.
    pub fn new(file: File) -> Self {
        Self { file, at: 0, trail: Trail::default() }
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// The operating system's.
    pub fn finish(mut self) -> Result<()> {
        self.trail.clear(&self.file)?;
        self.file.sync_all()
    }
}

impl Write for Behind {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let n = self.file.write(bytes)?;
        self.trail.wrote(&self.file, self.at, n as u64)?;
        self.at += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let mut out = Behind::new(File::create(&path).unwrap());
        // Over the window, in pieces that do not divide it.
        let piece: Vec<u8> = (0..5 << 20).map(|i: u32| (i >> 3) as u8).collect();
        for _ in 0..9 {
            out.write_all(&piece).unwrap();
        }
        out.finish().unwrap();
        assert!(std::fs::read(&path).unwrap() == piece.repeat(9));
    }

    #[test]
    fn a_trail_follows_jumps() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("out")).unwrap();
        let mut trail = Trail::default();
        for (offset, len) in [(100, 50), (150, 9 << 20), (0, 10), (1 << 30, 40 << 20)] {
            trail.wrote(&file, offset, len).unwrap();
            assert!(trail.end - trail.begin < WINDOW_BYTES && trail.stepped >= trail.begin);
        }
        trail.clear(&file).unwrap();
        assert_eq!(trail.begin, trail.end);
    }
}
