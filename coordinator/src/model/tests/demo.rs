//! The demo model: trained weights, sparse attention beyond 64 tokens.

use super::*;
use crate::model::trace::{Trace, TraceTensor};

#[test]
fn the_demo_model_matches_its_reference() {
    let model = load("demo-model");
    let prompts = json(&data("demo-model/expected/prompts.json"));
    let want = expected(&data("demo-model/expected/logits.safetensors"));
    let mut errors = Errors::default();
    for (name, prompt) in prompts.as_object().unwrap() {
        let tokens = ids(&prompt["prompt_ids"]);
        let mut trace = Trace::default();
        let mut seq = model.new_sequence(true);
        let hidden = model.forward(&mut seq, &tokens, None).unwrap();
        model.extend_mtp(&mut seq, None, Some(&mut trace)).unwrap();
        let logits = model.logits(&hidden);
        let key = |what: &str| format!("{name}.{what}");
        errors.close("hidden", name, &hidden.data, &want[&key("hidden_post_norm")].f32s);
        errors.close("logits", name, &logits.data, &want[&key("logits")].f32s);
        let TraceTensor::F32 { data, .. } = &trace.tensors["mtp_logits"] else { panic!("kind") };
        errors.close("mtp", name, data, &want[&key("mtp_logits")].f32s);

        let continuation = ids(&prompt["greedy_ids"]);
        assert_eq!(greedy(&*model, &tokens, continuation.len()).0, continuation, "{name}");
    }
    assert_eq!(prompts.as_object().unwrap().len(), 3);
    errors.report("demo-model");
}
