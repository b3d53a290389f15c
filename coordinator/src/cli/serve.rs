//! `shimmer serve`: the HTTP gateway and the status page.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Value, json};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::ModelArgs;
use super::open::{self, Loaded};
use super::output;
use super::sampling_args::{ThinkArgs, describe_thinking};
use crate::decode::EngineHandle;
use crate::gateway::{self, ApiKeys, Gateway, GatewayConfig, SamplingDefaults, Totals};
use shimmer_common::size::Size;

/// How long running answers may take after the server was asked to stop.
const DRAIN: Duration = Duration::from_secs(30);

/// Arguments of `shimmer serve`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer serve --model /models/glm-5.2
  shimmer serve --model /models/glm-5.2 --host 0.0.0.0 --api-key-file keys.txt --no-think
  curl http://127.0.0.1:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

Endpoints: /v1/models, /v1/chat/completions, /health, /status, /metrics and a page at /.")]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// IP address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    host: IpAddr,

    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,

    /// File with accepted API keys, one a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Serve beyond this machine without keys
    #[arg(long)]
    insecure_no_auth: bool,

    /// Name under which clients reach this server, such as mypc.local, when no API keys guard it; repeatable
    #[arg(long = "allowed-host", value_name = "NAME")]
    allowed_hosts: Vec<String>,

    /// Name of the model in the API [default: the directory's name]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,

    #[command(flatten)]
    think: ThinkArgs,

    /// Largest request body
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    max_body: Size,

    /// Print the bound address as a JSON line on stdout
    #[arg(long)]
    json: bool,
}

/// Runs the server until Ctrl-C or SIGTERM.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &ServeArgs) -> Result<(), CliError> {
    let api_keys = api_keys(args)?;
    let address = SocketAddr::new(args.host, args.port);
    // Bound before the model is loaded: a taken port fails at once.
    let listener = std::net::TcpListener::bind(address)
        .map_err(|e| CliError::Failed(format!("cannot listen on {address}: {e}; choose another --port")))?;
    let bound = listener.local_addr().map_err(|e| CliError::io("cannot read the bound address", &e))?;
    let interrupt = Interrupt::install();
    let loaded = Arc::new(open::load(&args.model)?);
    let engine = loaded.engine()?;
    let config = config(args, &loaded, api_keys)?;
    if args.json {
        output::emit_json_line(&json!({ "address": bound.to_string(), "model": config.model_id }))?;
    }
    output::note(&describe_thinking(&loaded.text, args.think.choice()));
    output::note(&format!("serving {} at http://{bound}/ (API at http://{bound}/v1)", config.model_id));
    let gateway = Arc::new(Gateway {
        config,
        engine: engine.clone(),
        totals: Totals::default(),
        preparing: tokio::sync::Semaphore::new(gateway::PREPARED_AT_A_TIME),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| CliError::io("cannot start the network runtime", &e))?;
    let served = runtime.block_on(serve(gateway, listener, interrupt.clone(), engine));
    // Tasks of clients that do not read any more are not waited for.
    runtime.shutdown_background();
    served?;
    if interrupt.terminated() { Ok(()) } else { Err(CliError::Interrupted) }
}

async fn serve(
    gateway: Arc<Gateway>,
    listener: std::net::TcpListener,
    interrupt: Interrupt,
    engine: EngineHandle,
) -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::io("the server failed", &e);
    listener.set_nonblocking(true).map_err(failed)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
    let asked = interrupt.clone();
    let server = gateway::serve(gateway, listener, async move { asked.wait().await });
    tokio::select! {
        () = server => Ok(()),
        () = async {
            interrupt.wait().await;
            output::note("finishing the running answers; press Ctrl-C again to stop at once");
            tokio::time::sleep(DRAIN).await;
        } => {
            engine.stop();
            Ok(())
        }
    }
}

fn api_keys(args: &ServeArgs) -> Result<ApiKeys, CliError> {
    let keys = match &args.api_key_file {
        None => ApiKeys::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|e| CliError::Usage(format!("cannot read the API keys {}: {e}", path.display())))?;
            let keys = ApiKeys::from_lines(&text);
            if keys.is_empty() {
                return Err(CliError::Usage(format!(
                    "{} holds no API key; write one a line",
                    path.display()
                )));
            }
            keys
        }
    };
    if keys.is_empty() && !args.host.is_loopback() && !args.insecure_no_auth {
        return Err(CliError::Usage(format!(
            "serving on {} without API keys would let everybody in; give --api-key-file FILE or --insecure-no-auth",
            args.host
        )));
    }
    if args.insecure_no_auth && !args.host.is_loopback() && keys.is_empty() {
        output::note("warning: everybody who reaches this machine may use the model (--insecure-no-auth)");
    }
    Ok(keys)
}

fn config(args: &ServeArgs, loaded: &Arc<Loaded>, api_keys: ApiKeys) -> Result<GatewayConfig, CliError> {
    let text = &loaded.text;
    let fingerprint = loaded.container.fingerprint()?.to_string();
    let name = args.served_model_name.clone().or_else(|| directory_name(loaded.container.dir()));
    let (counts, metrics) = (loaded.clone(), loaded.clone());
    Ok(GatewayConfig {
        model_id: name.unwrap_or_else(|| loaded.model.info().family.to_owned()),
        system_fingerprint: format!("fp_{}", fingerprint.get(..12).unwrap_or(&fingerprint)),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        context_tokens: loaded.memory.context_tokens,
        stop_ids: text.stop_ids(loaded.container.config().eos_token_ids()),
        sampling: SamplingDefaults {
            temperature: text.default_temperature().unwrap_or(1.0),
            top_p: text.default_top_p().unwrap_or(1.0),
            top_k: text.default_top_k().unwrap_or(0),
            min_p: 0.0,
        },
        thinking: args.think.choice(),
        drafts: args.model.limits.draft.0,
        prefill_chunk: loaded.memory.step_rows,
        api_keys,
        allowed_hosts: args.allowed_hosts.clone(),
        max_body_bytes: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        facts: facts(loaded),
        experts: Box::new(move || experts(&counts)),
        metrics: Box::new(move || metrics.metrics()),
    })
}

/// What `/status` says about experts: who computed how many and, as `cluster`, everything known of it.
fn experts(loaded: &Loaded) -> Value {
    let mut experts = serde_json::to_value(loaded.served()).unwrap_or(Value::Null);
    if let (Value::Object(fields), Some(cluster)) = (&mut experts, &loaded.cluster) {
        fields.insert("cluster".to_owned(), serde_json::to_value(cluster.report()).unwrap_or(Value::Null));
    }
    experts
}

fn directory_name(dir: &std::path::Path) -> Option<String> {
    let full = dir.canonicalize().ok()?;
    Some(full.file_name()?.to_string_lossy().into_owned())
}

/// What the status page says about model and machine.
fn facts(loaded: &Loaded) -> Value {
    let info = loaded.model.info();
    let memory = &loaded.memory;
    json!({
        "family": info.family,
        "formats": loaded.container.summary().line,
        "layers": info.num_layers,
        "drafts by MTP": if info.has_mtp { "yes" } else { "no" },
        "instruction set": super::isa_name(loaded.isa),
        "compute threads": loaded.pool.current_num_threads(),
        "dense part": Size(memory.dense_bytes).to_string(),
        "experts in RAM": format!("{} of {}", Size(memory.expert_bytes), Size(memory.all_experts_bytes)),
        "version": super::version(),
    })
}
