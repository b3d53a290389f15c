//! Routing traces: which experts every row of every layer was routed to, in the order it happened.
//!
//! A trace is written while a model runs and replayed by the simulator, so that a cache policy is judged
//! on real routing before it is judged on a disk. Layout (integers little-endian):
//!
//! ```text
//! file   = "SHMROUTE" u32 version block* [end]
//! block  = u32 bytes (1..), 16 bytes BLAKE3 of the payload, payload       end = u32 0
//! ```
//!
//! The first block's payload is the JSON of [`TraceShape`]. Every other block holds whole events, LEB128
//! integers: `1 layer rows` and per row `count`, the first id and the gaps between the ascending rest; or
//! `2 length` and a UTF-8 name, a mark (a session or a topic begins). Blocks are flushed as they fill: a
//! trace whose program was killed ends without `end` and is read up to its last whole block.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

use super::super::{ExpertLayout, RoutedBatch};
use super::varint;

/// What a trace begins with.
pub const TRACE_MAGIC: [u8; 8] = *b"SHMROUTE";
const VERSION: u32 = 1;
const HASH_BYTES: usize = 16;
/// A block is written when it has grown beyond this.
const FLUSH_BYTES: usize = 64 << 10;
/// Larger blocks are damage: one event of a million rows has some ten megabytes.
const MAX_BLOCK_BYTES: usize = 64 << 20;
const MAX_ROWS: u64 = 1 << 24;
const MAX_MARK_BYTES: u64 = 256;
const MAX_LAYERS: usize = 4096;
const BATCH: u64 = 1;
const MARK: u64 = 2;

/// Why a trace cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system failed.
    #[error("the routing trace cannot be read or written: {0}")]
    Io(#[from] std::io::Error),
    /// It is no trace.
    #[error(
        "this is not a routing trace: it does not begin with SHMROUTE; write one with --trace-routes FILE"
    )]
    NotATrace,
    /// Another version.
    #[error("the routing trace has version {0}, this program reads version {VERSION}; record it again")]
    Version(u32),
    /// The bytes contradict themselves.
    #[error("the routing trace is damaged at byte {at}: {what}; record it again")]
    Damaged {
        /// Where the block begins.
        at: u64,
        /// What does not fit.
        what: String,
    },
}

/// The model a trace comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceShape {
    /// The model's fingerprint in hexadecimal; empty for a synthetic trace.
    pub model: String,
    /// Every layer with routed experts.
    pub layers: Vec<LayerShape>,
}

/// One layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Number of experts, at least one.
    pub experts: u32,
    /// Size of the layer's largest record.
    pub record_bytes: u64,
}

impl TraceShape {
    /// The shape of a model's experts.
    pub fn new(model: String, layout: &ExpertLayout) -> Self {
        let mut layers = BTreeMap::<u16, LayerShape>::new();
        for id in layout.ids() {
            let bytes = layout.record_bytes(id).unwrap_or(0) as u64;
            let shape =
                layers.entry(id.layer).or_insert(LayerShape { layer: id.layer, experts: 0, record_bytes: 0 });
            shape.experts += 1;
            shape.record_bytes = shape.record_bytes.max(bytes);
        }
        Self { model, layers: layers.into_values().collect() }
    }

    /// Checks what cannot be a model.
    fn problem(&self) -> Option<&'static str> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Some("there are no layers, or too many");
        }
        if !self.layers.windows(2).all(|pair| matches!(pair, [a, b] if a.layer < b.layer)) {
            return Some("layers are not ascending");
        }
        let possible = |l: &LayerShape| (1..=1 << 16).contains(&l.experts) && l.record_bytes < 1 << 40;
        if !self.layers.iter().all(possible) {
            return Some("a layer's experts are impossible");
        }
        None
    }

    /// Experts of `layer`; 0 when it has none.
    fn experts(&self, layer: u16) -> u32 {
        let found = self.layers.binary_search_by_key(&layer, |l| l.layer).ok();
        found.and_then(|i| self.layers.get(i)).map_or(0, |l| l.experts)
    }
}

/// One entry of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// One layer's rows were routed.
    Batch(RouteBatch),
    /// A session or a topic begins.
    Mark(String),
}

/// The routes of one layer's rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteBatch {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Per row the experts, ascending.
    pub rows: Vec<Vec<u16>>,
}

impl RouteBatch {
    /// The routes of `batch`.
    pub fn of(batch: &RoutedBatch) -> Self {
        let mut rows = vec![Vec::new(); batch.x.rows()];
        for work in &batch.work {
            for routed in &work.rows {
                if let Some(row) = rows.get_mut(routed.row as usize) {
                    row.push(work.expert);
                }
            }
        }
        // Work is grouped by ascending expert; a row names an expert once.
        rows.iter_mut().for_each(Vec::dedup);
        Self { layer: batch.layer, rows }
    }
}

/// Writes a trace, block by block.
pub struct TraceWriter<W: Write> {
    out: W,
    block: Vec<u8>,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn new(mut out: W, shape: &TraceShape) -> Result<Self, TraceError> {
        out.write_all(&TRACE_MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        let block = serde_json::to_vec(shape).map_err(std::io::Error::from)?;
        let mut writer = Self { out, block };
        writer.flush()?;
        Ok(writer)
    }

    /// Adds one event.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn write(&mut self, event: &TraceEvent) -> Result<(), TraceError> {
        match event {
            TraceEvent::Batch(batch) => self.put_batch(batch),
            TraceEvent::Mark(name) => {
                let end = name.floor_char_boundary(MAX_MARK_BYTES as usize);
                let name = name.get(..end).unwrap_or_default();
                varint::put(&mut self.block, MARK);
                varint::put(&mut self.block, name.len() as u64);
                self.block.extend_from_slice(name.as_bytes());
            }
        }
        if self.block.len() > FLUSH_BYTES { self.flush() } else { Ok(()) }
    }

    fn put_batch(&mut self, batch: &RouteBatch) {
        varint::put(&mut self.block, BATCH);
        varint::put(&mut self.block, batch.layer.into());
        varint::put(&mut self.block, batch.rows.len() as u64);
        for row in &batch.rows {
            varint::put(&mut self.block, row.len() as u64);
            let mut last = 0;
            for (i, &id) in row.iter().enumerate() {
                // Ascending, so that most gaps take one byte.
                let gap = if i == 0 { id } else { id.wrapping_sub(last) };
                varint::put(&mut self.block, gap.into());
                last = id;
            }
        }
    }

    /// Writes what has gathered.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn flush(&mut self) -> Result<(), TraceError> {
        if self.block.is_empty() {
            return Ok(());
        }
        if self.block.len() > MAX_BLOCK_BYTES {
            return Err(std::io::Error::other("one step has too many rows for a trace").into());
        }
        self.out.write_all(&(self.block.len() as u32).to_le_bytes())?;
        self.out.write_all(&hash(&self.block))?;
        self.out.write_all(&self.block)?;
        self.out.flush()?;
        self.block.clear();
        Ok(())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.flush()?;
        self.out.write_all(&0u32.to_le_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }
}

fn hash(payload: &[u8]) -> [u8; HASH_BYTES] {
    let mut short = [0; HASH_BYTES];
    blake3::Hasher::new().update(payload).finalize_xof().fill(&mut short);
    short
}

/// Reads a trace, block by block. Nothing in it is trusted.
pub struct TraceReader<R: Read> {
    input: R,
    shape: TraceShape,
    block: Vec<u8>,
    /// Bytes of `block` already read.
    used: usize,
    /// Where `block` begins in the file.
    at: u64,
    next_at: u64,
    ended: bool,
    complete: bool,
}

impl<R: Read> TraceReader<R> {
    /// Reads the head of a trace.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn new(mut input: R) -> Result<Self, TraceError> {
        let mut head = [0; 12];
        read_up_to(&mut input, &mut head).map_err(TraceError::from).and_then(|n| {
            if n == head.len() && head.starts_with(&TRACE_MAGIC) {
                Ok(())
            } else {
                Err(TraceError::NotATrace)
            }
        })?;
        let version = head.last_chunk::<4>().map_or(0, |v| u32::from_le_bytes(*v));
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let mut reader = Self {
            input,
            shape: TraceShape::default(),
            block: Vec::new(),
            used: 0,
            at: 12,
            next_at: 12,
            ended: false,
            complete: false,
        };
        if !reader.next_block()? {
            return Err(reader.damaged("the file ends in its head"));
        }
        reader.shape = serde_json::from_slice(&reader.block)
            .map_err(|e| reader.damaged(&format!("the head is no JSON of a shape: {e}")))?;
        reader.used = reader.block.len();
        match reader.shape.problem() {
            Some(what) => Err(reader.damaged(what)),
            None => Ok(reader),
        }
    }

    /// The model the trace comes from.
    pub fn shape(&self) -> &TraceShape {
        &self.shape
    }

    /// Whether the end mark was reached; a trace without one was cut short.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn damaged(&self, what: &str) -> TraceError {
        TraceError::Damaged { at: self.at, what: what.to_owned() }
    }

    /// Takes the next block in; `false` at the end, torn or proper.
    fn next_block(&mut self) -> Result<bool, TraceError> {
        self.at = self.next_at;
        self.used = 0;
        self.block.clear();
        let mut len = [0; 4];
        if read_up_to(&mut self.input, &mut len)? < len.len() {
            return Ok(false);
        }
        let len = u32::from_le_bytes(len) as usize;
        if len == 0 {
            self.complete = true;
            return Ok(false);
        }
        if len > MAX_BLOCK_BYTES {
            return Err(self.damaged(&format!("a block of {len} bytes, more than {MAX_BLOCK_BYTES}")));
        }
        let mut expected = [0; HASH_BYTES];
        let hashed = read_up_to(&mut self.input, &mut expected)?;
        // Grows with what is really there: a length is no promise.
        (&mut self.input).take(len as u64).read_to_end(&mut self.block)?;
        if hashed < HASH_BYTES || self.block.len() < len {
            self.block.clear();
            return Ok(false);
        }
        if hash(&self.block) != expected {
            return Err(self.damaged("the checksum of the block does not match"));
        }
        self.next_at += (4 + HASH_BYTES + len) as u64;
        Ok(true)
    }

    /// The next event; `None` at the end.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn next_event(&mut self) -> Result<Option<TraceEvent>, TraceError> {
        while self.used >= self.block.len() {
            if self.ended || !self.next_block()? {
                self.ended = true;
                return Ok(None);
            }
        }
        let mut rest = self.block.get(self.used..).unwrap_or_default();
        let event = parse(&mut rest, &self.shape);
        self.used = self.block.len() - rest.len();
        event.map(Some).map_err(|what| self.damaged(what))
    }
}

/// Fills `buf` as far as the input goes and returns how far that is.
fn read_up_to(input: &mut impl Read, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn parse(bytes: &mut &[u8], shape: &TraceShape) -> Result<TraceEvent, &'static str> {
    const SHORT: &str = "an event ends before its time";
    let number = |bytes: &mut &[u8]| varint::take(bytes).ok_or(SHORT);
    match number(bytes)? {
        BATCH => {
            let layer = u16::try_from(number(bytes)?).map_err(|_| "a layer index is impossible")?;
            let experts = shape.experts(layer);
            if experts == 0 {
                return Err("a layer that the head does not name");
            }
            let rows = number(bytes)?;
            // Each row takes a byte at least.
            if rows > MAX_ROWS || rows > bytes.len() as u64 {
                return Err("a batch of too many rows");
            }
            let rows: Result<_, _> = (0..rows).map(|_| parse_row(bytes, experts)).collect();
            Ok(TraceEvent::Batch(RouteBatch { layer, rows: rows? }))
        }
        MARK => {
            let len = number(bytes)?;
            if len > MAX_MARK_BYTES || len > bytes.len() as u64 {
                return Err("a mark with too long a name");
            }
            let (name, rest) = bytes.split_at_checked(len as usize).ok_or(SHORT)?;
            *bytes = rest;
            let name = std::str::from_utf8(name).map_err(|_| "a mark's name is no UTF-8")?;
            Ok(TraceEvent::Mark(name.to_owned()))
        }
        _ => Err("an event of unknown kind"),
    }
}

fn parse_row(bytes: &mut &[u8], experts: u32) -> Result<Vec<u16>, &'static str> {
    const SHORT: &str = "a row ends before its time";
    let count = varint::take(bytes).ok_or(SHORT)?;
    if count > u64::from(experts) || count > bytes.len() as u64 {
        return Err("a row with more experts than there are");
    }
    let mut row = Vec::with_capacity(count as usize);
    let mut last: Option<u64> = None;
    for _ in 0..count {
        let gap = varint::take(bytes).ok_or(SHORT)?;
        let id = match last {
            None => gap,
            Some(_) if gap == 0 => return Err("a row's experts do not ascend"),
            Some(last) => last.saturating_add(gap),
        };
        if id >= u64::from(experts) {
            return Err("an expert beyond the layer's last");
        }
        row.push(id as u16);
        last = Some(id);
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn shape() -> TraceShape {
        let layer = |layer, experts| LayerShape { layer, experts, record_bytes: 4096 };
        TraceShape { model: "00ff".into(), layers: vec![layer(1, 8), layer(3, 300)] }
    }

    fn events() -> Vec<TraceEvent> {
        let batch = |layer, rows: &[&[u16]]| {
            TraceEvent::Batch(RouteBatch { layer, rows: rows.iter().map(|r| r.to_vec()).collect() })
        };
        vec![
            TraceEvent::Mark("session".into()),
            batch(1, &[&[0, 7], &[3, 4]]),
            batch(3, &[&[0, 255, 256, 299], &[]]),
            batch(1, &[]),
        ]
    }

    fn written() -> Vec<u8> {
        let mut writer = TraceWriter::new(Vec::new(), &shape()).unwrap();
        for (i, event) in events().iter().enumerate() {
            writer.write(event).unwrap();
            if i == 1 {
                writer.flush().unwrap();
            }
        }
        writer.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<(Vec<TraceEvent>, bool), TraceError> {
        let mut reader = TraceReader::new(bytes)?;
        let mut events = Vec::new();
        while let Some(event) = reader.next_event()? {
            events.push(event);
        }
        Ok((events, reader.is_complete()))
    }

    #[test]
    fn a_trace_comes_back() {
        let bytes = written();
        assert_eq!(TraceReader::new(bytes.as_slice()).unwrap().shape(), &shape());
        assert_eq!(read(&bytes).unwrap(), (events(), true));
    }

    #[test]
    fn a_torn_tail_is_cut_at_the_last_whole_block() {
        let bytes = written();
        let mut seen = std::collections::BTreeSet::new();
        for len in 0..bytes.len() {
            match read(&bytes[..len]) {
                Ok((found, complete)) => {
                    assert!(!complete && events().starts_with(&found), "{len} bytes");
                    seen.insert(found.len());
                }
                Err(error) => assert!(len < 200, "{len} bytes: {error}"),
            }
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 2, 4]);
    }

    #[test]
    fn a_flipped_bit_is_found() {
        let bytes = written();
        for at in 0..bytes.len() - 4 {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let whole = read(&bad).is_ok_and(|(found, complete)| complete && found == events());
            assert!(!whole, "bit flip at byte {at} was not noticed");
        }
    }

    #[test]
    fn contradictions_behind_a_right_checksum_are_refused() {
        let cases: [(&[u8], &str); 9] = [
            (&[1, 2, 1, 1, 0], "does not name"),
            (&[1, 1, 1, 1, 8], "beyond the layer's last"),
            (&[1, 1, 1, 2, 3, 0], "do not ascend"),
            (&[1, 1, 1, 9, 0, 1, 1, 1, 1, 1, 1, 1, 1], "more experts"),
            (&[1, 1, 0xff, 0xff, 0x7f, 0], "too many rows"),
            (&[2, 200, 1, 65], "too long"),
            (&[2, 1, 0xff], "UTF-8"),
            (&[9], "unknown kind"),
            (&[1, 1], "before its time"),
        ];
        for (payload, word) in cases {
            let mut writer = TraceWriter::new(Vec::new(), &shape()).unwrap();
            writer.block.extend_from_slice(payload);
            let error = read(&writer.finish().unwrap()).unwrap_err().to_string();
            assert!(error.contains(word), "{payload:?}: {error}");
        }
    }

    #[test]
    fn other_files_and_versions_are_told_apart() {
        assert!(matches!(read(b"{}"), Err(TraceError::NotATrace)));
        let mut bytes = written();
        bytes[8] = 9;
        assert!(matches!(read(&bytes), Err(TraceError::Version(9))));
    }
}
