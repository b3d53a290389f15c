//! The model against recorded references: `/tests/data` and its comparison rule (exact ids, floats
//! within `1e-4 · max(1, max|expected|)`).

mod bits;
mod demo;
mod drafts;
mod errors;
mod lookahead;
mod oracle;
mod sample;
mod variants;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use shimmer_common::container::Container;
use shimmer_common::container::config::ModelConfig;
use shimmer_common::experts::{ExpertCompute, LocalStore};
use shimmer_common::kernels::Kernels;
use shimmer_common::math;
use shimmer_common::profile::NumericProfile;

use super::glm::Glm;
use super::sequence::LayerCache;
use super::weights::Loader;
use super::{LanguageModel, Rows, Sequence};

/// Relative error allowed by the oracle's comparison rule.
const TOLERANCE: f64 = 1e-4;

fn data(case: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(case)
}

pub(super) fn container(case: &str) -> Container {
    Container::open(&[data(case)]).unwrap()
}

fn local_experts(container: &Container, kernels: Kernels) -> Arc<dyn ExpertCompute> {
    let store = LocalStore::new(container.experts(), kernels, NumericProfile::default(), 64 << 20);
    Arc::new(store.unwrap())
}

fn load_dir(dir: &Path, kernels: Kernels) -> Arc<dyn LanguageModel> {
    let container = Container::open(&[dir.to_owned()]).unwrap();
    let experts = local_experts(&container, kernels);
    super::load(&container, kernels, experts, &mut |_, _| {}).unwrap()
}

fn load_with(case: &str, kernels: Kernels) -> Arc<dyn LanguageModel> {
    load_dir(&data(case), kernels)
}

fn load(case: &str) -> Arc<dyn LanguageModel> {
    load_with(case, Kernels::best())
}

/// A GLM model with its insides, for tests of what the trait does not show.
pub(super) fn load_glm(case: &str, experts: Option<Arc<dyn ExpertCompute>>) -> Glm {
    let container = container(case);
    let kernels = Kernels::best();
    let experts = experts.unwrap_or_else(|| local_experts(&container, kernels));
    let ModelConfig::Glm(config) = container.config() else { panic!("{case} is not a GLM model") };
    let mut progress = |_, _| {};
    let mut loader = Loader::new(&container, &mut progress);
    Glm::load(config, &container, &mut loader, kernels, experts).unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A JSON list of token ids.
fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// An expected tensor.
#[derive(Debug)]
struct Expected {
    shape: Vec<usize>,
    f32s: Vec<f32>,
    i32s: Vec<i32>,
}

/// Reads a file of expected tensors; only F32 and I32 occur.
fn expected(path: &Path) -> BTreeMap<String, Expected> {
    let bytes = std::fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let numbers = |key: &str| -> Vec<usize> {
                info[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
            };
            let range = numbers("data_offsets");
            let words = data[range[0]..range[1]].chunks_exact(4).map(|w| <[u8; 4]>::try_from(w).unwrap());
            let (mut f32s, mut i32s) = (Vec::new(), Vec::new());
            match info["dtype"].as_str().unwrap() {
                "F32" => f32s = words.map(f32::from_le_bytes).collect(),
                "I32" => i32s = words.map(i32::from_le_bytes).collect(),
                other => panic!("{name}: unexpected dtype {other}"),
            }
            (name.clone(), Expected { shape: numbers("shape"), f32s, i32s })
        })
        .collect()
}

/// The error as a fraction of what the comparison rule allows, by group of tensors.
#[derive(Default)]
struct Errors(BTreeMap<String, f64>);

impl Errors {
    /// Asserts that `got` is close enough to `want`.
    fn close(&mut self, group: &str, name: &str, got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len(), "{name}: number of values");
        let largest = want.iter().fold(1f64, |max, w| max.max(f64::from(w.abs())));
        let error = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - f64::from(*w)).abs());
        let fraction =
            error.fold(0f64, |max, e| if e > max || e.is_nan() { e } else { max }) / (TOLERANCE * largest);
        assert!(fraction <= 1.0, "{name}: the error is {fraction:.2} of what is allowed");
        let worst = self.0.entry(group.to_owned()).or_default();
        *worst = worst.max(fraction);
    }

    fn report(&self, case: &str) {
        let groups: Vec<String> = self.0.iter().map(|(group, worst)| format!("{group} {worst:.3}")).collect();
        eprintln!("{case}: error as a fraction of the tolerance: {}", groups.join(", "));
    }
}

/// Forward in chunks of `chunk` rows.
fn prefill(model: &dyn LanguageModel, seq: &mut Sequence, tokens: &[u32], chunk: usize) -> Rows {
    let mut hidden = Rows::empty(model.info().hidden_size);
    for tokens in tokens.chunks(chunk) {
        hidden.data.extend(model.forward(seq, tokens, None).unwrap().data);
    }
    hidden
}

/// The most probable token after every row.
fn argmax_rows(logits: &Rows) -> Vec<u32> {
    (0..logits.rows()).map(|r| math::argmax(logits.row(r)) as u32).collect()
}

/// Cached greedy continuation; also the logits each token was taken from.
fn greedy(model: &dyn LanguageModel, prompt: &[u32], count: usize) -> (Vec<u32>, Rows) {
    let mut seq = model.new_sequence(false);
    let mut logits = model.logits(&model.forward(&mut seq, prompt, None).unwrap());
    let (mut tokens, mut used) = (Vec::new(), Rows::empty(logits.width));
    loop {
        let last = logits.row(logits.rows() - 1);
        used.data.extend_from_slice(last);
        tokens.push(math::argmax(last) as u32);
        if tokens.len() == count {
            return (tokens, used);
        }
        logits = model.logits(&model.forward(&mut seq, &tokens[tokens.len() - 1..], None).unwrap());
    }
}
