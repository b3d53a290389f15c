//! The OpenAI error envelope: every error has message, type, param and code.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::decode::{DecodeError, SubmitError};
use crate::model::ModelError;

/// Longest offending value repeated in a message, in characters.
const MAX_VALUE_CHARS: usize = 64;

/// An error as clients see it.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// `invalid_request_error`, `server_error`, …
    pub kind: &'static str,
    /// Machine-readable code.
    pub code: &'static str,
    /// Dotted path of the parameter at fault.
    pub param: Option<String>,
    /// One sentence.
    pub message: String,
    /// Seconds after which a retry makes sense.
    pub retry_after_s: Option<u32>,
    /// Further members of the `error` object.
    pub extra: Vec<(&'static str, Value)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after_s: None,
            extra: Vec::new(),
        }
    }

    /// 400 with a code.
    pub fn bad_request(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message);
        Self { param: Some(param.into()), ..error }
    }

    /// The envelope.
    pub fn body(&self) -> Value {
        let mut error =
            json!({ "message": self.message, "type": self.kind, "param": self.param, "code": self.code });
        for (name, value) in &self.extra {
            error[*name] = value.clone();
        }
        json!({ "error": error })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // A retry of a broken request breaks again.
            StatusCode::INTERNAL_SERVER_ERROR => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
            // The rest of the body, if it ever comes, must not be read as the next request.
            StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::UNSUPPORTED_MEDIA_TYPE => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

/// A value for a message, shortened.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// 400: the body is not JSON.
pub fn invalid_json(why: &str) -> ApiError {
    let message = format!("the body is not a JSON object: {why}");
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_json", message)
}

/// 400: a parameter has the wrong JSON type.
pub fn invalid_type(param: &str, value: &Value, expected: &str) -> ApiError {
    ApiError::bad_request(
        "invalid_type",
        param,
        format!("{param} is {}; it must be {expected}", shown(value)),
    )
}

/// 400: a parameter is out of range.
pub fn invalid_value(param: &str, value: &Value, expected: &str) -> ApiError {
    ApiError::bad_request(
        "invalid_value",
        param,
        format!("{param} is {}; it must be {expected}", shown(value)),
    )
}

/// 400: a parameter whose meaning cannot be honoured.
pub fn unsupported(param: &str, value: &Value) -> ApiError {
    let message = format!("{param} = {} is not supported by this server; leave it out", shown(value));
    ApiError::bad_request("unsupported_parameter", param, message)
}

/// 400: the prompt does not fit.
pub fn context_exceeded(limit: usize, prompt_tokens: usize, max_tokens: Option<usize>) -> ApiError {
    let wanted = max_tokens.map_or(String::new(), |n| format!(" ({n} tokens of output were requested)"));
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt_tokens} \
         tokens{wanted}. Please reduce the length of the messages."
    );
    let mut error = ApiError::bad_request("context_length_exceeded", "messages", message);
    error.extra = vec![("n_prompt_tokens", prompt_tokens.into()), ("n_ctx", limit.into())];
    error
}

/// 401.
pub fn invalid_api_key() -> ApiError {
    let message = "no valid API key was given; send it as Authorization: Bearer KEY";
    ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
}

/// 403.
pub fn origin_not_allowed(origin: &str) -> ApiError {
    let message = format!("requests from the web origin {} are not allowed", shown(&origin.into()));
    ApiError::new(StatusCode::FORBIDDEN, "permission_error", "origin_not_allowed", message)
}

/// 403: a host name that may be a web site's.
pub fn host_not_allowed(host: &str) -> ApiError {
    let message = format!(
        "requests for the host {} are not allowed; use the address, or start the server with --allowed-host NAME",
        shown(&host.into())
    );
    ApiError::new(StatusCode::FORBIDDEN, "permission_error", "host_not_allowed", message)
}

/// 404: unknown path.
pub fn unknown_url(path: &str) -> ApiError {
    let message = format!("there is nothing at {}", shown(&path.into()));
    ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", "unknown_url", message)
}

/// 404: unknown model.
pub fn model_not_found(wanted: &Value, served: &str) -> ApiError {
    let message = format!("the model {} is not served here; use {served}", shown(wanted));
    let error = ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message);
    ApiError { param: Some("model".into()), ..error }
}

/// 405.
pub fn method_not_allowed(method: &str, path: &str) -> ApiError {
    let message = format!("{method} is not possible at {}", shown(&path.into()));
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
}

/// 413.
pub fn request_too_large(limit: usize) -> ApiError {
    let message = format!("the body is larger than {limit} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "request_too_large", message)
}

/// 408: the body did not arrive in time.
pub fn request_timeout(seconds: u64) -> ApiError {
    let message = format!("the body did not arrive within {seconds} seconds");
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "request_timeout", message)
}

/// 415: a compressed body.
pub fn unsupported_encoding(encoding: &str) -> ApiError {
    let message = format!("the body has the encoding {}; send it uncompressed", shown(&encoding.into()));
    ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "invalid_request_error",
        "unsupported_encoding",
        message,
    )
}

/// 429 when the queue is full, 503 when the server stops.
impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        let (status, kind, code, seconds) = match error {
            SubmitError::QueueFull { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", 30)
            }
            SubmitError::Stopped => (StatusCode::SERVICE_UNAVAILABLE, "server_error", "shutting_down", 10),
        };
        Self { retry_after_s: Some(seconds), ..Self::new(status, kind, code, message) }
    }
}

/// Failures of a running generation.
impl From<DecodeError> for ApiError {
    fn from(error: DecodeError) -> Self {
        let message = error.to_string();
        match error {
            DecodeError::Model(ModelError::Expert(_)) => {
                let base =
                    Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "cluster_degraded", message);
                Self { retry_after_s: Some(30), ..base }
            }
            DecodeError::BadSampling { field, .. } => Self::bad_request("invalid_value", field, message),
            DecodeError::EmptyPrompt => Self::bad_request("invalid_value", "messages", message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "engine_error", message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_envelope_always_has_four_members() {
        let body = invalid_json("eof").body();
        for member in ["message", "type", "param", "code"] {
            assert!(body["error"].get(member).is_some(), "{member}");
        }
        assert_eq!(body["error"]["param"], Value::Null);
    }

    #[test]
    fn long_values_are_shortened() {
        let error = invalid_value("stop", &Value::from("ä".repeat(500)), "shorter");
        assert!(error.message.chars().count() < 120, "{}", error.message);
    }

    #[test]
    fn context_errors_carry_numbers() {
        let body = context_exceeded(4096, 5000, Some(10)).body();
        assert_eq!(body["error"]["n_ctx"], 4096);
        assert!(body["error"]["message"].as_str().unwrap().contains("maximum context length is 4096 tokens"));
    }
}
