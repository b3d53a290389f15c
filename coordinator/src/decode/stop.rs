//! Stop strings, exact across token boundaries.
//!
//! The answer ends where a stop string is first complete, reading character by character; if several are
//! complete at the same character, at the longest. So the result depends on the text only, not on how it was cut
//! into tokens.

use crate::text::hold::held_back;

/// Looks for stop strings in text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopScan {
    /// Text that is certain now and lies before any stop string.
    pub text: String,
    /// The stop string that was completed; text after it is dropped.
    pub hit: Option<String>,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopStrings { strings, held: String::new() }
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) -> StopScan {
        self.held.push_str(text);
        let found = self.strings.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        // First the earliest end, then the earliest start.
        if let Some((start, stop)) = found.min_by_key(|&(start, stop)| (start + stop.len(), start)) {
            let hit = Some(stop.clone());
            self.held.truncate(start);
            return StopScan { text: std::mem::take(&mut self.held), hit };
        }
        let certain = self.held.len() - held_back(&self.held, self.strings.iter().map(String::as_str));
        StopScan { text: self.held.drain(..certain).collect(), hit: None }
    }

    /// The text held back, at the end of the answer.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::philox::philox4x32;

    fn scan(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut scanner = StopStrings::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        let mut text = String::new();
        for piece in pieces {
            let found = scanner.push(piece);
            text += &found.text;
            if found.hit.is_some() {
                return (text, found.hit);
            }
        }
        (text + &scanner.finish(), None)
    }

    #[test]
    fn a_stop_string_may_lie_anywhere() {
        assert_eq!(scan(&["END"], &["some E", "N", "Dmore"]), ("some ".into(), Some("END".into())));
        assert_eq!(scan(&["END"], &["EEND"]), ("E".into(), Some("END".into())));
        assert_eq!(scan(&["END"], &["EN", "EN"]), ("ENEN".into(), None));
        assert_eq!(scan(&["ab", "xabc"], &["xabc"]), ("x".into(), Some("ab".into())));
        assert_eq!(scan(&["b", "ab"], &["ab"]), ("".into(), Some("ab".into())));
        assert_eq!(scan(&["", "é"], &["caf", "é!"]), ("caf".into(), Some("é".into())));
        assert_eq!(scan(&[], &["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn text_is_emitted_as_soon_as_it_is_certain() {
        let mut scanner = StopStrings::new(&["\n\nQ".to_owned()]);
        assert_eq!(scanner.push("one\n").text, "one");
        assert_eq!(scanner.push("two\n\n").text, "\ntwo");
        assert_eq!(scanner.push("\n").text, "\n");
        assert_eq!(scanner.finish(), "\n\n");
    }

    #[test]
    fn the_cut_into_pieces_does_not_matter() {
        let mut counter = 0;
        let mut random = |below: usize| {
            counter += 1;
            philox4x32([counter, 0, 0, 0], [3, 4])[0] as usize % below
        };
        let alphabet = ["a", "b", "é", "\n"];
        for _ in 0..500 {
            let mut word =
                |longest: usize| (0..1 + random(longest)).map(|_| alphabet[random(4)]).collect::<String>();
            let text = word(40);
            let stops = [word(4), word(3)];
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let single: Vec<&str> = characters.iter().map(String::as_str).collect();
            let expected = scan(&stops, &single);
            let joined: Vec<String> = characters.chunks(1 + random(6)).map(|c| c.concat()).collect();
            let joined: Vec<&str> = joined.iter().map(String::as_str).collect();
            assert_eq!(scan(&stops, &joined), expected, "{text:?} {stops:?}");
            assert_eq!(scan(&stops, &[&text]), expected, "{text:?} {stops:?}");
        }
    }
}
