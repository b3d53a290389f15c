//! Health, models, counters and the status page.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{Html, IntoResponse, Response};
use serde_json::{Value, json};

use super::Gateway;
use super::errors::{self, ApiError};
use crate::decode::{GenerateStats, Generation};

/// The page at `/`: one file, no external assets.
const PAGE: &str = include_str!("../../assets/status.html");

/// Counters since the server started.
pub struct Totals {
    since: Instant,
    requests: AtomicU64,
    finished: AtomicU64,
    sums: Mutex<Sums>,
}

/// Sums over the answered requests.
#[derive(Clone, Default)]
pub(super) struct Sums {
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generated_tokens: u64,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    last: Option<GenerateStats>,
}

impl Default for Totals {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            requests: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            sums: Mutex::default(),
        }
    }
}

impl Totals {
    /// A request went to the engine.
    pub fn started(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// A request was answered.
    pub fn finished(&self, generation: &Generation) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        let stats = &generation.stats;
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.prompt_tokens += stats.prompt_tokens as u64;
        sums.cached_tokens += stats.reused_tokens as u64;
        sums.generated_tokens += stats.generated_tokens as u64;
        sums.drafted += stats.drafted as u64;
        sums.accepted += stats.accepted as u64;
        sums.last = Some(stats.clone());
    }

    pub(super) fn counts(&self) -> Sums {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn json(&self) -> Value {
        let sums = self.counts();
        let last = sums.last.as_ref().map(|s| {
            let per_s = if s.decode_s > 0.0 { s.generated_tokens as f64 / s.decode_s } else { 0.0 };
            json!({
                "prompt_tokens": s.prompt_tokens,
                "generated_tokens": s.generated_tokens,
                "tokens_per_s": per_s,
                "prefill_s": s.prefill_s,
                "drafted": s.drafted,
                "accepted": s.accepted,
                "draft_choice": s.drafting,
                "time": s.time,
            })
        });
        json!({
            "uptime_s": self.since.elapsed().as_secs(),
            "requests": self.requests.load(Ordering::Relaxed),
            "answered": self.finished.load(Ordering::Relaxed),
            "prompt_tokens": sums.prompt_tokens,
            "cached_tokens": sums.cached_tokens,
            "generated_tokens": sums.generated_tokens,
            "drafted": sums.drafted,
            "accepted": sums.accepted,
            "last": last,
        })
    }
}

/// `GET /health`: public, without details.
pub async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

fn model_json(gateway: &Gateway) -> Value {
    let config = &gateway.config;
    json!({
        "id": config.model_id,
        "object": "model",
        "created": config.created,
        "owned_by": "shimmer",
        "context_length": config.context_tokens,
        "max_model_len": config.context_tokens,
        "capabilities": ["chat", "tools", "reasoning"],
        "architecture": { "input_modalities": ["text"], "output_modalities": ["text"] },
    })
}

/// `GET /v1/models`.
pub async fn models(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_json(&gateway)] }))
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// 404.
pub async fn model(
    State(gateway): State<Arc<Gateway>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id == gateway.config.model_id {
        return Ok(Json(model_json(&gateway)));
    }
    Err(errors::model_not_found(&id.into(), &gateway.config.model_id))
}

/// `GET /status`: what the page shows.
pub async fn status(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let text = &gateway.engine.engine().text;
    let thinking = gateway.config.thinking.unwrap_or_else(|| text.thinking_default());
    let experts = {
        let gateway = gateway.clone();
        // Node counters sit behind the cluster's locks.
        tokio::task::spawn_blocking(move || (gateway.config.experts)()).await.unwrap_or(Value::Null)
    };
    Json(json!({
        "model": model_json(&gateway),
        "facts": gateway.config.facts,
        "thinking": { "default": thinking, "switchable": text.thinking_switchable() },
        "queue": { "running": gateway.engine.is_running(), "waiting": gateway.engine.waiting() },
        "totals": gateway.totals.json(),
        "experts": experts,
    }))
}

/// `GET /`.
pub async fn page() -> Response {
    Html(PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::FinishReason;

    #[test]
    fn totals_add_up() {
        let totals = Totals::default();
        let stats = GenerateStats {
            prompt_tokens: 7,
            generated_tokens: 4,
            decode_s: 2.0,
            ..GenerateStats::default()
        };
        let generation =
            Generation { ids: Vec::new(), text: String::new(), finish: FinishReason::Length, stats };
        totals.started();
        totals.finished(&generation);
        totals.finished(&generation);
        let json = totals.json();
        assert_eq!((json["requests"].as_u64(), json["answered"].as_u64()), (Some(1), Some(2)));
        assert_eq!(json["prompt_tokens"], 14);
        assert_eq!(json["last"]["tokens_per_s"], 2.0);
    }

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
        assert!(PAGE.contains("status"));
        assert!(!PAGE.contains("http://") && !PAGE.contains("https://"), "the page must stand alone");
    }
}
