//! The members that may fetch records from this node, as the coordinator named them.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ids of members.
#[derive(Debug, Default)]
pub(crate) struct Roster(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    members: BTreeSet<String>,
    revoked: BTreeSet<String>,
}

impl Roster {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what a registration was answered.
    pub(crate) fn set(&self, members: impl IntoIterator<Item = String>) {
        let mut lists = self.lock();
        lists.members = members.into_iter().filter(|id| !lists.revoked.contains(id)).collect();
    }

    /// Forgets members for good; gives back those that are newly revoked.
    pub(crate) fn revoke(&self, ids: &[String]) -> Vec<String> {
        let mut lists = self.lock();
        let new: Vec<String> = ids.iter().filter(|id| lists.revoked.insert((*id).clone())).cloned().collect();
        new.iter().for_each(|id| {
            lists.members.remove(id);
        });
        new
    }

    /// Whether `id` may fetch records here.
    pub(crate) fn contains(&self, id: &str) -> bool {
        self.lock().members.contains(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revoked_member_never_returns() {
        let roster = Roster::default();
        roster.set(["a".to_owned(), "b".to_owned()]);
        assert!(roster.contains("a") && !roster.contains("c"));
        assert_eq!(roster.revoke(&["a".to_owned()]), ["a"]);
        assert!(roster.revoke(&["a".to_owned()]).is_empty(), "said once");
        // A registration answered before the revocation may arrive after it.
        roster.set(["a".to_owned(), "b".to_owned()]);
        assert!(!roster.contains("a") && roster.contains("b"));
    }
}
