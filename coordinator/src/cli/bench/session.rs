//! A loaded model under measurement, and what its expert store did meanwhile.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use shimmer_common::experts::StoreStats;
use shimmer_common::synth::random_ids;
use shimmer_common::{io, math};

use super::rates;
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::{ModelArgs, UsageArg, parse_positive};
use crate::cli::open::{self, Loaded};
use crate::decode::DraftPolicy;
use crate::model::{LanguageModel, Sequence};
use crate::text::TextModel;

/// A model, its text side where drafts need one.
pub type Subject = Loaded<Option<Arc<TextModel>>>;

/// How often a model is measured, and from which state.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Measured runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_positive)]
    pub runs: usize,

    /// Load anew for every run, from the disk
    #[arg(long)]
    pub cold: bool,

    /// Seed of the token ids
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl RunArgs {
    /// Random token ids, others for every run.
    pub fn ids(&self, vocab_size: usize, count: usize, run: u64) -> Vec<u32> {
        random_ids(vocab_size, count, self.seed.wrapping_add(run.wrapping_mul(0x9e37_79b9)))
    }

    /// Measures as often as asked for: one loaded model after `warm_up`, or with `--cold` a model loaded anew
    /// each time, its files in `dirs` forgotten and the one before it gone. The last model comes back too.
    ///
    /// # Errors
    /// Those of the parts; [`CliError::Interrupted`].
    pub fn repeat<R>(
        &self,
        dirs: &[PathBuf],
        interrupt: &Interrupt,
        load: impl Fn() -> Result<Subject, CliError>,
        warm_up: impl Fn(&Subject) -> Result<(), CliError>,
        mut measure: impl FnMut(&Subject, usize) -> Result<R, CliError>,
    ) -> Result<(Vec<R>, Subject), CliError> {
        let mut results = Vec::new();
        let mut subject = None;
        for run in 0..self.runs {
            if interrupt.requested() {
                return Err(CliError::Interrupted);
            }
            let loaded = match subject.take() {
                Some(loaded) if !self.cold => loaded,
                old => {
                    // A cold run gets the old one's memory back first.
                    drop(old);
                    if self.cold {
                        forget(dirs);
                    }
                    let loaded = load()?;
                    if !self.cold {
                        warm_up(&loaded)?;
                    }
                    loaded
                }
            };
            results.push(measure(&loaded, run)?);
            subject = Some(loaded);
        }
        let subject = subject.ok_or_else(|| CliError::Usage("--runs must be at least 1".into()))?;
        Ok((results, subject))
    }
}

/// Loads the model of `args` for sequences of `tokens` tokens.
///
/// # Errors
/// [`CliError`].
pub fn load(args: &ModelArgs, tokens: usize) -> Result<Subject, CliError> {
    let mut args = args.clone();
    args.limits.context = Some(args.limits.context.unwrap_or(tokens).max(tokens));
    // A measurement neither depends on earlier ones nor teaches later sessions.
    if args.limits.usage == UsageArg::Auto {
        args.limits.usage = UsageArg::Off;
    }
    open::load_with(&args, |container| {
        let limit = container.config().max_position_embeddings();
        if tokens > limit {
            return Err(CliError::Usage(format!(
                "{tokens} tokens are more than the {limit} this model supports"
            )));
        }
        // Only the generation loop drafts, and it speaks text.
        let drafting = container.has_mtp() && args.limits.draft.0 != DraftPolicy::Off;
        let open = || TextModel::open(container.dir(), container.config().vocab_size());
        Ok(if drafting { Some(Arc::new(open()?)) } else { None })
    })
}

/// Decodes one token after the other, whatever the model would say; `each` gets the milliseconds of every step.
///
/// # Errors
/// The model's; [`CliError::Interrupted`].
pub fn force(
    model: &dyn LanguageModel,
    seq: &mut Sequence,
    ids: &[u32],
    interrupt: &Interrupt,
    mut each: impl FnMut(f64),
) -> Result<(), CliError> {
    for &id in ids {
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        let started = Instant::now();
        let hidden = model.forward(seq, &[id], None)?;
        std::hint::black_box(math::argmax(&model.logits(&hidden).data));
        each(started.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Drops the model's files from the page cache, so far as the system lets us.
pub fn forget(dirs: &[PathBuf]) {
    for dir in dirs {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            io::forget_file(&entry.path());
        }
    }
}

/// The store's counters; zeros where experts are computed elsewhere.
pub fn counters(subject: &Subject) -> StoreStats {
    subject.local.as_ref().map(|store| store.stats()).unwrap_or_default()
}

/// Whether every expert of the model fits in the store.
pub fn all_resident(subject: &Subject) -> bool {
    subject.memory.expert_bytes >= subject.memory.all_experts_bytes
}

/// The limits of this machine, measured between runs.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Limits {
    /// Memory reads of all compute threads together.
    pub memory_bytes_per_s: Option<f64>,
    /// Reads of experts from the model's disk; only where experts are read while measuring.
    pub disk_bytes_per_s: Option<f64>,
}

impl Limits {
    /// Measures now.
    ///
    /// # Errors
    /// [`CliError`] when the model's experts cannot be listed.
    pub fn measure(subject: &Subject, seed: u64) -> Result<Self, CliError> {
        let memory_bytes_per_s = rates::memory(subject.pool.current_num_threads());
        let disk_bytes_per_s = match &subject.local {
            Some(store) if !all_resident(subject) => {
                rates::disk(&shimmer_common::measure::Reads::of_experts(store.source().as_ref())?, seed)
            }
            _ => None,
        };
        Ok(Self { memory_bytes_per_s, disk_bytes_per_s })
    }
}
