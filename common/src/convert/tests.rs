//! The converter against a second, plain implementation of docs/formats.md §4, and its life cycle.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::*;
use crate::container::safetensors::Dtype;
use crate::container::write::{SafetensorsWriter, TensorHeader};

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

fn go_on(_: ConvertProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A tensor as it lies in a file.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
    begin: u64,
}

fn read_shard(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let body = &bytes[8 + header_len..];
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, entry)| {
            let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
            let [begin, end] = [0, 1].map(|i| number(&entry["data_offsets"][i]));
            let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            (name.clone(), Stored { dtype, shape, bytes: body[begin..end].to_vec(), begin: begin as u64 })
        })
        .collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = if exponent == 0 {
        mantissa * 2f32.powi(-9)
    } else {
        (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7)
    };
    if byte & 0x80 == 0 { size } else { -size }
}

/// The values of a source tensor, row after row.
fn source_values(source: &BTreeMap<String, Stored>, name: &str) -> Vec<f32> {
    let stored = &source[name];
    let cols = *stored.shape.last().unwrap();
    match stored.dtype.as_str() {
        "F32" => f32s(&stored.bytes),
        "BF16" => {
            let widen = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            stored.bytes.chunks_exact(2).map(widen).collect()
        }
        "F8_E4M3" => {
            let scales = f32s(&source[&format!("{name}_scale_inv")].bytes);
            let scale = |i: usize| scales[i / cols / 128 * cols.div_ceil(128) + i % cols / 128];
            stored.bytes.iter().enumerate().map(|(i, &b)| e4m3(b) * scale(i)).collect()
        }
        other => panic!("unexpected dtype {other}"),
    }
}

/// Scales and integers of a matrix with one scale per `group` columns.
fn quantise(values: &[f32], cols: usize, group: usize, max: f32) -> (Vec<f32>, Vec<i8>) {
    let (mut scales, mut integers) = (Vec::new(), Vec::new());
    for row in values.chunks(cols) {
        for group in row.chunks(group) {
            let amax = group.iter().fold(0f32, |amax, w| amax.max(w.abs()));
            let scale = (amax / max).max(1e-8);
            scales.push(scale);
            integers.extend(group.iter().map(|w| (w / scale).round_ties_even().clamp(-max - 1.0, max) as i8));
        }
    }
    (scales, integers)
}

/// Payload and scales of a matrix in `format`.
fn encoded(format: TargetFormat, values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>) {
    let nibbles = |integers: Vec<i8>| {
        let pair = |pair: &[i8]| (pair[0] + 8) as u8 | ((pair.get(1).copied().unwrap_or(0) + 8) as u8) << 4;
        integers.chunks(cols).flat_map(|row| row.chunks(2).map(pair)).collect()
    };
    match format {
        TargetFormat::Int8 => {
            let (scales, integers) = quantise(values, cols, cols, 127.0);
            (integers.into_iter().map(|v| v as u8).collect(), scales)
        }
        TargetFormat::Int4Row | TargetFormat::Int4G64 => {
            let group = if format == TargetFormat::Int4Row { cols } else { 64 };
            let (scales, integers) = quantise(values, cols, group, 7.0);
            (nibbles(integers), scales)
        }
        TargetFormat::Bf16 => {
            (values.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect(), Vec::new())
        }
    }
}

/// File and format of a tensor by its name alone; `None` = f32.
fn expected_place(
    name: &str,
    mtp_layer: usize,
    options: &ConvertOptions,
) -> (&'static str, Option<TargetFormat>) {
    let mtp = name.starts_with(&format!("model.layers.{mtp_layer}."));
    let indexer = name.contains(".indexer.");
    let file = match (mtp, indexer) {
        (true, _) => "out-mtp-00000.safetensors",
        (false, true) => "out-idx-00000.safetensors",
        (false, false) => "out-00000.safetensors",
    };
    let stays_float = ["norm.weight", "norm.bias", "mlp.gate.weight", "e_score_correction_bias"];
    let format = if stays_float.iter().any(|suffix| name.ends_with(suffix)) {
        None
    } else if indexer {
        Some(options.indexer)
    } else if name.contains("embed_tokens") || name.contains("lm_head") {
        Some(options.embeddings)
    } else if mtp {
        Some(options.mtp)
    } else if name.contains(".experts.") {
        Some(options.experts)
    } else {
        Some(options.dense)
    };
    (file, format)
}

/// Converts `model` and compares every byte with the plain implementation.
fn check_against_rules(model: &str, options: &ConvertOptions) {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let report = convert(&data(model), &to, options, &mut go_on).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(data(model).join("config.json")).unwrap()).unwrap();
    let mtp_layer = config["num_hidden_layers"].as_u64().unwrap() as usize;
    let source = read_shard(&data(model).join("model.safetensors"));
    let mut outputs: BTreeMap<String, BTreeMap<String, Stored>> = BTreeMap::new();
    for entry in std::fs::read_dir(&to).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            outputs.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), read_shard(&path));
        }
    }
    assert_eq!(report.written_files, outputs.len());
    for (name, stored) in source.iter().filter(|(name, _)| !name.ends_with("_scale_inv")) {
        let (file, format) = expected_place(name, mtp_layer, options);
        let output = outputs.get_mut(file).unwrap_or_else(|| panic!("{model}: no {file}"));
        let found = output.remove(name).unwrap_or_else(|| panic!("{model}: {name} is not in {file}"));
        let values = source_values(&source, name);
        let cols = *stored.shape.last().unwrap();
        let scales = output.remove(&format!("{name}.qs"));
        let Some(format) = format else {
            assert_eq!((found.dtype.as_str(), &found.shape), ("F32", &stored.shape), "{model}: {name}");
            assert!(f32s(&found.bytes) == values && scales.is_none(), "{model}: {name}");
            continue;
        };
        let (weights, expected_scales) = encoded(format, &values, cols);
        assert!(found.bytes == weights, "{model}: payload of {name} as {format}");
        if format == TargetFormat::Bf16 {
            assert_eq!((found.dtype.as_str(), &found.shape), ("BF16", &stored.shape));
            assert!(scales.is_none());
        } else {
            let scales = scales.unwrap_or_else(|| panic!("{model}: {name} has no scales"));
            assert_eq!((found.dtype.as_str(), &found.shape), ("U8", &vec![weights.len()]));
            assert_eq!((scales.dtype.as_str(), &scales.shape), ("F32", &vec![expected_scales.len()]));
            assert!(f32s(&scales.bytes) == expected_scales, "{model}: scales of {name}");
        }
    }
    let left: Vec<_> = outputs.values().flat_map(|output| output.keys()).collect();
    assert!(left.is_empty(), "{model}: {left:?} were not asked for");
    for name in SIDE_FILES {
        let original = std::fs::read(data(model).join(name)).ok();
        assert_eq!(std::fs::read(to.join(name)).ok(), original, "{model}: {name}");
    }
}

#[test]
fn every_model_converts_as_the_rules_say() {
    for model in [
        "demo-model",
        "tiny-dense-index",
        "tiny-sparse",
        "tiny-groups",
        "tiny-mtp",
        "tiny-mtp-fp8",
        "tiny-olmoe",
    ] {
        check_against_rules(model, &ConvertOptions::default());
    }
}

#[test]
fn every_format_is_written_as_the_rules_say() {
    use TargetFormat::{Bf16, Int4G64, Int4Row, Int8};
    for (experts, dense, mtp, rest) in
        [(Int4Row, Bf16, Int4G64, Int8), (Int8, Int4G64, Bf16, Bf16), (Bf16, Int8, Int8, Bf16)]
    {
        let options = ConvertOptions { experts, dense, mtp, indexer: rest, embeddings: rest };
        check_against_rules("tiny-mtp", &options);
        check_against_rules("tiny-mtp-fp8", &options);
    }
}

/// Offset and name of every tensor of an output file, in the order of the file.
fn in_file(path: &Path) -> Vec<(u64, String, Stored)> {
    let mut tensors: Vec<_> =
        read_shard(path).into_iter().map(|(name, stored)| (stored.begin, name, stored)).collect();
    tensors.sort_by_key(|(begin, ..)| *begin);
    tensors
}

#[test]
fn whole_blocks_come_before_odd_ones_and_every_class_is_sorted_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let options = ConvertOptions { dense: TargetFormat::Bf16, ..ConvertOptions::default() };
    convert(&data("tiny-mtp"), &dir.path().join("out"), &options, &mut go_on).unwrap();
    let class = |dtype: &str| ["F32", "BF16", "U8"].iter().position(|known| *known == dtype).unwrap();
    let order: Vec<_> = in_file(&dir.path().join("out/out-00000.safetensors"))
        .into_iter()
        .filter(|(_, name, _)| !name.contains(".experts."))
        .map(|(_, name, stored)| (!stored.bytes.len().is_multiple_of(4096), class(&stored.dtype), name))
        .collect();
    assert!(order.is_sorted());
    assert_eq!(order.iter().map(|(_, class, _)| class).collect::<BTreeSet<_>>().len(), 3);
}

#[test]
fn an_expert_is_one_aligned_range_where_its_parts_allow_it() {
    let (mut whole, mut aligned) = (0, 0);
    for (model, experts) in [
        ("demo-model", TargetFormat::Int4G64),
        ("demo-model", TargetFormat::Bf16),
        ("tiny-mtp", TargetFormat::Bf16),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let options = ConvertOptions { experts, ..ConvertOptions::default() };
        convert(&data(model), &dir.path().join("out"), &options, &mut go_on).unwrap();
        let container = Container::open(&[dir.path().join("out")]).unwrap();
        let source = container.experts();
        for id in source.layout().ids() {
            let spec = source.layout().spec(id).unwrap();
            let segments = source.plan(id).unwrap();
            if let [only] = segments.as_slice() {
                assert_eq!(only.len, spec.payload_bytes());
                whole += 1;
                if only.len.is_multiple_of(4096) {
                    assert!(only.offset.is_multiple_of(4096), "{id} of {model} at {}", only.offset);
                    aligned += 1;
                }
            } else {
                assert!(!spec.is_gapless(), "{id} of {model} has {} ranges", segments.len());
            }
        }
    }
    assert!(whole > 0 && aligned > 0, "{whole} {aligned}");
}

/// Every file below `dir` with its bytes.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).unwrap())
    };
    std::fs::read_dir(dir).unwrap().map(entry).collect()
}

#[test]
fn an_interrupted_conversion_resumes_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, resumed) = (dir.path().join("whole"), dir.path().join("resumed"));
    let (from, options) = (data("tiny-mtp"), ConvertOptions::default());
    let report = convert(&from, &whole, &options, &mut go_on).unwrap();
    assert_eq!((report.written_files, report.kept_files), (3, 0));

    let mut stop_in_the_second = |progress: ConvertProgress| {
        if progress.files == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = convert(&from, &resumed, &options, &mut stop_in_the_second).unwrap_err();
    assert!(matches!(error, ConvertError::Cancelled), "{error}");
    let unfinished = contents(&resumed);
    assert!(unfinished.keys().all(|name| !name.ends_with(PARTIAL)), "{:?}", unfinished.keys());
    assert!(unfinished.contains_key(LOCK), "readers must be warned");
    // What a kill would leave.
    std::fs::write(resumed.join("out-mtp-00000.safetensors.partial"), b"torn").unwrap();
    std::fs::write(resumed.join(".tmp-abc"), b"torn").unwrap();

    let mut first = None;
    let report = convert(&from, &resumed, &options, &mut |progress| {
        first.get_or_insert(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!((report.written_files, report.kept_files), (2, 1));
    assert!(first.unwrap().files == 1 && first.unwrap().bytes > 0);
    assert_eq!(contents(&whole), contents(&resumed));

    // A finished file that rotted is made again; the rest is kept.
    let victim = resumed.join("out-idx-00000.safetensors");
    let mut bytes = std::fs::read(&victim).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&victim, bytes).unwrap();
    let report = convert(&from, &resumed, &options, &mut go_on).unwrap();
    assert_eq!((report.written_files, report.kept_files), (1, 2));
    assert_eq!(contents(&whole), contents(&resumed));
}

#[test]
fn other_options_or_another_source_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    convert(&data("tiny-mtp"), &to, &ConvertOptions::default(), &mut go_on).unwrap();
    let before = contents(&to);
    let options = ConvertOptions { mtp: TargetFormat::Bf16, ..ConvertOptions::default() };
    let error = convert(&data("tiny-mtp"), &to, &options, &mut go_on).unwrap_err().to_string();
    assert!(error.contains("begun with mtp = int8, now mtp = bf16"), "{error}");
    let error = convert(&data("tiny-groups"), &to, &ConvertOptions::default(), &mut go_on).unwrap_err();
    assert!(error.to_string().contains("begun from another source"), "{error}");
    assert_eq!(contents(&to), before);
}

#[test]
fn a_target_of_a_conversion_killed_at_its_very_start_is_taken_up() {
    let dir = tempfile::tempdir().unwrap();
    let (fresh, begun) = (dir.path().join("fresh"), dir.path().join("begun"));
    std::fs::create_dir(&begun).unwrap();
    std::fs::write(begun.join(LOCK), b"").unwrap();
    std::fs::write(begun.join(".tmp-Ab12Cd"), b"half").unwrap();
    for to in [&fresh, &begun] {
        convert(&data("tiny-olmoe"), to, &ConvertOptions::default(), &mut go_on).unwrap();
    }
    assert_eq!(contents(&begun), contents(&fresh));
}

#[test]
fn unsuitable_targets_are_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let options = ConvertOptions::default();
    let foreign = dir.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("letter.txt"), b"dear").unwrap();
    let error = convert(&data("tiny-olmoe"), &foreign, &options, &mut go_on).unwrap_err().to_string();
    assert!(error.contains("not empty"), "{error}");
    assert_eq!(contents(&foreign).len(), 1);

    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(data("tiny-olmoe").join(name), model.join(name)).unwrap();
    }
    for to in [model.clone(), model.join("deep/inside"), dir.path().to_owned()] {
        let error = convert(&model, &to, &options, &mut go_on).unwrap_err().to_string();
        assert!(error.contains("must not be the source"), "{error}");
    }
    assert_eq!(contents(&model).len(), 2);

    let bad = ConvertOptions { indexer: TargetFormat::Int4G64, ..options };
    assert!(matches!(convert(&model, &foreign, &bad, &mut go_on), Err(ConvertError::Options(_))));
    let error = convert(&data("colibri-container"), &dir.path().join("x"), &options, &mut go_on).unwrap_err();
    assert!(error.to_string().contains("convert from the original"), "{error}");
    assert!(!dir.path().join("x").exists());
}

/// A copy of a single-file checkpoint, its tensors dealt out to two shards, changed by `edit`.
fn split_copy(model: &str, to: &Path, edit: &mut dyn FnMut(&str, &mut Vec<u8>)) {
    let source = read_shard(&data(model).join("model.safetensors"));
    std::fs::copy(data(model).join("config.json"), to.join("config.json")).unwrap();
    for shard in 0..2usize {
        // Scales go to the shard that does not hold their matrix.
        let belongs =
            |name: &str| name.ends_with("_scale_inv") as usize ^ name.contains("down") as usize == shard;
        let chosen: Vec<_> = source.iter().filter(|(name, _)| belongs(name)).collect();
        let header = |(name, stored): &(&String, &Stored)| TensorHeader {
            name: (*name).clone(),
            dtype: Dtype::parse(&stored.dtype),
            shape: stored.shape.iter().map(|&n| n as u64).collect(),
        };
        let headers: Vec<_> = chosen.iter().map(header).collect();
        let path = to.join(format!("model-{:05}-of-00002.safetensors", shard + 1));
        let mut writer = SafetensorsWriter::create(&path, &headers, &[]).unwrap();
        for (name, stored) in chosen {
            let mut bytes = stored.bytes.clone();
            edit(name, &mut bytes);
            writer.write(&bytes).unwrap();
        }
        writer.finish().unwrap();
    }
}

#[test]
fn a_sharded_source_gives_the_same_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    split_copy("tiny-mtp-fp8", &model, &mut |_, _| {});
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let options = ConvertOptions::default();
    convert(&data("tiny-mtp-fp8"), &one, &options, &mut go_on).unwrap();
    let report = convert(&model, &two, &options, &mut go_on).unwrap();
    assert_eq!(report.written_files, 5, "two of the main model and of the MTP layer, one of the indexers");
    let tensors = |dir: &Path| -> BTreeMap<String, Vec<u8>> {
        let shards = contents(dir).into_keys().filter(|name| name.ends_with(".safetensors"));
        shards
            .flat_map(|name| read_shard(&dir.join(name)))
            .map(|(name, stored)| (name, stored.bytes))
            .collect()
    };
    assert!(tensors(&one) == tensors(&two));
}

#[test]
fn a_bad_weight_is_named_and_leaves_no_half_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let victim = "model.layers.1.mlp.experts.3.up_proj.weight";
    split_copy("tiny-olmoe", &model, &mut |name, bytes| {
        if name == victim {
            // NaN in row 1, column 2.
            let at = 2 * (64 + 2);
            bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
        }
    });
    let to = dir.path().join("out");
    let error = convert(&model, &to, &ConvertOptions::default(), &mut go_on).unwrap_err().to_string();
    assert!(error.contains(victim) && error.contains("row 1") && error.contains("column 2"), "{error}");
    assert!(contents(&to).keys().all(|name| !name.ends_with(PARTIAL)));
}
