//! `quantization_config`: matters for Hugging Face checkpoints only (docs/formats.md §1, docs/model.md §11).

use serde_json::{Value, json};

use super::fields::Fields;

/// Refuses any quantisation of an unconverted checkpoint but FP8 e4m3 in blocks of 128×128.
///
/// # Errors
/// One sentence naming the key, its value and what is supported.
pub(crate) fn check_quantization(json: &[u8]) -> Result<(), String> {
    let root: Value = serde_json::from_slice(json).map_err(|e| format!("not valid JSON: {e}"))?;
    let Value::Object(map) = &root else { return Err("not a JSON object".into()) };
    let Some(q) = Fields::new(map).object("quantization_config", "quantization_config.")? else {
        return Ok(());
    };
    q.required_str("quant_method")?;
    q.only("quant_method", &"fp8".into())?;
    q.only("fmt", &"e4m3".into())?;
    if q.get("weight_block_size").is_none() {
        return Err(q.refuse("weight_block_size", "[128,128]"));
    }
    q.only("weight_block_size", &json!([128, 128]))
}
