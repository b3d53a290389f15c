//! What is read before it is asked for, and what happens when RAM is taken away.

use std::time::{Duration, Instant};

use super::*;
use crate::experts::Ahead;
use crate::experts::testing::GatedSource;

fn id(layer: u16, index: u16) -> ExpertId {
    ExpertId { layer, index }
}

fn one(layer: u16, experts: &[u16]) -> RoutedBatch {
    let x = Activations::from_f32(noise(2, HIDDEN), HIDDEN).quantized();
    RoutedBatch::from_routes(layer, x, experts, &vec![1.0; experts.len()], experts.len())
}

fn ahead(layer: u16, experts: &[u16]) -> Lookahead {
    Lookahead { layer, experts: experts.to_vec() }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        std::thread::yield_now();
    }
}

/// Opens the disk whatever happens, or a failing test would wait for ever.
struct Opens<'a>(&'a GatedSource);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

fn gated(slots: usize) -> (Arc<MemorySource>, Arc<GatedSource>, LocalStore) {
    let source = source();
    let disk = GatedSource::shut(&source);
    let ram_bytes = slots * source.layout.max_record_bytes();
    let shared: Arc<dyn ExpertSource> = disk.clone();
    let io = IoOptions { prefetch_depth: 1, ..IoOptions::default() };
    let options = StoreOptions { io, ..StoreOptions::new(ram_bytes) };
    let store = LocalStore::open(shared, Kernels::best(), NumericProfile::default(), options).unwrap();
    (source, disk, store)
}

fn bytes(source: &MemorySource, layer: u16, experts: &[u16]) -> u64 {
    experts.iter().map(|&index| source.layout.record_bytes(id(layer, index)).unwrap() as u64).sum()
}

#[test]
fn a_right_guess_is_read_once_and_becomes_the_demand() {
    let (source, disk, store) = gated(EXPERTS);
    assert_eq!(store.lookahead(), Ahead::MEANWHILE);
    store.prefetch(&ahead(2, &[3, 5]));
    eventually("the first guess", || !disk.begun().is_empty());
    let batch = one(2, &[3, 5]);
    let sums = std::thread::scope(|scope| {
        let opens = Opens(&disk);
        let call = scope.spawn(|| store.compute(&batch, &mut || {}));
        // As demands both are under way at once; guesses here go one at a time.
        eventually("both reads", || disk.begun().len() == 2);
        drop(opens);
        call.join().unwrap().unwrap()
    });
    assert_eq!(sums, reference(&source, &batch));
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, disk.begun().len()), (2, 0, 2));
    assert_eq!((stats.guessed, stats.guessed_right, stats.guessable), (2, 2, 2));
    assert_eq!(stats.prefetch_issued_bytes, bytes(&source, 2, &[3, 5]));
    assert_eq!(stats.prefetch_used_bytes, stats.prefetch_issued_bytes);
}

#[test]
fn a_wrong_guess_is_called_off_and_a_new_one_replaces_the_old() {
    let (source, disk, store) = gated(EXPERTS);
    store.prefetch(&ahead(2, &[0, 1, 2]));
    eventually("the first guess", || !disk.begun().is_empty());
    store.prefetch(&ahead(2, &[0, 4]));
    let batch = one(2, &[7]);
    let sums = std::thread::scope(|scope| {
        let opens = Opens(&disk);
        let call = scope.spawn(|| store.compute(&batch, &mut || {}));
        eventually("the demand", || disk.begun().contains(&id(2, 7)));
        drop(opens);
        call.join().unwrap().unwrap()
    });
    assert_eq!(sums, reference(&source, &batch));
    let stats = store.stats();
    assert_eq!(stats.prefetch_issued_bytes, bytes(&source, 2, &[0, 1, 2, 4]));
    assert_eq!(stats.prefetch_cancelled_bytes, bytes(&source, 2, &[1, 2, 4]));
    assert_eq!((stats.guessed, stats.guessed_right, stats.guessable), (2, 0, 1));
    assert_eq!(disk.begun(), [id(2, 0), id(2, 7)]);
}

#[test]
fn guesses_of_layers_that_are_over_end_as_wrong_ones() {
    let (_, disk, store) = gated(EXPERTS);
    store.prefetch(&ahead(1, &[0, 4]));
    store.prefetch(&ahead(2, &[3, 5]));
    eventually("the first guess", || !disk.begun().is_empty());
    store.end_guesses(|layer| layer == 2);
    let stats = store.stats();
    assert_eq!((stats.guessed, stats.guessed_right), (2, 0), "only layer 2 is over");
    assert!(stats.prefetch_cancelled_bytes > 0, "what had not begun is not read");
    Opens(&disk);
}

#[test]
fn a_demand_takes_the_room_of_guesses_and_guesses_never_that_of_pins() {
    let (source, disk, store) = gated(2);
    disk.open();
    store.set_pins(&[id(1, 2)]);
    let pinned = bytes(&source, 1, &[2]);
    eventually("the pin", || store.stats().pinned_bytes == pinned);
    // One record of the largest kind is left, and a guess may have a quarter of all.
    for layer in [1, 2, 1, 2] {
        store.prefetch(&ahead(layer, &[0, 3, 5, 8, 11]));
        let batch = one(layer, &[1, 2, 8]);
        assert_eq!(store.compute(&batch, &mut || {}).unwrap(), reference(&source, &batch));
        assert!(store.core.cache.allocated_bytes() <= 2 * source.layout.max_record_bytes());
    }
    // A call that holds nothing may have taken its room for a moment; a guess may not.
    eventually("the pin", || store.core.cache.is_resident(id(1, 2)));
}

#[test]
fn a_pin_that_gave_way_comes_back_without_being_asked_for() {
    let (source, disk, store) = gated(2);
    disk.open();
    store.set_pins(&[id(1, 2)]);
    eventually("the pin", || store.core.cache.is_resident(id(1, 2)));
    // One record fits, so that a call has no room but the pin's.
    store.set_ram_limit(1);
    for _ in 0..20 {
        eventually("the pin", || store.core.cache.is_resident(id(1, 2)));
        // Its keeper has nothing to wait for now, and must be told.
        std::thread::sleep(Duration::from_millis(1));
        let evictions = store.stats().evictions;
        let batch = one(2, &[7]);
        assert_eq!(store.compute(&batch, &mut || {}).unwrap(), reference(&source, &batch));
        assert!(store.stats().evictions > evictions, "the pin had no need to give way");
    }
}

#[test]
fn pins_come_by_themselves_and_a_broken_one_is_given_up() {
    let source = source();
    source.broken.lock().unwrap().insert(id(1, 1));
    let store = store(&source, EXPERTS);
    store.set_pins(&[id(1, 0), id(1, 1), id(2, 3), id(7, 0)]);
    let wanted = bytes(&source, 1, &[0]) + bytes(&source, 2, &[3]);
    eventually("the pins", || store.stats().pinned_bytes == wanted && !store.core.cache.misses_pins());
    assert_eq!((store.stats().misses, store.stats().bytes_read), (0, wanted));
    assert_eq!(store.stats().pinned, 3);
    store.set_pins(&[]);
    assert_eq!((store.stats().pinned, store.stats().pinned_bytes), (0, 0));
}

#[test]
fn a_lowered_limit_gives_memory_back_and_changes_no_bit() {
    let source = source();
    let largest = source.layout.max_record_bytes();
    let store = store(&source, EXPERTS);
    store.set_pins(&[id(1, 2), id(1, 5)]);
    let batches = [batch(1, 9, 5), batch(2, 4, 6)];
    for slots in [EXPERTS, 3, 1, 7, 0, EXPERTS] {
        store.set_ram_limit(slots * largest);
        assert_eq!(store.ram_limit(), slots.max(1) * largest);
        for batch in &batches {
            assert_eq!(store.compute(batch, &mut || {}).unwrap(), reference(&source, batch));
        }
        eventually("less memory", || store.core.cache.allocated_bytes() <= slots.max(1) * largest);
    }
}

#[test]
fn what_moves_below_a_lowered_limit_is_not_read_again() {
    let source = source();
    let store = store(&source, 4);
    let largest = source.layout.max_record_bytes();
    // Kind 2 is the largest: 2, 5 and 8 fill three of four slots, and the hottest of them lies highest.
    for expert in [2, 5, 8, 8, 8, 8] {
        store.compute(&one(1, &[expert]), &mut || {}).unwrap();
    }
    store.set_ram_limit(largest);
    assert!(store.core.cache.is_resident(id(1, 8)), "the record used most should have stayed");
    let batch = one(1, &[8]);
    assert_eq!(store.compute(&batch, &mut || {}).unwrap(), reference(&source, &batch));
    assert_eq!(store.stats().misses, 3);
}

#[test]
fn records_of_several_sizes_leave_little_room_unused() {
    let source = source();
    let largest = source.layout.max_record_bytes();
    let budget = 8 * largest;
    let store = store(&source, 8);
    let (mut used, mut rounds) = (0, 0);
    for round in 0..400u64 {
        let experts: Vec<u16> = (0..3).map(|j| ((round * 7 + j * 5 + round * round) % 12) as u16).collect();
        store.compute(&one(1 + (round % 2) as u16, &experts), &mut || {}).unwrap();
        if round >= 100 {
            used += store.core.cache.allocated_bytes();
            rounds += 1;
        }
    }
    let share = used as f64 / (rounds * budget) as f64;
    assert!(share > 0.85, "{share:.2} of the budget is in use");
}

#[test]
fn everything_at_once_gives_the_same_bits() {
    let source = source();
    let store = store(&source, 3);
    let largest = source.layout.max_record_bytes();
    let batches: Vec<_> = (0..4).map(|i| batch(1 + i % 2, 1 + usize::from(i), 5)).collect();
    let wanted: Vec<_> = batches.iter().map(|batch| reference(&source, batch)).collect();
    std::thread::scope(|scope| {
        for (batch, wanted) in batches.iter().zip(&wanted) {
            let store = &store;
            scope.spawn(move || {
                for round in 0..30u16 {
                    store.prefetch(&ahead(3 - batch.layer, &[round % 12, (round + 5) % 12]));
                    assert!(store.compute_work(batch.layer, &batch.x, &batch.work).unwrap() == *wanted);
                    if round % 7 == batch.layer {
                        store.set_pins(&[id(batch.layer, round % 12)]);
                    }
                }
            });
        }
        scope.spawn(|| {
            for slots in [1, 3, 2, 3, 1, 3] {
                store.set_ram_limit(slots * largest);
                std::thread::yield_now();
            }
        });
    });
    assert!(store.core.cache.allocated_bytes() <= 3 * largest);
}

#[test]
fn reading_everything_finds_the_first_damage_and_keeps_what_fits() {
    let source = source();
    let all = store(&source, 2 * EXPERTS);
    all.read_all().unwrap();
    assert_eq!(all.core.cache.resident(), 2 * EXPERTS);
    assert_eq!(all.lookahead(), Ahead::NONE);
    let before = all.stats().bytes_read;
    all.compute(&batch(1, 9, 5), &mut || {}).unwrap();
    assert_eq!((all.stats().misses, all.stats().bytes_read), (0, before));
    source.broken.lock().unwrap().extend([id(2, 3), id(2, 1), id(2, 7)]);
    for slots in [1, 4, 2 * EXPERTS] {
        let store = store(&source, slots);
        let error = store.read_all().unwrap_err().to_string();
        assert!(error.contains(&id(2, 1).to_string()), "{error}");
        assert_eq!(store.compute(&batch(1, 2, 3), &mut || {}).unwrap(), reference(&source, &batch(1, 2, 3)));
    }
}
