//! Expert records are the container's bytes, whatever the file looks like.

use std::path::Path;

use shimmer_common::container::Container;
use shimmer_common::experts::{ExpertId, ExpertMatrix};
use shimmer_common::mem::AlignedBuf;

use crate::support::{RawFile, copy, data, edit, open};

fn records(container: &Container) -> Vec<(ExpertId, AlignedBuf)> {
    let source = container.experts();
    let read = |id: ExpertId| {
        let mut record = AlignedBuf::zeroed(source.layout().record_bytes(id).unwrap()).unwrap();
        record.fill(0xa5);
        source.read(id, &mut record).unwrap();
        (id, record)
    };
    source.layout().ids().map(read).collect()
}

/// All shards of a directory, taken apart.
fn shards(dir: &Path) -> Vec<RawFile> {
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    paths.iter().map(|p| RawFile::read(p)).collect()
}

/// Every part of every record equals the tensor's bytes, everything else is zero.
fn check(dir: &Path) {
    let container = open(dir).unwrap();
    let files = shards(dir);
    let stored = |name: &str| files.iter().find(|f| f.header.contains_key(name)).map(|f| f.bytes(name));
    let source = container.experts();
    let records = records(&container);
    assert!(records.len() >= 6);
    for (id, record) in records {
        let spec = source.layout().spec(id).unwrap();
        let mut covered = vec![false; record.len()];
        for part in spec.parts() {
            let name =
                format!("model.layers.{}.mlp.experts.{}.{}.weight", id.layer, id.index, part.matrix.name());
            let bytes = if part.scales {
                stored(&format!("{name}.qs")).or_else(|| stored(&format!("{name}_scale_inv"))).unwrap_or(&[])
            } else {
                stored(&name).unwrap()
            };
            assert_eq!(&record[part.range()], bytes, "{name} scales={}", part.scales);
            covered[part.range()].fill(true);
        }
        assert!(record.iter().zip(covered).all(|(&byte, covered)| covered || byte == 0), "padding of {id}");
        let ffn = spec.view(&record).unwrap();
        let name = format!("model.layers.{}.mlp.experts.{}.up_proj.weight", id.layer, id.index);
        let up = container.load_matrix(&name).unwrap();
        assert_eq!(ffn.up.weights, &up.weights[..]);
        assert_eq!(ffn.up.scales, up.scales);
        assert_eq!(spec.matrix(ExpertMatrix::Up).format, up.format);
    }
}

#[test]
fn records_are_the_bytes_of_the_files() {
    for model in ["colibri-container", "tiny-mtp", "tiny-mtp-fp8", "tiny-olmoe", "tiny-groups"] {
        check(&data(model));
    }
}

#[test]
fn records_do_not_depend_on_the_order_in_the_file() {
    let expected = records(&open(&data("colibri-container")).unwrap());
    let dir = copy("colibri-container");
    for shard in ["out-00000.safetensors", "out-mtp-00000.safetensors"] {
        edit(&dir.path().join(shard), |file| {
            // Lay the tensors out again, backwards and with gaps.
            let mut names: Vec<String> =
                file.header.keys().filter(|k| *k != "__metadata__").cloned().collect();
            names.sort_by_key(|name| std::cmp::Reverse(file.range(name).start));
            let mut data = Vec::new();
            for name in names {
                data.extend([0xee; 4]);
                let begin = data.len();
                data.extend(file.bytes(&name));
                file.header[&name]["data_offsets"] = serde_json::json!([begin, data.len()]);
            }
            file.data = data;
        });
    }
    check(dir.path());
    let shuffled = records(&open(dir.path()).unwrap());
    for ((id, a), (_, b)) in expected.iter().zip(&shuffled) {
        assert!(a[..] == b[..], "{id}");
    }
}

#[test]
fn unknown_experts_and_wrong_buffers_are_refused() {
    let container = open(&data("colibri-container")).unwrap();
    let source = container.experts();
    let id = ExpertId { layer: 1, index: 3 };
    assert!(!source.contains(id));
    assert!(source.read(id, &mut []).unwrap_err().to_string().contains("layer 1 expert 3"));
    let id = ExpertId { layer: 1, index: 2 };
    assert!(source.contains(id));
    let error = source.read(id, &mut [0; 100]).unwrap_err().to_string();
    assert!(error.contains("the buffer has 100 bytes"), "{error}");
    assert!(source.describe().starts_with("container "));
}
