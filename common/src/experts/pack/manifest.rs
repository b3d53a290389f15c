//! `manifest.json`: what is the same for every record, and the seal of a finished pack.
//!
//! The file is one JSON object whose last member, `blake3`, is the hash of all bytes before it, so
//! any changed bit is found before a single field is believed.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::ExpertLayout;
use super::{MANIFEST, PackError};
use crate::container::Fingerprint;
use crate::disk;

const KIND: &str = "shimmer-expert-pack";
const VERSION: u32 = 1;

/// A model of 80,000 experts needs 200 KB.
const MAX_BYTES: u64 = 64 << 20;

/// Checked manifest.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Manifest {
    pub fingerprint: Fingerprint,
    pub layout: ExpertLayout,
    pub seal: Option<Seal>,
}

/// What a finished pack promises.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seal {
    pub records: u64,
    /// BLAKE3 of `records.idx`, hex.
    pub index_blake3: String,
    /// Length of each data file by number.
    pub files: std::collections::BTreeMap<u32, u64>,
}

#[derive(Serialize, Deserialize)]
struct Body {
    kind: String,
    version: u32,
    fingerprint: String,
    layout: ExpertLayout,
    seal: Option<Seal>,
}

impl Manifest {
    /// Reads and checks the manifest of the pack at `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self, PackError> {
        let path = dir.join(MANIFEST);
        let len = match std::fs::metadata(&path) {
            Ok(meta) => meta.len(),
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
                ) =>
            {
                return Err(PackError::NotAPack { path: dir.to_owned() });
            }
            Err(error) => return Err(PackError::io("read", &path)(error)),
        };
        if len > MAX_BYTES {
            return Err(PackError::damaged(&path, format!("{len} bytes is too long for a manifest")));
        }
        let bytes = std::fs::read(&path).map_err(PackError::io("read", &path))?;
        Self::parse(&bytes, dir)
    }

    pub(super) fn parse(bytes: &[u8], dir: &Path) -> Result<Self, PackError> {
        let path = dir.join(MANIFEST);
        let damaged = |what: String| PackError::damaged(&path, what);
        let json =
            verified(bytes).ok_or_else(|| damaged("its contents do not match its own BLAKE3".into()))?;
        let body: Body =
            serde_json::from_slice(&json).map_err(|e| damaged(format!("not a manifest: {e}")))?;
        if body.kind != KIND || body.version != VERSION {
            let (kind, version) = (body.kind, body.version);
            return Err(PackError::Mismatch {
                path: dir.to_owned(),
                what: format!(
                    "{kind} version {version} is not supported (this is version {VERSION} of {KIND}); use the program that wrote it, or write the pack again"
                ),
            });
        }
        let fingerprint =
            parse_hex(&body.fingerprint).map(Fingerprint).ok_or_else(|| damaged("bad fingerprint".into()))?;
        body.layout.validate().map_err(|what| damaged(format!("impossible layout: {what}")))?;
        Ok(Self { fingerprint, layout: body.layout, seal: body.seal })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let body = Body {
            kind: KIND.into(),
            version: VERSION,
            fingerprint: self.fingerprint.to_string(),
            layout: self.layout.clone(),
            seal: self.seal.clone(),
        };
        let mut bytes = serde_json::to_vec(&body).expect("plain data with string keys always serialises");
        bytes.pop();
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash_member(&hash).as_bytes());
        bytes
    }

    pub(super) fn write(&self, dir: &Path) -> Result<(), PackError> {
        let path = dir.join(MANIFEST);
        disk::write_atomic(&path, &self.to_bytes()).map_err(PackError::io("write", &path))
    }
}

fn hash_member(hash: &blake3::Hash) -> String {
    format!(",\"blake3\":\"{}\"}}\n", hash.to_hex())
}

/// The JSON without its `blake3` member when that member is right.
fn verified(bytes: &[u8]) -> Option<Vec<u8>> {
    let member_len = hash_member(&blake3::hash(b"")).len();
    let (body, member) = bytes.split_at_checked(bytes.len().checked_sub(member_len)?)?;
    (member == hash_member(&blake3::hash(body)).as_bytes()).then(|| [body, b"}"].concat())
}

/// Parses 64 hex digits.
pub(super) fn parse_hex(hex: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(hex).ok().map(|hash| *hash.as_bytes())
}
