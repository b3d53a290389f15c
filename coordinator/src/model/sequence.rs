//! The caches of one sequence.

use super::rows::Rows;

/// Tokens and caches of one sequence. Made by [`super::LanguageModel::new_sequence`].
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    tokens: Vec<u32>,
    /// One per main layer.
    pub(super) layers: Vec<LayerCache>,
    /// What drafting needs, when asked for.
    pub(super) mtp: Option<MtpState>,
}

impl Sequence {
    /// An empty sequence over empty caches.
    pub(super) fn new(layers: Vec<LayerCache>, mtp: Option<MtpState>) -> Self {
        Self { tokens: Vec::new(), layers, mtp }
    }

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

    /// The processed tokens beside the drafting state.
    pub(super) fn tokens_and_mtp(&mut self) -> (&[u32], Option<&mut MtpState>) {
        (&self.tokens, self.mtp.as_mut())
    }

    /// Appends tokens whose rows are in every cache now.
    pub(crate) fn push_tokens(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Drops everything at positions `len..` from every cache.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        for layer in &mut self.layers {
            layer.truncate(len);
        }
        if let Some(mtp) = &mut self.mtp {
            mtp.truncate(len);
        }
    }
}

/// Cached rows of one layer, one per position.
#[derive(Clone, Debug)]
pub(super) struct LayerCache {
    /// GLM: `[latent ; rotated key]`, the key's pairs in place. OLMoE: `[keys ; values]`.
    pub kv: Rows,
    /// Keys of the layer's own indexer; width 0 where it has none.
    pub indexer_keys: Rows,
}

impl LayerCache {
    /// An empty cache of the given row lengths.
    pub fn new(kv_width: usize, indexer_width: usize) -> Self {
        Self { kv: Rows::empty(kv_width), indexer_keys: Rows::empty(indexer_width) }
    }

    /// Cached positions.
    pub fn len(&self) -> usize {
        self.kv.rows()
    }

    /// Keeps the first `len` positions.
    pub fn truncate(&mut self, len: usize) {
        self.kv.truncate(len);
        self.indexer_keys.truncate(len);
    }
}

/// Backlog beyond which [`MtpState::skip`] acts, and what it leaves. Rows that nobody drafted from for so long
/// are better dropped than computed: what they know only serves the acceptance of later drafts.
const BACKLOG_ROWS: usize = 64;
const KEPT_ROWS: usize = 32;

/// State of the MTP layer: its caches hold a row per position from `base` on whose successor was known; the
/// hiddens of the positions after those wait in `pending`. `base + cache.len() + pending.rows()` is the
/// sequence's length. Rotations count from `base`: only distances matter to attention.
///
/// After a truncation the last row kept may have consumed a successor that is no longer there. It
/// stays: it can only cost the acceptance of a draft, never change a token.
#[derive(Clone, Debug)]
pub(super) struct MtpState {
    /// Position of the first row.
    pub base: usize,
    /// The layer's own caches.
    pub cache: LayerCache,
    /// Post-final-norm hiddens that wait for their successor token.
    pub pending: Rows,
    /// The newest row of `cache`, while it is the newest position of the sequence.
    pub newest: Option<MtpRow>,
}

/// A processed MTP row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MtpRow {
    /// The target's hidden it consumed.
    pub hidden: Vec<f32>,
    /// The successor token it consumed.
    pub next: u32,
    /// Its output after `shared_head.norm`.
    pub output: Vec<f32>,
    /// The positions it attended to (`None`: all).
    pub selected: Option<Vec<u32>>,
}

impl MtpState {
    /// An empty state over `cache` for hiddens of `hidden_size` values.
    pub fn new(cache: LayerCache, hidden_size: usize) -> Self {
        Self { base: 0, cache, pending: Rows::empty(hidden_size), newest: None }
    }

    /// Drops a long backlog, and the rows before it, down to the newest rows.
    pub fn skip(&mut self) {
        let backlog = self.pending.rows();
        if backlog > BACKLOG_ROWS {
            self.base += self.cache.len() + backlog - KEPT_ROWS;
            self.pending.data.drain(..(backlog - KEPT_ROWS) * self.pending.width);
            self.cache.truncate(0);
            self.newest = None;
        }
    }

    fn truncate(&mut self, len: usize) {
        self.base = self.base.min(len);
        let len = len - self.base;
        if len < self.cache.len() {
            self.newest = None;
            self.cache.truncate(len);
        }
        self.pending.truncate(len - self.cache.len());
    }

    /// Takes back the newest row when it consumed another successor than `next`: its hidden waits again.
    pub fn expect_next(&mut self, next: u32) {
        if self.pending.rows() > 0 {
            return;
        }
        if let Some(row) = self.newest.take_if(|row| row.next != next) {
            self.cache.truncate(self.cache.len() - 1);
            self.pending.data = row.hidden;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(cached: usize, pending: usize, newest: Option<u32>) -> MtpState {
        let mut cache = LayerCache::new(2, 0);
        cache.kv = Rows::zeroed(cached, 2);
        let newest =
            newest.map(|next| MtpRow { hidden: vec![7.0; 3], next, output: Vec::new(), selected: None });
        MtpState { base: 0, cache, pending: Rows::zeroed(pending, 3), newest }
    }

    #[test]
    fn a_long_backlog_is_dropped_with_the_rows_before_it() {
        let mut mtp = state(4, BACKLOG_ROWS, Some(1));
        mtp.skip();
        assert_eq!((mtp.base, mtp.cache.len(), mtp.pending.rows()), (0, 4, BACKLOG_ROWS));
        mtp.pending = Rows::zeroed(BACKLOG_ROWS + 1, 3);
        mtp.skip();
        assert_eq!((mtp.cache.len(), mtp.pending.rows(), &mtp.newest), (0, KEPT_ROWS, &None));
        assert_eq!(mtp.base + KEPT_ROWS, 4 + BACKLOG_ROWS + 1);
        let base = mtp.base;
        mtp.truncate(base + 5);
        assert_eq!((mtp.base, mtp.pending.rows()), (base, 5));
        mtp.truncate(2);
        assert_eq!((mtp.base, mtp.cache.len(), mtp.pending.rows()), (2, 0, 0));
    }

    #[test]
    fn truncation_cuts_pending_hiddens_before_cached_rows() {
        let mut mtp = state(4, 3, None);
        mtp.truncate(5);
        assert_eq!((mtp.cache.len(), mtp.pending.rows()), (4, 1));
        mtp.truncate(2);
        assert_eq!((mtp.cache.len(), mtp.pending.rows()), (2, 0));
    }

    #[test]
    fn a_row_that_consumed_another_token_is_taken_back() {
        let mut mtp = state(4, 0, Some(11));
        mtp.expect_next(11);
        assert_eq!((mtp.cache.len(), mtp.pending.rows()), (4, 0));
        mtp.expect_next(12);
        assert_eq!((mtp.cache.len(), mtp.pending.data.as_slice()), (3, &[7.0; 3][..]));
    }
}
