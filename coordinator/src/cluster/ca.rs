//! The private certificate authority of a cluster.
//!
//! Certificates name who somebody is (`coordinator.shimmer`, `<id>.node.shimmer`), never where. They
//! begin two days in the past, so that a PC whose clock is late can take part.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use shimmer_node::tls;
use time::{Duration, OffsetDateTime};

/// How far in the past certificates begin.
const CLOCK_SKEW: Duration = Duration::days(2);
/// How long they are valid: longer than the PCs, because nobody renews a hobby cluster.
const LIFETIME: Duration = Duration::days(3650);

/// A certificate and its private key, PEM.
pub(super) struct KeyedCertificate {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// Makes a new CA and the coordinator's certificate signed by it.
pub(super) fn create() -> Result<(KeyedCertificate, KeyedCertificate), rcgen::Error> {
    let mut params = CertificateParams::default();
    set_validity(&mut params);
    params.distinguished_name.push(DnType::CommonName, "Shimmer cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    let ca = KeyedCertificate { certificate: certificate.pem(), key: key.serialize_pem() };

    let key = KeyPair::generate()?;
    let certificate =
        leaf("coordinator", vec![tls::COORDINATOR_NAME.to_owned()])?.signed_by(&key, &issuer(&ca)?)?;
    let coordinator = KeyedCertificate { certificate: certificate.pem(), key: key.serialize_pem() };
    Ok((ca, coordinator))
}

/// A certificate issued to a node.
pub(super) struct NodeCertificate {
    /// The certificate, DER.
    pub(super) der: Vec<u8>,
    /// BLAKE3 of the node's public key, hexadecimal.
    pub(super) key_hash: String,
}

/// Signs a node's request. Only its public key is taken over; names and uses are ours to decide.
pub(super) fn sign_node(
    ca: &KeyedCertificate,
    request: &[u8],
    id: &str,
) -> Result<NodeCertificate, rcgen::Error> {
    // Parsing also checks the request's signature: the caller has the private key.
    let request = CertificateSigningRequestParams::from_der(&request.to_vec().into())?;
    let names = vec![tls::node_name(id), tls::ANY_NODE_NAME.to_owned()];
    let certificate = leaf(id, names)?.signed_by(&request.public_key, &issuer(ca)?)?;
    let key_hash = blake3::hash(request.public_key.der_bytes()).to_hex().to_string();
    Ok(NodeCertificate { der: certificate.der().to_vec(), key_hash })
}

fn issuer(ca: &KeyedCertificate) -> Result<Issuer<'static, KeyPair>, rcgen::Error> {
    Issuer::from_ca_cert_pem(&ca.certificate, KeyPair::from_pem(&ca.key)?)
}

/// Every member is a server on its own port and a client of the others.
fn leaf(common_name: &str, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    set_validity(&mut params);
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn set_validity(params: &mut CertificateParams) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + LIFETIME;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_get_our_names_whatever_they_ask_for() {
        let (ca, coordinator) = create().unwrap();
        assert!(coordinator.certificate.contains("BEGIN CERTIFICATE"));
        let key = KeyPair::generate().unwrap();
        let wish = CertificateParams::new(vec![tls::COORDINATOR_NAME.to_owned()]).unwrap();
        let request = wish.serialize_request(&key).unwrap();
        let id = "0123456789abcdef0123";
        let issued = sign_node(&ca, request.der(), id).unwrap();
        assert_eq!(tls::names_of(&issued.der), [tls::node_name(id), tls::ANY_NODE_NAME.to_owned()]);
        assert_eq!(issued.key_hash, blake3::hash(key.der_bytes()).to_hex().to_string());
    }

    #[test]
    fn broken_requests_are_errors() {
        let (ca, _) = create().unwrap();
        let key = KeyPair::generate().unwrap();
        let good = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
        assert!(sign_node(&ca, b"", "0123456789abcdef0123").is_err());
        for at in (0..good.len()).step_by(7) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(sign_node(&ca, &bad, "0123456789abcdef0123").is_err(), "byte {at}");
        }
    }
}
