//! The caches of one sequence.

/// Tokens and caches of one sequence. Made by [`super::LanguageModel::new_sequence`].
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    tokens: Vec<u32>,
}

impl Sequence {
    /// Processed tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing was processed yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The processed token ids.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}
