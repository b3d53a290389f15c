//! A container of GLM-5.2's size, made of headers only: exact byte sums and the time to open it.

use std::time::Instant;

use shimmer_common::container::ByteSums;
use shimmer_common::experts::ExpertId;

use crate::support::{Width, glm_5_2, glm_container, open, write_container};

/// docs/formats.md §6.3, per layer and in total.
struct Table {
    attention: u64,
    dense_mlp: u64,
    shared_expert: u64,
    resident: u64,
    routed: u64,
    main: u64,
    record: usize,
}

fn check(body: Width, table: &Table, line: &str) {
    let dir = tempfile::tempdir().unwrap();
    write_container(dir.path(), &glm_5_2(), glm_container(&glm_5_2(), body, Width::Int8));
    let start = Instant::now();
    let container = open(dir.path()).unwrap();
    let elapsed = start.elapsed();
    println!("opened in {elapsed:?}");
    // Generous for an unoptimised build on a busy machine; in release it is a small part of a second.
    assert!(elapsed.as_secs() < 20, "opening took {elapsed:?}");

    let sums = container.bytes();
    assert_eq!(
        sums,
        ByteSums {
            embeddings_head: 1_904_404_480,
            attention: 78 * table.attention,
            norms: 78 * 59_392 + 6144 * 4,
            dense_mlp: 3 * table.dense_mlp,
            shared_experts: 75 * table.shared_expert,
            router: 75 * 6_292_480,
            indexer: 0,
            mtp_dense: 284_972_288,
            routed_main: table.routed,
            routed_mtp: 9_959_134_464 - 284_972_288,
        }
    );
    assert_eq!(sums.resident_main(), table.resident);
    assert_eq!(sums.resident_main() + sums.routed_main, table.main);
    assert_eq!(container.dense_bytes(), table.resident + 284_972_288);
    assert_eq!(container.summary().line, line);
    assert!(container.has_mtp() && !container.has_indexer());

    let experts = container.experts();
    let layout = experts.layout();
    assert_eq!(layout.ids().count(), 19_456);
    let id = ExpertId { layer: 77, index: 255 };
    assert_eq!(layout.record_bytes(id), Some(table.record));
    assert_eq!(layout.record_bytes(ExpertId { layer: 78, index: 0 }), Some(37_789_696));
    let mut record = vec![1; table.record];
    experts.read(id, &mut record).unwrap();
    assert!(record.iter().all(|&b| b == 0), "the hole reads as zeros");
    assert!(!experts.contains(ExpertId { layer: 2, index: 0 }), "layer 2 is dense");
    assert!(!experts.contains(ExpertId { layer: 3, index: 256 }));

    let start = Instant::now();
    let fingerprint = container.fingerprint().unwrap();
    println!("fingerprint in {:?}", start.elapsed());
    assert_eq!(fingerprint, open(dir.path()).unwrap().fingerprint().unwrap());
}

#[test]
fn int4_row_sums_are_those_of_the_formats_page() {
    check(
        Width::Int4Row,
        &Table {
            attention: 82_725_120,
            dense_mlp: 113_369_088,
            shared_expert: 18_915_328,
            resident: 10_592_313_856,
            routed: 363_174_297_600,
            main: 373_766_611_456,
            record: 18_915_328,
        },
        "int4 per-row experts, int4 per-row attention, int8 embeddings, MTP int8 (usable), \
         no indexer: attention is dense beyond 2048 tokens",
    );
}

#[test]
fn int4_gs64_sums_are_those_of_the_formats_page() {
    check(
        Width::Int4Group(64),
        &Table {
            attention: 92_823_552,
            dense_mlp: 127_401_984,
            shared_expert: 21_233_664,
            resident: 11_595_965_440,
            routed: 407_686_348_800,
            main: 419_282_314_240,
            record: 21_233_664,
        },
        "int4 gs64 experts, int4 gs64 attention, int8 embeddings, MTP int8 (usable), \
         no indexer: attention is dense beyond 2048 tokens",
    );
}

#[test]
fn an_int4_mtp_layer_has_the_stated_size_and_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let width = Width::Int4Row;
    write_container(dir.path(), &glm_5_2(), glm_container(&glm_5_2(), width, width));
    let container = open(dir.path()).unwrap();
    let sums = container.bytes();
    assert_eq!(sums.mtp_dense + sums.routed_mtp, 4_988_163_328);
    let warnings = container.summary().warnings.join("\n");
    assert!(warnings.contains("the MTP layer is int4"), "{warnings}");
    assert!(warnings.contains("one scale per row"), "{warnings}");
}
