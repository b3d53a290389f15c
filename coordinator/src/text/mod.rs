//! Text: tokenizer, chat template, incremental detokenisation, parsing of the model's output.

mod chat;
mod detokenizer;
mod generation_config;
pub(crate) mod hold;
mod python_json;
mod reply;
mod strftime;
mod template;
mod tool_call;
mod vocabulary;

pub use chat::ChatInput;
pub use detokenizer::Detokenizer;
pub use reply::{ReplyEvent, ReplyParser};
pub use tool_call::ToolCall;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use generation_config::GenerationConfig;
use template::ChatTemplate;
use vocabulary::Vocabulary;

/// Why text files of a model cannot be used or text cannot be processed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A tokenizer or template file is missing or malformed.
    #[error("{path}: {what}")]
    File {
        /// The file.
        path: PathBuf,
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

/// Tokenizer and chat format of one model directory.
pub struct TextModel {
    vocabulary: Vocabulary,
    template: Option<ChatTemplate>,
    generation: GenerationConfig,
    thinking_default: bool,
    thinking_switchable: bool,
}

impl TextModel {
    /// Opens `tokenizer.json`, `tokenizer_config.json` (optional), `chat_template.jinja` (else the template in
    /// `tokenizer_config.json`, else the built-in GLM template if the tokenizer has GLM's tokens) and
    /// `generation_config.json` (optional). `vocab_size` is the model's; a tokenizer with larger ids is refused
    /// as belonging to another model.
    ///
    /// # Errors
    /// [`TextError::File`].
    pub fn open(dir: &Path, vocab_size: usize) -> Result<Self, TextError> {
        let vocabulary = Vocabulary::open(&dir.join("tokenizer.json"), vocab_size)?;
        let template = open_template(dir, &vocabulary)?;
        let generation = GenerationConfig::open(&dir.join("generation_config.json"))?;
        let mut text = TextModel {
            vocabulary,
            template,
            generation,
            thinking_default: false,
            thinking_switchable: false,
        };
        text.thinking_default = text.probe_thinking(None);
        text.thinking_switchable = text.probe_thinking(Some(true)) != text.probe_thinking(Some(false));
        Ok(text)
    }

    /// Token ids of `text`; added tokens are matched in the text as in the reference.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.vocabulary.encode(text)
    }

    /// Text of `ids`; ids without text decode to nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.vocabulary.decode(ids, skip_special)
    }

    /// A fresh incremental detokeniser.
    pub fn stream(&self, skip_special: bool) -> Detokenizer<'_> {
        Detokenizer::new(self, skip_special)
    }

    /// Renders a conversation with the checkpoint's own template.
    ///
    /// # Errors
    /// [`TextError::Template`]; messages that the template would drop or misprint are refused by name.
    pub fn render_chat(&self, chat: &ChatInput) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or_else(|| {
            TextError::Template("this model has no chat template; give a raw prompt instead".into())
        })?;
        template.render(chat.variables()?)
    }

    /// Whether the model has a chat template (its own or the built-in one).
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Stop ids, ascending: the union of `config.json` (passed in) and `generation_config.json`.
    pub fn stop_ids(&self, config_eos: &[u32]) -> Vec<u32> {
        let mut ids = [config_eos, &self.generation.eos_token_ids].concat();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Temperature of `generation_config.json`, if it has one; 0 where `do_sample` is false.
    pub fn default_temperature(&self) -> Option<f64> {
        self.generation.temperature
    }

    /// `top_p` of `generation_config.json`, if it has one.
    pub fn default_top_p(&self) -> Option<f64> {
        self.generation.top_p
    }

    /// `top_k` of `generation_config.json`, if it has one.
    pub fn default_top_k(&self) -> Option<usize> {
        self.generation.top_k
    }

    /// Whether thinking is on when nobody says otherwise (found by rendering, not by name).
    pub fn thinking_default(&self) -> bool {
        self.thinking_default
    }

    /// Whether `enable_thinking` changes what the template renders as the generation prompt.
    pub fn thinking_switchable(&self) -> bool {
        self.thinking_switchable
    }

    fn probe_thinking(&self, enable: Option<bool>) -> bool {
        let mut chat = ChatInput {
            messages: vec![serde_json::json!({"role": "user", "content": "hello"})],
            add_generation_prompt: true,
            ..ChatInput::default()
        };
        if let Some(enable) = enable {
            chat.kwargs.insert("enable_thinking".into(), enable.into());
        }
        self.render_chat(&chat).is_ok_and(|prompt| prompt_opens_thinking(&prompt))
    }
}

fn open_template(dir: &Path, vocabulary: &Vocabulary) -> Result<Option<ChatTemplate>, TextError> {
    let config_path = dir.join("tokenizer_config.json");
    let config = read_json(&config_path)?.unwrap_or_default();
    let special_tokens = special_tokens(&config);
    let template_path = dir.join("chat_template.jinja");
    if let Some(source) = read_optional(&template_path)? {
        let source = String::from_utf8(source).map_err(|error| TextError::File {
            path: template_path.clone(),
            what: format!("is not UTF-8 text ({error}); copy it again from the model's original checkpoint"),
        })?;
        return ChatTemplate::compile(&source, &template_path, special_tokens).map(Some);
    }
    if let Some(source) = config.get("chat_template").and_then(default_template) {
        return ChatTemplate::compile(source, &config_path, special_tokens).map(Some);
    }
    let is_glm = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>"]
        .iter()
        .all(|token| vocabulary.id_of(token).is_some());
    if !is_glm {
        return Ok(None);
    }
    ChatTemplate::compile(template::BUILT_IN_GLM, Path::new("built-in GLM template"), special_tokens)
        .map(Some)
}

/// `chat_template` is a text, or a list of named templates of which "default" is the one for chatting.
fn default_template(value: &Value) -> Option<&str> {
    let named_default =
        |entry: &&Value| entry.get("name").and_then(Value::as_str).is_some_and(|name| name == "default");
    match value {
        Value::String(source) => Some(source),
        Value::Array(named) => named.iter().find(named_default)?.get("template")?.as_str(),
        _ => None,
    }
}

/// `bos_token`, `eos_token` and the like, whose values are texts or added-token objects.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    let named = config.iter().filter(|(name, _)| name.ends_with("_token"));
    named.filter_map(|(name, value)| Some((name.clone(), text(value)?.into()))).collect()
}

/// Tokenizers of large vocabularies have some 20 MB; anything far beyond is not a text file of a model.
const MAX_TEXT_FILE_BYTES: u64 = 256 << 20;

/// The bytes of a file that may be missing.
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match shimmer_common::disk::read_small(path, MAX_TEXT_FILE_BYTES) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(TextError::File { path: path.to_owned(), what: format!("cannot be read ({error})") })
        }
    }
}

/// A JSON object from an optional file.
fn read_json(path: &Path) -> Result<Option<Map<String, Value>>, TextError> {
    let file_error = |what: String| TextError::File { path: path.to_owned(), what };
    let Some(json) = read_optional(path)? else { return Ok(None) };
    let object = serde_json::from_slice(&json).map_err(|error| {
        file_error(format!(
            "is not a JSON object ({error}); copy it again from the model's original checkpoint"
        ))
    })?;
    Ok(Some(object))
}

/// Whether a rendered prompt ends inside an open think block, so that the reply starts with reasoning.
pub fn prompt_opens_thinking(rendered: &str) -> bool {
    rendered.trim_end().ends_with("<think>")
}

#[cfg(test)]
mod tests;
