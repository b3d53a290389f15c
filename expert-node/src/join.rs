//! Joining a cluster: a token and a certificate request go in, a certificate comes out.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use shimmer_common::experts::pack::Pack;
use shimmer_proto::v1;
use shimmer_proto::v1::cluster_client::ClusterClient;

use crate::config::{NodeConfig, Records, Settings};
use crate::discover::Search;
use crate::error::NodeError;
use crate::files::{create_private_dir, write_private};
use crate::interfaces;
use crate::records::Adopted;
use crate::tls::{self, Credentials};
use crate::token::Token;

/// Time for connecting and for the answer.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Choices of a node at join; they are kept for later starts.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// Name for people.
    pub name: String,
    /// Where to listen for the coordinator.
    pub listen: SocketAddr,
    /// Addresses told to the coordinator; empty means "where my calls come from".
    pub advertise: Vec<String>,
    /// RAM for experts in bytes.
    pub ram_bytes: Option<u64>,
    /// Instruction set.
    pub isa: Option<String>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// Expert pack to serve instead of fetching records.
    pub pack: Option<PathBuf>,
    /// Whether to look for the coordinator by mDNS beside the token's addresses.
    pub discovery: bool,
    /// Network interface whose addresses are told to the coordinator when `advertise` is empty.
    pub interface: Option<String>,
    /// Model directories or packs whose experts need not be fetched.
    pub adopt: Vec<PathBuf>,
}

/// Joins the cluster of `token` and fills `data_dir`. The private key is made here and never leaves.
/// Joining again with the same directory keeps the node's id, key and shard.
///
/// # Errors
/// [`NodeError`]; nothing is written unless the coordinator accepted.
pub fn join(token: &str, data_dir: &Path, options: JoinOptions) -> Result<NodeConfig, NodeError> {
    let token = Token::decode(token)?;
    if let Err(error) = token.check_expiry(SystemTime::now()) {
        // This clock may be the wrong one: the coordinator has the last word.
        tracing::warn!(%error, "asking the coordinator all the same");
    }
    if let Some(interface) = &options.interface {
        interfaces::addresses(Some(interface)).map_err(NodeError::Usage)?;
    }
    let known = data_dir.join("node.json").exists().then(|| NodeConfig::load(data_dir)).transpose()?;
    // A running node keeps its settings, and its second join must not use up the token.
    let _lock = known.as_ref().map(NodeConfig::lock).transpose()?;
    let mut settings = Settings::new(options.name, token.addresses.clone(), options.listen)?;
    if let Some(known) = &known {
        settings.id.clone_from(&known.settings.id);
    }
    settings.advertise = options.advertise;
    settings.ram_bytes = options.ram_bytes;
    settings.isa = options.isa;
    settings.threads = options.threads;
    settings.pack = options.pack;
    settings.discovery = options.discovery;
    settings.interface = options.interface;
    settings.adopt = options.adopt;
    settings.kernels()?;
    if let Some(dir) = &settings.pack {
        Pack::open(dir)?;
    }
    Adopted::open(&settings.adopt)?;

    let old_key = known.map(|k| k.credentials()).transpose()?.and_then(|c| c.identity).map(|(_, key)| key);
    let key = match old_key {
        Some(pem) => rcgen::KeyPair::from_pem(&pem),
        None => rcgen::KeyPair::generate(),
    };
    let key = key.map_err(|e| NodeError::Machine {
        what: "cannot make or read the node's key",
        cause: e.to_string(),
    })?;
    let request = rcgen::CertificateParams::default().serialize_request(&key).map_err(|e| {
        NodeError::Machine { what: "cannot make a certificate request", cause: e.to_string() }
    })?;
    let request = v1::JoinRequest {
        protocol: shimmer_proto::PROTOCOL_VERSION,
        secret: token.secret.to_vec().into(),
        node_id: settings.id.clone(),
        name: settings.name.clone(),
        certificate_request: request.der().to_vec().into(),
    };
    let credentials = Credentials { ca_pem: tls::der_to_pem(&token.ca_der), identity: None };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| NodeError::Machine { what: "cannot start the network runtime", cause: e.to_string() })?;
    let search = Search {
        addresses: token.addresses.clone(),
        discovery: settings.discovery,
        interface: settings.interface.clone(),
        listen: JOIN_TIMEOUT,
    };
    let (certificate, address) = runtime.block_on(ask(&search, &credentials, request))?;
    if !tls::names_of(&certificate).contains(&tls::node_name(&settings.id)) {
        return Err(NodeError::Refused("the coordinator answered with a certificate for somebody else; install the same version of Shimmer on both machines".to_owned()));
    }

    // Where it answered comes first from now on.
    settings.coordinators.retain(|a| *a != address);
    settings.coordinators.insert(0, address);
    let config = NodeConfig {
        data_dir: data_dir.to_owned(),
        records: settings.pack.clone().map_or(Records::Fetched, Records::Pack),
        settings,
    };
    create_private_dir(data_dir).map_err(|source| NodeError::File {
        action: "create",
        path: data_dir.to_owned(),
        source,
    })?;
    let write = |name: &str, text: &str| {
        let path = data_dir.join(name);
        write_private(&path, text.as_bytes()).map_err(|source| NodeError::File {
            action: "write",
            path,
            source,
        })
    };
    write("ca.crt", &credentials.ca_pem)?;
    write("node.key", &key.serialize_pem())?;
    write("node.crt", &tls::der_to_pem(&certificate))?;
    config.save()?;
    Ok(config)
}

/// Asks the coordinator that proves first that it has the token's CA; gives back the certificate and the
/// address it came from.
async fn ask(
    search: &Search,
    credentials: &Credentials,
    request: v1::JoinRequest,
) -> Result<(Vec<u8>, String), NodeError> {
    let found = search.reach(credentials, JOIN_TIMEOUT).await;
    let (channel, address) = found.map_err(|what| NodeError::Unreachable { what })?;
    match tokio::time::timeout(JOIN_TIMEOUT, ClusterClient::new(channel).join(request)).await {
        Ok(Ok(reply)) => Ok((reply.into_inner().certificate.to_vec(), address)),
        Ok(Err(status)) => Err(status_error(&status).unwrap_or_else(|| NodeError::Unreachable {
            what: format!("{address} {}", tls::status_cause(&status)),
        })),
        Err(_) => Err(NodeError::Unreachable { what: format!("{address} did not answer in time") }),
    }
}

/// What a coordinator's refusal means for this node; `None` when it is the network's fault.
pub(crate) fn status_error(status: &tonic::Status) -> Option<NodeError> {
    let sentence = status.message().to_owned();
    match status.code() {
        tonic::Code::FailedPrecondition => Some(NodeError::Mismatch(sentence)),
        tonic::Code::Unauthenticated
        | tonic::Code::PermissionDenied
        | tonic::Code::InvalidArgument
        | tonic::Code::AlreadyExists
        | tonic::Code::ResourceExhausted
        | tonic::Code::Internal => Some(NodeError::Refused(sentence)),
        tonic::Code::Aborted => Some(NodeError::Twin(sentence)),
        tonic::Code::Unimplemented => Some(NodeError::Mismatch(
            "the coordinator does not know this call; install the same version of Shimmer on both machines"
                .to_owned(),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_node_keeps_its_settings() {
        let dir = tempfile::tempdir().unwrap();
        let listen: SocketAddr = "127.0.0.1:7421".parse().unwrap();
        let settings = Settings::new("alpha".to_owned(), vec!["127.0.0.1:1".to_owned()], listen).unwrap();
        let config = NodeConfig { data_dir: dir.path().to_owned(), records: Records::Fetched, settings };
        config.save().unwrap();
        let before = std::fs::read(dir.path().join("node.json")).unwrap();
        let running = config.lock().unwrap();

        let token = Token {
            secret: [7; 32],
            expires_unix: u64::MAX / 2,
            ca_der: vec![1, 2, 3],
            addresses: vec!["127.0.0.1:1".to_owned()],
        };
        let options = JoinOptions {
            name: "beta".to_owned(),
            listen,
            advertise: Vec::new(),
            ram_bytes: None,
            isa: None,
            threads: None,
            pack: None,
            discovery: false,
            interface: None,
            adopt: Vec::new(),
        };
        // The lock is tried before the network: the token is not used up.
        let refused = join(&token.encode(), dir.path(), options).unwrap_err();
        assert!(refused.to_string().contains("in use by another running node"), "{refused}");
        assert_eq!(std::fs::read(dir.path().join("node.json")).unwrap(), before);
        drop(running);
    }
}
