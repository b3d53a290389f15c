//! What the parts of one call mean: nothing is believed but what was asked for, in that order.

use bytes::Bytes;
use shimmer_common::experts::{ExpertId, ExpertLayout};
use shimmer_proto::v1;

/// One record of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) id: ExpertId,
    /// Bytes that are here already.
    pub(super) offset: u64,
    /// What the record hashes to, as far as is known.
    pub(super) hash: Option<[u8; 32]>,
}

/// What a part says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The data of this record comes next.
    Begin(Wanted, [u8; 32]),
    /// Its next bytes, and whether they are its last.
    Data(Bytes, bool),
}

/// Why a part is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Odd {
    /// It is not what was asked for.
    Wrong(String),
    /// The coordinator's record is not the one whose beginning is here.
    Changed(Wanted, [u8; 32]),
}

/// Follows the parts of one call.
pub(super) struct Assembler<'a> {
    layout: &'a ExpertLayout,
    wanted: std::slice::Iter<'a, Wanted>,
    /// Whether the sender's word on hashes counts: it is the coordinator.
    trusted: bool,
    /// The record that comes, and how much of it is still to come.
    current: Option<(ExpertId, usize)>,
}

impl<'a> Assembler<'a> {
    pub(super) fn new(layout: &'a ExpertLayout, wanted: &'a [Wanted], trusted: bool) -> Self {
        Self { layout, wanted: wanted.iter(), trusted, current: None }
    }

    /// Takes the next part.
    pub(super) fn push(&mut self, part: v1::RecordPart) -> Result<Step, Odd> {
        match part.part {
            Some(v1::record_part::Part::Header(header)) => self.begin(&header),
            Some(v1::record_part::Part::Data(data)) => {
                let (id, left) = self.current.ok_or_else(|| wrong("data without a header"))?;
                if data.is_empty() || data.len() > left {
                    return Err(wrong(format!("{} bytes of {id} where {left} are missing", data.len())));
                }
                let left = left - data.len();
                self.current = (left > 0).then_some((id, left));
                Ok(Step::Data(data, left == 0))
            }
            None => Err(wrong("an empty part")),
        }
    }

    fn begin(&mut self, header: &v1::RecordHeader) -> Result<Step, Odd> {
        if let Some((id, _)) = self.current {
            return Err(wrong(format!("{id} is cut off")));
        }
        let wanted = *self.wanted.next().ok_or_else(|| wrong("more records than asked for"))?;
        let Wanted { id, offset, hash } = wanted;
        if (header.layer, header.expert) != (id.layer.into(), id.index.into()) {
            return Err(wrong(format!("layer {} expert {} instead of {id}", header.layer, header.expert)));
        }
        let len = self.layout.record_bytes(id).ok_or_else(|| wrong("a record this model does not have"))?;
        if header.record_bytes != len as u64 {
            return Err(wrong(format!("{id} with {} bytes instead of {len}", header.record_bytes)));
        }
        let theirs = header.blake3.as_ref().try_into();
        let theirs: [u8; 32] = theirs.map_err(|_| wrong(format!("{id} without its BLAKE3")))?;
        if header.offset != offset {
            return Err(wrong(format!("{id} from byte {} instead of {offset}", header.offset)));
        }
        if hash.is_none_or(|hash| hash != theirs) {
            if !self.trusted {
                return Err(wrong(format!("{id} with another BLAKE3 than the coordinator's")));
            }
            if offset > 0 {
                return Err(Odd::Changed(wanted, theirs));
            }
        }
        let left = len.saturating_sub(usize::try_from(offset).unwrap_or(len));
        self.current = Some((id, left));
        Ok(Step::Begin(wanted, theirs))
    }

    /// The call ended: everything asked for must be there.
    pub(super) fn end(mut self) -> Result<(), String> {
        match (self.current, self.wanted.next()) {
            (None, None) => Ok(()),
            (Some((id, _)), _) => Err(format!("{id} is cut off")),
            (None, Some(wanted)) => Err(format!("{} did not come", wanted.id)),
        }
    }
}

fn wrong(what: impl Into<String>) -> Odd {
    Odd::Wrong(what.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::synthetic_layout;

    const ID: ExpertId = ExpertId { layer: 1, index: 2 };
    const HASH: [u8; 32] = [9; 32];

    fn header(change: impl FnOnce(&mut v1::RecordHeader)) -> v1::RecordPart {
        let bytes = synthetic_layout(64, 64, &[1], 4).record_bytes(ID).unwrap() as u64;
        let blake3 = HASH.to_vec().into();
        let mut header = v1::RecordHeader { layer: 1, expert: 2, record_bytes: bytes, blake3, offset: 0 };
        change(&mut header);
        v1::RecordPart { part: Some(v1::record_part::Part::Header(header)) }
    }

    fn data(len: usize) -> v1::RecordPart {
        v1::RecordPart { part: Some(v1::record_part::Part::Data(vec![7; len].into())) }
    }

    #[test]
    fn records_come_together_from_parts() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let bytes = layout.record_bytes(ID).unwrap();
        for (offset, hash) in [(0, None), (0, Some(HASH)), (100, Some(HASH))] {
            let wanted = [Wanted { id: ID, offset, hash }];
            let mut assembler = Assembler::new(&layout, &wanted, hash.is_none());
            assert_eq!(assembler.push(header(|h| h.offset = offset)), Ok(Step::Begin(wanted[0], HASH)));
            let rest = bytes - offset as usize;
            assert_eq!(assembler.push(data(rest - 1)), Ok(Step::Data(vec![7; rest - 1].into(), false)));
            assert_eq!(assembler.push(data(1)), Ok(Step::Data(vec![7].into(), true)));
            assembler.end().unwrap();
        }
    }

    #[test]
    fn only_the_coordinator_says_what_a_record_hashes_to() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let push = |offset, hash, trusted| {
            let wanted = [Wanted { id: ID, offset, hash }];
            Assembler::new(&layout, &wanted, trusted).push(header(|h| h.offset = offset))
        };
        assert!(matches!(push(0, Some([1; 32]), false), Err(Odd::Wrong(_))));
        assert!(matches!(push(0, None, false), Err(Odd::Wrong(_))));
        assert!(matches!(push(0, Some([1; 32]), true), Ok(Step::Begin(_, HASH))));
        assert!(matches!(push(5, Some([1; 32]), true), Err(Odd::Changed(_, HASH))));
    }

    #[test]
    fn anything_else_is_refused() {
        let layout = synthetic_layout(64, 64, &[1], 4);
        let bytes = layout.record_bytes(ID).unwrap();
        let refused = |parts: Vec<v1::RecordPart>| {
            let wanted = [Wanted { id: ID, offset: 0, hash: None }];
            let mut assembler = Assembler::new(&layout, &wanted, true);
            let pushed: Result<Vec<_>, _> = parts.into_iter().map(|p| assembler.push(p)).collect();
            pushed.is_err() || assembler.end().is_err()
        };
        assert!(!refused(vec![header(|_| {}), data(bytes)]));
        assert!(refused(vec![]));
        assert!(refused(vec![data(1)]));
        assert!(refused(vec![v1::RecordPart { part: None }]));
        assert!(refused(vec![header(|_| {})]));
        assert!(refused(vec![header(|_| {}), header(|_| {})]));
        assert!(refused(vec![header(|_| {}), data(bytes + 1)]));
        assert!(refused(vec![header(|_| {}), data(0)]));
        assert!(refused(vec![header(|_| {}), data(bytes), header(|_| {})]));
        assert!(refused(vec![header(|_| {}), data(bytes), data(1)]));
        assert!(refused(vec![header(|h| h.expert = 3), data(bytes)]));
        assert!(refused(vec![header(|h| h.layer = u32::MAX), data(bytes)]));
        assert!(refused(vec![header(|h| h.record_bytes = u64::MAX), data(bytes)]));
        assert!(refused(vec![header(|h| h.offset = 1), data(bytes)]));
        assert!(refused(vec![header(|h| h.offset = u64::MAX), data(bytes)]));
        assert!(refused(vec![header(|h| h.blake3 = vec![0; 31].into()), data(bytes)]));
    }
}
