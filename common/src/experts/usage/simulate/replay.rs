//! A trace in memory, ready to be replayed many times.

use std::io::Read;
use std::ops::Range;

use super::super::super::ExpertId;
use super::super::trace::{RouteBatch, TraceError, TraceEvent, TraceReader, TraceShape};

/// Most accesses held: four gigabytes.
const MAX_ACCESSES: usize = 1 << 29;

/// What begins with a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseKind {
    /// A process: caches are empty.
    Session,
    /// Other prompts in the same process.
    Topic,
}

/// A part of the trace that is reported by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Its mark, or the file's name.
    pub name: String,
    /// What begins.
    pub kind: PhaseKind,
    /// Steps of the replay.
    pub steps: Range<usize>,
}

/// One layer's routed rows.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Checkpoint layer index.
    pub layer: u16,
    /// Rows routed.
    pub rows: u32,
    /// Tokens since the phase began.
    pub token: u64,
    /// The experts needed, by their number in the replay, each once.
    pub experts: &'a [u32],
    /// How many rows need each of them.
    pub rows_of: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    layer: u16,
    rows: u32,
    token: u64,
    begin: usize,
    end: usize,
}

/// Room for resident experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A share of all experts' bytes.
    Fraction(f64),
    /// Bytes.
    Bytes(u64),
}

impl Budget {
    /// In bytes.
    pub fn bytes(self, replay: &Replay) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Fraction(share) => (replay.total_bytes() as f64 * share) as u64,
        }
    }
}

/// Traces in memory.
pub struct Replay {
    /// The model.
    pub shape: TraceShape,
    /// Parts reported by themselves.
    pub phases: Vec<Phase>,
    /// Most rows of a decode step.
    pub decode_rows: u32,
    /// Length of the windows hit rates are reported for, in tokens.
    pub window_tokens: u64,
    entries: Vec<Entry>,
    experts: Vec<u32>,
    rows_of: Vec<u32>,
    /// Number of the first expert of every layer of the shape.
    first: Vec<u32>,
    ids: Vec<ExpertId>,
    /// Rows of each layer since the phase began.
    layer_rows: Vec<u64>,
}

impl Replay {
    /// An empty replay of a model.
    pub fn new(shape: TraceShape) -> Self {
        let mut first = Vec::new();
        let mut ids = Vec::new();
        for layer in &shape.layers {
            first.push(ids.len() as u32);
            ids.extend((0..layer.experts).map(|i| ExpertId { layer: layer.layer, index: i as u16 }));
        }
        let layer_rows = vec![0; shape.layers.len()];
        Self {
            shape,
            phases: Vec::new(),
            decode_rows: 8,
            window_tokens: 500,
            entries: Vec::new(),
            experts: Vec::new(),
            rows_of: Vec::new(),
            first,
            ids,
            layer_rows,
        }
    }

    /// Appends a trace file as a session, or as a change of topic, of this name.
    ///
    /// # Errors
    /// [`TraceError`], also when the trace is of another model or does not fit into memory.
    pub fn append<R: Read>(
        &mut self,
        name: &str,
        kind: PhaseKind,
        reader: &mut TraceReader<R>,
    ) -> Result<(), TraceError> {
        let damaged = |what: &str| TraceError::Damaged { at: 0, what: what.to_owned() };
        if *reader.shape() != self.shape {
            return Err(damaged("it was recorded with another model than the first trace"));
        }
        self.begin(name, kind);
        while let Some(event) = reader.next_event()? {
            if self.experts.len() > MAX_ACCESSES {
                return Err(damaged("it is too long to be replayed"));
            }
            self.push(&event);
        }
        Ok(())
    }

    /// Appends one event. Marks named `topic…` begin a topic, others a session.
    pub fn push(&mut self, event: &TraceEvent) {
        match event {
            TraceEvent::Mark(name) if name.starts_with("topic") => self.begin(name, PhaseKind::Topic),
            TraceEvent::Mark(name) => self.begin(name, PhaseKind::Session),
            TraceEvent::Batch(batch) => self.push_batch(batch),
        }
    }

    fn begin(&mut self, name: &str, kind: PhaseKind) {
        let at = self.entries.len();
        self.layer_rows.fill(0);
        // A session with nothing in it was the file's own beginning.
        if self.phases.last().is_some_and(|phase| phase.steps.is_empty()) {
            self.phases.pop();
        }
        self.phases.push(Phase { name: name.to_owned(), kind, steps: at..at });
    }

    fn push_batch(&mut self, batch: &RouteBatch) {
        if self.phases.is_empty() {
            self.begin("session", PhaseKind::Session);
        }
        let Ok(at) = self.shape.layers.binary_search_by_key(&batch.layer, |l| l.layer) else { return };
        let (Some(&first), Some(seen)) = (self.first.get(at), self.layer_rows.get_mut(at)) else { return };
        *seen += batch.rows.len() as u64;
        let token = self.layer_rows.iter().copied().max().unwrap_or(0).saturating_sub(1);
        let mut ids: Vec<u16> = batch.rows.iter().flatten().copied().collect();
        ids.sort_unstable();
        let begin = self.experts.len();
        for same in ids.chunk_by(|a, b| a == b) {
            if let Some(&id) = same.first() {
                self.experts.push(first + u32::from(id));
                self.rows_of.push(same.len() as u32);
            }
        }
        let end = self.experts.len();
        self.entries.push(Entry { layer: batch.layer, rows: batch.rows.len() as u32, token, begin, end });
        if let Some(phase) = self.phases.last_mut() {
            phase.steps.end = self.entries.len();
        }
    }

    /// The steps of a phase.
    pub fn steps(&self, phase: &Phase) -> impl Iterator<Item = Step<'_>> {
        self.entries.get(phase.steps.clone()).unwrap_or_default().iter().map(|e| Step {
            layer: e.layer,
            rows: e.rows,
            token: e.token,
            experts: self.experts.get(e.begin..e.end).unwrap_or_default(),
            rows_of: self.rows_of.get(e.begin..e.end).unwrap_or_default(),
        })
    }

    /// All accesses from the first of `step` on.
    pub(super) fn accesses_from(&self, step: usize) -> &[u32] {
        let begin = self.entries.get(step).map_or(self.experts.len(), |e| e.begin);
        self.experts.get(begin..).unwrap_or_default()
    }

    /// Whether few enough rows make this a decode step.
    pub fn is_decode(&self, step: &Step<'_>) -> bool {
        step.rows <= self.decode_rows
    }

    /// Tokens of a phase.
    pub fn tokens(&self, phase: &Phase) -> u64 {
        self.steps(phase).map(|step| step.token + 1).max().unwrap_or(0)
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.ids.len()
    }

    /// The expert of this number.
    pub(super) fn id(&self, expert: u32) -> ExpertId {
        self.ids.get(expert as usize).copied().unwrap_or(ExpertId { layer: 0, index: 0 })
    }

    /// The number of this expert.
    pub(super) fn dense(&self, id: ExpertId) -> Option<u32> {
        let at = self.shape.layers.binary_search_by_key(&id.layer, |l| l.layer).ok()?;
        Some(self.first.get(at)? + u32::from(id.index))
    }

    /// Bytes of one expert.
    pub(super) fn bytes(&self, expert: u32) -> u64 {
        let layer = self.id(expert).layer;
        let at = self.shape.layers.binary_search_by_key(&layer, |l| l.layer).ok();
        at.and_then(|at| self.shape.layers.get(at)).map_or(1, |l| l.record_bytes.max(1))
    }

    /// Bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        self.shape.layers.iter().map(|l| u64::from(l.experts) * l.record_bytes.max(1)).sum()
    }

    /// How many experts of mean size have room.
    pub(super) fn slots(&self, room: u64) -> usize {
        let mean = self.total_bytes() / (self.experts() as u64).max(1);
        (room / mean.max(1)) as usize
    }
}
