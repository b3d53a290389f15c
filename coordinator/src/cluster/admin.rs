//! The coordinator's `Admin` service: what the command line on its machine asks and orders.
//!
//! Only the coordinator's own certificate may call it: whoever can read the cluster directory is its owner.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shimmer_common::experts::{ExpertId, ExpertSource};
use shimmer_node::tls;
use shimmer_proto::v1;
use shimmer_proto::v1::admin_server::Admin;
use tonic::{Request, Response, Status};

use super::membership::Membership;
use super::placement::PlanReport;
use super::planner::Planner;
use super::service::{blocking, internal};
use super::state::ClusterState;
use super::{ClusterError, NodeStatus};

/// What a running coordinator says of its cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterReport {
    /// Every known node.
    pub nodes: Vec<NodeStatus>,
    /// What the planner said last; absent before anybody could be planned for.
    pub plan: Option<PlanReport>,
}

/// The service.
#[derive(Clone)]
pub(super) struct AdminService {
    pub(super) state: ClusterState,
    pub(super) membership: Arc<Membership>,
    pub(super) planner: Arc<Planner>,
    /// What this machine can compute when nobody else does.
    pub(super) local: Option<Arc<dyn ExpertSource>>,
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn status(&self, request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        only_ourselves(&request)?;
        let service = self.clone();
        // It waits for a plan that is being made.
        blocking(move || {
            let json = serde_json::to_string(&service.report()).map_err(|e| internal(&e))?;
            Ok(Response::new(v1::StatusReply { json }))
        })
        .await
    }

    async fn change(&self, request: Request<v1::ChangeRequest>) -> Result<Response<v1::ChangeReply>, Status> {
        only_ourselves(&request)?;
        let service = self.clone();
        let change = request.into_inner().change;
        let change = change.ok_or_else(|| Status::invalid_argument("the request asks for nothing"))?;
        blocking(move || service.change_now(change)).await.map(Response::new)
    }
}

fn only_ourselves<T>(request: &Request<T>) -> Result<(), Status> {
    if tls::peer_names(request).iter().any(|name| name == tls::COORDINATOR_NAME) {
        return Ok(());
    }
    Err(Status::permission_denied("only the owner of the cluster directory may ask this"))
}

impl AdminService {
    /// Everything there is to show.
    pub(super) fn report(&self) -> ClusterReport {
        ClusterReport { nodes: self.membership.statuses(), plan: self.planner.report() }
    }

    fn change_now(&self, change: v1::change_request::Change) -> Result<v1::ChangeReply, Status> {
        use v1::change_request::Change;
        match change {
            Change::Drain(which) => {
                let member = self.state.set_drained(&which, true).map_err(refusal)?;
                self.planner.review().map_err(refusal)?;
                let left = self.held_only_by(&member.id);
                Ok(say(format!(
                    "{} will own nothing; it serves until others have its experts ({left} are on it alone)",
                    member.name
                )))
            }
            Change::Resume(which) => {
                let member = self.state.set_drained(&which, false).map_err(refusal)?;
                self.planner.review().map_err(refusal)?;
                Ok(say(format!("{} takes part again", member.name)))
            }
            Change::Remove(which) => self.remove(&which),
            Change::Revoke(which) => {
                let member = self.state.revoke(&which).map_err(refusal)?;
                self.membership.revoke(&member.id);
                self.planner.review().map_err(refusal)?;
                Ok(say(format!("{} is not accepted any more", member.name)))
            }
            Change::Rebalance(v1::Rebalance { dry_run }) => {
                let (report, moved) = self.planner.rebalance(dry_run).map_err(refusal)?;
                let verb = if dry_run { "would change" } else { "change" };
                let json = serde_json::to_string(&report).map_err(|e| internal(&e))?;
                Ok(v1::ChangeReply { sentence: format!("{moved} experts {verb} their owner"), json })
            }
        }
    }

    /// Forgets a node that nobody needs any more.
    fn remove(&self, which: &str) -> Result<v1::ChangeReply, Status> {
        let member = self.state.set_drained(which, true).map_err(refusal)?;
        self.planner.review().map_err(refusal)?;
        let left = self.held_only_by(&member.id);
        if left > 0 {
            return Err(Status::failed_precondition(format!(
                "{left} experts are on {} alone; others are fetching them, remove it again in a while, or revoke it now",
                member.name
            )));
        }
        self.state.forget(&member.id).map_err(refusal)?;
        self.membership.remove(&member.id);
        Ok(say(format!("{} is forgotten; it can join again with a new token", member.name)))
    }

    /// Experts that a node holds and nobody else could compute.
    fn held_only_by(&self, id: &str) -> usize {
        let nodes = self.membership.all();
        let Some(node) = nodes.iter().find(|n| n.id == id) else { return 0 };
        let elsewhere = |expert: ExpertId| {
            self.local.as_ref().is_some_and(|local| local.contains(expert))
                || nodes.iter().any(|other| other.id != id && other.is_connected() && other.held(expert))
        };
        self.membership.layout().ids().filter(|&expert| node.held(expert) && !elsewhere(expert)).count()
    }
}

fn say(sentence: String) -> v1::ChangeReply {
    v1::ChangeReply { sentence, json: String::new() }
}

/// A change the state does not allow.
fn refusal(error: ClusterError) -> Status {
    Status::failed_precondition(error.to_string())
}
