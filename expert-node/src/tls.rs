//! Names, channels and checks of the cluster's mutual TLS.
//!
//! Certificates name who somebody is, never where: clients connect to any address and check the name
//! they expect behind it.

use std::time::{Duration, SystemTime};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
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

/// Longest time for a TCP connection: a lost SYN is repeated after 1 s, the next one after 3 s, and a new
/// attempt is sooner than that.
const TCP_TIMEOUT: Duration = Duration::from_millis(1500);

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
        .connect_timeout(timeout.min(TCP_TIMEOUT))
        .tcp_nodelay(true)
        .http2_max_header_list_size(16 << 10)
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

/// Why a call failed, in words for the owner of a cluster.
pub fn status_cause(status: &tonic::Status) -> String {
    explain(&cause(status))
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
    let now = || shown(unix_now());
    if cause.contains("certificate expired") || cause.contains("certificate not valid yet") {
        // rustls: "… verification time 1 (UNIX), but certificate is not valid before 2 (1 seconds …)".
        let (past, edge) = match cause.split_once("not valid before ") {
            Some((_, rest)) => ("begins", rest),
            None => ("ended", cause.split_once("not valid after ").map_or("", |(_, rest)| rest)),
        };
        let edge = edge
            .split(' ')
            .next()
            .and_then(|seconds| seconds.parse().ok())
            .map_or_else(|| "at another time".to_owned(), |seconds| format!("at {}", shown(seconds)));
        return format!(
            "shows a certificate whose time {past} {edge}, but the clock of this machine says {}; set the clocks of both machines right",
            now()
        );
    }
    if cause.contains("CertificateExpired") {
        return format!(
            "finds by its own clock that the certificate of this machine is not valid now; the clock of this machine says {}; set the clocks of both machines right",
            now()
        );
    }
    cause.to_owned()
}

/// Seconds since 1970 by this machine's clock.
fn unix_now() -> u64 {
    unix_millis() / 1000
}

/// Milliseconds since 1970 by this machine's clock.
pub fn unix_millis() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// A time for people.
fn shown(unix: u64) -> String {
    let time = i64::try_from(unix).ok().and_then(|unix| OffsetDateTime::from_unix_timestamp(unix).ok());
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_else(|| format!("{unix} s after 1970"))
}

/// What is wrong with two clocks that differ by more than five minutes: by how much `their` clock is
/// ahead of or behind `our` one; `None` when they agree or the other side did not say.
pub fn clock_skew(ours_ms: u64, theirs_ms: u64, they: &str) -> Option<String> {
    const TOLERATED_MS: u64 = 5 * 60 * 1000;
    let apart = ours_ms.abs_diff(theirs_ms);
    if theirs_ms == 0 || apart <= TOLERATED_MS {
        return None;
    }
    let minutes = apart / 60_000;
    let apart = match minutes {
        0..120 => format!("{minutes} minutes"),
        120..2880 => format!("{} hours", minutes / 60),
        _ => format!("{} days", minutes / 1440),
    };
    let direction = if theirs_ms > ours_ms { "ahead of" } else { "behind" };
    Some(format!(
        "the clock of {they} is {apart} {direction} the clock of this machine; work goes on, but certificates and tokens are judged by the clock, so set both right"
    ))
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

/// The node id in a DNS name of a node's certificate.
pub fn node_id(name: &str) -> Option<&str> {
    name.strip_suffix(ANY_NODE_NAME)?.strip_suffix('.').filter(|id| is_node_id(id))
}

/// The node id a caller's certificate carries.
pub fn peer_node_id<T>(request: &tonic::Request<T>) -> Option<String> {
    peer_names(request).iter().find_map(|name| node_id(name)).map(str::to_owned)
}

/// First and last second (since 1970) of a certificate.
///
/// # Errors
/// What is wrong with the text.
pub fn validity(pem: &[u8]) -> Result<(i64, i64), String> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem).map_err(|e| format!("is no certificate: {e}"))?;
    let certificate = pem.parse_x509().map_err(|e| format!("is no certificate: {e}"))?;
    let validity = certificate.validity();
    Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
}

/// The first certificate of a PEM text; `None` when there is none.
pub fn pem_to_der(pem: &str) -> Option<Vec<u8>> {
    x509_parser::pem::parse_x509_pem(pem.as_bytes()).ok().map(|(_, pem)| pem.contents)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_out_of_joint_are_explained_with_both_clocks() {
        let early = explain(
            "invalid peer certificate: certificate not valid yet: verification time 1700000000 (UNIX), but certificate is not valid before 1800000000 (100000000 seconds in future)",
        );
        assert!(early.contains("begins at 2027-01-15T08:00:00Z"), "{early}");
        let late = explain(
            "invalid peer certificate: certificate expired: verification time 1700000000 (UNIX), but certificate is not valid after 1600000000 (100000000 seconds ago)",
        );
        assert!(late.contains("ended at 2020-09-13T12:26:40Z"), "{late}");
        for text in [early, late, explain("received fatal alert: CertificateExpired")] {
            assert!(
                text.contains("clock of this machine says 2") && text.contains("set the clocks"),
                "{text}"
            );
        }
        assert_eq!(explain("odd"), "odd");
    }

    #[test]
    fn only_clocks_far_apart_are_mentioned() {
        let (minute, hour) = (60_000, 3_600_000);
        let ours = 1_800_000_000_000;
        assert_eq!(clock_skew(ours, ours + 4 * minute, "node a"), None);
        assert_eq!(clock_skew(ours, 0, "node a"), None);
        let ahead = clock_skew(ours, ours + 3 * hour, "node a").unwrap();
        assert!(ahead.contains("the clock of node a is 3 hours ahead of"), "{ahead}");
        let behind = clock_skew(ours, ours - 49 * hour, "node a").unwrap();
        assert!(behind.contains("2 days behind"), "{behind}");
    }

    #[test]
    fn certificates_survive_their_text_form() {
        let certificate = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap().cert;
        assert_eq!(pem_to_der(&der_to_pem(certificate.der())).unwrap(), certificate.der().to_vec());
        assert_eq!(pem_to_der("nonsense"), None);
    }
}
