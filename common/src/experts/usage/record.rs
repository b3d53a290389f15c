//! Sees every routed batch on its way to whoever computes it: counts it and, where asked, writes it down.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::store::SharedUsage;
use super::super::{Ahead, ExpertCompute, ExpertError, ExpertLayout, ExpertTimes, Lookahead, RoutedBatch};
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

/// Passes everything on to `inner` and changes nothing of it, but for how far ahead is guessed.
pub struct ObservedExperts {
    inner: Arc<dyn ExpertCompute>,
    usage: SharedUsage,
    trace: Option<TraceSink>,
    /// Layers looked ahead at most.
    lookahead: usize,
}

impl ObservedExperts {
    /// Counts in `usage` and writes to `trace`.
    pub fn new(inner: Arc<dyn ExpertCompute>, usage: SharedUsage, trace: Option<TraceSink>) -> Self {
        Self { inner, usage, trace, lookahead: usize::MAX }
    }

    /// Asks for guesses for the next `layers` layers only.
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
        self.inner.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        self.inner.layout()
    }

    fn prefetch(&self, ahead: &Lookahead) {
        self.inner.prefetch(ahead);
    }

    fn lookahead(&self) -> Ahead {
        let wanted = self.inner.lookahead();
        Ahead { depth: wanted.depth.min(self.lookahead), ..wanted }
    }

    fn times(&self) -> ExpertTimes {
        self.inner.times()
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

        fn lookahead(&self) -> Ahead {
            Ahead { depth: 3, before_sending: true }
        }
    }

    #[test]
    fn guesses_go_no_further_than_the_limit_and_are_passed_on() {
        for limit in [0, 1, 2, 7] {
            let inner = Arc::new(Guessed(MemorySource::new(4, 64, 64), Mutex::default()));
            let counts = Arc::new(Mutex::new(Usage::default()));
            let observed =
                ObservedExperts::new(Arc::clone(&inner) as _, counts, None).look_ahead_at_most(limit);
            assert_eq!(observed.lookahead(), Ahead { depth: limit.min(3), before_sending: true });
            observed.prefetch(&Lookahead { layer: 4, experts: vec![0] });
            let x = Activations::from_f32(noise(1, 64), 64).quantized();
            observed.compute(&RoutedBatch::from_routes(1, x, &[2], &[1.0], 1), &mut || {}).unwrap();
            assert_eq!(*inner.1.lock().unwrap(), [4]);
        }
    }
}
