//! Page-aligned memory for weights: anonymous maps, huge pages where the system offers them.

mod arena;
mod extents;

pub use arena::{Arena, ArenaBuf};

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// A zero-initialised buffer that starts on a page boundary (4 KiB or more).
///
/// Backed by an anonymous map, so large buffers cost nothing until touched and can sit on
/// transparent huge pages (worth 24–44 % of read bandwidth, see `docs/performance.md`).
pub struct AlignedBuf {
    map: Option<MmapMut>,
    len: usize,
}

/// Buffers at least this long ask for huge pages.
const HUGE_PAGE_THRESHOLD_BYTES: usize = 4 << 20;

/// The huge pages of x86-64 and of ARM with 4 KiB pages.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

impl AlignedBuf {
    /// Allocates `len` zero bytes.
    ///
    /// # Errors
    /// The operating system's error when the map is refused.
    pub fn zeroed(len: usize) -> std::io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None, len });
        }
        let map = MmapMut::map_anon(len)?;
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE_THRESHOLD_BYTES {
            // Advice only: a kernel without huge pages answers EINVAL and nothing is lost.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self { map: Some(map), len })
    }

    /// As [`AlignedBuf::zeroed`], on huge pages whatever its size, for a buffer that is used over and over.
    ///
    /// # Errors
    /// As [`AlignedBuf::zeroed`].
    pub fn huge(len: usize) -> std::io::Result<Self> {
        // Whole huge pages, or none would be used.
        let map = MmapMut::map_anon(len.max(1).next_multiple_of(HUGE_PAGE_BYTES))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map: Some(map), len })
    }

    /// Copies `bytes` into a new aligned buffer.
    ///
    /// # Errors
    /// As [`AlignedBuf::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> std::io::Result<Self> {
        let mut buf = Self::zeroed(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |m| &m[..self.len])
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.map.as_deref_mut().map_or(&mut [], |m| &mut m[..len])
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::AlignedBuf;

    #[test]
    fn buffers_are_page_aligned_and_zero() {
        let buf = AlignedBuf::zeroed(5000).unwrap();
        assert_eq!(buf.as_ptr() as usize % 4096, 0);
        assert_eq!(buf.len(), 5000);
        assert!(buf.iter().all(|&b| b == 0));
        assert!(AlignedBuf::zeroed(0).unwrap().is_empty());
    }
}
