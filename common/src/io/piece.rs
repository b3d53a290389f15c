//! Cutting segments into pieces.

use std::sync::Arc;

use super::file::SharedFile;
use super::os::BLOCK_BYTES;
use super::{ReadError, Segment};

/// A range of one file that is read with one system call, and where it belongs in the buffer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub file: Arc<SharedFile>,
    /// Index of the copy to read.
    pub copy: usize,
    pub offset: u64,
    pub len: usize,
    pub at: usize,
}

/// Refuses segments that overlap in the buffer or leave it: pieces are filled by several threads.
pub(super) fn check(segments: &[Segment], buf_bytes: usize) -> Result<(), ReadError> {
    let mut ranges: Vec<(usize, usize)> = Vec::with_capacity(segments.len());
    for Segment { offset, len, at, file } in segments {
        let end = at.checked_add(*len).filter(|&end| end <= buf_bytes);
        let Some(end) = end else {
            return Err(ReadError::Unfit(format!("{len} bytes at {at} do not fit into {buf_bytes}")));
        };
        if offset.checked_add(*len as u64 + 2 * BLOCK_BYTES as u64).is_none() {
            return Err(ReadError::Unfit(format!("offset {offset} is beyond every file")));
        }
        if file.copies().is_empty() {
            return Err(ReadError::Unfit("a file has no copy".into()));
        }
        if *len > 0 {
            ranges.push((*at, end));
        }
    }
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(ReadError::Unfit(format!("two segments fill byte {}", pair[1].0))),
        None => Ok(()),
    }
}

/// Cuts a checked segment at multiples of `piece_bytes` from the block its first byte lies in, so that
/// no block is read twice.
pub(super) fn cut(segment: &Segment, copy: usize, piece_bytes: usize) -> impl Iterator<Item = Piece> {
    let Segment { ref file, offset, len, at } = *segment;
    let skip = (offset % BLOCK_BYTES as u64) as usize;
    let mut done = 0;
    let file = Arc::clone(file);
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let to_cut = piece_bytes - (skip + done) % piece_bytes;
        let piece = Piece {
            file: Arc::clone(&file),
            copy,
            offset: offset + done as u64,
            len: to_cut.min(len - done),
            at: at + done,
        };
        done += piece.len;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn segment(offset: u64, len: usize, at: usize) -> Segment {
        Segment { file: Arc::new(SharedFile::new(Path::new("f"), true)), offset, len, at }
    }

    #[test]
    fn pieces_cover_the_segment_and_end_on_blocks() {
        for (offset, len) in [(0, 1), (0, 16384), (4095, 2), (5000, 30_000), (8192, 8192), (4096, 0)] {
            let pieces: Vec<_> = cut(&segment(offset, len, 7), 0, 8192).collect();
            let mut next = (offset, 7);
            for piece in &pieces {
                assert_eq!((piece.offset, piece.at), next);
                assert!(piece.len > 0 && piece.len <= 8192);
                next = (piece.offset + piece.len as u64, piece.at + piece.len);
            }
            assert_eq!(next.0, offset + len as u64);
            let inner = &pieces[..pieces.len().saturating_sub(1)];
            assert!(inner.iter().all(|p| (p.offset + p.len as u64).is_multiple_of(4096)));
        }
    }

    #[test]
    fn segments_that_overlap_or_do_not_fit_are_refused() {
        let good = [segment(0, 10, 5), segment(50, 5, 0), segment(0, 0, 7)];
        assert!(check(&good, 15).is_ok());
        assert!(check(&good, 14).unwrap_err().to_string().contains("do not fit into 14"));
        assert!(check(&[segment(0, 10, 5), segment(50, 6, 0)], 15).is_err());
        assert!(check(&[segment(0, 2, usize::MAX)], 15).is_err());
        assert!(check(&[segment(u64::MAX - 5, 2, 0)], 15).is_err());
    }
}
