//! For whom this node works: one coordinator process at a time.
//!
//! A coordinator holds the lease by its open streams and its pings. When its last stream ends, as it does
//! at once when the process does, the lease is free; a coordinator whose machine vanished closes nothing
//! and loses it when its pings stay away.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// How long a coordinator that greeted keeps the node before its first ping.
pub(crate) const GREETING: Duration = Duration::from_secs(10);
/// Longest lease a ping may ask for.
const LONGEST: Duration = Duration::from_secs(60);

/// The lease of a node.
pub(crate) struct Lease {
    holder: Mutex<Holder>,
    /// Number of the coordinator that holds it, counted since the process began.
    turn: watch::Sender<u64>,
}

#[derive(Default)]
struct Holder {
    instance: Vec<u8>,
    streams: usize,
    until: Option<Instant>,
    turn: u64,
}

impl Lease {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { holder: Mutex::default(), turn: watch::Sender::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Holder> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes or shares the lease for a stream of `instance`, for at least `time`.
    ///
    /// # Errors
    /// One sentence while another instance holds it.
    pub(crate) fn take(self: &Arc<Self>, instance: &[u8], time: Duration) -> Result<Stay, String> {
        let now = Instant::now();
        let mut holder = self.lock();
        let alive = holder.streams > 0 && holder.until.is_some_and(|until| until > now);
        if holder.instance != instance || holder.turn == 0 {
            if alive {
                return Err("the node works for another coordinator with the same cluster directory; stop one of them, or wait 10 s after it has ended".to_owned());
            }
            let turn = holder.turn + 1;
            *holder = Holder { instance: instance.to_vec(), streams: 0, until: None, turn };
            self.turn.send_replace(turn);
        }
        holder.streams += 1;
        holder.until = holder.until.max(Some(now + time.min(LONGEST)));
        Ok(Stay { lease: self.clone(), turn: holder.turn, current: self.turn.subscribe() })
    }
}

/// A stream's part of the lease; ends with it.
pub(crate) struct Stay {
    lease: Arc<Lease>,
    turn: u64,
    current: watch::Receiver<u64>,
}

impl Stay {
    /// Lengthens the lease; `false` when another instance holds it by now.
    pub(crate) fn extend(&self, time: Duration) -> bool {
        let mut holder = self.lease.lock();
        let ours = holder.turn == self.turn;
        if ours {
            holder.until = holder.until.max(Some(Instant::now() + time.min(LONGEST)));
        }
        ours
    }

    /// Waits until another instance has taken the lease.
    pub(crate) async fn lost(&mut self) {
        let turn = self.turn;
        // The sender lives as long as the lease this refers to.
        let _ = self.current.wait_for(|&current| current != turn).await;
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut holder = self.lease.lock();
        if holder.turn == self.turn {
            holder.streams = holder.streams.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_instance_at_a_time_and_a_closed_one_is_forgotten_at_once() {
        let lease = Lease::new();
        let first = lease.take(b"first", GREETING).unwrap();
        let again = lease.take(b"first", GREETING).unwrap();
        let refused = lease.take(b"second", GREETING).map(drop).unwrap_err();
        assert!(refused.contains("another coordinator"), "{refused}");
        drop(first);
        assert!(lease.take(b"second", GREETING).is_err(), "one stream of the first is open");
        drop(again);
        let second = lease.take(b"second", GREETING).unwrap();
        assert!(lease.take(b"first", GREETING).is_err());
        assert!(second.extend(GREETING));
    }

    #[test]
    fn a_silent_coordinator_loses_the_node() {
        let lease = Lease::new();
        let silent = lease.take(b"silent", Duration::ZERO).unwrap();
        let other = lease.take(b"other", GREETING).unwrap();
        assert!(!silent.extend(GREETING), "it is no longer the holder");
        drop(silent);
        assert!(other.extend(GREETING) && lease.take(b"third", GREETING).is_err());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut late = lease.take(b"other", GREETING).unwrap();
        drop(other);
        late.turn = 0;
        runtime.block_on(late.lost());
    }
}
