//! The HTTP gateway: OpenAI-compatible endpoints over the engine handle; knows nothing of tensors.
//!
//! Rooms: `connections` (the accept loop), [`errors`] (the error envelope), `guard` (keys, hosts and origins), `body` (JSON as clients really
//! send it), `chat_request` (fields and their ranges), `chat` (the endpoint), `sse` (frames and
//! keep-alives), `status` (health, counters, the page), `metrics`.
//!
//! Everything a client can do wrong is answered before the engine sees the request, so that a stream
//! once started fails only for reasons of the engine.

mod body;
mod chat;
mod chat_request;
mod connections;
mod errors;
mod guard;
mod metrics;
mod sse;
mod status;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::Uri;
use axum::routing::{get, post};
use serde_json::Value;

pub use errors::ApiError;
pub use guard::ApiKeys;
pub use metrics::{ExpertMetrics, NodeState};
pub use status::Totals;

use crate::decode::{DraftPolicy, EngineHandle};

/// What the operator decided.
pub struct GatewayConfig {
    /// Name the model is served under.
    pub model_id: String,
    /// Changes when weights, quantisation or build change.
    pub system_fingerprint: String,
    /// Seconds since 1970 at which the model was loaded.
    pub created: u64,
    /// Longest conversation in tokens.
    pub context_tokens: usize,
    /// Stop ids of the model.
    pub stop_ids: Vec<u32>,
    /// Sampling where a request says nothing.
    pub sampling: SamplingDefaults,
    /// Thinking where a request says nothing; `None` follows the template.
    pub thinking: Option<bool>,
    /// Drafting.
    pub drafts: DraftPolicy,
    /// Rows per prefill step.
    pub prefill_chunk: usize,
    /// Accepted keys; empty = everybody.
    pub api_keys: ApiKeys,
    /// Names this server may be called by besides addresses and `localhost`; `*` = any.
    pub allowed_hosts: Vec<String>,
    /// Most bytes of a request body.
    pub max_body_bytes: usize,
    /// Facts for the status page that do not change: machine, memory, model.
    pub facts: Value,
    /// Experts served per place, for the status page.
    pub experts: Box<dyn Fn() -> Value + Send + Sync>,
    /// Times and counts of experts, for `/metrics`.
    pub metrics: Box<dyn Fn() -> ExpertMetrics + Send + Sync>,
}

/// Sampling parameters a request may leave out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 = argmax.
    pub temperature: f64,
    /// 1 = off.
    pub top_p: f64,
    /// 0 = off.
    pub top_k: usize,
    /// 0 = off.
    pub min_p: f64,
}

/// What every handler sees.
pub struct Gateway {
    /// The operator's choices.
    pub config: GatewayConfig,
    /// The engine.
    pub engine: EngineHandle,
    /// Counters since the start.
    pub totals: Totals,
    /// Bounds the requests that are parsed and rendered at a time: parsed JSON takes many times its bytes.
    pub preparing: tokio::sync::Semaphore,
}

/// Requests parsed and rendered at a time.
pub const PREPARED_AT_A_TIME: usize = 4;

/// The routes over one gateway.
pub fn router(gateway: Arc<Gateway>) -> Router {
    let limit = DefaultBodyLimit::max(gateway.config.max_body_bytes);
    let api = Router::new()
        .route("/models", get(status::models))
        .route("/models/{*id}", get(status::model))
        .route("/chat/completions", post(chat::completions));
    Router::new()
        .nest("/v1", api.clone())
        .merge(api)
        .route("/status", get(status::status))
        .route("/metrics", get(metrics::metrics))
        .route("/", get(status::page))
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), guard::check))
        .route("/health", get(status::health))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(limit)
        .with_state(gateway)
}

async fn not_found(uri: Uri) -> ApiError {
    errors::unknown_url(uri.path())
}

async fn wrong_method(method: axum::http::Method, uri: Uri) -> ApiError {
    errors::method_not_allowed(method.as_str(), uri.path())
}

/// Serves on a bound listener until `shutdown` is done and the running answers are finished.
pub async fn serve(
    gateway: Arc<Gateway>,
    listener: tokio::net::TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    connections::serve(router(gateway), listener, connections::Limits::default(), shutdown).await;
}
