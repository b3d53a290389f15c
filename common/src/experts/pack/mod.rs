//! The expert pack: fixed-size records, 4 KiB aligned, a manifest with a BLAKE3 per record.
