//! Which experts to pin: the hottest, as far as a share of the room goes.

use std::collections::HashSet;

use super::super::ExpertId;
use super::Usage;

/// Share of the store's room that stays pinned while the model runs; at the start, pins are what is read
/// ahead and fill it. By simulation a quarter costs nothing, three quarters up to a point of hit rate: the
/// policy ranks by the same heat, without hysteresis (docs/performance.md).
pub const PINNED_SHARE: f64 = 0.25;

/// Tokens between two looks at the pins.
pub const REPIN_TOKENS: u64 = 32;

/// An expert takes a pinned one's place when it is hotter by this factor.
const HYSTERESIS: f64 = 1.1;

/// Largest share of the pins exchanged at once.
const EXCHANGE_SHARE: usize = 4;

/// The hottest experts by heat per byte, hottest first, whose records fit into `room_bytes`. `bytes` gives
/// the size of a record, `None` for experts that cannot be had here.
pub fn hottest(usage: &Usage, room_bytes: u64, bytes: impl Fn(ExpertId) -> Option<u64>) -> Vec<ExpertId> {
    let mut ranking: Vec<(f64, ExpertId, u64)> = usage
        .heats()
        .filter(|&(_, heat)| heat > 0.0)
        .filter_map(|(id, heat)| {
            let bytes = bytes(id).filter(|&bytes| bytes > 0)?;
            Some((heat / bytes as f64, id, bytes))
        })
        .collect();
    ranking.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut left = room_bytes;
    let mut chosen = Vec::new();
    for (_, id, bytes) in ranking {
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        chosen.push(id);
    }
    chosen
}

/// New pins in place of `pinned`, or `None` when the ranking has hardly moved. Free room is filled; beyond
/// that an expert is exchanged only for one clearly hotter, a part of them at a time, the clearest cases
/// first. Pins beyond the room are dropped.
pub fn exchange(
    usage: &Usage,
    room_bytes: u64,
    pinned: &[ExpertId],
    bytes: impl Fn(ExpertId) -> Option<u64>,
) -> Option<Vec<ExpertId>> {
    let wanted = hottest(usage, room_bytes, &bytes);
    let (now, then): (HashSet<_>, HashSet<_>) =
        (pinned.iter().copied().collect(), wanted.iter().copied().collect());
    let bytes = |id: ExpertId| bytes(id).unwrap_or(0);
    let mut out: Vec<ExpertId> = pinned.iter().copied().filter(|id| !then.contains(id)).collect();
    out.sort_by(|&a, &b| usage.heat(b).total_cmp(&usage.heat(a)));
    let mut pins = pinned.to_vec();
    let mut used: u64 = pins.iter().map(|&id| bytes(id)).sum();
    let mut exchanges = (pinned.len() / EXCHANGE_SHARE).max(1);
    let mut changed = used > room_bytes;
    while let Some(&coolest) = out.last().filter(|_| used > room_bytes) {
        out.pop();
        used -= bytes(coolest);
        pins.retain(|&pin| pin != coolest);
    }
    for id in wanted.into_iter().filter(|id| !now.contains(id)) {
        if used + bytes(id) > room_bytes {
            // The coolest pin that is not wanted gives its place, if the difference is worth a read.
            let Some(&victim) = out.last() else { break };
            let worth_it = usage.heat(id) > HYSTERESIS * usage.heat(victim);
            if exchanges == 0 || !worth_it || used - bytes(victim) + bytes(id) > room_bytes {
                break;
            }
            out.pop();
            exchanges -= 1;
            used -= bytes(victim);
            pins.retain(|&pin| pin != victim);
        }
        used += bytes(id);
        pins.push(id);
        changed = true;
    }
    changed.then(|| {
        pins.sort_by(|&a, &b| usage.heat(b).total_cmp(&usage.heat(a)).then(a.cmp(&b)));
        pins
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn use_rows(usage: &mut Usage, layer: u16, expert: u16, rows: usize) {
        usage.record(layer, 0, [(expert, rows)].into_iter());
    }

    /// All experts of two layers have this size.
    const ONE: u64 = 100;

    fn bytes(id: ExpertId) -> Option<u64> {
        (1..=2).contains(&id.layer).then_some(ONE)
    }

    fn id(layer: u16, index: u16) -> ExpertId {
        ExpertId { layer, index }
    }

    #[test]
    fn the_hottest_of_all_layers_fill_the_room() {
        let mut usage = Usage::default();
        for (layer, expert, rows) in [(1, 0, 9), (1, 3, 2), (2, 0, 5), (2, 6, 7), (2, 9, 1)] {
            use_rows(&mut usage, layer, expert, rows);
        }
        use_rows(&mut usage, 7, 0, 99);
        let pins = hottest(&usage, 3 * ONE + ONE / 2, bytes);
        assert_eq!(pins, [id(1, 0), id(2, 6), id(2, 0)]);
        assert_eq!(hottest(&usage, ONE, |pin| bytes(pin).filter(|_| pin.layer == 2)), [id(2, 6)]);
        assert_eq!(hottest(&usage, u64::MAX, bytes).len(), 5, "experts never used are not pinned");
    }

    #[test]
    fn pins_change_for_clear_reasons_and_a_few_at_a_time() {
        let mut usage = Usage::default();
        for (expert, rows) in [(0, 100), (3, 90), (6, 95)] {
            use_rows(&mut usage, 1, expert, rows);
        }
        let room = 2 * ONE;
        let pinned = [id(1, 0), id(1, 3)];
        assert_eq!(exchange(&usage, room, &pinned, bytes), None, "95 is hardly more than 90");
        use_rows(&mut usage, 1, 6, 60);
        use_rows(&mut usage, 1, 9, 300);
        // Both newcomers are hotter than both pins; only one exchange at a time, the clearest.
        assert_eq!(exchange(&usage, room, &pinned, bytes), Some(vec![id(1, 9), id(1, 0)]));
        let again = exchange(&usage, room, &[id(1, 9), id(1, 0)], bytes);
        assert_eq!(again, Some(vec![id(1, 9), id(1, 6)]));
        assert_eq!(exchange(&usage, room, &[id(1, 9), id(1, 6)], bytes), None);
    }

    #[test]
    fn the_coolest_go_when_there_are_too_many() {
        let mut usage = Usage::default();
        for (expert, rows) in [(0, 9), (1, 8), (2, 7), (3, 6)] {
            use_rows(&mut usage, 1, expert, rows);
        }
        let all = [id(1, 0), id(1, 1), id(1, 2), id(1, 3)];
        assert_eq!(exchange(&usage, 2 * ONE, &all, bytes), Some(vec![id(1, 0), id(1, 1)]));
    }

    #[test]
    fn free_room_is_filled() {
        let mut usage = Usage::default();
        use_rows(&mut usage, 1, 0, 5);
        use_rows(&mut usage, 2, 3, 4);
        assert_eq!(exchange(&usage, 1 << 30, &[], bytes), Some(vec![id(1, 0), id(2, 3)]));
    }
}
