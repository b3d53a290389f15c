//! `shimmer chat`: a conversation in the terminal, with a local model or a server.

use std::path::PathBuf;

use clap::Args;

use super::answer::Limits;
use super::chat_session::{ChatSession, ChatSetup};
use super::error::CliError;
use super::http_client::Server;
use super::interrupt::Interrupt;
use super::model_args::{LimitArgs, ModelArgs};
use super::open;
use super::sampling_args::{SamplingArgs, ThinkArgs};
use crate::decode::DraftPolicy;

/// Arguments of `shimmer chat`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer chat --model /models/glm-5.2
  shimmer chat --url http://192.168.1.10:8000 --no-think

Type /help inside. Ctrl-C stops the answer, Ctrl-D ends the chat.")]
pub struct ChatArgs {
    /// Model directory; repeat it for a model spread over several disks
    #[arg(long, value_name = "DIR", conflicts_with = "url")]
    model: Vec<PathBuf>,

    /// Talk to this server instead of loading a model (http:// only)
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// File whose first line is the server's API key
    #[arg(long, value_name = "FILE", requires = "url")]
    api_key_file: Option<PathBuf>,

    /// Read expert records from this pack instead of the container
    #[arg(long, value_name = "DIR")]
    pack: Option<PathBuf>,

    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    #[command(flatten)]
    think: ThinkArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    limits: LimitArgs,
}

/// Runs the chat until its end.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ChatArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let setup = |limits| ChatSetup {
        sampling: args.sampling.clone(),
        limits,
        think: args.think.choice(),
        system: args.system.clone(),
        history: history_file(),
    };
    if let Some(url) = &args.url {
        let server = Server::parse(url, api_key(args)?)?;
        // The server knows its own limits.
        let limits = Limits {
            context_tokens: usize::MAX,
            stop_ids: Vec::new(),
            drafts: DraftPolicy::Auto,
            prefill_chunk: 0,
        };
        return ChatSession::remote(server, setup(limits), interrupt).run();
    }
    // Not a requirement for clap: the model may come from shimmer.toml, which is merged later.
    if args.model.is_empty() {
        return Err(CliError::Usage(
            "give --model DIR for a model here or --url http://host:port for a server".into(),
        ));
    }
    let model_args =
        ModelArgs { model: args.model.clone(), pack: args.pack.clone(), limits: args.limits.clone() };
    let loaded = open::load(&model_args)?;
    let engine = loaded.engine()?;
    let limits = super::run::limits(&loaded, &model_args);
    ChatSession::local(engine, loaded.text.clone(), setup(limits), interrupt).run()
}

fn api_key(args: &ChatArgs) -> Result<Option<String>, CliError> {
    let Some(path) = &args.api_key_file else { return Ok(None) };
    let text = std::fs::read_to_string(path)
        .map_err(|e| CliError::Usage(format!("cannot read the API key {}: {e}", path.display())))?;
    let key = text.lines().map(str::trim).find(|l| !l.is_empty() && !l.starts_with('#'));
    match key {
        Some(key) => Ok(Some(key.to_owned())),
        None => Err(CliError::Usage(format!("{} holds no API key", path.display()))),
    }
}

/// Where typed lines are kept between chats, following the XDG base directories.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let dir = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?.join("shimmer");
    // Without a directory there is no history, which is no reason not to chat.
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("chat_history"))
}
