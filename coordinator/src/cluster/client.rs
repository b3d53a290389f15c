//! Talking to the coordinator that runs on a cluster directory, with its own certificate.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use shimmer_node::tls;
use shimmer_proto::v1;
use shimmer_proto::v1::admin_client::AdminClient;
use tonic::transport::Channel;

use super::admin::ClusterReport;
use super::state::ClusterState;
use super::{ClusterError, PlanReport};

/// Time for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for an answer: planning for a large model takes some seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to the running coordinator.
pub struct Coordinator {
    runtime: tokio::runtime::Runtime,
    client: AdminClient<Channel>,
    address: String,
}

impl Coordinator {
    /// Connects; `None` when no coordinator runs where the state says one listens.
    ///
    /// # Errors
    /// [`ClusterError`] when the state cannot be used.
    pub fn connect(state: &ClusterState) -> Result<Option<Self>, ClusterError> {
        let credentials = state.credentials()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| state.error("", format!("no network runtime can be started: {e}")))?;
        let address = reachable(state.running_at()).to_string();
        let connected = tls::connect(&credentials, &address, tls::COORDINATOR_NAME, CONNECT_TIMEOUT);
        match runtime.block_on(connected) {
            Ok(channel) => Ok(Some(Self { runtime, client: AdminClient::new(channel), address })),
            Err(why) => {
                tracing::debug!(address, why, "no coordinator answers");
                Ok(None)
            }
        }
    }

    /// Where it was reached.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What the coordinator says of its cluster.
    ///
    /// # Errors
    /// [`ClusterError::Node`] when it does not answer sensibly.
    pub fn report(&mut self) -> Result<ClusterReport, ClusterError> {
        let call = self.client.status(v1::StatusRequest {});
        let answered = self.runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, call).await });
        let reply = self.answer(answered)?;
        self.parse(&reply.json)
    }

    /// Has it change something; the sentence for people and, for a rebalance, the new plan.
    ///
    /// # Errors
    /// [`ClusterError::Node`] with its refusal.
    pub fn change(
        &mut self,
        change: v1::change_request::Change,
    ) -> Result<(String, Option<PlanReport>), ClusterError> {
        let call = self.client.change(v1::ChangeRequest { change: Some(change) });
        let answered = self.runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, call).await });
        let reply = self.answer(answered)?;
        let plan = if reply.json.is_empty() { None } else { Some(self.parse(&reply.json)?) };
        Ok((reply.sentence, plan))
    }

    fn answer<T>(
        &self,
        answered: Result<Result<tonic::Response<T>, tonic::Status>, tokio::time::error::Elapsed>,
    ) -> Result<T, ClusterError> {
        match answered {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(self.error(status.message().to_owned())),
            Err(_) => Err(self.error(format!("did not answer within {} s", ANSWER_TIMEOUT.as_secs()))),
        }
    }

    fn parse<T: serde::de::DeserializeOwned>(&self, json: &str) -> Result<T, ClusterError> {
        serde_json::from_str(json).map_err(|e| {
            self.error(format!("answered what this version does not understand ({e}); use the same version"))
        })
    }

    fn error(&self, what: String) -> ClusterError {
        ClusterError::Node { node: format!("the coordinator at {}", self.address), what }
    }
}

/// Where a listener on `listen` is reached from this machine.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_reached_on_this_machine() {
        let at = |text: &str| reachable(text.parse().unwrap()).to_string();
        assert_eq!(at("0.0.0.0:7420"), "127.0.0.1:7420");
        assert_eq!(at("[::]:7420"), "[::1]:7420");
        assert_eq!(at("192.168.1.7:7420"), "192.168.1.7:7420");
    }
}
