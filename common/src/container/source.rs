//! Routed experts straight from a container: one or two ranges per expert where the file allows it.
//!
//! The three matrices are independent locations, possibly in different shards. Parts that lie next to
//! each other in file and record are one segment (docs/formats.md §5): a container sorted by name gives
//! one range of weights and one of scales, one that we wrote the whole record.

use std::path::PathBuf;
use std::sync::Arc;

use super::Inner;
use super::file::Shard;
use super::load::{stored_scale_flaw, weight_flaw};
use super::resolve::{ExpertPlaces, Span};
use super::tensors::expert_name;
use crate::experts::{ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertSpec, RecordPart};
use crate::io::Segment;

/// The routed experts of an open container.
pub(super) struct ContainerSource {
    pub(super) inner: Arc<Inner>,
}

/// A part of the record and where its bytes are.
#[derive(Clone, Copy)]
struct Piece {
    part: RecordPart,
    span: Span,
}

impl ExpertSource for ContainerSource {
    fn layout(&self) -> &ExpertLayout {
        &self.inner.resolved.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.places(id).is_some()
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        let (spec, places) = self.find(id)?;
        let pieces = pieces(spec, places);
        let mut segments = Vec::with_capacity(2);
        let mut rest = &pieces[..];
        while let Some(run) = leading_run(rest) {
            rest = &rest[run.len()..];
            let Some(first) = run.first() else { break };
            let shard = self.shard(&first.span).ok_or_else(|| ExpertError::Read {
                id,
                path: self.inner.dir().to_owned(),
                source: std::io::Error::new(std::io::ErrorKind::NotFound, "no such shard"),
            })?;
            let file = Arc::clone(shard.file());
            let len = run.iter().map(|piece| piece.part.len).sum();
            segments.push(Segment { file, offset: first.span.offset, len, at: first.part.offset });
        }
        Ok(segments)
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        let (spec, places) = self.find(id)?;
        let pieces = pieces(spec, places);
        clear_padding(&pieces, record);
        self.check(id, spec, &pieces, record)
    }

    fn describe(&self) -> String {
        format!("container {}", self.inner.dir().display())
    }
}

impl ContainerSource {
    fn find(&self, id: ExpertId) -> Result<(&ExpertSpec, &ExpertPlaces), ExpertError> {
        self.layout().spec(id).zip(self.places(id)).ok_or_else(|| ExpertError::Missing {
            id,
            holder: "container".into(),
            remedy: "check that it is the container the other side uses".into(),
        })
    }

    fn places(&self, id: ExpertId) -> Option<&ExpertPlaces> {
        self.inner.resolved.experts.get(&id.layer)?.get(usize::from(id.index))
    }

    fn shard(&self, span: &Span) -> Option<&Shard> {
        self.inner.shards.get(span.shard as usize)
    }

    fn path(&self, span: &Span) -> PathBuf {
        self.shard(span).map(|s| s.path().to_owned()).unwrap_or_default()
    }

    /// Refuses NaN, infinite and negative scales, and float weights that are not finite.
    fn check(
        &self,
        id: ExpertId,
        spec: &ExpertSpec,
        pieces: &[Piece],
        record: &[u8],
    ) -> Result<(), ExpertError> {
        for Piece { part, span } in pieces {
            let bytes = &record[part.range()];
            let flaw = if part.scales {
                stored_scale_flaw(bytes)
            } else {
                weight_flaw(spec.matrix(part.matrix).format, bytes)
            };
            if let Some(flaw) = flaw {
                let name = expert_name(id.layer, usize::from(id.index), part.matrix);
                let of = if part.scales { "scales of " } else { "" };
                return Err(ExpertError::Damaged {
                    id,
                    path: self.path(span),
                    what: format!("{of}{name}: {flaw}"),
                });
            }
        }
        Ok(())
    }
}

/// The parts of the record that hold bytes, in record order, with their places.
fn pieces(spec: &ExpertSpec, places: &ExpertPlaces) -> Vec<Piece> {
    let [down, gate, up] = places;
    let spans =
        [Some(down.weights), Some(gate.weights), Some(up.weights), down.scales, gate.scales, up.scales];
    let with_span = |(part, span): (RecordPart, Option<Span>)| Some(Piece { part, span: span? });
    spec.parts().into_iter().zip(spans).filter_map(with_span).collect()
}

/// The longest prefix whose bytes lie one after another in shard and record; `None` when nothing is left.
fn leading_run(pieces: &[Piece]) -> Option<&[Piece]> {
    let touches = |pair: &[Piece]| match pair {
        [a, b] => {
            a.span.shard == b.span.shard
                && a.span.offset + a.span.bytes == b.span.offset
                && a.part.offset + a.part.len == b.part.offset
        }
        _ => false,
    };
    let joined = pieces.windows(2).take_while(|pair| touches(pair)).count();
    if pieces.is_empty() { None } else { pieces.get(..=joined) }
}

/// Zeroes everything between and behind the parts: a record has the same bytes however it was made.
fn clear_padding(pieces: &[Piece], record: &mut [u8]) {
    let mut end = 0;
    for Piece { part, .. } in pieces {
        record[end..part.offset].fill(0);
        end = part.range().end;
    }
    record[end..].fill(0);
}
