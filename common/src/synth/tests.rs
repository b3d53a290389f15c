use std::ops::ControlFlow;

use super::*;
use crate::experts::ExpertId;

fn write(to: &Path, options: &SynthOptions) -> SynthReport {
    synthesise(to, options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn tiny() -> SynthOptions {
    SynthOptions { shape: SynthShape::tiny(), shard_bytes: 200_000, ..SynthOptions::default() }
}

const FORMATS: [Format; 10] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Fp8Block,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Grouped { group: 32 },
    Format::Int4Grouped { group: 64 },
    Format::Int3G64,
    Format::Int2Row,
];

#[test]
fn every_format_opens_and_every_tensor_loads() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let to = dir.path().join(format.to_string());
        let mut options = SynthOptions { expert_format: format, mtp: true, ..tiny() };
        // No multiple of a group; 144 columns could not tell three groups of int3 from int4.
        options.shape.hidden_size = 200;
        let report = write(&to, &options);
        let container = Container::open(std::slice::from_ref(&to)).unwrap();
        assert!(container.has_mtp() && container.has_indexer() && container.has_mtp_indexer());
        assert_eq!(container.summary().warnings.iter().filter(|w| w.contains("ignored")).count(), 0);
        assert_eq!(report.bytes, container.bytes().total(), "{format}");
        assert!(report.files > 3);
        for tensor in container.dense_tensors() {
            match tensor.shape {
                crate::container::TensorShape::Matrix { .. } => {
                    drop(container.load_matrix(&tensor.name).unwrap());
                }
                crate::container::TensorShape::Vector { .. } => {
                    drop(container.load_vector(&tensor.name).unwrap());
                }
            }
        }
        let source = container.experts();
        let spec = source.layout().spec(ExpertId { layer: 1, index: 0 }).unwrap();
        assert_eq!(spec.gate.format, format);
        let ids: Vec<ExpertId> = source.layout().ids().collect();
        assert_eq!(ids.len(), 3 * 16);
        for id in ids {
            let mut record = vec![0; source.layout().record_bytes(id).unwrap()];
            source.read(id, &mut record).unwrap();
        }
    }
}

#[test]
fn dense_parts_may_have_any_format() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let to = dir.path().join(format.to_string());
        write(&to, &SynthOptions { dense_format: format, embedding_format: format, ..tiny() });
        let container = Container::open(&[to]).unwrap();
        let spec = container.matrix_spec("model.layers.1.self_attn.o_proj.weight").unwrap();
        assert_eq!(spec.format, format);
    }
}

#[test]
fn the_same_options_give_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str, options: &SynthOptions| {
        let to = dir.path().join(name);
        write(&to, options);
        let mut files: Vec<_> = std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let contents = files
            .iter()
            .map(|path| (path.file_name().unwrap().to_owned(), blake3::hash(&std::fs::read(path).unwrap())));
        contents.collect::<Vec<_>>()
    };
    let options = SynthOptions { router: RouterSkew::Zipf(1.25), ..tiny() };
    let first = read("first", &options);
    assert_eq!(first, read("second", &options));
    assert_ne!(first, read("third", &SynthOptions { seed: 1, ..options.clone() }));
    // How bytes are cut into shards changes none of them.
    let whole = read("whole", &SynthOptions { shard_bytes: u64::MAX, ..options });
    assert!(whole.len() < first.len());
}

#[test]
fn a_token_touches_what_the_shape_says() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    let report = write(&to, &tiny());
    let container = Container::open(&[to]).unwrap();
    let bytes = container.bytes();
    // 4 of 16 experts in two layers.
    assert_eq!(report.token.routed, bytes.routed_main / 4);
    let one_table = bytes.embeddings_head / 2;
    let other = bytes.attention + bytes.norms + bytes.dense_mlp + bytes.shared_experts + bytes.router;
    assert!(report.token.dense > one_table + other && report.token.dense < one_table + other + bytes.indexer);
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    let stopped = synthesise(&to, &tiny(), &mut |done, _| {
        if done > 100_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(SynthError::Cancelled)));
    let mut huge = tiny();
    huge.shape.n_routed_experts = 60_000;
    huge.shape.moe_intermediate_size = 1 << 20;
    let refused = synthesise(&to, &huge, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(SynthError::Space { .. })), "{refused:?}");
    let mut unclear = SynthOptions { expert_format: Format::Int3G64, ..tiny() };
    unclear.shape.hidden_size = 144;
    let refused = synthesise(&to, &unclear, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(SynthError::Options(_))), "{refused:?}");
    let mut odd = tiny();
    odd.shape.qk_rope_head_dim = 5;
    let refused = synthesise(&to, &odd, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(SynthError::Options(_))), "{refused:?}");
    let mut dense = tiny();
    dense.shape.first_k_dense_replace = dense.shape.num_hidden_layers;
    let refused = synthesise(&to, &dense, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(SynthError::Options(_))), "{refused:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    std::fs::create_dir(&to).unwrap();
    let refused = synthesise(&to, &tiny(), &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(SynthError::Occupied { .. })));
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), 0);
}

#[test]
fn headers_alone_are_enough_to_open() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, headers) = (dir.path().join("whole"), dir.path().join("headers"));
    let report = write(&whole, &tiny());
    let same = write(&headers, &SynthOptions { headers_only: true, ..tiny() });
    assert_eq!((report.bytes, report.files, report.token), (same.bytes, same.files, same.token));
    for entry in std::fs::read_dir(&whole).unwrap() {
        let path = entry.unwrap().path();
        let other = headers.join(path.file_name().unwrap());
        assert_eq!(other.metadata().unwrap().len(), path.metadata().unwrap().len(), "{}", path.display());
    }
}
