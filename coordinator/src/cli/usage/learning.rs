//! Usage while a command runs a model: where it is kept, what it takes over, the trace that was asked for.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use shimmer_common::container::{Container, Fingerprint};
use shimmer_common::disk;
use shimmer_common::experts::usage::simulate::PolicyKind;
use shimmer_common::experts::usage::{
    ObservedExperts, TRACE_MAGIC, TraceShape, TraceSink, UsageKeeper, file,
};
use shimmer_common::experts::{EvictionPolicy, ExpertCompute, ExpertId, ExpertLayout, LocalStore};

use super::super::error::CliError;
use super::super::interrupt::Interrupt;
use super::super::model_args::{LimitArgs, UsageArg};
use super::super::output;
use super::files::import_colibri;

/// What a running model learns and records; dropping it saves.
pub struct Learning {
    keeper: UsageKeeper,
    trace: Option<TraceSink>,
    /// The policy asked for in place of the learned one.
    instead: Option<PolicyKind>,
    /// Layers looked ahead at most.
    lookahead: usize,
}

impl Learning {
    /// Takes up what is known about the model.
    ///
    /// # Errors
    /// [`CliError`] when the container cannot be read or the trace not be made.
    pub fn open(container: &Container, layout: &ExpertLayout, limits: &LimitArgs) -> Result<Self, CliError> {
        let model = container.fingerprint()?;
        let path = match &limits.usage {
            UsageArg::Off => None,
            UsageArg::File(path) => {
                refuse_foreign(path, &file::MAGIC, "--usage", "expert usage")?;
                Some(path.clone())
            }
            UsageArg::Auto => file::place(container.dir(), model),
        };
        let trace = limits.trace_routes.as_deref().map(|path| open_trace(path, model, layout)).transpose()?;
        let keeper = UsageKeeper::open(path, model, layout, || {
            let (saved, notes) = import_colibri(container, layout);
            notes.iter().for_each(|note| output::note(note));
            saved
        });
        Interrupt::install().on_kill(keeper.saver());
        Ok(Self { keeper, trace, instead: limits.policy, lookahead: limits.lookahead })
    }

    /// The eviction policy of this machine's store, which has room for `room_bytes`.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a policy that can only be simulated.
    pub fn policy(
        &self,
        layout: &ExpertLayout,
        room_bytes: u64,
    ) -> Result<Box<dyn EvictionPolicy>, CliError> {
        // `observe` sees all routes, also those that nodes compute.
        let Some(kind) = self.instead else { return Ok(self.keeper.policy(false)) };
        let slots = room_bytes / (layout.max_record_bytes() as u64).max(1);
        kind.policy(slots as usize)
            .ok_or_else(|| CliError::Usage(format!("--policy {kind} can only be simulated; leave it out")))
    }

    /// Has the store follow what is learned, unless another policy was asked for.
    pub fn pin(&self, store: &Arc<LocalStore>, room_bytes: u64) {
        if self.instead.is_none() {
            self.keeper.pin(store, room_bytes);
        }
    }

    /// The heat of an expert, as learned so far.
    pub fn heat(&self) -> Arc<dyn Fn(ExpertId) -> f64 + Send + Sync> {
        let counts = self.keeper.counts();
        Arc::new(move |id| counts.lock().unwrap_or_else(PoisonError::into_inner).heat(id))
    }

    /// Sees everything that is asked of `experts`.
    pub fn observe(&self, experts: Arc<dyn ExpertCompute>) -> Arc<dyn ExpertCompute> {
        let observed = ObservedExperts::new(experts, self.keeper.counts(), self.trace.clone());
        Arc::new(observed.look_ahead_at_most(self.lookahead))
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.trace.as_ref().map(TraceSink::finish) {
            output::note(&format!("warning: {error}"));
        }
    }
}

/// Refuses to write over a file of another kind.
///
/// # Errors
/// [`CliError::Usage`].
pub(super) fn refuse_foreign(path: &Path, magic: &[u8], flag: &str, what: &str) -> Result<(), CliError> {
    // What cannot be read cannot be told; writing it says what is wrong.
    if disk::may_replace(path, magic).unwrap_or(true) {
        return Ok(());
    }
    let path = path.display();
    Err(CliError::Usage(format!(
        "{flag} {path}: this file holds something else than {what}; name another one"
    )))
}

fn open_trace(path: &Path, model: Fingerprint, layout: &ExpertLayout) -> Result<TraceSink, CliError> {
    let failed = |e: &dyn std::fmt::Display| {
        CliError::Failed(format!("cannot write the routing trace {}: {e}", path.display()))
    };
    refuse_foreign(path, &TRACE_MAGIC, "--trace-routes", "a routing trace")?;
    let out = File::create(path).map_err(|e| failed(&e))?;
    let shape = TraceShape::new(model.to_string(), layout);
    TraceSink::new(Box::new(BufWriter::new(out)), &shape).map_err(|e| failed(&e))
}
