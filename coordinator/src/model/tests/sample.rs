//! The sample container: the quantised path against a float reference over the same weights.

use super::*;

#[test]
fn the_quantised_path_keeps_every_argmax_of_the_sample_container() {
    let model = load("colibri-container");
    let oracle = &json(&data("colibri-container/expected.json"))["hf_oracle"];
    let tokens = ids(&oracle["input_ids"]);
    let mut seq = model.new_sequence(true);
    let logits = model.logits(&prefill(&*model, &mut seq, &tokens, usize::MAX));
    let last = logits.row(tokens.len() - 1);
    let want = oracle["last_position_logits_first16"].as_array().unwrap();
    let error = want.iter().zip(last).map(|(w, g)| (w.as_f64().unwrap() - f64::from(*g)).abs());
    let worst = error.fold(0f64, f64::max);
    eprintln!("colibri-container: last logits differ by at most {worst:.4}");
    assert_eq!(argmax_rows(&logits), ids(&oracle["argmax_per_position"]));
    // int8 activations in groups of 64 carry a rounding error of 1/254 of the group's largest value.
    assert!(worst < 0.1, "{worst}");
}

#[test]
fn the_mtp_layer_of_a_container_drafts_without_an_indexer() {
    let model = load("colibri-container");
    assert!(model.info().has_mtp);
    let mut seq = model.new_sequence(true);
    model.forward(&mut seq, &[3, 14, 59, 26], None).unwrap();
    assert_eq!(model.draft(&mut seq, 53, 3).unwrap().len(), 3);
    assert!(seq.mtp.unwrap().newest.unwrap().selected.is_none());
}
