//! A tokenizer for a random model: one token per byte, GLM's control tokens, and words nobody writes.

use serde_json::{Map, Value, json};

/// What the chat format is made of; the last ids of the vocabulary.
const CONTROL_TOKENS: [&str; 9] = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<|endoftext|>",
];

/// `tokenizer.json` of a byte-level tokenizer with `vocab_size` tokens; `None` when the bytes and the control
/// tokens do not fit.
pub(super) fn tokenizer(vocab_size: usize) -> Option<Value> {
    let words = vocab_size.checked_sub(256 + CONTROL_TOKENS.len())?;
    let mut vocab = Map::new();
    for byte in 0..=u8::MAX {
        vocab.insert(stand_in(byte).to_string(), Value::from(vocab.len()));
    }
    for word in 0..words {
        // U+0120 stands for a blank.
        vocab.insert(format!("\u{120}w{word}"), Value::from(vocab.len()));
    }
    let added: Vec<Value> = CONTROL_TOKENS
        .iter()
        .zip(256 + words..)
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    Some(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    }))
}

/// The printable stand-in of a byte in byte-level BPE (GPT-2's `bytes_to_unicode`).
fn stand_in(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count();
    char::from_u32(0x100 + before as u32).unwrap_or('\u{100}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_is_named_once() {
        for size in [265, 300] {
            let json = tokenizer(size).unwrap();
            let base = json["model"]["vocab"].as_object().unwrap();
            let added = json["added_tokens"].as_array().unwrap();
            let ids = base.values().chain(added.iter().map(|token| &token["id"]));
            let mut ids: Vec<_> = ids.map(|id| id.as_u64().unwrap()).collect();
            ids.sort_unstable();
            assert!(ids.into_iter().eq(0..size as u64));
        }
        assert!(tokenizer(264).is_none());
        assert_eq!((stand_in(b' '), stand_in(b'a'), stand_in(0), stand_in(0xAD)), ('Ġ', 'a', 'Ā', 'Ń'));
    }
}
