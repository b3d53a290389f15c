//! Incremental detokenisation that never splits a UTF-8 character.

use super::TextModel;

/// Turns tokens into text without ever splitting a UTF-8 character. Joined, the pieces are exactly what
/// [`TextModel::decode`] gives for all the ids.
pub struct Detokenizer<'a> {
    text: &'a TextModel,
    skip_special: bool,
    /// The beginning of a character whose rest has not arrived: at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    pub(super) fn new(text: &'a TextModel, skip_special: bool) -> Self {
        Detokenizer { text, skip_special, pending: Vec::new() }
    }

    /// Adds a token; returns the text that may be emitted now (possibly empty).
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(self.text.vocabulary.bytes_of(id, self.skip_special));
        let complete = self.pending.len() - unfinished_tail(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        text
    }

    /// The rest (an incomplete character becomes U+FFFD).
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Length of the unfinished UTF-8 sequence at the end of `bytes`, 0 if there is none.
fn unfinished_tail(bytes: &[u8]) -> usize {
    for (back, &byte) in bytes.iter().rev().take(4).enumerate() {
        let have = back + 1;
        let need = match byte {
            0x80..=0xBF => continue,
            0xC0..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF7 => 4,
            _ => 1,
        };
        return if need > have { have } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sequence_that_can_continue_is_held_back() {
        assert_eq!(unfinished_tail(b""), 0);
        assert_eq!(unfinished_tail(b"a"), 0);
        assert_eq!(unfinished_tail(&[0xE2, 0x82]), 2);
        assert_eq!(unfinished_tail(&[0xE2, 0x82, 0xAC]), 0);
        assert_eq!(unfinished_tail(&[b'a', 0xF0, 0x9F, 0x98]), 3);
        assert_eq!(unfinished_tail(&[0x80, 0x80, 0x80, 0x80]), 0);
        assert_eq!(unfinished_tail(&[0xFF]), 0);
    }
}
