//! The cluster directory: CA, coordinator identity, invitations and members.
//!
//! `cluster.json`, `ca.crt`, `ca.key`, `coordinator.crt`, `coordinator.key`, `tokens.json`,
//! `nodes.json`; directory mode 0700, files 0600, every file replaced atomically. Two locks:
//! `state.lock` is held for the moment of a change, so that `cluster invite` works beside a running
//! coordinator; `coordinator.lock` is held by the coordinator while it runs, so that there is one.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shimmer_node::files::{FileLock, create_private_dir, read_private, write_private};
use shimmer_node::tls::Credentials;

use super::ca::{self, KeyedCertificate};
use super::placement::PlacementFile;
use super::token::{Invitation, new_invitation};
use super::{ClusterError, token};

const STATE_VERSION: u32 = 1;

/// The cluster directory (`--cluster DIR`): CA, coordinator identity, tokens, known nodes.
#[derive(Clone, Debug)]
pub struct ClusterState {
    dir: PathBuf,
    listen: SocketAddr,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    version: u32,
    listen: SocketAddr,
}

/// A node that joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Stable id.
    pub id: String,
    /// Name given at join.
    pub name: String,
    /// BLAKE3 of its public key, hexadecimal.
    pub key_hash: String,
    /// Addresses (`host:port`) it was last reached at or told us.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Whether its certificate is no longer accepted.
    #[serde(default)]
    pub revoked: bool,
    /// Whether it should own nothing.
    #[serde(default)]
    pub drained: bool,
    /// What was last measured of it.
    #[serde(default)]
    pub measured: Option<Measured>,
}

impl Member {
    /// Whether it may own experts: one that joined and was never seen serving owns nothing, because nobody
    /// else would fetch its share.
    pub(super) fn takes_part(&self) -> bool {
        !self.revoked && !self.drained && !self.addresses.is_empty()
    }
}

/// Speeds of a member: what it measured of itself, and what the coordinator measured of the way to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Random reads of whole records; 0 = not measured.
    pub disk_bytes_per_s: f64,
    /// Weights multiplied with one row; 0 = not measured.
    pub gemv_bytes_per_s: f64,
    /// RAM for experts.
    pub ram_bytes: u64,
    /// Bytes of records it can keep: held and free.
    pub disk_bytes: Option<u64>,
    /// A small message there and back, median.
    pub round_trip_us: Option<f64>,
    /// Payload of the link.
    pub link_bytes_per_s: Option<f64>,
}

impl ClusterState {
    /// Makes a private CA and a coordinator certificate in `dir`; refuses to overwrite.
    /// `listen` is where nodes will join and fetch.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn init(dir: &Path, listen: SocketAddr) -> Result<Self, ClusterError> {
        let state = Self { dir: dir.to_owned(), listen };
        create_private_dir(dir).map_err(|e| state.error("", format!("cannot be made: {e}")))?;
        let _lock = state.lock()?;
        if state.path("cluster.json").exists() {
            return Err(
                state.error("", "already holds a cluster; use it, or choose another directory".to_owned())
            );
        }
        let (ca, coordinator) =
            ca::create().map_err(|e| state.error("", format!("certificates cannot be made: {e}")))?;
        state.write("ca.key", ca.key.as_bytes())?;
        state.write("ca.crt", ca.certificate.as_bytes())?;
        state.write("coordinator.key", coordinator.key.as_bytes())?;
        state.write("coordinator.crt", coordinator.certificate.as_bytes())?;
        // Written last: a directory with this file is complete.
        state.write_json("cluster.json", &ClusterFile { version: STATE_VERSION, listen })?;
        Ok(state)
    }

    /// Opens an existing directory.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn open(dir: &Path) -> Result<Self, ClusterError> {
        let mut state = Self { dir: dir.to_owned(), listen: SocketAddr::from(([0, 0, 0, 0], 0)) };
        let file: Option<ClusterFile> = state.read_json("cluster.json")?;
        let file = file.ok_or_else(|| {
            state.error("", "holds no cluster; run `shimmer cluster init` first".to_owned())
        })?;
        if file.version != STATE_VERSION {
            let what =
                format!("version {} is not {STATE_VERSION}; use the Shimmer that wrote it", file.version);
            return Err(state.error("cluster.json", what));
        }
        state.listen = file.listen;
        Ok(state)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where nodes join and fetch.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Where the coordinator that runs on this directory listens: what it wrote down, else the address of the
    /// state.
    pub fn running_at(&self) -> SocketAddr {
        let noted = std::fs::read_to_string(self.path("coordinator.addr")).ok();
        noted.and_then(|text| text.trim().parse().ok()).unwrap_or(self.listen)
    }

    /// Writes down where the running coordinator listens.
    pub(super) fn note_running_at(&self, address: SocketAddr) -> Result<(), ClusterError> {
        self.write("coordinator.addr", format!("{address}\n").as_bytes())
    }

    /// Makes a join token: CA certificate, expiring secret, addresses. `advertise` lists the
    /// addresses a node should try.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn invite(
        &self,
        advertise: &[SocketAddr],
        valid_for: Duration,
        uses: u32,
    ) -> Result<String, ClusterError> {
        let (token, invitation) = new_invitation(self.ca_der()?, advertise, valid_for, uses)
            .map_err(|what| self.error("", what))?;
        self.change_invitations(|invitations| {
            token::forget_dead(invitations);
            invitations.push(invitation);
        })?;
        Ok(token.encode())
    }

    /// Fingerprint of the CA, for people to compare with what `shimmer-node join` prints.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn ca_fingerprint(&self) -> Result<String, ClusterError> {
        Ok(shimmer_node::token::fingerprint_of(&self.ca_der()?))
    }

    /// Every node that ever joined, revoked ones included.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn members(&self) -> Result<Vec<Member>, ClusterError> {
        Ok(self.read_json("nodes.json")?.unwrap_or_default())
    }

    /// The members, when their file is not the one `seen` before.
    pub(super) fn members_if_changed(
        &self,
        seen: &mut Option<(SystemTime, u64)>,
    ) -> Result<Option<Vec<Member>>, ClusterError> {
        let Ok(file) = std::fs::metadata(self.path("nodes.json")) else { return Ok(None) };
        let now = (file.modified().unwrap_or(SystemTime::UNIX_EPOCH), file.len());
        if *seen == Some(now) {
            return Ok(None);
        }
        let members = self.members()?;
        *seen = Some(now);
        Ok(Some(members))
    }

    /// Stops accepting the node `which` (id or name).
    ///
    /// # Errors
    /// [`ClusterError::State`] when there is no such node.
    pub fn revoke(&self, which: &str) -> Result<Member, ClusterError> {
        self.change_member(which, |member| member.revoked = true)
    }

    /// The placement in force when a coordinator last ran; a file that cannot be read is planned anew.
    pub(super) fn placement(&self) -> Result<Option<PlacementFile>, ClusterError> {
        self.read_json("placement.json").or_else(|error| {
            tracing::warn!(%error, "planning anew");
            Ok(None)
        })
    }

    pub(super) fn set_placement(&self, file: &PlacementFile) -> Result<(), ClusterError> {
        self.write_json("placement.json", file)
    }

    /// Has the node `which` (id or name) own nothing, or something again.
    ///
    /// # Errors
    /// [`ClusterError::State`] when there is no such node.
    pub fn set_drained(&self, which: &str, drained: bool) -> Result<Member, ClusterError> {
        self.change_member(which, |member| member.drained = drained)
    }

    /// Forgets the node `which` (id or name): it would have to join again.
    ///
    /// # Errors
    /// [`ClusterError::State`] when there is no such node.
    pub fn forget(&self, which: &str) -> Result<Member, ClusterError> {
        let member = self.change_member(which, |_| ())?;
        self.change_members(|members| members.retain(|m| m.id != member.id))?;
        Ok(member)
    }

    fn change_member(&self, which: &str, change: impl FnOnce(&mut Member)) -> Result<Member, ClusterError> {
        self.change_members(|members| {
            let found = members.iter_mut().find(|m| m.id == which || m.name == which);
            found.map(|member| {
                change(member);
                member.clone()
            })
        })?
        .ok_or_else(|| {
            self.error("nodes.json", format!("has no node {which}; `shimmer cluster nodes` lists them"))
        })
    }

    /// Takes the directory for a running coordinator.
    pub(super) fn lock_coordinator(&self) -> Result<FileLock, ClusterError> {
        match FileLock::try_acquire(&self.path("coordinator.lock")) {
            Ok(Some(lock)) => Ok(lock),
            Ok(None) => Err(ClusterError::Busy { path: self.dir.clone() }),
            Err(e) => Err(self.error("coordinator.lock", format!("cannot be locked: {e}"))),
        }
    }

    /// What the coordinator shows and accepts.
    ///
    /// # Errors
    /// [`ClusterError::State`].
    pub fn credentials(&self) -> Result<Credentials, ClusterError> {
        Ok(Credentials {
            ca_pem: self.read_text("ca.crt")?,
            identity: Some((self.read_text("coordinator.crt")?, self.read_key("coordinator.key")?)),
        })
    }

    pub(super) fn ca(&self) -> Result<KeyedCertificate, ClusterError> {
        Ok(KeyedCertificate { certificate: self.read_text("ca.crt")?, key: self.read_key("ca.key")? })
    }

    fn ca_der(&self) -> Result<Vec<u8>, ClusterError> {
        let pem = self.read_text("ca.crt")?;
        let (_, parsed) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|e| {
            self.error("ca.crt", format!("is damaged ({e}); restore it or start a new cluster"))
        })?;
        Ok(parsed.contents)
    }

    /// Reads, changes and writes the members under the lock.
    pub(super) fn change_members<T>(
        &self,
        change: impl FnOnce(&mut Vec<Member>) -> T,
    ) -> Result<T, ClusterError> {
        self.change("nodes.json", change)
    }

    /// Reads, changes and writes the invitations under the lock.
    pub(super) fn change_invitations<T>(
        &self,
        change: impl FnOnce(&mut Vec<Invitation>) -> T,
    ) -> Result<T, ClusterError> {
        self.change("tokens.json", change)
    }

    fn change<V, T>(&self, name: &str, change: impl FnOnce(&mut V) -> T) -> Result<T, ClusterError>
    where
        V: Serialize + DeserializeOwned + Default + PartialEq + Clone,
    {
        let _lock = self.lock()?;
        let before: V = self.read_json(name)?.unwrap_or_default();
        let mut after = before.clone();
        let result = change(&mut after);
        if after != before {
            self.write_json(name, &after)?;
        }
        Ok(result)
    }

    fn lock(&self) -> Result<FileLock, ClusterError> {
        FileLock::acquire(&self.path("state.lock"))
            .map_err(|e| self.error("state.lock", format!("cannot be locked: {e}")))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn read_text(&self, name: &str) -> Result<String, ClusterError> {
        std::fs::read_to_string(self.path(name)).map_err(|e| self.error(name, format!("cannot be read: {e}")))
    }

    fn read_key(&self, name: &str) -> Result<String, ClusterError> {
        read_private(&self.path(name)).map_err(|e| self.error(name, format!("cannot be read: {e}")))
    }

    fn read_json<V: DeserializeOwned>(&self, name: &str) -> Result<Option<V>, ClusterError> {
        match std::fs::read(self.path(name)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| {
                self.error(name, format!("is damaged ({e}); restore it or start a new cluster"))
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.error(name, format!("cannot be read: {e}"))),
        }
    }

    fn write_json<V: Serialize>(&self, name: &str, value: &V) -> Result<(), ClusterError> {
        let mut bytes = serde_json::to_vec_pretty(value)
            .map_err(|e| self.error(name, format!("cannot be written: {e}")))?;
        bytes.push(b'\n');
        self.write(name, &bytes)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), ClusterError> {
        write_private(&self.path(name), bytes)
            .map_err(|e| self.error(name, format!("cannot be written: {e}")))
    }

    pub(super) fn error(&self, name: &str, what: String) -> ClusterError {
        let path = if name.is_empty() { self.dir.clone() } else { self.path(name) };
        ClusterError::State { path, what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> (tempfile::TempDir, ClusterState) {
        let root = tempfile::tempdir().unwrap();
        let state =
            ClusterState::init(&root.path().join("cluster"), "127.0.0.1:7420".parse().unwrap()).unwrap();
        (root, state)
    }

    #[cfg(unix)]
    #[test]
    fn everything_is_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_root, state) = fresh();
        state.invite(&[], Duration::from_secs(60), 1).unwrap();
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(state.dir()), 0o700);
        let files: Vec<_> = std::fs::read_dir(state.dir()).unwrap().map(|f| f.unwrap().path()).collect();
        assert!(files.len() >= 6, "{files:?}");
        for file in files {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_key_others_can_read_is_refused_with_the_remedy() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_root, state) = fresh();
        let key = state.dir().join("coordinator.key");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
        let refused = state.credentials().unwrap_err().to_string();
        assert!(refused.contains("chmod 600") && refused.contains("coordinator.key"), "{refused}");
    }

    #[test]
    fn a_cluster_is_made_once_and_found_again() {
        let (_root, state) = fresh();
        let again = ClusterState::init(state.dir(), state.listen()).unwrap_err();
        assert!(again.to_string().contains("already holds a cluster"), "{again}");
        let opened = ClusterState::open(state.dir()).unwrap();
        assert_eq!(opened.listen(), state.listen());
        let missing = ClusterState::open(&state.dir().join("nothing")).unwrap_err();
        assert!(missing.to_string().contains("cluster init"), "{missing}");
        std::fs::write(state.dir().join("cluster.json"), "{").unwrap();
        assert!(ClusterState::open(state.dir()).unwrap_err().to_string().contains("is damaged"));
    }

    #[test]
    fn one_coordinator_per_directory() {
        let (_root, state) = fresh();
        let first = state.lock_coordinator().unwrap();
        let second = ClusterState::open(state.dir()).unwrap().lock_coordinator().unwrap_err();
        assert!(second.to_string().contains("another running coordinator"), "{second}");
        drop(first);
        assert!(state.lock_coordinator().is_ok());
    }

    #[test]
    fn members_are_revoked_by_name_or_id() {
        let (_root, state) = fresh();
        let member = Member {
            id: "a".repeat(20),
            name: "kitchen".into(),
            key_hash: String::new(),
            addresses: vec![],
            revoked: false,
            drained: false,
            measured: None,
        };
        state.change_members(|m| m.push(member.clone())).unwrap();
        assert!(state.revoke("kitchen").unwrap().revoked);
        assert!(state.members().unwrap()[0].revoked);
        let mut seen = None;
        assert_eq!(state.members_if_changed(&mut seen).unwrap().map(|m| m.len()), Some(1));
        assert_eq!(state.members_if_changed(&mut seen).unwrap(), None);
        assert!(state.revoke("cellar").unwrap_err().to_string().contains("no node cellar"));
    }
}
