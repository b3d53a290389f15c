//! Sees every routed batch on its way to whoever computes it: counts it and, where asked, writes it down.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::store::SharedUsage;
use super::super::{ExpertCompute, ExpertError, ExpertLayout, Lookahead, RoutedBatch};
use super::trace::{RouteBatch, TraceError, TraceEvent, TraceShape, TraceWriter};
use crate::fixed::FixedRows;

type Writer = TraceWriter<Box<dyn Write + Send>>;

/// A trace being written that several threads can reach. After a failure it records no more.
#[derive(Clone)]
pub struct TraceSink(Arc<Mutex<Option<Writer>>>);

impl TraceSink {
    /// Begins a trace.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn new(out: Box<dyn Write + Send>, shape: &TraceShape) -> Result<Self, TraceError> {
        Ok(Self(Arc::new(Mutex::new(Some(TraceWriter::new(out, shape)?)))))
    }

    fn write(&self, batch: &RoutedBatch) {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = writer.as_mut() else { return };
        if let Err(error) = open.write(&TraceEvent::Batch(RouteBatch::of(batch))) {
            tracing::warn!(%error, "routes are no longer recorded");
            *writer = None;
        }
    }

    /// Ends the trace; what is routed later is not recorded.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn finish(&self) -> Result<(), TraceError> {
        let writer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        writer.map_or(Ok(()), |writer| writer.finish().map(drop))
    }
}

/// Passes everything on to `inner` and changes nothing of it.
pub struct ObservedExperts {
    inner: Arc<dyn ExpertCompute>,
    usage: SharedUsage,
    trace: Option<TraceSink>,
}

impl ObservedExperts {
    /// Counts in `usage` and writes to `trace`.
    pub fn new(inner: Arc<dyn ExpertCompute>, usage: SharedUsage, trace: Option<TraceSink>) -> Self {
        Self { inner, usage, trace }
    }
}

impl ExpertCompute for ObservedExperts {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        let uses = batch.work.iter().map(|work| (work.expert, work.rows.len()));
        self.usage.lock().unwrap_or_else(PoisonError::into_inner).record(batch.layer, batch.x.rows(), uses);
        if let Some(trace) = &self.trace {
            trace.write(batch);
        }
        self.inner.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        self.inner.layout()
    }

    fn prefetch(&self, ahead: &Lookahead) {
        self.inner.prefetch(ahead);
    }

    fn wants_lookahead(&self) -> bool {
        self.inner.wants_lookahead()
    }
}
