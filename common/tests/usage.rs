//! Usage files and routing traces: damaged ones are refused, a recorded one is replayed.

#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use shimmer_common::container::Fingerprint;
use shimmer_common::experts::ExpertLayout;
use shimmer_common::experts::usage::simulate::{Budget, PhaseKind, PolicyKind, Replay, Tally, simulate};
use shimmer_common::experts::usage::{
    LayerShape, Synthetic, TraceEvent, TraceReader, TraceShape, TraceWriter, Usage, UsageOptions, colibri,
    file,
};

const MUTATIONS_PER_SEED: u64 = 4000;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds")).join(target);
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 3);
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// One to four flipped, cut, doubled or inserted pieces, the same for the same number.
fn mutate(seed: &[u8], number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |limit: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit.max(1)
    };
    let mut bytes = seed.to_vec();
    for _ in 0..=below(4) {
        let at = below(bytes.len());
        let end = (at + 1 + below(12)).min(bytes.len());
        match below(5) {
            0 if at < bytes.len() => bytes[at] ^= 1 << below(8),
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                let to = below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => drop(bytes.splice(at..at, [0xff, 0xff, 0x7f, below(256) as u8])),
        }
    }
    bytes
}

/// Calls `parse` with every seed and its mutations; returns how many of each it accepted.
fn accepted(target: &str, parse: impl Fn(&[u8]) -> bool) -> (usize, usize) {
    let seeds = seeds(target);
    let mutated = |seed: &Vec<u8>| (1..=MUTATIONS_PER_SEED).filter(|&n| parse(&mutate(seed, n))).count();
    let whole = seeds.iter().filter(|seed| parse(seed)).count();
    assert_eq!(whole, seeds.len(), "every seed is valid");
    (whole, seeds.iter().map(mutated).sum())
}

#[test]
fn mutated_traces_are_refused_or_make_sense() {
    let layer = |layer, experts| LayerShape { layer, experts, record_bytes: 4096 };
    let shape = TraceShape { model: String::new(), layers: vec![layer(1, 32), layer(3, 300)] };
    let mut head = TraceWriter::new(Vec::new(), &shape).unwrap().finish().unwrap();
    head.truncate(head.len() - 4);
    let (whole, mutated) = accepted("route_trace", |payload| {
        let length = (payload.len() as u32).to_le_bytes();
        let hash = blake3::hash(payload);
        let bytes = [&head, &length[..], &hash.as_bytes()[..16], payload].concat();
        let mut reader = TraceReader::new(bytes.as_slice()).unwrap();
        loop {
            match reader.next_event() {
                Ok(Some(TraceEvent::Batch(batch))) => {
                    let experts = if batch.layer == 1 { 32 } else { 300 };
                    assert!(
                        batch.rows.iter().all(|row| row.is_sorted() && row.iter().all(|&id| id < experts))
                    );
                }
                Ok(Some(TraceEvent::Mark(_))) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    });
    assert!(mutated > 0 && mutated < whole * MUTATIONS_PER_SEED as usize);
}

#[test]
fn mutated_usage_files_are_refused_or_make_sense() {
    let (whole, mutated) = accepted("usage_file", |rest| {
        let head = [b"SHMUSAGE", &1u32.to_le_bytes()[..], blake3::hash(rest).as_bytes()].concat();
        let Ok(saved) = file::decode(&[&head, rest].concat(), Fingerprint([0; 32])) else { return false };
        let usage = Usage::resume(saved, UsageOptions::default());
        assert!(usage.heats().all(|(_, heat)| heat >= 0.0 && heat.is_finite()));
        true
    });
    assert!(mutated > 0 && mutated < whole * MUTATIONS_PER_SEED as usize);
}

#[test]
fn mutated_foreign_usage_is_refused_or_makes_sense() {
    let layers = BTreeMap::from([(1, vec![0; 4]), (2, vec![0; 4])]);
    let layout = ExpertLayout { hidden_size: 64, specs: Vec::new(), layers };
    let (_, mutated) = accepted("coli_usage", |bytes| match colibri::import(bytes, &layout, 2) {
        Ok(imported) => {
            let layers = imported.usage.map(|usage| usage.layers).unwrap_or_default();
            assert!(layers.iter().all(|layer| layer.experts.len() == 4));
            true
        }
        Err(_) => false,
    });
    assert!(mutated > 0);
}

/// Hits per use in decode steps of each phase, at a quarter of the experts.
fn rates(replay: &Replay, kind: PolicyKind) -> Vec<f64> {
    let results = simulate(replay, kind, Budget::Fraction(0.25));
    results.iter().map(|phase| phase.decode.rate()).collect()
}

/// The demo model writing stories in two sessions, then prose in the second one (drafts on).
fn recorded() -> Replay {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/routes"));
    let open = |name: &str| TraceReader::new(std::fs::read(dir.join(name)).unwrap().leak() as &[u8]).unwrap();
    let mut replay = Replay::new(open("stories-1.routes").shape().clone());
    for (name, kind) in
        [("stories-1", PhaseKind::Session), ("stories-2", PhaseKind::Session), ("prose", PhaseKind::Topic)]
    {
        replay.append(name, kind, &mut open(&format!("{name}.routes"))).unwrap();
    }
    replay
}

#[test]
fn on_the_demo_models_routes_no_other_policy_finds_more() {
    let replay = recorded();
    let learned = rates(&replay, "learned".parse().unwrap());
    let rivals = PolicyKind::all().into_iter().filter(|kind| {
        !matches!(
            kind,
            PolicyKind::Learned(_)
                | PolicyKind::Pinned(..)
                | PolicyKind::Fixed
                | PolicyKind::FixedPerLayer
                | PolicyKind::Belady
        )
    });
    for kind in rivals {
        let rival = rates(&replay, kind);
        assert!(learned[1] >= rival[1], "{kind} finds {rival:?}, learned {learned:?}");
    }
}

#[test]
fn on_skewed_routes_nearly_as_much_is_found_as_by_the_best_fixed_choice() {
    let synthetic: Synthetic = "zipf:1.23,5,64,8,2500,1".parse().unwrap();
    let mut replay = Replay::new(synthetic.shape());
    synthetic
        .events::<()>(&mut |event| {
            replay.push(&event);
            Ok(())
        })
        .unwrap();
    let (learned, fixed) = (rates(&replay, "learned".parse().unwrap()), rates(&replay, PolicyKind::Fixed));
    assert!(learned[1] >= 0.97 * fixed[1], "second session: {learned:?} of {fixed:?}");
    let lru = rates(&replay, PolicyKind::Lru);
    assert!(lru[1] < 0.58 && fixed[1] > 0.69, "not the intended model: LRU {lru:?}, fixed {fixed:?}");
    let windows = |kind| simulate(&replay, kind, Budget::Fraction(0.25))[2].windows.clone();
    let (learned, fixed) = (windows("learned".parse().unwrap()), windows(PolicyKind::Fixed));
    // The fourth window of 500 tokens ends with the two thousandth.
    let fourth = |windows: &[Tally]| windows[3].rate();
    assert!(fourth(&learned) >= 0.95 * fourth(&fixed), "after the change: {learned:?} of {fixed:?}");
}
