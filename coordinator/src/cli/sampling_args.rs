//! Flags about the answer: how tokens are drawn and when to stop.

use clap::Args;

use super::error::CliError;
use super::model_args::parse_positive;
use crate::decode::SamplingParams;
use crate::text::TextModel;

/// Sampling flags; what is absent comes from the model's `generation_config.json`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 = always the most probable token [default: the model's]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub temperature: Option<f64>,

    /// Keep the most probable tokens up to this mass [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f64>,

    /// Keep this many tokens, 0 = all [default: the model's]
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,

    /// Keep tokens at least this many times as probable as the best
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f64>,

    /// Seed; the same seed gives the same answer on any topology [default: random]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Always the most probable token
    #[arg(long)]
    pub greedy: bool,

    /// Most tokens to generate [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub max_tokens: Option<usize>,

    /// Text that ends the answer; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

/// `--think` and `--no-think`.
#[derive(Args, Clone, Debug, Default)]
pub struct ThinkArgs {
    /// Let the model think before it answers [default: the model's]
    #[arg(long, overrides_with = "no_think")]
    pub think: bool,

    /// Answer without thinking
    #[arg(long)]
    pub no_think: bool,
}

impl ThinkArgs {
    /// The explicit choice, if there is one.
    pub fn choice(&self) -> Option<bool> {
        match (self.think, self.no_think) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }
}

/// "on" or "off".
pub fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// One line for people: whether the model thinks before it answers, and who said so.
pub fn describe_thinking(text: &TextModel, choice: Option<bool>) -> String {
    let default = on_off(text.thinking_default());
    match choice {
        _ if !text.thinking_switchable() => format!("thinking: {default} (this model cannot switch it)"),
        Some(on) => format!("thinking: {} (the model's default: {default})", on_off(on)),
        None => format!("thinking: {default} (the model's default)"),
    }
}

impl SamplingArgs {
    /// The parameters: flags over the model's defaults over "temperature 1, everything else off".
    ///
    /// # Errors
    /// [`CliError::Usage`] for values out of range.
    pub fn params(&self, text: &TextModel) -> Result<SamplingParams, CliError> {
        let temperature =
            if self.greedy { 0.0 } else { self.temperature.or(text.default_temperature()).unwrap_or(1.0) };
        let params = SamplingParams {
            temperature,
            top_k: self.top_k.or(text.default_top_k()).unwrap_or(0),
            top_p: self.top_p.or(text.default_top_p()).unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            seed: match self.seed {
                Some(seed) => seed,
                None => random_seed()?,
            },
        };
        params.validate().map_err(|e| CliError::Usage(e.to_string()))?;
        if let Some(empty) = self.stop.iter().find(|s| s.is_empty()) {
            return Err(CliError::Usage(format!(
                "--stop {empty:?} is empty; give the text that ends the answer"
            )));
        }
        Ok(params)
    }
}

/// A seed nobody chose.
///
/// # Errors
/// [`CliError::Failed`] when the system has no randomness.
pub fn random_seed() -> Result<u64, CliError> {
    getrandom::u64()
        .map_err(|e| CliError::Failed(format!("no random seed from the system: {e}; give --seed")))
}
