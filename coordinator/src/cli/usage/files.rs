//! `shimmer usage reset|export|import`, and the import of colibrì's counts.

use std::path::{Path, PathBuf};

use clap::Args;
use shimmer_common::container::config::ModelConfig;
use shimmer_common::container::{Container, Fingerprint};
use shimmer_common::disk;
use shimmer_common::experts::ExpertLayout;
use shimmer_common::experts::usage::{SavedUsage, colibri, file};

use super::super::error::CliError;
use super::super::model_args::UsageArg;
use super::super::open;
use super::super::output;
use super::learning::refuse_foreign;

/// Which model's usage.
#[derive(Args, Clone, Debug)]
pub struct KeptArgs {
    /// Model directory; repeat it for a model spread over several disks
    #[arg(long, value_name = "DIR", required = true)]
    pub model: Vec<PathBuf>,

    /// The usage file [default: beside the model, else in the cache directory]
    #[arg(long, value_name = "FILE")]
    pub usage: Option<UsageArg>,
}

/// A model and the file its usage is kept in.
pub struct Kept {
    /// The opened model.
    pub container: Container,
    /// Its identity.
    pub model: Fingerprint,
    /// Where its usage is kept.
    pub path: PathBuf,
}

impl KeptArgs {
    /// Opens the model and finds its usage file.
    ///
    /// # Errors
    /// [`CliError`].
    pub fn open(&self) -> Result<Kept, CliError> {
        let container = open::container(&self.model)?;
        let model = container.fingerprint()?;
        let path = match &self.usage {
            Some(UsageArg::File(path)) => path.clone(),
            Some(UsageArg::Off) => {
                return Err(CliError::Usage("--usage off keeps nothing; name the file or leave --usage out".into()));
            }
            Some(UsageArg::Auto) | None => file::place(container.dir(), model).ok_or_else(|| {
                CliError::Failed("neither the model's directory nor a cache directory can be written to; give --usage FILE".into())
            })?,
        };
        Ok(Kept { container, model, path })
    }
}

impl Kept {
    /// What is kept; `None` when nothing is.
    ///
    /// # Errors
    /// [`CliError::Data`] when the file cannot be used.
    pub fn load(&self) -> Result<Option<SavedUsage>, CliError> {
        load(&self.path, self.model)
    }
}

fn load(path: &Path, model: Fingerprint) -> Result<Option<SavedUsage>, CliError> {
    file::load(path, model).map_err(|e| {
        CliError::Data(format!(
            "{} cannot be used: {e}; remove it or run `shimmer usage reset`",
            path.display()
        ))
    })
}

/// Arguments of `shimmer usage reset`.
#[derive(Args, Clone, Debug)]
pub struct ResetArgs {
    #[command(flatten)]
    kept: KeptArgs,
}

/// Removes the usage file.
///
/// # Errors
/// [`CliError`].
pub fn reset(args: &ResetArgs) -> Result<(), CliError> {
    if let Some(UsageArg::File(path)) = &args.kept.usage {
        refuse_foreign(path, &file::MAGIC, "--usage", "expert usage")?;
    }
    let kept = args.kept.open()?;
    match std::fs::remove_file(&kept.path) {
        Ok(()) => output::emit(&format!("removed {}\n", kept.path.display())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            output::emit(&format!("{} does not exist; nothing is remembered\n", kept.path.display()))
        }
        Err(e) => Err(CliError::io(format!("cannot remove {}", kept.path.display()), &e)),
    }
}

/// Arguments of `shimmer usage export`.
#[derive(Args, Clone, Debug)]
pub struct ExportArgs {
    #[command(flatten)]
    kept: KeptArgs,

    /// File to write
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

/// Writes what is kept to another file.
///
/// # Errors
/// [`CliError`].
pub fn export(args: &ExportArgs) -> Result<(), CliError> {
    refuse_foreign(&args.to, &file::MAGIC, "--to", "expert usage")?;
    let kept = args.kept.open()?;
    let saved = kept.load()?.ok_or_else(|| {
        CliError::Failed(format!("{} does not exist: nothing was learned yet", kept.path.display()))
    })?;
    write(&args.to, &saved, kept.model)
}

fn write(path: &Path, saved: &SavedUsage, model: Fingerprint) -> Result<(), CliError> {
    file::save(path, saved, model)
        .map_err(|e| CliError::io(format!("cannot write {}", path.display()), &e))?;
    output::emit(&format!("{}: usage over {:.0} tokens\n", path.display(), saved.lifetime_tokens))
}

/// Arguments of `shimmer usage import`.
#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    #[command(flatten)]
    kept: KeptArgs,

    /// File written by `shimmer usage export`, or a .coli_usage
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
}

/// Replaces what is kept by a file's contents.
///
/// # Errors
/// [`CliError`].
pub fn import(args: &ImportArgs) -> Result<(), CliError> {
    let kept = args.kept.open()?;
    let layout = kept.container.experts().layout().clone();
    let bytes = disk::read_small(&args.from, colibri::MAX_BYTES)
        .map_err(|e| CliError::io(format!("cannot read {}", args.from.display()), &e))?;
    let mut saved = match file::decode(&bytes, kept.model) {
        Err(file::UsageError::NotUsage) => {
            let bad = |what| CliError::Data(format!("{}: {what}", args.from.display()));
            let imported = colibri::import(&bytes, &layout, topk(&kept.container)).map_err(bad)?;
            imported.warnings.iter().for_each(|warning| output::note(&format!("warning: {warning}")));
            imported.usage.ok_or_else(|| bad("it counts nothing".to_owned()))?
        }
        other => other.map_err(|e| CliError::Data(format!("{} cannot be used: {e}", args.from.display())))?,
    };
    saved.fit(&layout);
    write(&kept.path, &saved, kept.model)
}

fn topk(container: &Container) -> usize {
    match container.config() {
        ModelConfig::Glm(c) => c.num_experts_per_tok,
        ModelConfig::Olmoe(c) => c.num_experts_per_tok,
    }
}

/// The counts colibrì has left beside the model, and sentences about them.
pub fn import_colibri(container: &Container, layout: &ExpertLayout) -> (Option<SavedUsage>, Vec<String>) {
    let path = container.dir().join(colibri::FILE_NAME);
    let bytes = match disk::read_small(&path, colibri::MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return (None, Vec::new()),
        Err(e) => return (None, vec![format!("warning: {} is not used: {e}", path.display())]),
    };
    match colibri::import(&bytes, layout, topk(container)) {
        Err(what) => (None, vec![format!("warning: {} is not used: {what}", path.display())]),
        Ok(imported) => {
            let mut notes: Vec<String> =
                imported.warnings.iter().map(|w| format!("warning: {}: {w}", path.display())).collect();
            if imported.usage.is_some() {
                notes.push(format!("expert usage taken over from {}", path.display()));
            }
            (imported.usage, notes)
        }
    }
}
