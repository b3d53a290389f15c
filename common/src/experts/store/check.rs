//! Reading everything once: experts of small models are checked at opening, and stay where they fit.

use std::sync::mpsc::channel;

use super::super::{ExpertError, ExpertId};
use super::cache::{Arrival, Outcome, Wanted};
use super::{Core, Why};

/// Experts asked for at a time.
const AT_ONCE: usize = 64;

/// Reads every expert of the source through the cache.
///
/// # Errors
/// Of the first experts in ascending order that cannot be read.
pub(super) fn read_all(core: &Core) -> Result<(), ExpertError> {
    let layout = core.source.layout();
    let held = layout.ids().filter(|id| core.source.contains(*id));
    let all: Vec<(ExpertId, usize)> = held.filter_map(|id| Some((id, layout.record_bytes(id)?))).collect();
    all.chunks(AT_ONCE).try_for_each(|some| read(core, some))
}

fn read(core: &Core, experts: &[(ExpertId, usize)]) -> Result<(), ExpertError> {
    let (sender, arrivals) = channel();
    // Of no layer, so that no guess ends.
    let call = core.cache.begin(u16::MAX, &[]);
    let mut pending: Vec<usize> = (0..experts.len()).collect();
    let mut awaited = 0;
    let mut first_error: Option<(usize, ExpertError)> = None;
    let mut why = Why::Demand;
    while awaited > 0 || !pending.is_empty() {
        let wanted = |item: usize| {
            let (id, record_bytes) = *experts.get(item)?;
            Some(Wanted { item, id, record_bytes })
        };
        let wanted: Vec<_> = pending.drain(..).filter_map(wanted).collect();
        let claims = core.cache.claim(call, why, &wanted, &sender);
        awaited += claims.awaited + claims.loads.len();
        pending.extend(claims.refused);
        claims.loads.into_iter().for_each(|load| core.submit(load));
        why = Why::Demand;
        if awaited == 0 && !pending.is_empty() {
            core.cache.wait_for_room(call);
            why = Why::LastResort;
            continue;
        }
        while awaited > 0 {
            // This function keeps a sender, so the channel stays open.
            let Ok(Arrival { item, outcome }) = arrivals.recv() else { break };
            awaited -= 1;
            match outcome {
                Outcome::Ready(_) => {}
                Outcome::Retry => pending.push(item),
                Outcome::Failed(error) if first_error.as_ref().is_none_or(|&(first, _)| item < first) => {
                    first_error = Some((item, error));
                }
                Outcome::Failed(_) => {}
            }
        }
    }
    core.call_ended(call);
    first_error.map_or(Ok(()), |(_, error)| Err(error))
}
