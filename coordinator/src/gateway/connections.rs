//! The accept loop: how many connections there may be and how long a client may take to ask.
//!
//! A client that connects and says nothing, or says it one byte at a time, costs a task and a socket. Both
//! are bounded: by the number of connections, and by one clock for the header block, which also closes
//! keep-alive connections nobody uses. Answers have no clock: a healthy one may take an hour.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower_service::Service as _;

/// What a client may take up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections at a time; those beyond are closed at once.
    pub(super) connections: usize,
    /// Time for a whole header block, from when the connection is ready for one.
    pub(super) header_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 256, header_time: Duration::from_secs(30) }
    }
}

/// Most bytes of a header block.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Pause after the system refused to accept: it is out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Serves until `shutdown` is done, then finishes the running answers.
pub(super) async fn serve(
    router: Router,
    listener: TcpListener,
    limits: Limits,
    shutdown: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let running = GracefulShutdown::new();
    let (ending, ended) = tokio::sync::watch::channel(false);
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        // Frames of a stream are small and each is awaited.
        let _ = stream.set_nodelay(true);
        keep_alive(&stream);
        let router = router.clone();
        let asked = Arc::new(AtomicBool::new(false));
        let asking = asked.clone();
        let answer = hyper::service::service_fn(move |request: Request<Incoming>| {
            asking.store(true, Ordering::Relaxed);
            let mut router = router.clone();
            async move {
                Ok::<_, Infallible>(router.call(request.map(Body::new)).await.unwrap_or_else(|e| match e {}))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(stream), answer);
        let connection = running.watch(connection);
        let mut ended = ended.clone();
        tokio::spawn(async move {
            let silent_at_the_end = async {
                let _ = ended.wait_for(|ended| *ended).await;
                if asked.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                // How a client broke its connection is its own affair.
                _ = connection => {}
                () = silent_at_the_end => {}
            }
            drop(place);
        });
    }
    drop(listener);
    // Connections on which nothing was asked yet are not waited for.
    let _ = ending.send(true);
    running.shutdown().await;
}

/// Lets the system find out, within about two minutes, that a client's machine is gone.
fn keep_alive(stream: &tokio::net::TcpStream) {
    #[cfg(unix)]
    {
        use rustix::net::sockopt;
        // Where the system refuses, dead clients are found later.
        let _ = sockopt::set_socket_keepalive(stream, true);
        let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(60));
        let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(15));
        let _ = sockopt::set_tcp_keepcnt(stream, 4);
    }
    #[cfg(not(unix))]
    let _ = stream;
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn start(limits: Limits) -> (std::net::SocketAddr, tokio::sync::oneshot::Sender<()>) {
        let (address, stop, _) = start_to_end(limits).await;
        (address, stop)
    }

    type Served = tokio::task::JoinHandle<()>;

    async fn start_to_end(
        limits: Limits,
    ) -> (std::net::SocketAddr, tokio::sync::oneshot::Sender<()>, Served) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let router = Router::new().route("/", get(|| async { "hello" }));
        let served = tokio::spawn(serve(router, listener, limits, async {
            let _ = stopped.await;
        }));
        (address, stop, served)
    }

    /// Sends `text` and reads until the server closes.
    async fn talk(address: std::net::SocketAddr, text: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        // A reset is a close, too.
        let _ = tokio::time::timeout(PATIENCE, read).await.expect("the server closes the connection");
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn slow_headers_and_idle_connections_are_closed() {
        let (address, _stop) =
            start(Limits { connections: 4, header_time: Duration::from_millis(200) }).await;
        assert!(!talk(address, "GET / HTTP/1.1\r\nHost: x\r\n").await.contains("200 OK"));
        // The answer comes, then nobody asks again.
        assert!(talk(address, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.ends_with("hello"));
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_closed_and_others_served() {
        let (address, _stop) = start(Limits { connections: 1, header_time: PATIENCE }).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        assert!(first.read_u8().await.is_ok(), "the first is served");
        assert_eq!(talk(address, "").await, "");
        drop(first);
        let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let served = async { while !talk(address, request).await.ends_with("hello") {} };
        tokio::time::timeout(PATIENCE, served).await.expect("the place is free again");
    }

    #[tokio::test]
    async fn the_end_does_not_wait_for_clients_that_ask_nothing() {
        let limits = Limits { connections: 4, header_time: Duration::from_secs(3600) };
        let (address, stop, served) = start_to_end(limits).await;
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET / HT").await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        assert!(idle.read_u8().await.is_ok(), "it is served");
        stop.send(()).unwrap();
        tokio::time::timeout(PATIENCE, served).await.expect("the server ends").unwrap();
    }

    #[tokio::test]
    async fn many_fields_are_refused() {
        let (address, _stop) = start(Limits::default()).await;
        let fields: String = (0..200).map(|i| format!("x-{i}: a\r\n")).collect();
        assert!(talk(address, &format!("GET / HTTP/1.1\r\n{fields}\r\n")).await.starts_with("HTTP/1.1 431"));
    }
}
