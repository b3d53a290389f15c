//! The date directives templates use in `strftime_now` (UTC, English names, as C's locale has them).

use minijinja::{Error, ErrorKind};
use time::OffsetDateTime;

/// Formats `now`; an unknown directive is refused.
pub(super) fn strftime(now: OffsetDateTime, format: &str) -> Result<String, Error> {
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = rest.next();
        // glibc's "-" drops the padding.
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let text = directive.and_then(|d| expand(now, d)).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now does not know a directive of {format:?}"),
            )
        })?;
        let trimmed = text.trim_start_matches(['0', ' ']);
        out.push_str(match (unpadded, trimmed.is_empty()) {
            (true, false) => trimmed,
            (true, true) => "0",
            (false, _) => &text,
        });
    }
    Ok(out)
}

fn expand(now: OffsetDateTime, directive: char) -> Option<String> {
    let month = now.month().to_string();
    let weekday = now.weekday().to_string();
    let hour12 = match now.hour() % 12 {
        0 => 12,
        hour => hour,
    };
    Some(match directive {
        'Y' => now.year().to_string(),
        'y' => format!("{:02}", now.year().rem_euclid(100)),
        'm' => format!("{:02}", u8::from(now.month())),
        'd' => format!("{:02}", now.day()),
        'e' => format!("{:2}", now.day()),
        'j' => format!("{:03}", now.ordinal()),
        'H' => format!("{:02}", now.hour()),
        'I' => format!("{hour12:02}"),
        'M' => format!("{:02}", now.minute()),
        'S' => format!("{:02}", now.second()),
        'p' => if now.hour() < 12 { "AM" } else { "PM" }.into(),
        'b' | 'h' => month.chars().take(3).collect(),
        'a' => weekday.chars().take(3).collect(),
        'B' => month,
        'A' => weekday,
        'F' => format!("{}-{:02}-{:02}", now.year(), u8::from(now.month()), now.day()),
        'T' => format!("{:02}:{:02}:{:02}", now.hour(), now.minute(), now.second()),
        '%' => "%".into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn common_formats() {
        let now = datetime!(2026-03-05 15:04:09 UTC);
        for (format, text) in [
            ("%d %B %Y", "05 March 2026"),
            ("%-d %b %y, %A", "5 Mar 26, Thursday"),
            ("%F %T|%I:%M %p", "2026-03-05 15:04:09|03:04 PM"),
            ("%a %e. %j 100%%", "Thu  5. 064 100%"),
        ] {
            assert_eq!(strftime(now, format).unwrap(), text);
        }
        assert!(strftime(now, "%").is_err());
    }
}
