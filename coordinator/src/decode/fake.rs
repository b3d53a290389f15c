//! A model for tests of the decode loop: logits are a pseudo-random function of the token prefix, drafts are right
//! about two times in three.

use std::sync::{Arc, Mutex, mpsc};

use super::philox::philox4x32;
use super::{DraftPolicy, Engine, GenerateRequest, SamplingParams};
use crate::model::{LanguageModel, ModelError, ModelInfo, Rows, Sequence, Trace, TraceTensor};
use crate::text::TextModel;

/// The vocabulary of tests/data/tokenizer; ids from 736 on have no text.
pub(super) const VOCAB: usize = 768;
/// A prompt token that makes the model panic (above the vocabulary, so that none is ever drawn).
pub(super) const PANIC: u32 = 1001;
/// Two tokens after which all logits are NaN.
pub(super) const NAN: [u32; 2] = [764, 764];

/// Words of the prefix's hash, each small enough to be exact in f32.
const HIDDEN: usize = 4;

pub(super) struct FakeModel {
    info: ModelInfo,
    seed: u64,
    /// When set, every forward step waits for one permit.
    permits: Option<Mutex<mpsc::Receiver<()>>>,
}

impl FakeModel {
    pub(super) fn new(seed: u64, max_positions: usize, has_mtp: bool) -> Self {
        let info = ModelInfo {
            family: "fake",
            vocab_size: VOCAB,
            hidden_size: HIDDEN,
            num_layers: 1,
            max_positions,
            has_mtp,
            cache_bytes_per_token: 4,
        };
        FakeModel { info, seed, permits: None }
    }

    /// Forward steps wait for permits sent to the returned channel; dropping it lets all pass.
    pub(super) fn gated(mut self) -> (Self, mpsc::Sender<()>) {
        let (sender, receiver) = mpsc::channel();
        self.permits = Some(Mutex::new(receiver));
        (self, sender)
    }

    fn hidden_of(&self, prefix: &[u32]) -> [f32; HIDDEN] {
        let mut state = [self.seed as u32, 0, 0, 0];
        for &token in prefix {
            state[1] ^= token + 1;
            state = philox4x32(state, [17, 29]);
        }
        state.map(|word| (word >> 12) as f32)
    }

    fn logits_of(&self, hidden: &[f32]) -> Vec<f32> {
        let words: Vec<u32> = hidden.iter().map(|&x| x as u32).collect();
        let random = |i: u32| philox4x32([i, words[1], words[2], words[3]], [words[0], 5]);
        // A few favourites over a noisy floor, so that argmax, top-p and temperature all matter.
        let mut logits: Vec<f32> =
            (0..VOCAB as u32 / 4).flat_map(random).map(|word| (word >> 16) as f32 / 16384.0).collect();
        for (i, word) in (1000..1002).flat_map(random).enumerate() {
            logits[word as usize % VOCAB] += 5.0 + 0.25 * i as f32;
        }
        logits
    }
}

impl LanguageModel for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_sequence(&self, _with_mtp: bool) -> Sequence {
        Sequence::default()
    }

    fn forward(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        trace: Option<&mut Trace>,
    ) -> Result<Rows, ModelError> {
        if let Some(permits) = &self.permits {
            // A closed channel lets every step pass.
            let _ = permits.lock().unwrap().recv();
        }
        assert!(!tokens.contains(&PANIC), "told to panic");
        let wanted = seq.len() + tokens.len();
        if wanted > self.info.max_positions {
            return Err(ModelError::ContextExceeded { wanted, limit: self.info.max_positions });
        }
        let mut data = Vec::new();
        for &token in tokens {
            seq.push_tokens(&[token]);
            if seq.tokens().ends_with(&NAN) {
                data.extend([f32::NAN; HIDDEN]);
            } else {
                data.extend(self.hidden_of(seq.tokens()));
            }
        }
        if let Some(trace) = trace {
            let tensor = TraceTensor::F32 { width: HIDDEN, data: data.clone() };
            trace.tensors.insert("hidden.0".into(), tensor);
        }
        Ok(Rows { data, width: HIDDEN })
    }

    fn logits(&self, hidden: &Rows) -> Rows {
        let mut data = Vec::new();
        for i in 0..hidden.rows() {
            let row = hidden.row(i);
            if row[0].is_nan() { data.extend([f32::NAN; VOCAB]) } else { data.extend(self.logits_of(row)) }
        }
        Rows { data, width: VOCAB }
    }

    fn extend_mtp(
        &self,
        _seq: &mut Sequence,
        _next: Option<u32>,
        _trace: Option<&mut Trace>,
    ) -> Result<(), ModelError> {
        Ok(())
    }

    fn draft(&self, seq: &mut Sequence, next: u32, k: usize) -> Result<Vec<u32>, ModelError> {
        assert!(self.info.has_mtp, "drafting without an MTP layer");
        let mut prefix = [seq.tokens(), &[next]].concat();
        let start = prefix.len();
        for _ in 0..k {
            let hidden = self.hidden_of(&prefix);
            let logits = self.logits_of(&hidden);
            let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap();
            let right = !(hidden[3] as u32).is_multiple_of(3);
            prefix.push(if right { best as u32 } else { (best as u32 + 1) % 700 });
        }
        Ok(prefix.split_off(start))
    }

    fn truncate(&self, seq: &mut Sequence, len: usize) {
        seq.truncate(len);
    }
}

/// Text of tests/data/tokenizer.
pub(super) fn text() -> Arc<TextModel> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/tokenizer");
    Arc::new(TextModel::open(std::path::Path::new(dir), VOCAB).unwrap())
}

pub(super) fn engine(model: FakeModel) -> Engine {
    Engine { model: Arc::new(model), text: text() }
}

/// A greedy request without stop rules.
pub(super) fn request(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams::greedy(),
        max_tokens,
        stop_ids: Vec::new(),
        stop_strings: Vec::new(),
        drafts: DraftPolicy::Off,
        prefill_chunk: 0,
    }
}
