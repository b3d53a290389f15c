//! Ctrl-C: the first one asks the running work to stop, the second one ends the program.
//!
//! One watcher thread owns the signals. Work polls an [`Interrupt`] between steps. Things that must
//! not outlive the program (child processes, temporary directories) register a clean-up that also runs
//! before the hard exit.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How soon a pause notices Ctrl-C.
const LOOK_EVERY: Duration = Duration::from_millis(50);

type CleanUp = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Shared {
    requested: AtomicBool,
    /// Whether the last signal was SIGTERM: an ordinary end for a server.
    terminated: AtomicBool,
    /// Whether a person is being asked for input: no running work will notice a signal.
    at_prompt: AtomicBool,
    /// Ctrl-C presses since the last [`Interrupt::reset`].
    presses: AtomicU32,
    notify: Notify,
    clean_ups: Mutex<Vec<CleanUp>>,
}

/// A handle to the process's interrupt state. Cheap to clone.
#[derive(Clone)]
pub struct Interrupt {
    shared: Arc<Shared>,
}

static INSTALLED: OnceLock<Interrupt> = OnceLock::new();

impl Interrupt {
    /// The process-wide handle; the first call starts the signal watcher.
    pub fn install() -> Self {
        INSTALLED
            .get_or_init(|| {
                let interrupt = Self { shared: Arc::default() };
                let watcher = interrupt.clone();
                // Without a watcher Ctrl-C keeps its default meaning: the process ends at once.
                let _ = std::thread::Builder::new().name("signals".into()).spawn(move || watcher.watch());
                interrupt
            })
            .clone()
    }

    fn watch(&self) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
        runtime.block_on(async {
            let Ok(mut signals) = Signals::new() else { return };
            while let Some(kind) = signals.next().await {
                self.shared.terminated.store(kind == Kind::Terminate, Ordering::SeqCst);
                self.shared.requested.store(true, Ordering::SeqCst);
                self.shared.notify.notify_waiters();
                let idle = kind == Kind::Terminate && self.shared.at_prompt.load(Ordering::SeqCst);
                if self.shared.presses.fetch_add(1, Ordering::SeqCst) >= 1 || idle {
                    self.clean_up();
                    std::process::exit(130);
                }
            }
        });
    }

    /// Whether Ctrl-C (or a termination signal) arrived.
    pub fn requested(&self) -> bool {
        self.shared.requested.load(Ordering::SeqCst)
    }

    /// Whether the last signal was SIGTERM.
    pub fn terminated(&self) -> bool {
        self.shared.terminated.load(Ordering::SeqCst)
    }

    /// Says whether the program waits for a person's input; SIGTERM then ends it at once.
    pub fn at_prompt(&self, waiting: bool) {
        self.shared.at_prompt.store(waiting, Ordering::SeqCst);
    }

    /// Forgets a Ctrl-C that was answered (chat stops the answer, not the program).
    pub fn reset(&self) {
        self.shared.requested.store(false, Ordering::SeqCst);
        self.shared.presses.store(0, Ordering::SeqCst);
    }

    /// Waits until Ctrl-C arrives.
    pub async fn wait(&self) {
        let notified = self.shared.notify.notified();
        tokio::pin!(notified);
        // Registered before the flag is read, so that no wake-up is lost between the two.
        notified.as_mut().enable();
        if !self.requested() {
            notified.await;
        }
    }

    /// Sleeps; `false` when Ctrl-C arrived meanwhile.
    pub fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while !self.requested() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
        false
    }

    /// Registers work to be done before the program ends by a second Ctrl-C.
    pub fn on_kill(&self, clean_up: impl FnOnce() + Send + 'static) {
        self.shared.clean_ups.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(clean_up));
    }

    fn clean_up(&self) {
        let work = std::mem::take(&mut *self.shared.clean_ups.lock().unwrap_or_else(PoisonError::into_inner));
        for clean_up in work {
            clean_up();
        }
    }
}

/// Which signal arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Interrupt,
    #[cfg_attr(not(unix), expect(dead_code))]
    Terminate,
}

/// The signals that ask a program to stop: Ctrl-C and, on Unix, SIGTERM.
struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    #[cfg(not(unix))]
    fn new() -> std::io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal; `None` when none can arrive any more.
    #[cfg(unix)]
    async fn next(&mut self) -> Option<Kind> {
        tokio::select! {
            signal = self.interrupt.recv() => signal.map(|()| Kind::Interrupt),
            signal = self.terminate.recv() => signal.map(|()| Kind::Terminate),
        }
    }

    #[cfg(not(unix))]
    async fn next(&mut self) -> Option<Kind> {
        tokio::signal::ctrl_c().await.ok().map(|()| Kind::Interrupt)
    }
}
