//! Thousands of small deterministic changes to valid files: the parsers answer, they never panic.
//! The seeds are those of the fuzz targets in `common/fuzz`.

use std::path::{Path, PathBuf};

use shimmer_common::container::config::ModelConfig;
use shimmer_common::container::safetensors::read_header_with;

use crate::support::{copy, open};

const MUTATIONS_PER_SEED: u64 = 4000;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds")).join(target);
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 3);
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// xorshift64*: a fixed sequence for a fixed seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit.max(1)
    }
}

/// Text that has broken parsers before.
const NASTY: [&str; 14] = [
    "-1",
    "0",
    "1e400",
    "18446744073709551615",
    "9223372036854775808",
    "0.5",
    "null",
    "[]",
    "{}",
    "\"\"",
    "true",
    "[[[[[[",
    "\\ud800",
    "4294967296",
];

/// One to four edits: flipped bits, cut, doubled or removed ranges, replaced numbers.
fn mutate(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(12)).min(bytes.len());
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            4 => replace_number(&mut bytes, at, random),
            _ => drop(bytes.splice(at..at, NASTY[random.below(NASTY.len())].bytes())),
        }
    }
    bytes
}

/// Replaces the first run of digits at or behind `at`.
fn replace_number(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|i| at + i) else { return };
    let len = bytes[start..].iter().take_while(|b| b.is_ascii_digit()).count();
    bytes.splice(start..start + len, NASTY[random.below(NASTY.len())].bytes());
}

/// Reads a header from memory; whatever a clean header promises lies inside the file.
fn header(file: &[u8]) -> bool {
    let read = |buf: &mut [u8], offset: u64| {
        buf.copy_from_slice(&file[offset as usize..offset as usize + buf.len()]);
        Ok(())
    };
    let header = read_header_with(file.len() as u64, read).unwrap();
    for flaw in &header.flaws {
        assert!(!flaw.what.is_empty());
    }
    let clean = header.flaws.is_empty();
    for (name, tensor) in header.tensors.iter().filter(|_| clean) {
        assert!(tensor.begin <= tensor.end && tensor.end <= file.len() as u64, "{name}");
    }
    clean
}

#[test]
fn safetensors_headers() {
    let (mut clean, mut flawed) = (0, 0);
    for (i, seed) in seeds("safetensors_header").iter().enumerate() {
        assert!(header(seed), "seed {i} is valid");
        let mut random = Random::new(i as u64);
        for _ in 0..MUTATIONS_PER_SEED {
            let file = mutate(seed, &mut random);
            *(if header(&file) { &mut clean } else { &mut flawed }) += 1;
        }
    }
    assert!(clean > 100 && flawed > 100, "the mutations reach both answers: {clean} clean, {flawed} flawed");
}

#[test]
fn configurations() {
    let (mut accepted, mut refused) = (0, 0);
    for (i, seed) in seeds("config_json").iter().enumerate() {
        ModelConfig::parse(seed).unwrap();
        let mut random = Random::new(i as u64);
        for _ in 0..MUTATIONS_PER_SEED {
            match ModelConfig::parse(&mutate(seed, &mut random)) {
                Ok(config) => {
                    accepted += 1;
                    assert!(config.hidden_size() > 0 && config.vocab_size() > 0);
                }
                Err(message) => {
                    refused += 1;
                    assert!(!message.is_empty() && !message.contains('\n'), "{message}");
                }
            }
        }
    }
    assert!(accepted > 100 && refused > 100, "{accepted} accepted, {refused} refused");
}

/// Opens a directory and, when it opens, reads everything.
fn read_all(dir: &Path) -> bool {
    let Ok(container) = open(dir) else { return false };
    for tensor in container.dense_tensors() {
        let _ = container.load_matrix(&tensor.name);
        let _ = container.load_vector(&tensor.name);
    }
    let source = container.experts();
    for id in source.layout().ids() {
        let mut record = vec![0; source.layout().record_bytes(id).unwrap()];
        let _ = source.read(id, &mut record);
    }
    true
}

#[test]
fn whole_containers() {
    let (mut opened, mut refused) = (0, 0);
    for (i, file) in ["out-00001.safetensors", "out-mtp-00000.safetensors", "config.json"].iter().enumerate()
    {
        let dir = copy("colibri-container");
        let path = dir.path().join(file);
        let original = std::fs::read(&path).unwrap();
        // Mutations go to the header, where the structure is; the data follows unchanged.
        let head = if i == 2 {
            original.len()
        } else {
            8 + usize::from(u16::from_le_bytes([original[0], original[1]]))
        };
        let mut random = Random::new(100 + i as u64);
        for _ in 0..150 {
            let mut bytes = mutate(&original[..head], &mut random);
            if i < 2 {
                // Keep the length field honest most of the time.
                if random.below(8) > 0 && bytes.len() >= 8 {
                    let len = bytes.len() as u64 - 8;
                    bytes[..8].copy_from_slice(&len.to_le_bytes());
                }
                bytes.extend(&original[head..]);
            }
            std::fs::write(&path, bytes).unwrap();
            *(if read_all(dir.path()) { &mut opened } else { &mut refused }) += 1;
        }
    }
    assert!(opened > 5 && refused > 50, "{opened} opened, {refused} refused");
}
