//! Packs: equal bytes, crash safety, and every kind of damage.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::container::{Container, Fingerprint};
use crate::experts::testing::{MODEL, MemorySource};
use crate::experts::{ExpertLayout, ExpertSource, ExpertSpec, LocalStore, MatrixSpec, RoutedBatch};
use crate::kernels::{Activations, Kernels};
use crate::profile::NumericProfile;
use crate::quant::Format;

fn go_on(_: PackProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn record(source: &dyn ExpertSource, id: ExpertId) -> Vec<u8> {
    let mut record = vec![0; source.layout().record_bytes(id).unwrap()];
    source.read(id, &mut record).unwrap();
    record
}

fn append(store: &PackStore, source: &MemorySource, id: ExpertId) -> bool {
    let record = record(source, id);
    store.append(id, &record, *blake3::hash(&record).as_bytes()).unwrap()
}

fn small_source() -> MemorySource {
    MemorySource::new(4, 64, 64)
}

/// A sealed pack of every expert of `source` in `dir/pack`.
fn packed(source: &MemorySource, dir: &Path) -> PathBuf {
    let to = dir.join("pack");
    write_pack(source, &source.ids(), MODEL, &to, &mut go_on).unwrap();
    to
}

#[test]
fn a_pack_holds_the_containers_records_and_computes_its_bits() {
    let dir = tempfile::tempdir().unwrap();
    let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/colibri-container"));
    let container = Container::open(&[model.to_owned()]).unwrap();
    let (experts, fingerprint) = (container.experts(), container.fingerprint().unwrap());
    let ids: Vec<_> = experts.layout().ids().collect();
    let to = dir.path().join("pack");
    let mut last = None;
    let report = write_pack(experts.as_ref(), &ids, fingerprint, &to, &mut |progress| {
        last = Some(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(
        (report.records, last.unwrap().records, last.unwrap().bytes),
        (ids.len(), ids.len(), report.bytes)
    );
    let pack = Pack::open(&to).unwrap();
    assert!(pack.is_sealed() && pack.fingerprint() == fingerprint && pack.ids() == ids);
    assert_eq!(pack.layout(), experts.layout());
    for &id in &ids {
        let original = record(experts.as_ref(), id);
        assert!(record(&pack, id) == original, "{id}");
        assert_eq!(pack.record_hash(id).unwrap(), *blake3::hash(&original).as_bytes());
    }
    let verified = pack.verify_all(&mut |_, _| ControlFlow::Continue(()));
    assert_eq!((verified.records, verified.bytes, verified.damaged.len()), (ids.len(), report.bytes, 0));

    let x: Vec<f32> = (0..3 * 128).map(|i| (i as f32 * 0.37).sin()).collect();
    let batch = RoutedBatch::from_routes(
        1,
        Activations::from_f32(x, 128).quantized(),
        &[0, 1, 2, 0, 1, 2],
        &[0.25, 1.0, -0.5, 0.125, 0.75, 2.0],
        2,
    );
    let sums = |source: Arc<dyn ExpertSource>| {
        let store = LocalStore::new(source, Kernels::best(), NumericProfile::default(), 1 << 20).unwrap();
        store.compute_work(batch.layer, &batch.x, &batch.work).unwrap()
    };
    assert!(sums(experts) == sums(Arc::new(pack)));
}

#[test]
fn a_pack_of_some_experts_says_which_one_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let ids =
        [ExpertId { layer: 2, index: 1 }, ExpertId { layer: 1, index: 3 }, ExpertId { layer: 2, index: 1 }];
    let report = write_pack(&source, &ids, MODEL, &dir.path().join("pack"), &mut go_on).unwrap();
    assert_eq!(report.records, 2);
    let pack = Pack::open(&dir.path().join("pack")).unwrap();
    let absent = ExpertId { layer: 1, index: 0 };
    assert!(!pack.contains(absent) && pack.contains(ids[0]));
    let error = pack.read(absent, &mut vec![0; source.layout.record_bytes(absent).unwrap()]).unwrap_err();
    assert!(error.to_string().contains("layer 1 expert 0 is not held by this pack"), "{error}");
}

#[test]
fn failures_leave_nothing_and_cancelled_work_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let to = dir.path().join("pack");
    let entries = || std::fs::read_dir(dir.path()).unwrap().count();
    let unknown = [ExpertId { layer: 9, index: 0 }];
    assert!(matches!(write_pack(&source, &unknown, MODEL, &to, &mut go_on), Err(PackError::Expert(_))));
    source.broken.lock().unwrap().insert(source.ids()[3]);
    assert!(matches!(write_pack(&source, &source.ids(), MODEL, &to, &mut go_on), Err(PackError::Expert(_))));
    assert_eq!(entries(), 0);
    source.broken.lock().unwrap().clear();

    let mut stop = |progress: PackProgress| {
        if progress.records == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert!(matches!(write_pack(&source, &source.ids(), MODEL, &to, &mut stop), Err(PackError::Cancelled)));
    assert!(!to.exists() && entries() == 1);
    let other = Fingerprint([9; 32]);
    let error = write_pack(&source, &source.ids(), other, &to, &mut go_on).unwrap_err();
    assert!(matches!(error, PackError::Mismatch { .. }), "{error}");
    let report = write_pack(&source, &source.ids(), MODEL, &to, &mut go_on).unwrap();
    assert_eq!((report.records, report.resumed_records, entries()), (8, 5, 1));
    assert!(matches!(
        write_pack(&source, &source.ids(), MODEL, &to, &mut go_on),
        Err(PackError::Occupied { .. })
    ));
    assert_eq!(Pack::open(&to).unwrap().ids(), source.ids());
}

#[test]
fn a_store_grows_over_several_files_and_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let ids = source.ids();
    let file_bytes = 3 * source.layout.max_record_bytes() as u64;
    let open = || PackStore::open_with_file_bytes(dir.path(), MODEL, &source.layout, file_bytes).unwrap();
    for (i, &id) in ids.iter().enumerate() {
        let store = open();
        assert_eq!(store.missing(&ids), &ids[i..]);
        assert!(append(&store, &source, id) && !append(&store, &source, id));
        assert!(record(&store, id) == record(&source, id));
        assert!(store.repairs().is_empty());
    }
    assert!(dir.path().join("experts-00001.pack").exists());
    let pack = Pack::open(dir.path()).unwrap();
    assert!(!pack.is_sealed());
    assert!(ids.iter().all(|&id| record(&pack, id) == record(&source, id)));
    // Sealed, opened by a node, and grown again.
    open().seal().unwrap();
    assert!(Pack::open(dir.path()).unwrap().is_sealed());
    let store = open();
    store.forget(ids[2]).unwrap();
    assert_eq!(store.missing(&ids), [ids[2]]);
    assert!(!Pack::open(dir.path()).unwrap().is_sealed());
    assert!(append(&store, &source, ids[2]));
    drop(store);
    let store = open();
    assert!(store.missing(&ids).is_empty() && store.ids() == ids);
    assert!(ids.iter().all(|&id| record(&store, id) == record(&source, id)));
}

#[test]
fn a_store_refuses_wrong_records_other_models_and_a_second_writer() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let open = |model, layout: &_| PackStore::open_or_create(dir.path(), model, layout);
    let store = open(MODEL, &source.layout).unwrap();
    let id = source.ids()[0];
    let mut bytes = record(&source, id);
    let hash = *blake3::hash(&bytes).as_bytes();
    bytes[77] ^= 4;
    let error = store.append(id, &bytes, hash).unwrap_err().to_string();
    assert!(error.contains("layer 1 expert 0") && error.contains("BLAKE3"), "{error}");
    let error = store.append(id, &bytes[1..], hash).unwrap_err().to_string();
    assert!(error.contains("bytes instead of"), "{error}");
    let unknown = ExpertId { layer: 1, index: 99 };
    assert!(matches!(store.append(unknown, &bytes, hash), Err(PackError::WrongRecord { .. })));
    assert_eq!(store.missing(&[id]), [id]);

    assert!(matches!(open(MODEL, &source.layout), Err(PackError::Busy { .. })));
    drop(store);
    let error = open(Fingerprint([8; 32]), &source.layout).err().unwrap().to_string();
    assert!(error.contains("belongs to model 0707") && error.contains("not to 0808"), "{error}");
    let other = MemorySource::new(4, 64, 128);
    assert!(matches!(open(MODEL, &other.layout), Err(PackError::Mismatch { .. })));
    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("letter.txt"), b"dear").unwrap();
    let refused = PackStore::open_or_create(foreign.path(), MODEL, &source.layout);
    assert!(matches!(refused, Err(PackError::Occupied { .. })));
    assert!(matches!(Pack::open(foreign.path()), Err(PackError::NotAPack { .. })));
}

/// A store that was killed while writing may have kept any prefix of the last write.
#[test]
fn a_torn_tail_is_cut_at_every_byte() {
    let source = small_source();
    let ids = &source.ids()[..3];
    let dir = tempfile::tempdir().unwrap();
    let store = PackStore::open_or_create(dir.path(), MODEL, &source.layout).unwrap();
    ids.iter().for_each(|&id| assert!(append(&store, &source, id)));
    drop(store);
    let (index, data) = (dir.path().join(INDEX), dir.path().join(data_file_name(0)));
    let (index_bytes, data_bytes) = (std::fs::read(&index).unwrap(), std::fs::read(&data).unwrap());
    let record_bytes = source.layout.record_bytes(ids[2]).unwrap();
    let cuts =
        (0..=64).map(|cut| (cut, 0)).chain([1, 100, record_bytes].map(|cut| (64, cut))).chain([(0, 1)]);
    for (index_cut, data_cut) in cuts {
        std::fs::write(&index, &index_bytes[..index_bytes.len() - index_cut]).unwrap();
        std::fs::write(&data, &data_bytes[..data_bytes.len() - data_cut]).unwrap();
        let store = PackStore::open_or_create(dir.path(), MODEL, &source.layout).unwrap();
        let missing = if index_cut == 0 && data_cut == 0 { &[][..] } else { &ids[2..] };
        assert_eq!(
            store.missing(ids),
            missing,
            "{index_cut} bytes of the index and {data_cut} of the data lost"
        );
        missing.iter().for_each(|&id| assert!(append(&store, &source, id)));
        assert!(ids.iter().all(|&id| record(&store, id) == record(&source, id)));
        drop(store);
        assert!(std::fs::read(&data).unwrap() == data_bytes && std::fs::read(&index).unwrap() == index_bytes);
    }
}

#[test]
fn a_growing_store_forgets_damaged_records_and_says_so() {
    let source = small_source();
    let dir = tempfile::tempdir().unwrap();
    let store = PackStore::open_or_create(dir.path(), MODEL, &source.layout).unwrap();
    let ids = source.ids();
    ids.iter().for_each(|&id| assert!(append(&store, &source, id)));
    drop(store);
    for (file, at) in [(data_file_name(0), 5000), (INDEX.to_owned(), 70)] {
        let path = dir.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let store = PackStore::open_or_create(dir.path(), MODEL, &source.layout).unwrap();
        assert_eq!((store.repairs().len(), store.missing(&ids).len()), (1, 1), "{:?}", store.repairs());
        store.missing(&ids).into_iter().for_each(|id| assert!(append(&store, &source, id)));
        assert!(ids.iter().all(|&id| record(&store, id) == record(&source, id)));
    }
}

/// Every way to notice damage: opening, or reading all records.
fn complaint(dir: &Path) -> Option<String> {
    match Pack::open(dir) {
        Err(error) => Some(error.to_string()),
        Ok(pack) => {
            let report = pack.verify_all(&mut |_, _| ControlFlow::Continue(()));
            report.damaged.first().map(ToString::to_string)
        }
    }
}

#[test]
fn a_sealed_pack_that_lost_its_tail_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(&small_source(), dir.path());
    assert_eq!(complaint(&pack), None);
    for name in [INDEX.to_owned(), data_file_name(0)] {
        let path = pack.join(&name);
        let bytes = std::fs::read(&path).unwrap();
        for cut in [1, 64, 4096.min(bytes.len()), bytes.len()] {
            std::fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
            let complaint = complaint(&pack).unwrap_or_else(|| panic!("{cut} bytes of {name} may vanish"));
            assert!(complaint.contains(&name) && complaint.contains("damaged"), "{complaint}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(complaint(&pack).unwrap().contains(&name));
        std::fs::write(&path, bytes).unwrap();
    }
    std::fs::write(pack.join(data_file_name(1)), b"stray").unwrap();
    assert!(complaint(&pack).unwrap().contains("does not belong"));
}

#[test]
fn one_flipped_bit_anywhere_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let source = MemorySource::new(1, 64, 64);
    let pack = packed(&source, dir.path());
    let mut manifest = std::fs::read(pack.join(MANIFEST)).unwrap();
    for bit in 0..8 * manifest.len() {
        manifest[bit / 8] ^= 1 << (bit % 8);
        assert!(
            manifest::Manifest::parse(&manifest, &pack).is_err(),
            "bit {bit} of the manifest goes unnoticed"
        );
        manifest[bit / 8] ^= 1 << (bit % 8);
    }
    for (name, step) in [(MANIFEST.to_owned(), 101), (INDEX.to_owned(), 3), (data_file_name(0), 1009)] {
        let path = pack.join(&name);
        let bytes = std::fs::read(&path).unwrap();
        for bit in (0..8 * bytes.len()).step_by(step) {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &flipped).unwrap();
            let complaint = complaint(&pack).unwrap_or_else(|| panic!("bit {bit} of {name} goes unnoticed"));
            assert!(complaint.contains(&name) && complaint.contains("damaged"), "{name}: {complaint}");
        }
        std::fs::write(&path, &bytes).unwrap();
    }
    assert_eq!(complaint(&pack), None);
}

/// All 19,456 experts of GLM-5.2 at int4 in groups of 64: 413 GB of records, holes on this disk.
#[test]
fn a_pack_of_glm_size_opens_quickly() {
    let spec = |rows, cols| MatrixSpec { format: Format::Int4Grouped { group: 64 }, rows, cols };
    let spec = ExpertSpec { gate: spec(2048, 6144), up: spec(2048, 6144), down: spec(6144, 2048) };
    let layers = (3..=78).map(|layer| (layer, vec![0; 256])).collect();
    let layout = ExpertLayout { hidden_size: 6144, specs: vec![spec], layers };
    let dir = tempfile::tempdir().unwrap();
    drop(PackStore::open_or_create(dir.path(), MODEL, &layout).unwrap());
    let bytes = spec.record_bytes() as u64;
    let per_file = FILE_BYTES / bytes;
    let place = |(i, id): (usize, ExpertId)| {
        let (file, slot) = (i as u64 / per_file, i as u64 % per_file);
        index::Entry { id, file: file as u32, offset: slot * bytes, bytes, hash: [1; 32] }
    };
    let entries: Vec<_> = layout.ids().enumerate().map(place).collect();
    std::fs::write(dir.path().join(INDEX), index::encode_all(&entries, &MODEL)).unwrap();
    for file in 0..=entries.last().unwrap().file {
        let data = std::fs::File::create(dir.path().join(data_file_name(file))).unwrap();
        data.set_len(per_file * bytes).unwrap();
    }
    let start = std::time::Instant::now();
    let pack = Pack::open(dir.path()).unwrap();
    assert!(start.elapsed() < std::time::Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!((pack.ids().len(), pack.bytes()), (19_456, 19_456 * 21_233_664));
}

#[test]
fn a_damaged_record_is_named_with_file_and_offset() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let pack = packed(&source, dir.path());
    let path = pack.join(data_file_name(0));
    let mut bytes = std::fs::read(&path).unwrap();
    let offset = source.layout.record_bytes(source.ids()[0]).unwrap();
    bytes[offset + 5] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let damaged = complaint(&pack).unwrap();
    assert!(
        damaged.contains("layer 1 expert 1") && damaged.contains(&format!("offset {offset}")),
        "{damaged}"
    );
}

/// The seed of the fuzz target `expert_pack` gets past every checksum.
#[test]
fn the_fuzz_seed_is_a_valid_pack() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/expert_pack/two-specs");
    let seed = std::fs::read(path).unwrap();
    let (body, fields) = seed.split_at(seed.iter().position(|&byte| byte == 0).unwrap());
    let hash = blake3::hash(body).to_hex();
    let manifest = [body, format!(",\"blake3\":\"{hash}\"}}\n").as_bytes()].concat();
    let mut index = Vec::new();
    for (position, fields) in fields[1..].as_chunks::<56>().0.iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&[0; 32]).update(&(position as u64).to_le_bytes()).update(fields);
        index.extend_from_slice(fields);
        index.extend_from_slice(&hasher.finalize().as_bytes()[..8]);
    }
    let files = [(0, 1 << 20), (1, 1 << 20)].into();
    assert_eq!(check(&manifest, &index, &files).unwrap().len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Neither arbitrary bytes nor edited packs make the reader panic or believe anything false.
    #[test]
    fn arbitrary_files_never_panic(
        edits in prop::collection::vec((0usize..3, any::<prop::sample::Index>(), any::<u8>()), 1..6),
        junk in prop::collection::vec(any::<u8>(), 0..300),
        replace in prop::option::of(0usize..3),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let source = MemorySource::new(1, 64, 64);
        let pack = packed(&source, dir.path());
        let paths = [MANIFEST.to_owned(), INDEX.to_owned(), data_file_name(0)].map(|name| pack.join(name));
        let originals = paths.clone().map(|path| std::fs::read(path).unwrap());
        for (file, at, value) in edits {
            let mut bytes = std::fs::read(&paths[file]).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = value;
            std::fs::write(&paths[file], bytes).unwrap();
        }
        if let Some(file) = replace {
            std::fs::write(&paths[file], &junk).unwrap();
        }
        let changed = paths.iter().zip(&originals).any(|(path, bytes)| std::fs::read(path).unwrap() != *bytes);
        prop_assert_eq!(complaint(&pack).is_some(), changed);
        if let Ok(store) = PackStore::open_or_create(&pack, MODEL, &source.layout) {
            for id in store.ids() {
                let mut bytes = vec![0; source.layout.record_bytes(id).unwrap()];
                prop_assert!(store.read(id, &mut bytes).is_err() || bytes == record(&source, id));
            }
        }
    }

    #[test]
    fn manifests_of_arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(manifest::Manifest::parse(&bytes, Path::new("x")).is_err());
    }

    /// Entries with right checksums and arbitrary fields: only what lies inside the files and
    /// overlaps nothing is ever accepted.
    #[test]
    fn arbitrary_index_entries_are_accepted_only_when_they_make_sense(
        fields in prop::collection::vec(
            (0u16..4, 0u16..6, 0u32..3, prop_oneof![0u64..20, Just(u64::MAX / 4096)], prop_oneof![Just(0u64), Just(1)], any::<bool>()),
            0..12,
        ),
    ) {
        let layout = MemorySource::new(4, 64, 64).layout;
        let entries: Vec<_> = fields
            .into_iter()
            .map(|(layer, index, file, page, skew, right_size)| {
                let id = ExpertId { layer, index };
                let bytes = layout.record_bytes(id).filter(|_| right_size).unwrap_or(usize::MAX) as u64;
                index::Entry { id, file, offset: (page * 4096).saturating_add(skew), bytes, hash: [0; 32] }
            })
            .collect();
        let manifest = manifest::Manifest { fingerprint: MODEL, layout: layout.clone(), seal: None };
        let lengths = std::collections::BTreeMap::from([(0, 1 << 16), (1, 20 << 12)]);
        let checked = check(&manifest.to_bytes(), &index::encode_all(&entries, &MODEL), &lengths);
        let sound = |entry: &index::Entry| {
            layout.record_bytes(entry.id).is_some_and(|bytes| bytes as u64 == entry.bytes)
                && entry.offset.is_multiple_of(4096)
                && lengths.get(&entry.file).is_some_and(|&len| entry.offset.checked_add(entry.bytes).is_some_and(|end| end <= len))
        };
        let apart = |a: &index::Entry, b: &index::Entry| {
            a.id != b.id && (a.file != b.file || a.end() <= b.offset || b.end() <= a.offset)
        };
        let all_apart = entries.iter().enumerate().all(|(i, a)| entries[..i].iter().all(|b| apart(a, b)));
        prop_assert_eq!(checked.is_ok(), entries.iter().all(sound) && all_apart);
        if let Ok(ids) = checked {
            prop_assert_eq!(ids, entries.iter().map(|entry| entry.id).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_record_arrives_in_pieces_and_a_kill_between_them_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let (to, id) = (dir.path().join("shard"), source.ids()[2]);
    let whole = record(&source, id);
    let hash = *blake3::hash(&whole).as_bytes();
    let open = || PackStore::open_or_create(&to, MODEL, source.layout()).unwrap();
    let mut here = 0;
    for piece in whole.chunks(1000) {
        // Every piece comes to a process of its own.
        let store = open();
        let known = PartialInfo { id, hash, bytes: here };
        assert_eq!(store.partials().unwrap(), if here == 0 { vec![] } else { vec![known] });
        let mut partial = store.open_partial(id, hash, here).unwrap();
        assert_eq!(partial.wanted() as u64, whole.len() as u64 - here);
        partial.push(piece).unwrap();
        here += piece.len() as u64;
        assert!(!store.contains(id));
    }
    let store = open();
    let partial = store.open_partial(id, hash, here).unwrap();
    assert!(partial.wanted() == 0 && partial.finish(&store).unwrap());
    assert_eq!(store.partials().unwrap(), []);
    assert!(record(&store, id) == whole);

    // Killed after the record was stored and before its beginning was removed.
    drop(store.open_partial(id, hash, 0).unwrap());
    assert_eq!(store.partials().unwrap(), []);
    assert!(
        std::fs::read_dir(&to).unwrap().all(|f| !f
            .unwrap()
            .file_name()
            .to_string_lossy()
            .contains("partial"))
    );
}

#[test]
fn a_damaged_beginning_never_becomes_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let source = small_source();
    let id = source.ids()[0];
    let whole = record(&source, id);
    let hash = *blake3::hash(&whole).as_bytes();
    let store = PackStore::open_or_create(&dir.path().join("shard"), MODEL, source.layout()).unwrap();
    let mut partial = store.open_partial(id, hash, 0).unwrap();
    partial.push(&whole[..100]).unwrap();
    drop(partial);
    let mut partial = store.open_partial(id, hash, 99).unwrap();
    assert!(matches!(partial.push(&whole), Err(PackError::WrongRecord { .. })), "too long");
    partial.push(&whole[..whole.len() - 99]).unwrap();
    assert!(matches!(partial.finish(&store), Err(PackError::WrongRecord { .. })));
    assert!(!store.contains(id) && store.partials().unwrap().is_empty());
    // More is asked to be kept than there is.
    assert!(store.open_partial(id, hash, 1).is_err());
    assert!(store.open_partial(ExpertId { layer: 9, index: 0 }, hash, 0).is_err());
    let odd = store.dir().join(partial_file(id, hash));
    std::fs::write(&odd, vec![0; whole.len() + 1]).unwrap();
    assert!(store.partials().unwrap().is_empty() && !odd.exists(), "longer than the record");
}

fn partial_file(id: ExpertId, hash: [u8; 32]) -> String {
    format!("partial-{}-{}-{}", id.layer, id.index, blake3::Hash::from_bytes(hash).to_hex())
}

#[test]
fn only_names_that_are_written_are_read() {
    let id = ExpertId { layer: 78, index: 255 };
    let name = partial_file(id, [0xab; 32]);
    assert_eq!(parse_partial_name(&name), Some((id, [0xab; 32])));
    for bad in ["partial-", "partial-1-2", "partial-+1-2-", "partial-70000-1-"] {
        assert_eq!(parse_partial_name(bad), None, "{bad}");
        assert_eq!(parse_partial_name(&format!("{bad}{}", "ab".repeat(32))), None, "{bad}");
    }
    assert_eq!(parse_partial_name(&name.replace("-78-", "-078-")), None);
    assert_eq!(parse_partial_name(&name.to_uppercase().replace("PARTIAL", "partial")), None);
    assert_eq!(parse_partial_name(&name[..name.len() - 1]), None);
    assert_eq!(parse_partial_name(&format!("{name}0")), None);
}
