//! The data directory of a node: settings, identity and shard.
//!
//! `node.json` (settings, written by `join`), `node.key`, `node.crt`, `ca.crt` (identity), `lock`
//! (held while the node runs), `problem` (why the coordinator cannot reach it), `shard/` (records fetched)
//! and `progress.json` (how far fetching is).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::ExpertSource;
use shimmer_common::kernels::{Isa, Kernels};

use crate::error::NodeError;
use crate::files::{FileLock, read_private, write_private};
use crate::tls::{self, Credentials};

const SETTINGS_VERSION: u32 = 1;
/// Where a running node keeps what is wrong with it.
const PROBLEM: &str = "problem";

/// What `join` writes and `start` reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Version of this file.
    pub version: u32,
    /// Stable random id: 20 lower-case hexadecimal digits.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Addresses (`host:port`) of the coordinator, tried in order.
    pub coordinators: Vec<String>,
    /// Where to listen for the coordinator.
    pub listen: SocketAddr,
    /// Addresses told to the coordinator; empty means "where my calls come from".
    pub advertise: Vec<String>,
    /// RAM for experts in bytes; absent means what the machine can spare.
    pub ram_bytes: Option<u64>,
    /// Instruction set; absent means the best of this CPU.
    pub isa: Option<String>,
    /// Compute threads; absent means all cores.
    pub threads: Option<usize>,
    /// Expert pack to serve; absent means fetching records from the coordinator.
    pub pack: Option<PathBuf>,
    /// Model directories or packs whose experts need not be fetched.
    #[serde(default)]
    pub adopt: Vec<PathBuf>,
    /// Whether to look for the coordinator by mDNS beside its known addresses.
    #[serde(default = "yes")]
    pub discovery: bool,
    /// Network interface whose addresses are told to the coordinator.
    #[serde(default)]
    pub interface: Option<String>,
}

fn yes() -> bool {
    true
}

/// Where a node's records come from.
#[derive(Clone, Default)]
pub enum Records {
    /// A pack made by `shimmer pack`.
    Pack(PathBuf),
    /// Fetched from the coordinator into `shard/`.
    #[default]
    Fetched,
    /// A source already open in this process.
    Source {
        /// The records.
        source: Arc<dyn ExpertSource>,
        /// The model they belong to.
        fingerprint: Fingerprint,
    },
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Records::Pack(dir) => write!(f, "Pack({})", dir.display()),
            Records::Fetched => f.write_str("Fetched"),
            Records::Source { source, .. } => write!(f, "Source({})", source.describe()),
        }
    }
}

/// Everything [`crate::run`] needs.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The data directory.
    pub data_dir: PathBuf,
    /// Contents of `node.json`.
    pub settings: Settings,
    /// Where records come from.
    pub records: Records,
}

impl Settings {
    /// Checks what a person may have edited.
    fn check(&self) -> Result<(), String> {
        if self.version != SETTINGS_VERSION {
            return Err(format!(
                "version {} is not {SETTINGS_VERSION}; use the Shimmer that wrote it, or join again",
                self.version
            ));
        }
        if !tls::is_node_id(&self.id) {
            return Err("`id` is not 20 lower-case hexadecimal digits; join again".to_owned());
        }
        if self.coordinators.is_empty() && !self.discovery {
            return Err("`coordinators` is empty; add host:port or join again".to_owned());
        }
        Ok(())
    }

    /// New settings with a fresh id.
    ///
    /// # Errors
    /// [`NodeError::Machine`] without randomness.
    pub fn new(name: String, coordinators: Vec<String>, listen: SocketAddr) -> Result<Self, NodeError> {
        let mut id = [0u8; 10];
        getrandom::fill(&mut id)
            .map_err(|e| NodeError::Machine { what: "cannot draw a random node id", cause: e.to_string() })?;
        Ok(Self {
            version: SETTINGS_VERSION,
            id: id.iter().map(|b| format!("{b:02x}")).collect(),
            name,
            coordinators,
            listen,
            advertise: Vec::new(),
            ram_bytes: None,
            isa: None,
            threads: None,
            pack: None,
            discovery: true,
            interface: None,
            adopt: Vec::new(),
        })
    }

    /// The kernels asked for.
    ///
    /// # Errors
    /// [`NodeError::Usage`] for an unknown name or one this CPU lacks.
    pub fn kernels(&self) -> Result<Kernels, NodeError> {
        let isa = match self.isa.as_deref() {
            None | Some("auto") => return Ok(Kernels::best()),
            Some(name) => Isa::from_str(name).map_err(|e| NodeError::Usage(e.to_string()))?,
        };
        Kernels::new(isa).map_err(|e| NodeError::Usage(e.to_string()))
    }
}

impl NodeConfig {
    /// Reads the settings of a data directory that `join` made.
    ///
    /// # Errors
    /// [`NodeError::Data`] or [`NodeError::File`].
    pub fn load(data_dir: &Path) -> Result<Self, NodeError> {
        let path = data_dir.join("node.json");
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => NodeError::Data {
                path: data_dir.to_owned(),
                what: "is not the data directory of a node; run `shimmer-node join TOKEN --data DIR` first"
                    .to_owned(),
            },
            _ => NodeError::File { action: "read", path: path.clone(), source },
        })?;
        let damaged = |what: String| NodeError::Data { path: path.clone(), what };
        let settings: Settings = serde_json::from_slice(&bytes)
            .map_err(|e| damaged(format!("is damaged ({e}); mend it or join again")))?;
        settings.check().map_err(damaged)?;
        let records = settings.pack.clone().map_or(Records::Fetched, Records::Pack);
        Ok(Self { data_dir: data_dir.to_owned(), settings, records })
    }

    /// Writes the settings.
    ///
    /// # Errors
    /// [`NodeError::File`].
    pub fn save(&self) -> Result<(), NodeError> {
        let path = self.data_dir.join("node.json");
        let mut bytes = serde_json::to_vec_pretty(&self.settings)
            .map_err(|e| NodeError::Machine { what: "cannot write settings", cause: e.to_string() })?;
        bytes.push(b'\n');
        write_private(&path, &bytes).map_err(|source| NodeError::File { action: "write", path, source })
    }

    /// The certificates and key that `join` stored.
    ///
    /// # Errors
    /// [`NodeError::File`], also for a key that others can read.
    pub fn credentials(&self) -> Result<Credentials, NodeError> {
        let read = |name: &str, how: fn(&Path) -> std::io::Result<String>| {
            let path = self.data_dir.join(name);
            how(&path).map_err(|source| NodeError::File { action: "read", path, source })
        };
        let public = |path: &Path| std::fs::read_to_string(path);
        let identity = (read("node.crt", public)?, read("node.key", read_private)?);
        Ok(Credentials { ca_pem: read("ca.crt", public)?, identity: Some(identity) })
    }

    /// Puts an address the coordinator was found at before the others.
    ///
    /// # Errors
    /// [`NodeError::File`].
    pub(crate) fn remember(&mut self, address: &str) -> Result<(), NodeError> {
        /// Addresses kept: each costs a try while the coordinator is away.
        const KEPT: usize = 8;
        let known = &mut self.settings.coordinators;
        known.retain(|a| a != address);
        known.insert(0, address.to_owned());
        known.truncate(KEPT);
        self.save()
    }

    /// Notes for `shimmer-node status` what is wrong with the running node; empty when nothing is.
    ///
    /// # Errors
    /// [`NodeError::File`].
    pub(crate) fn note_problem(&self, problem: &str) -> Result<(), NodeError> {
        let path = self.data_dir.join(PROBLEM);
        write_private(&path, problem.as_bytes()).map_err(|source| NodeError::File {
            action: "write",
            path,
            source,
        })
    }

    /// What was noted last.
    pub(crate) fn problem(&self) -> Option<String> {
        let noted = std::fs::read_to_string(self.data_dir.join(PROBLEM)).ok();
        noted.filter(|problem| !problem.is_empty())
    }

    /// Takes the directory for this process.
    ///
    /// # Errors
    /// [`NodeError::Refused`] when another node runs on it.
    pub fn lock(&self) -> Result<FileLock, NodeError> {
        let path = self.data_dir.join("lock");
        match FileLock::try_acquire(&path) {
            Ok(Some(lock)) => Ok(lock),
            Ok(None) => Err(NodeError::Refused(format!(
                "{}: is in use by another running node; stop it first or use another --data directory",
                self.data_dir.display()
            ))),
            Err(source) => Err(NodeError::File { action: "lock", path, source }),
        }
    }
}
