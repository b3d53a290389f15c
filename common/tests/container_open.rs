//! Every model of the test data opens, and what is in it is said correctly.

use std::path::PathBuf;

use shimmer_common::container::Container;

fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

fn open(name: &str) -> Container {
    Container::open(&[data(name)]).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn every_oracle_model_opens() {
    for (name, mtp, line) in [
        ("tiny-dense-index", false, "bf16 experts, bf16 attention, bf16 embeddings, no MTP, indexer"),
        ("tiny-sparse", false, "bf16 experts, bf16 attention, bf16 embeddings, no MTP, indexer"),
        ("tiny-groups", false, "bf16 experts, bf16 attention, bf16 embeddings, no MTP, indexer"),
        ("tiny-mtp", true, "bf16 experts, bf16 attention, bf16 embeddings, MTP bf16 (usable), indexer"),
        (
            "tiny-mtp-fp8",
            true,
            "fp8 experts, fp8 attention, bf16 embeddings, MTP mixed fp8/bf16 (usable), indexer",
        ),
        ("tiny-olmoe", false, "bf16 experts, bf16 attention, bf16 embeddings"),
        ("demo-model", true, "bf16 experts, bf16 attention, bf16 embeddings, MTP bf16 (usable), indexer"),
        (
            "colibri-container",
            true,
            "int4 gs64 experts, int4 gs64 attention, int8 embeddings, MTP int8 (usable), indexer",
        ),
    ] {
        let container = open(name);
        assert_eq!(container.summary().line, line, "{name}");
        assert_eq!(container.summary().warnings, Vec::<String>::new(), "{name}");
        assert_eq!(container.has_mtp(), mtp, "{name}");
        assert_eq!(container.has_indexer(), name != "tiny-olmoe", "{name}");
        assert_eq!(container.has_mtp_indexer(), mtp && name != "colibri-container", "{name}");
    }
}
