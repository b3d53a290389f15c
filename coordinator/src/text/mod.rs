//! Text: tokenizer, chat template, incremental detokenisation, parsing of the model's output.

mod reply;

pub use reply::{ReplyEvent, ReplyParser, ToolCall};

use std::path::Path;

use serde_json::Value;

/// Why text files of a model cannot be used or text cannot be processed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A tokenizer or template file is missing or malformed.
    #[error("{path}: {what}")]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong and the remedy.
        what: String,
    },
    /// The chat template refused the conversation.
    #[error("the chat template cannot render this conversation: {0}")]
    Template(String),
    /// The tokenizer failed on a text.
    #[error("cannot tokenize: {0}")]
    Tokenize(String),
}

/// What a conversation is rendered with.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// OpenAI-style message objects.
    pub messages: Vec<Value>,
    /// OpenAI-style tool objects.
    pub tools: Vec<Value>,
    /// Extra template variables (`enable_thinking`, `reasoning_effort`, …).
    pub kwargs: serde_json::Map<String, Value>,
    /// Whether the assistant's turn is opened.
    pub add_generation_prompt: bool,
}

/// Tokenizer and chat format of one model directory.
pub struct TextModel {
    _private: (),
}

impl TextModel {
    /// Opens `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` (or the built-in GLM
    /// template) and `generation_config.json`. `vocab_size` is the model's; a tokenizer with larger
    /// ids is refused as belonging to another model.
    ///
    /// # Errors
    /// [`TextError::File`].
    pub fn open(dir: &Path, vocab_size: usize) -> Result<Self, TextError> {
        let _ = (dir, vocab_size);
        todo!()
    }

    /// Token ids of `text`; added tokens are matched in the text as in the reference.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let _ = text;
        todo!()
    }

    /// Text of `ids`; ids without text decode to nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let _ = (ids, skip_special);
        todo!()
    }

    /// A fresh incremental detokeniser.
    pub fn stream(&self, skip_special: bool) -> Detokenizer<'_> {
        let _ = skip_special;
        todo!()
    }

    /// Renders a conversation with the checkpoint's own template.
    ///
    /// # Errors
    /// [`TextError::Template`].
    pub fn render_chat(&self, chat: &ChatInput) -> Result<String, TextError> {
        let _ = chat;
        todo!()
    }

    /// Stop ids: the union of `config.json` (passed in) and `generation_config.json`.
    pub fn stop_ids(&self, config_eos: &[u32]) -> Vec<u32> {
        let _ = config_eos;
        todo!()
    }

    /// Sampling defaults of `generation_config.json` (temperature, top_p, top_k), where present.
    pub fn default_temperature(&self) -> Option<f64> {
        todo!()
    }

    /// See [`TextModel::default_temperature`].
    pub fn default_top_p(&self) -> Option<f64> {
        todo!()
    }

    /// See [`TextModel::default_temperature`].
    pub fn default_top_k(&self) -> Option<usize> {
        todo!()
    }

    /// Whether thinking is on when nobody says otherwise (found by rendering, not by name).
    pub fn thinking_default(&self) -> bool {
        todo!()
    }

    /// Whether `enable_thinking` changes what the template renders as the generation prompt.
    pub fn thinking_switchable(&self) -> bool {
        todo!()
    }
}

/// Turns tokens into text without ever splitting a UTF-8 character.
pub struct Detokenizer<'a> {
    _text: &'a TextModel,
}

impl Detokenizer<'_> {
    /// Adds a token; returns the text that may be emitted now (possibly empty).
    pub fn push(&mut self, id: u32) -> String {
        let _ = id;
        todo!()
    }

    /// The rest (an incomplete character becomes U+FFFD).
    pub fn finish(&mut self) -> String {
        todo!()
    }
}

/// Whether a rendered prompt ends inside an open think block, so that the reply starts with reasoning.
pub fn prompt_opens_thinking(rendered: &str) -> bool {
    rendered.trim_end().ends_with("<think>")
}
