//! Names, channels and checks of the cluster's mutual TLS.
//!
//! Certificates name who somebody is, never where: clients connect to any address and check the name
//! they expect behind it.

use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// DNS name in the coordinator's certificate.
pub const COORDINATOR_NAME: &str = "coordinator.shimmer";
/// DNS name in every node's certificate, besides its own.
pub const ANY_NODE_NAME: &str = "node.shimmer";

/// DNS name in the certificate of the node `id`.
pub fn node_name(id: &str) -> String {
    format!("{id}.{ANY_NODE_NAME}")
}

/// Whether `id` has the form of a node id: 20 lower-case hexadecimal digits.
pub fn is_node_id(id: &str) -> bool {
    id.len() == 20 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// What one side of a connection has: its CA, certificate and private key. `Debug` shows none of it.
#[derive(Clone)]
pub struct Credentials {
    /// CA certificate, PEM.
    pub ca_pem: String,
    /// Own certificate and key, PEM; `None` before joining.
    pub identity: Option<(String, String)>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("joined", &self.identity.is_some()).finish_non_exhaustive()
    }
}

impl Credentials {
    /// The certificate and key as tonic takes them.
    pub fn tonic_identity(&self) -> Option<Identity> {
        self.identity.as_ref().map(|(cert, key)| Identity::from_pem(cert, key))
    }

    /// The CA as tonic takes it.
    pub fn tonic_ca(&self) -> Certificate {
        Certificate::from_pem(&self.ca_pem)
    }
}

/// Connects to `address` (`host:port`) and checks that the peer's certificate carries `name`.
///
/// # Errors
/// One sentence without the address.
pub async fn connect(
    credentials: &Credentials,
    address: &str,
    name: &str,
    timeout: Duration,
) -> Result<Channel, String> {
    let mut tls =
        ClientTlsConfig::new().ca_certificate(credentials.tonic_ca()).domain_name(name).timeout(timeout);
    if let Some(identity) = credentials.tonic_identity() {
        tls = tls.identity(identity);
    }
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .map_err(|_| "is not an address of the form host:port".to_owned())?
        .connect_timeout(timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true)
        .tls_config(tls)
        .map_err(|e| format!("the certificates cannot be used: {}", cause(&e)))?;
    match tokio::time::timeout(timeout, endpoint.connect()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(e)) => Err(explain(&cause(&e))),
        Err(_) => Err(format!("did not answer within {} ms", timeout.as_millis())),
    }
}

/// The innermost cause of an error: tonic's own text is only "transport error".
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    let text = inner.to_string();
    // What a killed process leaves behind; rustls explains it to programmers.
    if text.contains("close_notify") { "it went away without a goodbye".to_owned() } else { text }
}

/// Says what a TLS alert means for the owner of a cluster.
fn explain(cause: &str) -> String {
    if cause.contains("UnknownIssuer") || cause.contains("BadSignature") {
        return "shows a certificate of another cluster; check the address or join again with a new token"
            .to_owned();
    }
    if cause.contains("NotValidForName") {
        return "is a machine of this cluster, but not the one expected there; check the address".to_owned();
    }
    if cause.contains("Expired") || cause.contains("NotValidYet") {
        return "shows a certificate that is not valid now; check the clocks of both machines".to_owned();
    }
    cause.to_owned()
}

/// DNS names in the certificate of the caller of a request, empty when it showed none.
pub fn peer_names<T>(request: &tonic::Request<T>) -> Vec<String> {
    let Some(certificates) = request.peer_certs() else { return Vec::new() };
    certificates.first().map(|der| names_of(der)).unwrap_or_default()
}

/// DNS names of a certificate.
pub fn names_of(der: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Vec::new() };
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let dns = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(dns) => Some((*dns).to_owned()),
        _ => None,
    });
    dns.collect()
}

/// The node id a caller's certificate carries.
pub fn peer_node_id<T>(request: &tonic::Request<T>) -> Option<String> {
    let suffix = format!(".{ANY_NODE_NAME}");
    peer_names(request)
        .iter()
        .filter_map(|name| name.strip_suffix(&suffix))
        .find(|id| is_node_id(id))
        .map(str::to_owned)
}

/// Text form of a DER certificate.
pub fn der_to_pem(der: &[u8]) -> String {
    use base64::Engine as _;
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in body.as_bytes().chunks(64) {
        pem.extend(line.iter().map(|&b| char::from(b)));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}
