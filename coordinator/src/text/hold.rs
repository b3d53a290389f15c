//! Holding text back while it may still become a tag or a stop string.

/// Bytes at the end of `text` to hold back: the longest suffix that is a proper prefix of some pattern.
pub(crate) fn held_back<'a>(text: &str, patterns: impl Iterator<Item = &'a str>) -> usize {
    let suffix_in = |pattern: &str| {
        let longest = pattern.len().saturating_sub(1).min(text.len());
        (1..=longest).rev().find(|&len| {
            let cut = text.len() - len;
            text.is_char_boundary(cut) && pattern.starts_with(&text[cut..])
        })
    };
    patterns.filter_map(suffix_in).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_possible_beginning_is_held() {
        let held = |text: &str, patterns: &[&str]| held_back(text, patterns.iter().copied());
        assert_eq!(held("abc", &["cd", "bcd"]), 2);
        assert_eq!(held("abcd", &["bcd"]), 0);
        assert_eq!(held("aa", &["aaa"]), 2);
        assert_eq!(held("", &["x"]), 0);
        assert_eq!(held("x", &[""]), 0);
        // 'é' is two bytes: no cut inside it.
        assert_eq!(held("né", &["éa"]), 2);
        assert_eq!(held("è", &["é"]), 0);
    }
}
