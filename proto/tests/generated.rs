//! The committed code is what the `.proto` files generate.

use std::path::Path;

#[test]
fn generated_code_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = root.join("proto");
    let descriptors = protox::compile(["shimmer/v1/shimmer.proto"], [&include]).unwrap();
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .bytes(".")
        // What status pages show as it came.
        .type_attribute("shimmer.v1.Load", "#[derive(serde::Serialize, serde::Deserialize)]")
        .type_attribute("shimmer.v1.Measurement", "#[derive(serde::Serialize, serde::Deserialize)]")
        .type_attribute("shimmer.v1.SyncProgress", "#[derive(serde::Serialize, serde::Deserialize)]")
        .field_attribute("shimmer.v1.Load.resident", "#[serde(skip)]")
        .emit_rerun_if_changed(false)
        .out_dir(out.path())
        .compile_fds(descriptors)
        .unwrap();
    let fresh = std::fs::read_to_string(out.path().join("shimmer.v1.rs")).unwrap();
    let committed = root.join("src/generated/shimmer.v1.rs");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&committed, &fresh).unwrap();
    }
    let stored = std::fs::read_to_string(&committed).unwrap();
    assert!(
        stored == fresh,
        "src/generated/shimmer.v1.rs is out of date; run UPDATE=1 cargo test -p shimmer-proto and commit it"
    );
}
