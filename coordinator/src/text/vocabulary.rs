//! `tokenizer.json`: text to ids through the `tokenizers` crate, ids to bytes through a table of our own.
//!
//! The table (one byte string per id) makes detokenisation exact and O(1) per token: a byte-level BPE token is
//! a run of bytes, and a character may be spread over several tokens.

use std::path::Path;

use serde::Deserialize;
use tokenizers::{DecoderWrapper, Tokenizer};

use super::TextError;

#[derive(Clone, Copy, Default)]
struct TokenBytes {
    start: usize,
    end: usize,
    special: bool,
}

/// The tokens of one checkpoint.
pub(super) struct Vocabulary {
    tokenizer: Tokenizer,
    /// All tokens' bytes, addressed by `tokens`.
    bytes: Vec<u8>,
    /// By id; ids that `tokenizer.json` does not name are empty.
    tokens: Vec<TokenBytes>,
}

impl Vocabulary {
    /// Reads `tokenizer.json`; every id must be below `vocab_size`.
    pub(super) fn open(path: &Path, vocab_size: usize) -> Result<Self, TextError> {
        let file_error = |what: String| TextError::File { path: path.to_owned(), what };
        let json = super::read_optional(path)?.ok_or_else(|| {
            file_error("the file is missing; copy it from the model's original checkpoint".into())
        })?;
        let mut tokenizer = Tokenizer::from_bytes(&json).map_err(|error| {
            file_error(format!(
                "is not a valid tokenizer ({error}); copy it again from the model's original checkpoint"
            ))
        })?;
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(file_error(
                "the decoder is not ByteLevel; only byte-level BPE tokenizers are supported".into(),
            ));
        }
        // Padding and truncation are a training batch's concern; a prompt is never cut silently.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| file_error(error.to_string()))?;
        check_added_ids(&json, &tokenizer).map_err(file_error)?;
        let (bytes, tokens) = byte_table(&tokenizer, vocab_size).map_err(file_error)?;
        Ok(Vocabulary { tokenizer, bytes, tokens })
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        Ok(encoding.map_err(|error| TextError::Tokenize(error.to_string()))?.get_ids().to_vec())
    }

    /// The id of an added or base token by its exact text.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Bytes of a token; none for ids without text and, with `skip_special`, for special tokens.
    pub(super) fn bytes_of(&self, id: u32, skip_special: bool) -> &[u8] {
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id)).copied().unwrap_or_default();
        if skip_special && token.special { &[] } else { &self.bytes[token.start..token.end] }
    }

    /// Text of `ids`; bytes that form no character become U+FFFD.
    pub(super) fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes_of(id, skip_special)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The part of `tokenizer.json` in which the `tokenizers` crate renumbers without a word.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// Refuses files in which an added token would get another id than the one written.
fn check_added_ids(json: &[u8], tokenizer: &Tokenizer) -> Result<(), String> {
    let file: AddedTokens = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    for token in file.added_tokens {
        let found = tokenizer.token_to_id(&token.content);
        if found != Some(token.id) {
            let found = found.map_or("no token".to_owned(), |id| id.to_string());
            return Err(format!(
                "added token {:?} has id {} but would become {found}; copy the file again from the model's original checkpoint",
                token.content, token.id
            ));
        }
    }
    Ok(())
}

fn byte_table(tokenizer: &Tokenizer, vocab_size: usize) -> Result<(Vec<u8>, Vec<TokenBytes>), String> {
    let vocab = tokenizer.get_vocab(true);
    let added = tokenizer.get_added_tokens_decoder();
    if let Some((token, id)) = vocab.iter().max_by_key(|(_, id)| **id)
        && *id as usize >= vocab_size
    {
        return Err(format!(
            "token {token:?} has id {id}, but the model's vocabulary has {vocab_size} tokens; this tokenizer belongs to another model"
        ));
    }
    let mut bytes = Vec::new();
    let mut tokens = vec![TokenBytes::default(); vocab_size];
    let alphabet = ByteAlphabet::new();
    // Text with such a byte would be dropped without a word.
    if let Some(byte) = alphabet.first_missing(|token| vocab.contains_key(token)) {
        return Err(format!(
            "no token stands for the single byte 0x{byte:02x}; copy the file again from the model's original checkpoint"
        ));
    }
    for (token, &id) in &vocab {
        let start = bytes.len();
        match added.get(&id) {
            Some(added) => bytes.extend_from_slice(added.content.as_bytes()),
            None => alphabet.append(token, &mut bytes),
        }
        let special = added.get(&id).is_some_and(|added| added.special);
        tokens[id as usize] = TokenBytes { start, end: bytes.len(), special };
    }
    Ok((bytes, tokens))
}

/// The printable stand-ins of byte-level BPE: bytes that print stand for themselves, the others for
/// U+0100 upward in ascending order (GPT-2's `bytes_to_unicode`).
struct ByteAlphabet {
    /// By code point.
    byte_of: [Option<u8>; 0x200],
}

impl ByteAlphabet {
    fn new() -> Self {
        let mut byte_of = [None; 0x200];
        let mut stand_in = 0x100;
        for byte in 0..=u8::MAX {
            if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
                byte_of[usize::from(byte)] = Some(byte);
            } else {
                byte_of[stand_in] = Some(byte);
                stand_in += 1;
            }
        }
        ByteAlphabet { byte_of }
    }

    /// The first byte of UTF-8 texts whose one-byte token does not exist.
    fn first_missing(&self, exists: impl Fn(&str) -> bool) -> Option<u8> {
        let stand_ins =
            (0_u32..).zip(self.byte_of).filter_map(|(code, byte)| Some((char::from_u32(code)?, byte?)));
        let in_utf8 = |byte: u8| !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
        let mut missing = stand_ins.filter(|&(c, byte)| in_utf8(byte) && !exists(c.encode_utf8(&mut [0; 4])));
        missing.next().map(|(_, byte)| byte)
    }

    /// Appends the bytes a base token stands for; a token outside the alphabet stands for its own text.
    fn append(&self, token: &str, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        for character in token.chars() {
            match self.byte_of.get(character as usize).copied().flatten() {
                Some(byte) => bytes.push(byte),
                None => {
                    bytes.truncate(start);
                    bytes.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }
}
