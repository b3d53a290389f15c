//! The thread that brings pinned experts into RAM while nobody waits for a disk.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Core;

/// Pinned experts read at a time: the disk is kept busy, and little stands in the way of demands.
const PINS_IN_FLIGHT: usize = 2;

/// A pinned expert that found no room, or was called off for a demand, is tried again after this time.
const TRY_AGAIN: Duration = Duration::from_millis(200);

/// Wakes the keeper.
#[derive(Default)]
pub(super) struct Signal {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    woken: bool,
    stopped: bool,
}

impl Signal {
    /// There may be something to do.
    pub(super) fn wake(&self) {
        self.set(|state| state.woken = true);
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits to be woken, or for a while; false when it is time to end.
    fn wait(&self, at_most: Duration) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = |state: &mut State| !state.woken && !state.stopped;
        let waited = self.changed.wait_timeout_while(state, at_most, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.woken = false;
        !state.stopped
    }
}

/// The running thread; dropping it ends it.
pub(super) struct Keeper {
    core: Arc<Core>,
    signal: Arc<Signal>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread. Where the system refuses one, pinned experts come when they are asked for.
    pub(super) fn start(core: &Arc<Core>, signal: Arc<Signal>) -> Self {
        let (shared, wakes) = (Arc::clone(core), Arc::clone(&signal));
        let run = move || {
            while wakes.wait(if shared.cache.misses_pins() { TRY_AGAIN } else { Duration::MAX }) {
                load_pins(&shared);
            }
        };
        let thread = std::thread::Builder::new().name("expert-keeper".into()).spawn(run);
        if let Err(error) = &thread {
            tracing::warn!(%error, "no thread for pinned experts; they are read when they are asked for");
        }
        Self { core: Arc::clone(core), signal, thread: thread.ok() }
    }
}

fn load_pins(core: &Core) {
    let bytes = |id| core.source.layout().record_bytes(id);
    while let Some(load) = core.cache.next_pin(PINS_IN_FLIGHT, bytes) {
        core.submit(load);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.core.cache.stop();
        self.signal.set(|state| state.stopped = true);
        if let Some(thread) = self.thread.take() {
            // It ends after at most one submission; a panic in it has nothing to tell any more.
            let _ = thread.join();
        }
    }
}
