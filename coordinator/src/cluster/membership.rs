//! The nodes this coordinator knows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use shimmer_common::experts::ExpertLayout;
use shimmer_node::gate::Gate;
use tokio::sync::mpsc::UnboundedSender;

use super::NodeStatus;
use super::node::Node;

/// Tells waiters that some node changed its state.
#[derive(Default)]
pub(super) struct Changed {
    count: Mutex<u64>,
    bell: Condvar,
}

impl Changed {
    pub(super) fn ring(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.bell.notify_all();
    }
}

/// All nodes.
pub(super) struct Membership {
    layout: ExpertLayout,
    nodes: Mutex<BTreeMap<String, Arc<Node>>>,
    changed: Arc<Changed>,
    /// Where new nodes get their link and their pulse.
    joined: Vec<UnboundedSender<Arc<Node>>>,
    /// Ids that are not accepted any more.
    revoked: Mutex<BTreeSet<String>>,
    /// The connections to the control port.
    pub(super) gate: Arc<Gate>,
}

impl Membership {
    pub(super) fn new(layout: ExpertLayout, joined: Vec<UnboundedSender<Arc<Node>>>) -> Self {
        Self {
            layout,
            nodes: Mutex::default(),
            changed: Arc::default(),
            joined,
            revoked: Mutex::default(),
            gate: Gate::new(),
        }
    }

    /// Stops working with the node `id` now: its connections, made by us or by it, are cut, and every
    /// other node hears of it with the next ping. `false` when that was done before.
    pub(super) fn revoke(&self, id: &str) -> bool {
        let new = self.revoked.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        if new {
            if let Some(node) = self.get(id) {
                node.revoke();
            }
            self.gate.close_node(id);
        }
        new
    }

    /// Ids that are not accepted any more.
    pub(super) fn revoked(&self) -> Vec<String> {
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node `id`, made (and its link started) when it is new.
    pub(super) fn get_or_add(&self, id: &str, name: &str, addresses: &[String]) -> Arc<Node> {
        let mut nodes = self.lock();
        if let Some(node) = nodes.get(id) {
            return node.clone();
        }
        let node = Arc::new(Node::new(id, name, addresses, &self.layout, self.changed.clone()));
        nodes.insert(id.to_owned(), node.clone());
        for thread in &self.joined {
            // Without its threads the cluster is shutting down.
            let _ = thread.send(node.clone());
        }
        node
    }

    /// Ends the connection of a node that no longer belongs here, and forgets it.
    pub(super) fn remove(&self, id: &str) {
        let node = self.lock().remove(id);
        if let Some(node) = node {
            node.revoke();
        }
        self.gate.close_node(id);
        self.changed.ring();
    }

    /// The model's experts.
    pub(super) fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Node>> {
        self.lock().get(id).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Node>> {
        self.lock().values().cloned().collect()
    }

    /// Status of every known node.
    pub(super) fn statuses(&self) -> Vec<NodeStatus> {
        self.all().iter().map(|node| node.status()).collect()
    }

    /// Whether `done` holds for the states of all nodes, now or before `deadline`.
    pub(super) fn wait(&self, deadline: Instant, done: impl Fn(&[Arc<Node>]) -> bool) -> bool {
        let mut count = self.changed.count.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let seen = *count;
            drop(count);
            if done(&self.all()) {
                return true;
            }
            count = self.changed.count.lock().unwrap_or_else(PoisonError::into_inner);
            while *count == seen {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return false;
                }
                count = self.changed.bell.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}
