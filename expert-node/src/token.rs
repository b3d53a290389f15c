//! Join tokens: everything a new node needs to find and trust a cluster, in one line of text.
//!
//! `shimmer1-` + base64url of: version byte, expiry (u64 seconds, big-endian), secret (32 bytes), CA
//! certificate (u16 length, DER), number of addresses and addresses (u8 length, text), and the first
//! four bytes of the BLAKE3 of all that. The token carries the whole CA certificate, not only its
//! fingerprint, so that the first connection is already checked by plain TLS: the secret is never
//! sent to anybody but the owner of that CA.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// What every token begins with.
pub const PREFIX: &str = "shimmer1-";
const VERSION: u8 = 1;
const CHECK_BYTES: usize = 4;
const MAX_TOKEN_CHARS: usize = 16 << 10;

/// A decoded join token. `Debug` does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// Proof of the invitation.
    pub secret: [u8; 32],
    /// When the coordinator stops accepting it, seconds since 1970.
    pub expires_unix: u64,
    /// Certificate of the cluster's private CA, DER.
    pub ca_der: Vec<u8>,
    /// Addresses (`host:port`) of the coordinator, to be tried in order.
    pub addresses: Vec<String>,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("ca", &fingerprint_of(&self.ca_der))
            .field("expires_unix", &self.expires_unix)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

/// Why a text is not a usable token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Not a token at all, or of a later version.
    #[error("this is not a join token of this version of Shimmer; make one with `shimmer cluster invite`")]
    NotAToken,
    /// Cut off or changed while copying.
    #[error("the join token is incomplete or was changed while copying; copy the whole line again")]
    Damaged,
    /// Its time is over.
    #[error("the join token expired {ago} ago by the clock of this machine")]
    Expired {
        /// How long ago, for people.
        ago: String,
    },
}

impl Token {
    /// The text form.
    pub fn encode(&self) -> String {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.expires_unix.to_be_bytes());
        bytes.extend_from_slice(&self.secret);
        bytes.extend_from_slice(&(self.ca_der.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&self.ca_der);
        let addresses: Vec<&String> = self.addresses.iter().filter(|a| a.len() <= 255).take(255).collect();
        bytes.push(addresses.len() as u8);
        for address in addresses {
            bytes.push(address.len() as u8);
            bytes.extend_from_slice(address.as_bytes());
        }
        let check = blake3::hash(&bytes);
        bytes.extend_from_slice(&check.as_bytes()[..CHECK_BYTES]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Reads the text form; white space around it is ignored.
    ///
    /// # Errors
    /// [`TokenError::NotAToken`] or [`TokenError::Damaged`].
    pub fn decode(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let body = text.strip_prefix(PREFIX).ok_or(TokenError::NotAToken)?;
        if text.len() > MAX_TOKEN_CHARS {
            return Err(TokenError::Damaged);
        }
        let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| TokenError::Damaged)?;
        let (payload, check) = bytes
            .len()
            .checked_sub(CHECK_BYTES)
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or(TokenError::Damaged)?;
        if !blake3::hash(payload).as_bytes().starts_with(check) {
            return Err(TokenError::Damaged);
        }
        let mut reader = Reader(payload);
        if reader.take::<1>().ok_or(TokenError::Damaged)? != [VERSION] {
            return Err(TokenError::NotAToken);
        }
        reader.token().filter(|_| reader.0.is_empty()).ok_or(TokenError::Damaged)
    }

    /// Whether the token's time is over by this machine's clock. That clock may be wrong: only the
    /// coordinator's decides.
    ///
    /// # Errors
    /// [`TokenError::Expired`].
    pub fn check_expiry(&self, now: SystemTime) -> Result<(), TokenError> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        match now.checked_sub(self.expires_unix) {
            None | Some(0) => Ok(()),
            Some(late) => Err(TokenError::Expired {
                ago: match late {
                    1..7200 => format!("{} minutes", late.div_ceil(60)),
                    7200..172_800 => format!("{} hours", late / 3600),
                    _ => format!("{} days", late / (24 * 3600)),
                },
            }),
        }
    }

    /// Fingerprint of the CA, for people to compare.
    pub fn ca_fingerprint(&self) -> String {
        fingerprint_of(&self.ca_der)
    }
}

/// Fingerprint of a certificate: the first 16 bytes of its BLAKE3 in hexadecimal.
pub fn fingerprint_of(der: &[u8]) -> String {
    blake3::hash(der).to_hex().chars().take(32).collect()
}

/// Reads fields from the front of a byte string.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn take_vec(&mut self, len: usize) -> Option<Vec<u8>> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head.to_vec())
    }

    fn token(&mut self) -> Option<Token> {
        let expires_unix = u64::from_be_bytes(self.take()?);
        let secret = self.take()?;
        let ca_len = u16::from_be_bytes(self.take()?);
        let ca_der = self.take_vec(ca_len.into())?;
        let mut addresses = Vec::new();
        for _ in 0..u8::from_be_bytes(self.take()?) {
            let len = u8::from_be_bytes(self.take()?);
            addresses.push(String::from_utf8(self.take_vec(len.into())?).ok()?);
        }
        Some(Token { secret, expires_unix, ca_der, addresses })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Token {
        Token {
            secret: [7; 32],
            expires_unix: 2_000_000_000,
            ca_der: (0..=255).collect(),
            addresses: vec!["192.168.1.4:7420".into(), "[fe80::1]:7420".into()],
        }
    }

    #[test]
    fn tokens_survive_copying() {
        let text = token().encode();
        assert!(text.starts_with(PREFIX));
        assert_eq!(Token::decode(&format!("  {text}\n")).unwrap(), token());
        assert!(!format!("{:?}", token()).contains("7, 7, 7"), "the secret must not be shown");
    }

    #[test]
    fn any_change_is_noticed() {
        let text = token().encode();
        assert_eq!(Token::decode("hello"), Err(TokenError::NotAToken));
        for cut in PREFIX.len()..text.len() {
            assert_eq!(Token::decode(&text[..cut]), Err(TokenError::Damaged), "cut at {cut}");
        }
        for at in PREFIX.len()..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).unwrap();
            assert!(changed == text || Token::decode(&changed).is_err(), "change at {at}");
        }
    }

    #[test]
    fn an_old_token_is_recognised() {
        let at = |s| UNIX_EPOCH + Duration::from_secs(s);
        assert!(token().check_expiry(at(2_000_000_000)).is_ok());
        let late = token().check_expiry(at(2_000_000_000 + 90)).unwrap_err();
        assert!(late.to_string().contains("2 minutes ago"), "{late}");
        let late = token().check_expiry(at(2_000_000_000 + 50 * 3600)).unwrap_err();
        assert!(late.to_string().contains("2 days ago"), "{late}");
    }
}
