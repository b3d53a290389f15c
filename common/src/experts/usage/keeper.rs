//! Usage while experts are computed: saved now and then and at the end, and turned into pins.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::store::{EvictionPolicy, LearnedFrequency, LocalStore, SharedUsage};
use super::super::{ExpertId, ExpertLayout};
use super::{Usage, UsageOptions, file, pins};
use crate::container::Fingerprint;

/// Between two saves while counts change.
const SAVE_EVERY: Duration = Duration::from_secs(180);
/// Between two looks at how many tokens have passed.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Owns a model's usage. Dropping it ends its thread and saves.
pub struct UsageKeeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    usage: SharedUsage,
    model: Fingerprint,
    /// `None`: nothing is kept.
    path: Option<PathBuf>,
    pinned: Mutex<Option<Pinned>>,
    /// Tokens counted at the last save.
    saved_tokens: Mutex<f64>,
    ending: Mutex<bool>,
    wake: Condvar,
}

/// A store whose pins follow the usage.
struct Pinned {
    store: Weak<LocalStore>,
    room_bytes: u64,
    pins: Vec<ExpertId>,
    /// Tokens counted at the last look.
    looked_tokens: f64,
}

impl UsageKeeper {
    /// Takes up what is kept in `path` (`None`: nothing is), or, where there is no file, what `otherwise`
    /// has. A file that cannot be used costs a warning and its contents.
    pub fn open(
        path: Option<PathBuf>,
        model: Fingerprint,
        layout: &ExpertLayout,
        otherwise: impl FnOnce() -> Option<super::SavedUsage>,
    ) -> Self {
        let saved = match path.as_deref().map(|path| file::load(path, model)) {
            None => None,
            Some(Ok(None)) => otherwise(),
            Some(Ok(saved)) => saved,
            Some(Err(error)) => {
                let path = path.as_deref().unwrap_or_else(|| "".as_ref()).display();
                tracing::warn!(%path, %error, "learned expert usage is not used and will be replaced");
                None
            }
        };
        let usage = match saved {
            None => Usage::default(),
            Some(mut saved) => {
                saved.fit(layout);
                Usage::resume(saved, UsageOptions::default())
            }
        };
        let shared = Arc::new(Shared {
            saved_tokens: Mutex::new(usage.lifetime_tokens()),
            usage: SharedUsage::new(Mutex::new(usage)),
            model,
            path,
            pinned: Mutex::default(),
            ending: Mutex::default(),
            wake: Condvar::new(),
        });
        let kept = shared.clone();
        // Without a thread, usage is saved at the end and pins stay as they are.
        let thread = std::thread::Builder::new().name("usage".into()).spawn(move || kept.watch()).ok();
        Self { shared, thread }
    }

    /// The counts.
    pub fn counts(&self) -> SharedUsage {
        self.shared.usage.clone()
    }

    /// The eviction policy that follows the counts; `counting` says whether it records what the store
    /// computes, or somebody who sees more does.
    pub fn policy(&self, counting: bool) -> Box<dyn EvictionPolicy> {
        Box::new(LearnedFrequency::over(self.counts(), counting))
    }

    /// Has `store`, which has room for `room_bytes`, read the hottest experts ahead and keep the hottest of
    /// them pinned as the usage changes.
    pub fn pin(&self, store: &Arc<LocalStore>, room_bytes: u64) {
        let (pins, looked_tokens) = {
            let usage = lock(&self.shared.usage);
            (pins::hottest(&usage, room_bytes, |id| record_bytes(store, id)), usage.lifetime_tokens())
        };
        if !pins.is_empty() {
            store.set_pins(&pins);
        }
        let store = Arc::downgrade(store);
        let room_bytes = (room_bytes as f64 * pins::PINNED_SHARE) as u64;
        *lock(&self.shared.pinned) = Some(Pinned { store, room_bytes, pins, looked_tokens });
    }

    /// Something that saves when called, for a program that is about to be ended.
    pub fn saver(&self) -> impl FnOnce() + Send + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || {
            if let Some(shared) = shared.upgrade() {
                shared.save();
            }
        }
    }
}

impl Drop for UsageKeeper {
    fn drop(&mut self) {
        *lock(&self.shared.ending) = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, its message is on stderr.
            let _ = thread.join();
        }
        self.shared.save();
    }
}

impl Shared {
    fn watch(&self) {
        let mut saved = Instant::now();
        let mut ending = lock(&self.ending);
        while !*ending {
            let woken = self.wake.wait_timeout(ending, LOOK_EVERY);
            ending = woken.unwrap_or_else(PoisonError::into_inner).0;
            if *ending {
                return;
            }
            drop(ending);
            self.repin();
            if saved.elapsed() >= SAVE_EVERY {
                self.save();
                saved = Instant::now();
            }
            ending = lock(&self.ending);
        }
    }

    fn repin(&self) {
        let mut pinned = lock(&self.pinned);
        let Some(pinned) = pinned.as_mut() else { return };
        let Some(store) = pinned.store.upgrade() else { return };
        let exchanged = {
            let usage = lock(&self.usage);
            if usage.lifetime_tokens() - pinned.looked_tokens < pins::REPIN_TOKENS as f64 {
                return;
            }
            pinned.looked_tokens = usage.lifetime_tokens();
            pins::exchange(&usage, pinned.room_bytes, &pinned.pins, |id| record_bytes(&store, id))
        };
        if let Some(pins) = exchanged {
            store.set_pins(&pins);
            pinned.pins = pins;
        }
    }

    /// Saves what has changed since the last time.
    fn save(&self) {
        let Some(path) = &self.path else { return };
        let mut saved_tokens = lock(&self.saved_tokens);
        let saved = {
            let usage = lock(&self.usage);
            if usage.lifetime_tokens() <= *saved_tokens {
                return;
            }
            usage.save()
        };
        *saved_tokens = saved.lifetime_tokens;
        if let Err(error) = file::save(path, &saved, self.model) {
            tracing::warn!(path = %path.display(), %error, "learned expert usage could not be saved");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Size of a record this machine can read.
fn record_bytes(store: &LocalStore, id: ExpertId) -> Option<u64> {
    let source = store.source();
    source.contains(id).then(|| source.layout().record_bytes(id)).flatten().map(|bytes| bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::testing::{MODEL, MemorySource};
    use crate::experts::{ExpertSource, StoreOptions};
    use crate::kernels::Kernels;
    use crate::profile::NumericProfile;

    fn rows(keeper: &UsageKeeper, expert: u16, rows: usize) {
        lock(&keeper.counts()).record(1, rows, [(expert, rows)].into_iter());
    }

    #[test]
    fn usage_is_kept_from_session_to_session_and_pins_the_hottest() {
        let dir = tempfile::tempdir().unwrap();
        let path = Some(dir.path().join(file::FILE_NAME));
        let source = Arc::new(MemorySource::new(12, 64, 64));
        let open = || UsageKeeper::open(path.clone(), MODEL, &source.layout, || None);
        let first = open();
        rows(&first, 7, 30);
        rows(&first, 4, 90);
        drop(first);
        let second = open();
        let id = |index| ExpertId { layer: 1, index };
        // One lock at a time: both guards would live to the end of one statement.
        let hot = lock(&second.counts()).heat(id(4));
        let warm = lock(&second.counts()).heat(id(7));
        assert!(hot > warm && warm > 0.0, "{hot} {warm}");

        let shared: Arc<dyn ExpertSource> = source.clone();
        let options = StoreOptions { policy: second.policy(false), ..StoreOptions::new(1 << 20) };
        let store = LocalStore::open(shared, Kernels::best(), NumericProfile::default(), options);
        let store = Arc::new(store.unwrap());
        second.pin(&store, 1 << 20);
        assert_eq!(store.stats().pinned, 2);
    }

    #[test]
    fn a_damaged_file_is_a_fresh_start_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(file::FILE_NAME);
        std::fs::write(&path, b"SHMUSAGE but not really, and long enough to be looked at").unwrap();
        let layout = MemorySource::new(4, 64, 64).layout;
        let import = || -> Option<crate::experts::usage::SavedUsage> { panic!("a file was there") };
        let keeper = UsageKeeper::open(Some(path.clone()), MODEL, &layout, import);
        assert_eq!(lock(&keeper.counts()).lifetime_tokens(), 0.0);
        rows(&keeper, 1, 5);
        keeper.saver()();
        assert_eq!(file::load(&path, MODEL).unwrap().unwrap().lifetime_tokens, 5.0);
    }
}
