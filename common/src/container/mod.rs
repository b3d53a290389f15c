//! Reading model directories: Hugging Face checkpoints and colibrì containers (docs/formats.md).
//!
//! [`Container::open`] reads headers only: it parses `config.json`, indexes every shard and resolves
//! each tensor the configuration requires to a format and a place, or reports everything that is wrong
//! at once. Data is read later, tensor by tensor, read-only.

pub mod config;
mod error;
mod file;
mod fingerprint;
pub(crate) mod format;
mod index;
pub(crate) mod load;
mod missing;
pub(crate) mod resolve;
pub mod safetensors;
mod source;
mod summary;
pub(crate) mod tensors;
pub mod write;

pub use error::{ContainerError, Problem};
pub use summary::{ByteSums, Summary, TokenBytes};
pub use tensors::{Part, TensorShape};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::experts::{ExpertSource, MatrixSpec};
use crate::quant::Matrix;
use config::ModelConfig;
use file::Shard;
use index::Index;
use resolve::{MatrixPlace, Place, Resolved};

/// Larger config files are not configurations.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

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

/// One dense tensor the model uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseTensor {
    /// Hugging Face name.
    pub name: String,
    /// Logical shape.
    pub shape: TensorShape,
    /// Part of the model it belongs to.
    pub part: Part,
    /// Whether it belongs to the MTP layer.
    pub mtp: bool,
    /// Stored bytes, scales included.
    pub bytes: u64,
}

/// What the container and its expert source share.
struct Inner {
    dirs: Vec<PathBuf>,
    shards: Vec<Shard>,
    resolved: Resolved,
    loader: load::Loader,
}

impl Inner {
    /// The first directory; [`Container::open`] refuses an empty list.
    fn dir(&self) -> &Path {
        self.dirs.first().map_or(Path::new(""), PathBuf::as_path)
    }
}

/// An opened model directory: every tensor the configuration requires is resolved, no data read yet.
pub struct Container {
    inner: Arc<Inner>,
    config: ModelConfig,
    summary: Summary,
    bytes: ByteSums,
    fingerprint: blake3::Hasher,
}

impl std::fmt::Debug for Container {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Container({}: {})", self.dir().display(), self.summary.line)
    }
}

/// Left in a directory by a converter, colibrì's or ours, that is running or was interrupted.
pub(crate) const CONVERSION_LOCK: &str = ".convert.lock";

/// Puts the likely cause before everything that is missing: a conversion that has not finished.
fn unfinished_first(dirs: &[PathBuf], mut problems: Vec<Problem>) -> Vec<Problem> {
    if let Some(dir) = dirs.iter().find(|dir| dir.join(CONVERSION_LOCK).exists()) {
        let what = "a conversion into this directory is running or was interrupted; let it finish, or run \
                    the same `shimmer convert` again";
        problems.insert(0, Problem { file: Some(dir.clone()), tensor: None, what: what.to_owned() });
    }
    problems
}

impl Container {
    /// Opens a model that may be spread over several directories (the first wins on equal names).
    ///
    /// # Errors
    /// [`ContainerError::Damaged`] lists every problem found, not just the first.
    pub fn open(dirs: &[PathBuf]) -> Result<Self, ContainerError> {
        let (config_path, json) = read_config(dirs)?;
        let config_error = |what| ContainerError::Config { path: config_path.clone(), what };
        let config = ModelConfig::parse(&json).map_err(config_error)?;
        let mut index = Index::scan(dirs)?;
        if !index.is_colibri() {
            config::check_quantization(&json).map_err(config_error)?;
        }
        let resolved = resolve::resolve(&config, &mut index, dirs)
            .map_err(|problems| ContainerError::Damaged(unfinished_first(dirs, problems)))?;
        let summary = summary::summarise(&config, &resolved, &index);
        let bytes = summary::byte_sums(&resolved);
        let fingerprint = fingerprint::start(&config, &index);
        let inner = Arc::new(Inner {
            dirs: dirs.to_vec(),
            shards: index.shards,
            resolved,
            loader: load::Loader::default(),
        });
        Ok(Self { inner, config, summary, bytes, fingerprint })
    }

    /// Where every tensor is, for the converter.
    pub(crate) fn resolved(&self) -> &Resolved {
        &self.inner.resolved
    }

    /// The files that [`Container::resolved`] refers to by number.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.inner.shards
    }

    /// The first directory.
    pub fn dir(&self) -> &Path {
        self.inner.dir()
    }

    /// Parsed configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What was found.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Model identity (cheap: headers, the content of vectors, the first bytes of matrices).
    ///
    /// # Errors
    /// Reading may fail.
    pub fn fingerprint(&self) -> Result<Fingerprint, ContainerError> {
        let hasher = self.fingerprint.clone();
        fingerprint::finish(hasher, &self.inner.resolved, &self.inner.shards).map(Fingerprint)
    }

    /// Whether the MTP layer is complete.
    pub fn has_mtp(&self) -> bool {
        self.inner.resolved.mtp_layer.is_some()
    }

    /// Whether every full-attention layer has its indexer (otherwise attention is dense everywhere).
    pub fn has_indexer(&self) -> bool {
        self.inner.resolved.has_indexer
    }

    /// Whether the MTP layer has its own indexer (colibrì containers never do; it then attends densely).
    pub fn has_mtp_indexer(&self) -> bool {
        self.inner.resolved.has_mtp_indexer
    }

    /// Whether the model uses a tensor of this name, dense or routed expert.
    pub fn has(&self, name: &str) -> bool {
        self.place(name).is_some()
    }

    /// Every dense tensor the model uses, sorted by name. A tied `lm_head` is not listed.
    pub fn dense_tensors(&self) -> impl Iterator<Item = DenseTensor> + '_ {
        self.inner.resolved.dense.iter().map(|(name, dense)| DenseTensor {
            name: name.clone(),
            shape: match &dense.place {
                Place::Matrix(m) => TensorShape::Matrix { rows: m.spec.rows, cols: m.spec.cols },
                Place::Vector(v) => TensorShape::Vector { len: v.len },
            },
            part: dense.part,
            mtp: dense.mtp,
            bytes: dense.bytes(),
        })
    }

    /// Shape and format of a resolved matrix (HF name, e.g. `model.layers.0.self_attn.o_proj.weight`).
    pub fn matrix_spec(&self, name: &str) -> Option<MatrixSpec> {
        match self.place(name)? {
            Place::Matrix(m) => Some(m.spec),
            Place::Vector(_) => None,
        }
    }

    /// Reads one matrix into memory.
    ///
    /// # Errors
    /// Missing name, short read, non-finite weight, non-finite or negative scale.
    pub fn load_matrix(&self, name: &str) -> Result<Matrix, ContainerError> {
        match self.place(name) {
            Some(Place::Matrix(place)) => load::matrix(&self.inner.shards, &self.inner.loader, name, &place),
            Some(Place::Vector(_)) => Err(self.misuse(name, "is a vector, not a matrix")),
            None => Err(self.misuse(name, "is not a tensor of this model")),
        }
    }

    /// Reads one float tensor (norms, biases) as f32.
    ///
    /// # Errors
    /// As [`Container::load_matrix`]; every element must be finite.
    pub fn load_vector(&self, name: &str) -> Result<Vec<f32>, ContainerError> {
        match self.place(name) {
            Some(Place::Vector(place)) => load::vector(&self.inner.shards, &self.inner.loader, name, &place),
            Some(Place::Matrix(_)) => Err(self.misuse(name, "is a matrix, not a vector")),
            None => Err(self.misuse(name, "is not a tensor of this model")),
        }
    }

    /// Gives back the threads and buffers that loading matrices took; to be called when that is over.
    /// Loading more later works all the same.
    pub fn finish_loading(&self) {
        self.inner.loader.stop();
    }

    /// The routed experts as a record source; shares the open files.
    pub fn experts(&self) -> Arc<dyn ExpertSource> {
        Arc::new(source::ContainerSource { inner: Arc::clone(&self.inner) })
    }

    /// Stored bytes by part of the model.
    pub fn bytes(&self) -> ByteSums {
        self.bytes
    }

    /// Stored bytes one token reads (context below `index_topk`, drafts not counted).
    pub fn token_bytes(&self) -> TokenBytes {
        summary::token_bytes(&self.config, &self.inner.resolved)
    }

    /// Bytes of every resolved dense tensor (weights and scales), for plans and progress bars.
    pub fn dense_bytes(&self) -> u64 {
        self.bytes.resident()
    }

    fn place(&self, name: &str) -> Option<Place> {
        let resolved = &self.inner.resolved;
        if let Some(dense) = resolved.dense.get(name) {
            return Some(dense.place);
        }
        if name == "lm_head.weight" && self.tied() {
            return resolved.dense.get("model.embed_tokens.weight").map(|d| d.place);
        }
        self.expert_place(name).map(Place::Matrix)
    }

    fn tied(&self) -> bool {
        match &self.config {
            ModelConfig::Glm(c) => c.tie_word_embeddings,
            ModelConfig::Olmoe(c) => c.tie_word_embeddings,
        }
    }

    fn expert_place(&self, name: &str) -> Option<MatrixPlace> {
        let (layer, expert, matrix) = tensors::parse_expert_name(name)?;
        let places = self.inner.resolved.experts.get(&layer)?.get(expert)?;
        places.get(matrix as usize).copied()
    }

    fn misuse(&self, name: &str, what: &str) -> ContainerError {
        ContainerError::Damaged(vec![Problem {
            file: Some(self.dir().to_owned()),
            tensor: Some(name.to_owned()),
            what: what.to_owned(),
        }])
    }
}

/// `config.json` of the first directory that has one.
fn read_config(dirs: &[PathBuf]) -> Result<(PathBuf, Vec<u8>), ContainerError> {
    let candidates = dirs.iter().map(|dir| dir.join("config.json"));
    let Some(path) = candidates.clone().find(|p| p.exists()).or_else(|| candidates.clone().next()) else {
        let what = "no model directory was given".into();
        return Err(ContainerError::Config { path: "config.json".into(), what });
    };
    let io = |source| ContainerError::Io { path: path.clone(), source };
    let json = match crate::disk::read_small(&path, MAX_CONFIG_BYTES) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let what = "no such file; name a directory that holds a model".into();
            return Err(ContainerError::Config { path, what });
        }
        read => read.map_err(io)?,
    };
    Ok((path, json))
}
