//! Sizes as people write them: `24GiB`, `500MB`; a bare number is refused, because nobody knows its unit.

use std::fmt;
use std::str::FromStr;

/// A number of bytes given by a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Unit names, longest first so that `MiB` is not read as `B`.
const UNITS: [(&str, u64); 13] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let lower = text.to_ascii_lowercase();
        let Some((number, factor)) =
            UNITS.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)))
        else {
            return Err(match text.parse::<f64>() {
                Ok(_) => format!("a size needs a unit; did you mean {text}GiB or {text}MB?"),
                Err(_) => "write a size such as 24GiB or 500MB".to_owned(),
            });
        };
        let number = number.trim_end();
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(factor)
                .map(Size)
                .ok_or_else(|| "this size is beyond 16 EiB".to_owned());
        }
        let digits = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        match number.parse::<f64>() {
            Ok(value) if digits => {
                let bytes = value * factor as f64;
                if bytes < u64::MAX as f64 {
                    Ok(Size(bytes as u64))
                } else {
                    Err("this size is beyond 16 EiB".to_owned())
                }
            }
            _ => Err("write a size such as 24GiB or 500MB".to_owned()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        for (unit, factor) in [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if bytes >= factor {
                let value = bytes as f64 / factor as f64;
                return if bytes.is_multiple_of(factor) {
                    write!(f, "{value:.0}{unit}")
                } else {
                    write!(f, "{value:.2}{unit}")
                };
            }
        }
        write!(f, "{bytes}B")
    }
}

#[cfg(test)]
mod tests {
    use super::Size;

    #[test]
    fn sizes_with_units_are_read() {
        for (text, bytes) in [
            ("24GiB", 24u64 << 30),
            ("500MB", 500_000_000),
            ("1.5GiB", 3 << 29),
            ("4096B", 4096),
            ("7k", 7168),
            (" 2 tib ", 2 << 40),
            ("0B", 0),
        ] {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn bare_numbers_get_a_hint() {
        let error = "24".parse::<Size>().unwrap_err();
        assert!(error.contains("24GiB"), "{error}");
        assert!("24.5".parse::<Size>().unwrap_err().contains("24.5GiB"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "GiB", "-3GiB", "infGB", "1e30GB", "nanMB", "12 parsecs", "99999999999TiB", "1.2.3GB"]
        {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print_readably() {
        assert_eq!(Size(24 << 30).to_string(), "24GiB");
        assert_eq!(Size(1_500_000).to_string(), "1.43MiB");
        assert_eq!(Size(12).to_string(), "12B");
    }
}
