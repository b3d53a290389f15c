//! The input is a `config.json`. An accepted one has no dimension of zero and one entry per layer.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_common::container::config::ModelConfig;

fuzz_target!(|json: &[u8]| {
    let Ok(config) = ModelConfig::parse(json) else { return };
    assert!(config.hidden_size() > 0 && config.vocab_size() > 0);
    if let ModelConfig::Glm(c) = config {
        assert_eq!(c.sparse_layers.len(), c.num_hidden_layers);
        assert_eq!(c.indexer_modes.len(), c.num_hidden_layers);
        assert!(c.num_experts_per_tok <= c.n_routed_experts);
    }
});
