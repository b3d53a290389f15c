//! The simulator on traces whose outcome is known.

use super::*;
use crate::experts::usage::{LayerShape, RouteBatch, Synthetic, TraceEvent, TraceShape};

fn replay(layers: u16, experts: u32) -> Replay {
    let layer = |layer| LayerShape { layer, experts, record_bytes: 1 };
    Replay::new(TraceShape { model: String::new(), layers: (0..layers).map(layer).collect() })
}

fn push(replay: &mut Replay, layer: u16, rows: &[&[u16]]) {
    let rows = rows.iter().map(|row| row.to_vec()).collect();
    replay.push(&TraceEvent::Batch(RouteBatch { layer, rows }));
}

fn synthetic(text: &str) -> Replay {
    let synthetic: Synthetic = text.parse().unwrap();
    let mut replay = Replay::new(synthetic.shape());
    synthetic
        .events::<()>(&mut |event| {
            replay.push(&event);
            Ok(())
        })
        .unwrap();
    replay
}

fn rates(replay: &Replay, kind: PolicyKind) -> Vec<f64> {
    simulate(replay, kind, Budget::Fraction(0.25)).iter().map(|phase| phase.decode.rate()).collect()
}

#[test]
fn a_loop_defeats_lru_and_belady_keeps_what_it_can() {
    let mut replay = replay(1, 8);
    for i in 0..80 {
        push(&mut replay, 0, &[&[i % 4]]);
    }
    let hits = |kind| simulate(&replay, kind, Budget::Bytes(3))[0].decode.hits;
    assert_eq!(hits(PolicyKind::Lru), 0);
    assert_eq!(hits(PolicyKind::Fifo), 0);
    // Two of three slots hold, the third is scratch: of every 3 uses after the first four one misses.
    assert!((48..=52).contains(&hits(PolicyKind::Belady)), "{}", hits(PolicyKind::Belady));
    assert_eq!(hits(PolicyKind::Fixed), 60);
}

#[test]
fn nothing_beats_belady_and_everything_fits_into_full_room() {
    let replay = synthetic("zipf:0.9,3,24,3,300,5,0.3");
    let belady = rates(&replay, PolicyKind::Belady);
    for kind in PolicyKind::all() {
        let whole: u64 = simulate(&replay, kind, Budget::Fraction(1.0))
            .iter()
            .map(|phase| phase.decode.uses - phase.decode.hits)
            .sum();
        // Each of the two sessions reads each expert at most once; the fixed choice none.
        assert!(whole <= 2 * 72, "{kind}: {whole} misses");
        if !matches!(
            kind,
            PolicyKind::Fixed | PolicyKind::FixedPerLayer | PolicyKind::Learned(_) | PolicyKind::Pinned(..)
        ) {
            let found = rates(&replay, kind);
            assert!(found.iter().zip(&belady).all(|(a, b)| a <= b), "{kind}: {found:?} above {belady:?}");
        }
    }
}

#[test]
fn names_come_back() {
    for kind in PolicyKind::all() {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert_eq!("decayed:32".parse(), Ok(PolicyKind::Decayed(32.0)));
    let other: PolicyKind = "pinned@0.25:8x0.5,100x0.25,1000x0.25".parse().unwrap();
    assert_eq!(other.to_string().parse(), Ok(other));
    for bad in [
        "",
        "mru",
        "lru:4",
        "decayed:-1",
        "learned:1,2",
        "pinned@2",
        "decayed:0.5",
        "learned:0x1,2x1,3x1",
        "lru:16x1,2x1,3x1",
    ] {
        assert!(bad.parse::<PolicyKind>().is_err(), "{bad}");
    }
}

#[test]
fn prefill_and_decode_are_told_apart_by_rows() {
    let mut replay = replay(1, 8);
    let row: &[u16] = &[1, 2];
    push(&mut replay, 0, &[row; 9]);
    push(&mut replay, 0, &[row]);
    let result = &simulate(&replay, PolicyKind::Lru, Budget::Bytes(4))[0];
    assert_eq!(result.prefill, Tally { uses: 2, hits: 0 });
    assert_eq!(result.decode, Tally { uses: 2, hits: 2 });
    assert_eq!(replay.tokens(&replay.phases[0]), 10);
}
