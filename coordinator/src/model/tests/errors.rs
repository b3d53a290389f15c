//! A failed step leaves the sequence as it was.

use std::sync::atomic::{AtomicBool, Ordering};

use shimmer_common::experts::{ExpertError, ExpertLayout, RoutedBatch};
use shimmer_common::fixed::FixedRows;

use super::*;
use crate::model::ModelError;

/// Fails on `fail_layer` while `failing`.
struct Flaky {
    inner: Arc<dyn ExpertCompute>,
    fail_layer: u16,
    failing: AtomicBool,
}

impl ExpertCompute for Flaky {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        if batch.layer == self.fail_layer && self.failing.load(Ordering::Relaxed) {
            meanwhile();
            return Err(ExpertError::Unreachable("node b is gone; start it again".to_owned()));
        }
        self.inner.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        self.inner.layout()
    }
}

fn flaky(case: &str, fail_layer: u16) -> (Glm, Arc<Flaky>) {
    let inner = local_experts(&container(case), Kernels::best());
    let experts = Arc::new(Flaky { inner, fail_layer, failing: AtomicBool::new(false) });
    (load_glm(case, Some(Arc::clone(&experts) as Arc<dyn ExpertCompute>)), experts)
}

#[test]
fn a_failed_step_leaves_no_rows_behind() {
    let (model, experts) = flaky("tiny-mtp", 2);
    let tokens: Vec<u32> = (10..30).collect();
    let mut seq = model.new_sequence(true);
    model.forward(&mut seq, &tokens[..9], None).unwrap();
    let cached = |seq: &Sequence| -> Vec<usize> { seq.layers.iter().map(LayerCache::len).collect() };

    experts.failing.store(true, Ordering::Relaxed);
    let error = model.forward(&mut seq, &tokens[9..], None).unwrap_err();
    assert!(error.to_string().contains("node b is gone"), "{error}");
    assert_eq!((seq.len(), cached(&seq)), (9, vec![9; 4]));

    experts.failing.store(false, Ordering::Relaxed);
    let hidden = model.forward(&mut seq, &tokens[9..], None).unwrap();
    let mut straight = model.new_sequence(true);
    let want = model.forward(&mut straight, &tokens, None).unwrap();
    assert!(hidden.data == want.data[9 * want.width..]);
    assert_eq!(model.draft(&mut seq, 31, 3).unwrap(), model.draft(&mut straight, 31, 3).unwrap());
}

#[test]
fn a_failed_draft_can_be_repeated() {
    let (model, experts) = flaky("tiny-mtp", 4);
    let mut seq = model.new_sequence(true);
    model.forward(&mut seq, &[5, 6, 7, 8, 9], None).unwrap();
    let mut untroubled = seq.clone();
    experts.failing.store(true, Ordering::Relaxed);
    assert!(matches!(model.draft(&mut seq, 10, 3), Err(ModelError::Expert(_))));
    experts.failing.store(false, Ordering::Relaxed);
    assert_eq!(model.draft(&mut seq, 10, 3).unwrap(), model.draft(&mut untroubled, 10, 3).unwrap());
}

#[test]
fn unknown_tokens_and_overlong_sequences_are_refused() {
    let model = load("tiny-sparse");
    let mut seq = model.new_sequence(false);
    let error = model.forward(&mut seq, &[1, 768], None).unwrap_err();
    assert_eq!(error.to_string(), "token id 768 is not below the vocabulary size 768");
    let error = model.forward(&mut seq, &vec![1; 4097], None).unwrap_err();
    assert_eq!(error.to_string(), "4097 tokens exceed the context of 4096");
    assert!(seq.is_empty());
    assert_eq!(model.forward(&mut seq, &[], None).unwrap().rows(), 0);
}
