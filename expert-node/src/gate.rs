//! Who may hold a connection: callers that have shown nothing yet are few, short-lived and replaceable.
//!
//! Everybody on the network can open connections. Until a caller has proved with a certificate that it
//! belongs to the cluster, its connection counts as a stranger's. Strangers have bounded numbers, in all
//! and per address, and a bounded time. When the numbers are reached the oldest gives way: a handshake
//! takes milliseconds, so a member gets in past any number of connections that only wait.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::tls;

/// Most strangers at once, where the process may open enough files.
const STRANGERS: usize = 1024;
/// Most connections of one member.
const PER_MEMBER: usize = 64;
/// How long a stranger may take to show who it is.
const PATIENCE: Duration = Duration::from_secs(15);
/// Pause when the system has no room for another connection.
const OUT_OF_FILES: Duration = Duration::from_millis(50);
/// How often a silent connection is asked for a sign of life, and how long one may take.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Calls one connection may have open, bytes of their headers, and bytes of one HTTP/2 frame.
const MAX_CALLS: u32 = 64;
const MAX_HEADER_BYTES: u32 = 16 << 10;
const MAX_FRAME_BYTES: u32 = 16 << 10;

/// Sets the limits every port of the cluster has on what one connection may ask for.
pub fn limited(server: Server) -> Server {
    server
        // A peer whose machine lost power closes nothing.
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .max_concurrent_streams(Some(MAX_CALLS))
        .http2_max_header_list_size(Some(MAX_HEADER_BYTES))
        .max_frame_size(Some(MAX_FRAME_BYTES))
}

/// The connections of one port.
#[derive(Debug)]
pub struct Gate {
    strangers: usize,
    per_address: usize,
    patience: Duration,
    tickets: Mutex<Tickets>,
}

#[derive(Debug, Default)]
struct Tickets {
    next: u64,
    by_peer: HashMap<SocketAddr, Arc<Ticket>>,
}

/// One connection.
#[derive(Debug)]
struct Ticket {
    number: u64,
    peer: SocketAddr,
    /// Who it belongs to, once that is known.
    owner: Mutex<Option<String>>,
    closed: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Ticket {
    fn is_stranger(&self) -> bool {
        lock(&self.owner).is_none()
    }

    /// Makes the connection fail at its next read or write, which is now.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if let Some(waker) = lock(&self.waker).take() {
            waker.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// A gate whose limits fit the number of files this process may open.
    pub fn new() -> Arc<Self> {
        let strangers = open_files().map_or(STRANGERS, |files| STRANGERS.min(files / 4)).max(8);
        Self::with_limits(strangers, PATIENCE)
    }

    /// At most `strangers` at once, a quarter of them from one address, each for `patience`.
    fn with_limits(strangers: usize, patience: Duration) -> Arc<Self> {
        let per_address = (strangers / 4).max(2);
        Arc::new(Self { strangers, per_address, patience, tickets: Mutex::default() })
    }

    /// The connections of `listener`, each watched over by this gate. Needs a tokio runtime.
    pub fn incoming(self: &Arc<Self>, listener: TcpListener) -> Incoming {
        Incoming { gate: self.clone(), listener, pause: None }
    }

    fn admit(self: &Arc<Self>, tcp: TcpStream, peer: SocketAddr) -> Guarded {
        let mut tickets = lock(&self.tickets);
        let make_room = |most: usize, from: Option<IpAddr>| {
            let strangers = tickets.by_peer.values().filter(|t| t.is_stranger());
            let mut strangers: Vec<_> =
                strangers.filter(|t| from.is_none_or(|ip| t.peer.ip() == ip)).cloned().collect();
            if strangers.len() >= most {
                strangers.sort_by_key(|t| t.number);
                let surplus = strangers.len() + 1 - most;
                strangers.into_iter().take(surplus).collect()
            } else {
                Vec::new()
            }
        };
        let mut leaving: Vec<Arc<Ticket>> = make_room(self.per_address, Some(peer.ip()));
        if leaving.is_empty() {
            leaving = make_room(self.strangers, None);
        }
        for old in leaving {
            tickets.by_peer.remove(&old.peer);
            old.close();
        }
        tickets.next += 1;
        let ticket = Arc::new(Ticket {
            number: tickets.next,
            peer,
            owner: Mutex::default(),
            closed: AtomicBool::new(false),
            waker: Mutex::default(),
        });
        tickets.by_peer.insert(peer, ticket.clone());
        let patience = Box::pin(tokio::time::sleep(self.patience));
        Guarded { tcp, ticket, gate: self.clone(), patience: Some(patience) }
    }

    /// Notes whose connection a call came over; to be used as an interceptor of every call.
    ///
    /// # Errors
    /// `ResourceExhausted` when its owner has too many connections.
    pub fn recognise(&self, request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        let tickets = lock(&self.tickets);
        let ticket = request.remote_addr().and_then(|peer| tickets.by_peer.get(&peer));
        let Some(ticket) = ticket.filter(|t| t.is_stranger()) else { return Ok(request) };
        let Some(owner) = owner_of(&request) else { return Ok(request) };
        let same = |t: &&Arc<Ticket>| lock(&t.owner).as_ref() == Some(&owner);
        if tickets.by_peer.values().filter(same).count() >= PER_MEMBER {
            ticket.close();
            return Err(tonic::Status::resource_exhausted(format!(
                "{owner} has {PER_MEMBER} connections open here already; restart it"
            )));
        }
        *lock(&ticket.owner) = Some(owner);
        Ok(request)
    }

    /// Closes every connection of the node `id`.
    pub fn close_node(&self, id: &str) {
        let name = tls::node_name(id);
        let mut tickets = lock(&self.tickets);
        tickets.by_peer.retain(|_, ticket| {
            let theirs = lock(&ticket.owner).as_ref() == Some(&name);
            if theirs {
                ticket.close();
            }
            !theirs
        });
    }

    /// Closes the oldest stranger, to get a file back.
    fn close_oldest(&self) {
        let tickets = lock(&self.tickets);
        let strangers = tickets.by_peer.values().filter(|t| t.is_stranger());
        if let Some(oldest) = strangers.min_by_key(|t| t.number) {
            oldest.close();
        }
    }
}

/// The name that identifies a caller: its own, not the one all nodes share.
fn owner_of<T>(request: &tonic::Request<T>) -> Option<String> {
    tls::peer_names(request).into_iter().find(|name| name != tls::ANY_NODE_NAME)
}

#[cfg(unix)]
fn open_files() -> Option<usize> {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    usize::try_from(most).ok()
}

#[cfg(not(unix))]
fn open_files() -> Option<usize> {
    None
}

/// The connections of a listener.
#[derive(Debug)]
pub struct Incoming {
    gate: Arc<Gate>,
    listener: TcpListener,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Stream for Incoming {
    type Item = io::Result<Guarded>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                if pause.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                self.pause = None;
            }
            match self.listener.poll_accept(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok((tcp, peer))) => {
                    if let Err(error) = tcp.set_nodelay(true) {
                        tracing::debug!(%error, %peer, "TCP_NODELAY cannot be set");
                    }
                    return Poll::Ready(Some(Ok(self.gate.admit(tcp, peer))));
                }
                Poll::Ready(Err(error)) => {
                    // The port must outlive whatever one connection, or a lack of files, does to it.
                    tracing::debug!(%error, "a connection cannot be accepted");
                    self.gate.close_oldest();
                    self.pause = Some(Box::pin(tokio::time::sleep(OUT_OF_FILES)));
                }
            }
        }
    }
}

/// A connection that ends when the gate says so.
#[derive(Debug)]
pub struct Guarded {
    tcp: TcpStream,
    ticket: Arc<Ticket>,
    gate: Arc<Gate>,
    /// Runs while the caller is a stranger.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Guarded {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.ticket.closed.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(patience) = &mut self.patience
            && patience.as_mut().poll(cx).is_ready()
        {
            if self.ticket.is_stranger() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.patience = None;
        }
        Ok(())
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        {
            let mut waker = lock(&self.ticket.waker);
            match &mut *waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
        }
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

impl Connected for Guarded {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.tcp.connect_info()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut tickets = lock(&self.gate.tickets);
        if tickets.by_peer.get(&self.ticket.peer).is_some_and(|t| t.number == self.ticket.number) {
            tickets.by_peer.remove(&self.ticket.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_stream::StreamExt as _;

    async fn open(incoming: &mut Incoming, at: SocketAddr) -> (TcpStream, Guarded) {
        let (theirs, ours) = tokio::join!(TcpStream::connect(at), incoming.next());
        (theirs.unwrap(), ours.unwrap().unwrap())
    }

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn the_oldest_stranger_gives_way_and_members_stay() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let gate = Gate::with_limits(8, Duration::from_secs(60));
            let mut incoming = gate.incoming(listener);
            let (_member_end, mut member) = open(&mut incoming, at).await;
            *lock(&member.ticket.owner) = Some(tls::node_name("0123456789abcdef0123"));
            let (_end, mut first) = open(&mut incoming, at).await;
            let (_end, mut second) = open(&mut incoming, at).await;
            let (_end, mut third) = open(&mut incoming, at).await;
            let error = first.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
            for open in [&mut second, &mut third, &mut member] {
                open.write_all(b"x").await.unwrap();
            }
            gate.close_node("0123456789abcdef0123");
            assert!(member.write_all(b"x").await.is_err(), "a revoked node's connection ends");
            drop((first, second, third, member));
            assert!(lock(&gate.tickets).by_peer.is_empty(), "nothing is kept of closed connections");
        });
    }

    #[test]
    fn a_waiting_reader_is_woken_by_the_end_of_patience() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let gate = Gate::with_limits(8, Duration::from_millis(20));
            let mut incoming = gate.incoming(listener);
            let (_end, mut silent) = open(&mut incoming, at).await;
            let ended = tokio::time::timeout(Duration::from_secs(20), silent.read_u8()).await.unwrap();
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }
}
