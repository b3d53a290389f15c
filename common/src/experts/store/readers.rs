//! A few threads that only read: every miss of a layer is queued at once, so that a disk with
//! parallel channels sees all of them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Concurrent reads. One per expert of a GLM-5.2 token and layer; NVMe drives gain little beyond.
const READERS: usize = 8;

type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Readers {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Starts the threads. Where the system refuses them all, jobs run on the caller.
    pub(super) fn start() -> Self {
        let (queue, jobs) = channel::<Job>();
        let jobs = Arc::new(Mutex::new(jobs));
        let threads: Vec<_> = (0..READERS)
            .filter_map(|i| {
                let jobs = Arc::clone(&jobs);
                std::thread::Builder::new().name(format!("expert-read-{i}")).spawn(move || serve(&jobs)).ok()
            })
            .collect();
        Self { queue: Some(queue), threads }
    }

    /// Queues one read.
    pub(super) fn submit(&self, job: Job) {
        match &self.queue {
            Some(queue) if !self.threads.is_empty() => {
                if let Err(unsent) = queue.send(job) {
                    (unsent.0)();
                }
            }
            _ => job(),
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A reader cannot panic: jobs catch panics of the source themselves.
            let _ = thread.join();
        }
    }
}
