//! Sees every routed batch on its way to whoever computes it: counts it and, where asked, writes it down.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// Passes everything on to `inner` and changes nothing of it, but for guesses that look too far ahead.
pub struct ObservedExperts {
    inner: Arc<dyn ExpertCompute>,
    usage: SharedUsage,
    trace: Option<TraceSink>,
    /// Layers looked ahead at most.
    lookahead: usize,
    /// Guesses since the last batch: the nearest layer comes first.
    guesses: AtomicUsize,
}

impl ObservedExperts {
    /// Counts in `usage` and writes to `trace`.
    pub fn new(inner: Arc<dyn ExpertCompute>, usage: SharedUsage, trace: Option<TraceSink>) -> Self {
        Self { inner, usage, trace, lookahead: usize::MAX, guesses: AtomicUsize::new(0) }
    }

    /// Passes on guesses for the next `layers` layers only.
    pub fn look_ahead_at_most(self, layers: usize) -> Self {
        Self { lookahead: layers, ..self }
    }
}

impl ExpertCompute for ObservedExperts {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        let uses = batch.work.iter().map(|work| (work.expert, work.rows.len()));
        self.usage.lock().unwrap_or_else(PoisonError::into_inner).record(batch.layer, batch.x.rows(), uses);
        if let Some(trace) = &self.trace {
            trace.write(batch);
        }
        self.guesses.store(0, Ordering::Relaxed);
        self.inner.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        self.inner.layout()
    }

    fn prefetch(&self, ahead: &Lookahead) {
        if self.guesses.fetch_add(1, Ordering::Relaxed) < self.lookahead {
            self.inner.prefetch(ahead);
        }
    }

    fn wants_lookahead(&self) -> bool {
        self.lookahead > 0 && self.inner.wants_lookahead()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{MemorySource, noise};
    use super::*;
    use crate::experts::usage::Usage;
    use crate::kernels::Activations;

    /// Remembers for which layers it was given guesses.
    struct Guessed(MemorySource, Mutex<Vec<u16>>);

    impl ExpertCompute for Guessed {
        fn compute(
            &self,
            batch: &RoutedBatch,
            meanwhile: &mut dyn FnMut(),
        ) -> Result<FixedRows, ExpertError> {
            meanwhile();
            Ok(FixedRows::zeroed(batch.x.rows(), batch.x.cols(), 8))
        }

        fn layout(&self) -> &ExpertLayout {
            &self.0.layout
        }

        fn prefetch(&self, ahead: &Lookahead) {
            self.1.lock().unwrap().push(ahead.layer);
        }

        fn wants_lookahead(&self) -> bool {
            true
        }
    }

    #[test]
    fn guesses_beyond_the_limit_end_here_and_each_batch_begins_anew() {
        for (limit, passed) in [(0, vec![]), (1, vec![4, 5]), (2, vec![4, 5, 5, 6])] {
            let inner = Arc::new(Guessed(MemorySource::new(4, 64, 64), Mutex::default()));
            let counts = Arc::new(Mutex::new(Usage::default()));
            let observed =
                ObservedExperts::new(Arc::clone(&inner) as _, counts, None).look_ahead_at_most(limit);
            assert_eq!(observed.wants_lookahead(), limit > 0);
            for layer in [3, 4] {
                for ahead in 1..=3 {
                    observed.prefetch(&Lookahead { layer: layer + ahead, experts: vec![0] });
                }
                let x = Activations::from_f32(noise(1, 64), 64).quantized();
                let batch = RoutedBatch::from_routes(1, x, &[2], &[1.0], 1);
                observed.compute(&batch, &mut || {}).unwrap();
            }
            assert_eq!(*inner.1.lock().unwrap(), passed);
        }
    }
}
