//! A source of random experts in memory, for the tests of store and pack.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use super::{ExpertError, ExpertId, ExpertLayout, ExpertSource, ExpertSpec, MatrixSpec};
use crate::container::Fingerprint;
use crate::io::{Segment, SharedFile};
use crate::mem::AlignedBuf;
use crate::quant::{Format, encode};

pub(crate) const MODEL: Fingerprint = Fingerprint([7; 32]);

/// Deterministic values in about -1..1.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Experts of layers 1 and 2, in alternating formats.
pub(crate) struct MemorySource {
    pub layout: ExpertLayout,
    pub records: HashMap<ExpertId, Arc<AlignedBuf>>,
    /// Reads of these fail.
    pub broken: Mutex<HashSet<ExpertId>>,
    /// Reads of these panic.
    pub explosive: Mutex<HashSet<ExpertId>>,
    pub reads: AtomicUsize,
}

impl MemorySource {
    /// `experts` per layer with gate and up `[inner, hidden_size]`.
    pub(crate) fn new(experts: usize, hidden_size: usize, inner: usize) -> Self {
        let spec = |wide: Format, narrow: Format| ExpertSpec {
            gate: MatrixSpec { format: wide, rows: inner, cols: hidden_size },
            up: MatrixSpec { format: wide, rows: inner, cols: hidden_size },
            down: MatrixSpec { format: narrow, rows: hidden_size, cols: inner },
        };
        let grouped = Format::Int4Grouped { group: 64 };
        let specs = vec![
            spec(grouped, grouped),
            spec(Format::Int8Row, Format::Int4Row),
            spec(Format::Bf16, Format::Int8Row),
        ];
        let kinds: Vec<u8> = (0..experts).map(|i| (i % 3) as u8).collect();
        let layers = BTreeMap::from([(1, kinds.clone()), (2, kinds)]);
        let layout = ExpertLayout { hidden_size, specs, layers };
        let record = |id: ExpertId| {
            let spec = layout.spec(id).unwrap();
            let mut record = AlignedBuf::zeroed(spec.record_bytes()).unwrap();
            for part in spec.parts() {
                let MatrixSpec { format, rows, cols } = *spec.matrix(part.matrix);
                let seed = u64::from(id.layer) << 32 | u64::from(id.index) << 8 | part.matrix as u64;
                let (weights, scales) = encode(format, rows, cols, &noise(seed, rows * cols)).unwrap();
                let bytes = if part.scales { bytemuck::cast_slice(&scales) } else { weights.as_slice() };
                record[part.range()].copy_from_slice(bytes);
            }
            Arc::new(record)
        };
        let records = layout.ids().map(|id| (id, record(id))).collect();

        Self {
            layout,
            records,
            broken: Mutex::default(),
            explosive: Mutex::default(),
            reads: AtomicUsize::new(0),
        }
    }

    pub(crate) fn ids(&self) -> Vec<ExpertId> {
        self.layout.ids().collect()
    }
}

impl ExpertSource for MemorySource {
    fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.records.contains_key(&id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let broken = self.broken.lock().unwrap().contains(&id);
        let explosive = self.explosive.lock().unwrap().contains(&id);
        let record = Arc::clone(&self.records[&id]);
        let len = record.len();
        let read = move |buf: &mut [u8], offset: u64| {
            if broken {
                return Err(std::io::Error::other("the disk is on fire"));
            }
            assert!(!explosive, "a source that panics");
            buf.copy_from_slice(&record[offset as usize..][..buf.len()]);
            Ok(buf.len())
        };
        let file = Arc::new(SharedFile::custom(Path::new("memory"), 0, Arc::new(read)));
        Ok(vec![Segment { file, offset: 0, len, at: 0 }])
    }

    fn finish(&self, _: ExpertId, _: &mut [u8]) -> Result<(), ExpertError> {
        Ok(())
    }

    fn describe(&self) -> String {
        "memory".into()
    }
}

/// A disk that reads nothing while it is shut, and notes what it begins to read.
pub(crate) struct GatedSource {
    inner: Arc<MemorySource>,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    begun: Mutex<Vec<ExpertId>>,
}

impl GatedSource {
    pub(crate) fn shut(inner: &Arc<MemorySource>) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(inner), gate: Arc::default() })
    }

    pub(crate) fn open(&self) {
        *self.gate.open.lock().unwrap() = true;
        self.gate.changed.notify_all();
    }

    pub(crate) fn begun(&self) -> Vec<ExpertId> {
        self.gate.begun.lock().unwrap().clone()
    }
}

impl ExpertSource for GatedSource {
    fn layout(&self) -> &ExpertLayout {
        &self.inner.layout
    }

    fn contains(&self, id: ExpertId) -> bool {
        self.inner.contains(id)
    }

    fn plan(&self, id: ExpertId) -> Result<Vec<Segment>, ExpertError> {
        let (gate, record) = (Arc::clone(&self.gate), Arc::clone(&self.inner.records[&id]));
        let len = record.len();
        let read = move |buf: &mut [u8], offset: u64| {
            gate.begun.lock().unwrap().push(id);
            drop(gate.changed.wait_while(gate.open.lock().unwrap(), |open| !*open).unwrap());
            buf.copy_from_slice(&record[offset as usize..][..buf.len()]);
            Ok(buf.len())
        };
        let file = Arc::new(SharedFile::custom(Path::new("memory"), 0, Arc::new(read)));
        Ok(vec![Segment { file, offset: 0, len, at: 0 }])
    }

    fn finish(&self, id: ExpertId, record: &mut [u8]) -> Result<(), ExpertError> {
        self.inner.finish(id, record)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
