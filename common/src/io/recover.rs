//! What is done about a failing piece: the same copy again after a pause, then the other copies.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use super::ReadError;
use super::file::{Bounce, Served};
use super::piece::Piece;
use super::queue::Shared;

/// Reads a piece on the calling thread, after `first` went wrong. May pause.
pub(super) fn recover(
    shared: &Shared,
    piece: &Piece,
    buf: &mut [u8],
    first: std::io::Error,
    bounce: &mut Bounce,
) -> Result<Served, ReadError> {
    let options = shared.options();
    let copies = piece.file.copies();
    let mut error = first;
    let mut path = piece.file.path();
    // The chosen copy first, which has had its first attempt.
    let order = std::iter::once(piece.copy).chain((0..copies.len()).filter(|&copy| copy != piece.copy));
    for copy in order {
        let Some(replica) = copies.get(copy) else { continue };
        path = replica.path();
        let mut read = || replica.read(buf, piece.offset, options.caching, false, bounce);
        let mut outcome = if copy == piece.copy { Err(error) } else { read() };
        let mut pause = options.retry_pause;
        for _ in 0..options.retries {
            if !outcome.as_ref().is_err_and(may_pass) {
                break;
            }
            shared.retries.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(pause);
            pause = pause.saturating_mul(2);
            outcome = read();
        }
        match outcome {
            Ok(served) => {
                if copy != piece.copy {
                    shared.rescued.fetch_add(1, Ordering::Relaxed);
                }
                return Ok(served);
            }
            Err(last) => {
                if !replica.has_failed() {
                    tracing::warn!(path = %path.display(), offset = piece.offset, error = %last, "a read failed");
                    replica.mark_failed();
                }
                error = last;
            }
        }
    }
    Err(ReadError::Failed { path: path.to_owned(), offset: piece.offset, len: piece.len, source: error })
}

/// Whether the same read may succeed a moment later.
fn may_pass(error: &std::io::Error) -> bool {
    !matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::NotFound | ErrorKind::PermissionDenied)
}
