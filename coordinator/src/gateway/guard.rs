//! Who may ask: API keys, host names and web origins, checked before a body is read.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{Gateway, errors};

/// Digests of the accepted API keys; the keys themselves are not kept.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<blake3::Hash>);

impl ApiKeys {
    /// Keys, one a line; empty lines and lines that start with `#` are skipped.
    pub fn from_lines(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        Self(lines.map(|key| blake3::hash(key.as_bytes())).collect())
    }

    /// Whether no key is needed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Compares digests, each in constant time and all of them.
    fn accept(&self, key: &str) -> bool {
        let given = blake3::hash(key.as_bytes());
        self.0.iter().fold(false, |found, known| (*known == given) | found)
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// Refuses foreign web origins, foreign host names and missing keys.
pub async fn check(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if let Some(origin) = foreign_origin(headers) {
        return errors::origin_not_allowed(origin).into_response();
    }
    let keys = &gateway.config.api_keys;
    if keys.is_empty()
        && let Some(host) = foreign_host(headers, &gateway.config.allowed_hosts)
    {
        return errors::host_not_allowed(host).into_response();
    }
    if !keys.is_empty() && !key_of(headers).is_some_and(|key| keys.accept(key)) {
        return errors::invalid_api_key().into_response();
    }
    next.run(request).await
}

/// The `Origin` of a page that this server did not deliver: a web site must not use a visitor's browser
/// to reach a server on the visitor's machine.
fn foreign_origin(headers: &HeaderMap) -> Option<&str> {
    let origin = headers.get(header::ORIGIN)?.to_str().unwrap_or("unreadable");
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let same = origin.split_once("://").is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host));
    (!same).then_some(origin)
}

/// A host name that is not known to mean this server. A web site can point its own name at a visitor's
/// machine, and its pages then look same-origin; it cannot do so with addresses and `localhost`.
fn foreign_host<'a>(headers: &'a HeaderMap, allowed: &[String]) -> Option<&'a str> {
    let host = headers.get(header::HOST)?.to_str().unwrap_or("unreadable");
    // "name:port", "address:port", "[v6]:port" or without a port.
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    let name = name.trim_end_matches('.');
    let known = name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || allowed.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(name));
    (!known).then_some(host)
}

fn key_of(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key")?.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_from_lines_and_compared() {
        let keys = ApiKeys::from_lines("# office\nsecret-1\n\n secret-2 \n");
        assert!(keys.accept("secret-1") && keys.accept("secret-2"));
        assert!(!keys.accept("secret") && !keys.accept(""));
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn only_own_pages_have_an_allowed_origin() {
        let headers = |origin: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, "127.0.0.1:8000".parse().unwrap());
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            headers
        };
        assert_eq!(foreign_origin(&headers("http://127.0.0.1:8000")), None);
        assert_eq!(foreign_origin(&headers("https://evil.example")), Some("https://evil.example"));
        assert_eq!(foreign_origin(&headers("null")), Some("null"));
        assert_eq!(foreign_origin(&HeaderMap::new()), None);
    }

    #[test]
    fn names_a_web_site_could_point_here_are_foreign() {
        let foreign = |host: &'static str, allowed: &[String]| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            foreign_host(&headers, allowed).is_some()
        };
        for host in ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "[::1]", "192.168.1.7:8000"]
        {
            assert!(!foreign(host, &[]), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[evil",
        ] {
            assert!(foreign(host, &[]), "{host}");
        }
        assert!(!foreign("MyPC.local:8000", &["mypc.local".into()]));
        assert!(!foreign("any.example", &["*".into()]));
        assert_eq!(foreign_host(&HeaderMap::new(), &[]), None);
    }

    #[test]
    fn both_key_headers_work() {
        let mut headers = HeaderMap::new();
        headers.insert("x-api-key", "k1".parse().unwrap());
        assert_eq!(key_of(&headers), Some("k1"));
        headers.insert(header::AUTHORIZATION, "bearer k2".parse().unwrap());
        assert_eq!(key_of(&headers), Some("k2"));
    }
}
