//! Random models of any shape: the way to test speed and memory at real expert size without real weights.
//!
//! [`synthesise`] writes a `glm_moe_dsa` container that every command opens: configuration, shards, a
//! tokenizer, and on demand an MTP layer. Weights are random with deviations that keep activations near unit
//! size through any number of layers; routers choose experts with a chosen skew ([`RouterSkew`]). The same
//! options always give the same bytes. Everything is written into a directory beside the target that takes its
//! name when it is complete.

mod files;
mod matrix;
mod random;
mod router;
mod shape;
mod tokenizer;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub use matrix::{fill_matrix, random_ids, random_values, shuffled};
pub use router::{DEFAULT_ZIPF_EXPONENT, RouterSkew};
pub use shape::SynthShape;

use self::files::{Content, OutputFile, Piece};
use self::random::{PIECE_ALIGN_BYTES, Payload, SCALE_SPREAD, Stream};
use crate::container::config::ModelConfig;
use crate::container::write::{SafetensorsWriter, TensorHeader, header_json};
use crate::container::{Container, ContainerError};
use crate::disk;
use crate::quant::Format;

/// What is made at a time, and all the memory that is needed beside the headers.
const BUFFER_BYTES: usize = PIECE_ALIGN_BYTES << 16;

/// Metadata key of the stamp that names storage formats (docs/formats.md §4.3).
const STAMP_KEY: &str = "colibri.fmt";

/// What to write.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthOptions {
    /// Dimensions.
    pub shape: SynthShape,
    /// Routed experts of the main layers.
    pub expert_format: Format,
    /// Attention, dense MLPs, shared experts.
    pub dense_format: Format,
    /// Every matrix of the MTP layer but its indexer.
    pub mtp_format: Format,
    /// Indexers.
    pub indexer_format: Format,
    /// Embedding table and output head.
    pub embedding_format: Format,
    /// Whether there is an MTP layer.
    pub mtp: bool,
    /// How often the experts of a layer are chosen.
    pub router: RouterSkew,
    /// Of all random numbers.
    pub seed: u64,
    /// Largest shard; one expert or dense matrix is never cut.
    pub shard_bytes: u64,
    /// Write headers only and leave the data out of files of full length (sparse where the file system can):
    /// enough for everything that reads no weights.
    pub headers_only: bool,
}

impl Default for SynthOptions {
    /// GLM-5.2's matrices in six layers: 7.7 GB, of which a token touches 1.65 GB.
    fn default() -> Self {
        let int4 = Format::Int4Grouped { group: 64 };
        Self {
            shape: SynthShape::glm_slice(),
            expert_format: int4,
            dense_format: int4,
            mtp_format: Format::Int8Row,
            indexer_format: Format::Int8Row,
            embedding_format: Format::Int8Row,
            mtp: false,
            router: RouterSkew::Uniform,
            seed: 0,
            shard_bytes: 1 << 30,
            headers_only: false,
        }
    }
}

/// Why no model was written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The shape is none that a model can have.
    #[error("no such model: {0}")]
    Options(String),
    /// There is something already.
    #[error("{path} exists; name a new directory")]
    Occupied {
        /// The target.
        path: PathBuf,
    },
    /// The model would not fit.
    #[error(
        "{path} has {free_bytes} bytes free but the model and a reserve need {needed_bytes}; free some space, name another disk or ask for fewer layers or experts"
    )]
    Space {
        /// The target.
        path: PathBuf,
        /// Bytes to be written, and what shall be left.
        needed_bytes: u64,
        /// Bytes available.
        free_bytes: u64,
    },
    /// The operating system refused.
    #[error("cannot write {path}: {source}")]
    Io {
        /// File or directory.
        path: PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// What was written cannot be opened.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// The caller stopped the work.
    #[error("cancelled; nothing was left behind")]
    Cancelled,
}

/// What was written.
#[derive(Clone, Debug)]
pub struct SynthReport {
    /// Safetensors files.
    pub files: usize,
    /// Their tensor bytes.
    pub bytes: u64,
    /// What the reader says about the container.
    pub summary: String,
    /// Bytes a token touches.
    pub token: crate::container::TokenBytes,
    /// Whether there is a tokenizer; vocabularies below 265 tokens have none and take ids only.
    pub tokenizer: bool,
}

/// Room for side files and the file system's own records.
const RESERVE_BYTES: u64 = 64 << 20;

/// Writes a random model to the new directory `to`. `progress` gets bytes written and bytes in all, many
/// times a second, and stops the work by returning `Break`.
///
/// # Errors
/// [`SynthError`]; in every case nothing is left behind.
pub fn synthesise(
    to: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<SynthReport, SynthError> {
    let shape = &options.shape;
    if shape.first_k_dense_replace >= shape.num_hidden_layers {
        let what = format!("all {} layers are dense; ask for fewer dense layers", shape.num_hidden_layers);
        return Err(SynthError::Options(what));
    }
    let config = shape.config(options.mtp);
    let config = serde_json::to_vec_pretty(&config).map_err(|e| SynthError::Options(e.to_string()))?;
    let parsed = ModelConfig::parse(&config).map_err(SynthError::Options)?;
    let files = files::files(&parsed, options).map_err(SynthError::Options)?;
    let bytes = files.iter().flat_map(|f| &f.pieces).map(Piece::bytes).fold(0, u64::saturating_add);
    if to.symlink_metadata().is_ok() {
        return Err(SynthError::Occupied { path: to.to_owned() });
    }
    check_space(to, if options.headers_only { 0 } else { bytes })?;

    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| SynthError::Io { path, source }
    };
    let parent = disk::parent(to);
    std::fs::create_dir_all(parent).map_err(io(parent))?;
    let temporary = tempfile::Builder::new().prefix(".tmp-synth-").tempdir_in(parent).map_err(io(parent))?;
    let dir = temporary.path();
    let tokenizer = tokenizer::tokenizer(options.shape.vocab_size);
    let side_file = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(io(&path))
    };
    side_file("config.json", &config)?;
    if let Some(tokenizer) = &tokenizer {
        side_file("tokenizer.json", tokenizer.to_string().as_bytes())?;
    }
    let mut written = 0;
    for file in &files {
        write_file(dir, file, options, &mut |more| {
            written += more;
            progress(written, bytes)
        })?;
    }
    let container = Container::open(&[dir.to_owned()])?;
    publish(&temporary, to).map_err(io(to))?;
    // The directory has a new name; there is nothing left to remove.
    let _ = temporary.keep();
    Ok(SynthReport {
        files: files.len(),
        bytes,
        summary: container.summary().line.clone(),
        token: container.token_bytes(),
        tokenizer: tokenizer.is_some(),
    })
}

fn check_space(to: &Path, bytes: u64) -> Result<(), SynthError> {
    let needed_bytes = bytes.saturating_add(RESERVE_BYTES);
    let free_bytes = disk::free_bytes(to).map_err(|source| SynthError::Io { path: to.to_owned(), source })?;
    if free_bytes < needed_bytes {
        return Err(SynthError::Space { path: to.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

/// Gives the finished directory its name.
fn publish(temporary: &tempfile::TempDir, to: &Path) -> std::io::Result<()> {
    // Temporary directories are their owner's alone; a model is as readable as any new directory.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(temporary.path(), std::fs::Permissions::from_mode(0o755))?;
    }
    disk::sync_dir(temporary.path())?;
    std::fs::rename(temporary.path(), to)?;
    disk::sync_dir(disk::parent(to))
}

/// Writes one file; `progress` gets the bytes written since the last call.
fn write_file(
    dir: &Path,
    file: &OutputFile,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<(), SynthError> {
    let path = dir.join(&file.name);
    let io = |source| SynthError::Io { path: path.clone(), source };
    let headers: Vec<TensorHeader> = file.pieces.iter().map(|piece| piece.header.clone()).collect();
    let stamps: BTreeMap<&str, &str> = file
        .pieces
        .iter()
        .filter_map(|piece| Some((piece.header.name.as_str(), piece.stamp.as_deref()?)))
        .collect();
    let stamps = serde_json::to_string(&stamps).map_err(|e| io(e.into()))?;
    let metadata = [(STAMP_KEY, stamps.as_str())];
    let metadata = if stamps == "{}" { &metadata[..0] } else { &metadata[..] };
    if options.headers_only {
        write_header(&path, &headers, metadata).map_err(io)?;
        let bytes = file.pieces.iter().map(Piece::bytes).sum();
        return if progress(bytes).is_break() { Err(SynthError::Cancelled) } else { Ok(()) };
    }
    let mut writer = SafetensorsWriter::create(&path, &headers, metadata).map_err(io)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    for piece in &file.pieces {
        let mut source = Filler::new(piece, options.seed);
        let mut left = piece.bytes();
        while left > 0 {
            let len = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            source.fill(&mut buffer[..len]);
            writer.write(&buffer[..len]).map_err(io)?;
            left -= len as u64;
            if progress(len as u64).is_break() {
                return Err(SynthError::Cancelled);
            }
        }
    }
    writer.finish().map_err(io)
}

/// Writes a header and gives the file the length of all its data.
fn write_header(path: &Path, tensors: &[TensorHeader], metadata: &[(&str, &str)]) -> std::io::Result<()> {
    let (header, data_bytes) = header_json(tensors, metadata)?;
    let mut file = std::fs::File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    file.set_len((8 + header.len() as u64).saturating_add(data_bytes))
}

/// Makes the bytes of one tensor, front to back.
struct Filler<'a> {
    random: Stream,
    kind: Kind<'a>,
}

enum Kind<'a> {
    Payload(Payload),
    Values { centre: f32, spread: f32 },
    Exact(&'a [f32]),
}

impl<'a> Filler<'a> {
    fn new(piece: &'a Piece, seed: u64) -> Self {
        let kind = match &piece.content {
            Content::Weights { format, sigma } => Kind::Payload(Payload::new(*format, *sigma)),
            Content::Scales { format, sigma } => {
                let centre = Payload::new(*format, *sigma).scale(*sigma);
                Kind::Values { centre, spread: SCALE_SPREAD * centre }
            }
            Content::Vector { centre, spread } => Kind::Values { centre: *centre, spread: *spread },
            Content::Exact(values) => Kind::Exact(values),
        };
        Self { random: Stream::new(seed, &piece.header.name), kind }
    }

    /// The next `out.len()` bytes: a multiple of 4 for f32 values, of [`PIECE_ALIGN_BYTES`] (or the last) else.
    fn fill(&mut self, out: &mut [u8]) {
        match &mut self.kind {
            Kind::Payload(payload) => payload.fill(&mut self.random, out),
            Kind::Values { centre, spread } => {
                for value in out.chunks_exact_mut(4) {
                    value.copy_from_slice(&(*centre + *spread * self.random.symmetric()).to_le_bytes());
                }
            }
            Kind::Exact(values) => {
                let (now, later) = values.split_at(values.len().min(out.len() / 4));
                out.copy_from_slice(bytemuck::cast_slice(now));
                *values = later;
            }
        }
    }
}

#[cfg(test)]
mod tests;
