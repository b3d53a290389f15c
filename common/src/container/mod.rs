//! Reading model directories: Hugging Face checkpoints and colibrì containers (docs/formats.md).

pub mod config;
mod error;

pub use error::{ContainerError, Problem};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::experts::{ExpertSource, MatrixSpec};
use crate::quant::Matrix;
use config::ModelConfig;

/// Identifies a model: configuration and tensors. Equal fingerprints mean the same experts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// What was found in a model directory, for people.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// One line: formats of experts, embeddings, MTP, indexer.
    pub line: String,
    /// Things worth a warning (int4 MTP head, indexer missing, conversion lock file, unknown tensors).
    pub warnings: Vec<String>,
}

/// An opened model directory: every tensor the configuration requires is resolved, no data read yet.
pub struct Container {
    dirs: Vec<PathBuf>,
}

impl Container {
    /// Opens a model that may be spread over several directories (the first wins on equal names).
    ///
    /// # Errors
    /// [`ContainerError::Damaged`] lists every problem found, not just the first.
    pub fn open(dirs: &[PathBuf]) -> Result<Self, ContainerError> {
        let _ = dirs;
        todo!()
    }

    /// The first directory.
    pub fn dir(&self) -> &Path {
        &self.dirs[0]
    }

    /// Parsed configuration.
    pub fn config(&self) -> &ModelConfig {
        todo!()
    }

    /// What was found.
    pub fn summary(&self) -> &Summary {
        todo!()
    }

    /// Model identity (cheap: headers plus the content of small f32 tensors).
    ///
    /// # Errors
    /// Reading the small tensors may fail.
    pub fn fingerprint(&self) -> Result<Fingerprint, ContainerError> {
        todo!()
    }

    /// Whether the MTP layer is complete.
    pub fn has_mtp(&self) -> bool {
        todo!()
    }

    /// Whether every full-attention layer has its indexer (otherwise attention is dense everywhere).
    pub fn has_indexer(&self) -> bool {
        todo!()
    }

    /// Shape and format of a resolved matrix (HF name, e.g. `model.layers.0.self_attn.o_proj.weight`).
    pub fn matrix_spec(&self, name: &str) -> Option<MatrixSpec> {
        let _ = name;
        todo!()
    }

    /// Reads one matrix into memory.
    ///
    /// # Errors
    /// Missing name, short read, non-finite or negative scale, fp8 NaN.
    pub fn load_matrix(&self, name: &str) -> Result<Matrix, ContainerError> {
        let _ = name;
        todo!()
    }

    /// Reads one float tensor (norms, biases) as f32.
    ///
    /// # Errors
    /// As [`Container::load_matrix`].
    pub fn load_vector(&self, name: &str) -> Result<Vec<f32>, ContainerError> {
        let _ = name;
        todo!()
    }

    /// The routed experts as a record source; shares the open files.
    pub fn experts(&self) -> Arc<dyn ExpertSource> {
        todo!()
    }

    /// Bytes of every resolved dense tensor (weights and scales), for plans and progress bars.
    pub fn dense_bytes(&self) -> u64 {
        todo!()
    }
}
