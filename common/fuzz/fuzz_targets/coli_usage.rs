//! colibrì's usage file.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use shimmer_common::experts::ExpertLayout;
use shimmer_common::experts::usage::colibri;

fuzz_target!(|bytes: &[u8]| {
    let layers = BTreeMap::from([(1, vec![0; 4]), (2, vec![0; 4])]);
    let layout = ExpertLayout { hidden_size: 64, specs: Vec::new(), layers };
    if let Ok(imported) = colibri::import(bytes, &layout, 2) {
        let layers = imported.usage.map(|usage| usage.layers).unwrap_or_default();
        assert!(layers.iter().all(|layer| layer.experts.len() == 4));
    }
});
