//! The command line of `shimmer-node`, also reached as `shimmer node`.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::{Args, Parser, Subcommand, ValueEnum};
use shimmer_common::experts::pack::Pack;
use shimmer_common::kernels::Kernels;
use shimmer_common::size::Size;

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::fetch::progress::SyncReport;
use crate::files::FileLock;
use crate::join::{JoinOptions, join};
use crate::run::run;

const AFTER_HELP: &str = "\
Examples:
  shimmer-node join shimmer1-… --data ~/.local/share/shimmer-node
  shimmer-node join shimmer1-… --data /srv/shimmer --ram 24GiB --pack /mnt/usb/pack
  shimmer-node start --data /srv/shimmer

Exit codes: 0 done, 1 failed, 2 bad usage, 3 data damaged or unsupported, 4 coordinator cannot be
reached, 130 interrupted.";

/// Version and the instruction set found on this CPU.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} ({})", env!("CARGO_PKG_VERSION"), Kernels::best().isa()));

/// Lends a PC's memory and disk to a Shimmer cluster.
#[derive(Parser)]
#[command(name = "shimmer-node", version = VERSION.as_str(), after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Form of the log on stderr (RUST_LOG chooses what is logged)
    #[arg(long, global = true, value_enum, default_value = "text", env = "SHIMMER_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Join a cluster, fetch this PC's share of the experts and serve it
    Join(Box<JoinArgs>),
    /// Serve again after a join
    Start(DataArgs),
    /// Show what is in the data directory
    Status(StatusArgs),
}

#[derive(Args)]
struct DataArgs {
    /// Data directory of this node
    #[arg(long, value_name = "DIR", env = "SHIMMER_NODE_DATA")]
    data: PathBuf,
}

#[derive(Args)]
struct StatusArgs {
    #[command(flatten)]
    data: DataArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct JoinArgs {
    /// Token printed by `shimmer cluster invite`
    token: String,
    #[command(flatten)]
    data: DataArgs,
    /// Address to serve on; port 0 takes any free port
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7421")]
    listen: SocketAddr,
    /// Address the coordinator should dial instead of the one this PC's calls come from; repeatable
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Vec<String>,
    /// Name shown in messages and status [default: the host name]
    #[arg(long)]
    name: Option<String>,
    /// RAM for experts, such as 24GiB [default: most of what is free]
    #[arg(long, value_name = "SIZE", value_parser = clap::value_parser!(Size))]
    ram: Option<Size>,
    /// Instruction set: auto, portable, avx2 or avx512
    #[arg(long, default_value = "auto")]
    isa: String,
    /// Compute threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Serve this expert pack (made by `shimmer pack`) instead of fetching records
    #[arg(long, value_name = "DIR")]
    pack: Option<PathBuf>,
    /// Network interface the coordinator should reach this PC at, such as eth0
    #[arg(long, value_name = "NAME", conflicts_with = "advertise")]
    interface: Option<String>,
    /// Use only the token's addresses: do not look for the coordinator by multicast DNS
    #[arg(long)]
    no_discovery: bool,
    /// Model directory or expert pack already on this PC: its experts are served from there instead of
    /// being fetched; repeatable
    #[arg(long, value_name = "DIR", conflicts_with = "pack")]
    adopt: Vec<PathBuf>,
    /// Join only; `shimmer-node start` serves later
    #[arg(long)]
    no_start: bool,
}

/// Parses the process's arguments and runs the command.
pub fn main() -> ExitCode {
    main_with(std::env::args_os())
}

/// As [`main`] with given arguments; the first is the program's name.
pub fn main_with(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are not failures.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    start_logging(cli.log_format);
    let done = match cli.command {
        Command::Join(args) => join_and_run(*args),
        Command::Start(args) => NodeConfig::load(&args.data)
            .and_then(|config| bind(config.settings.listen).and_then(|listener| start(config, listener))),
        Command::Status(args) => status(&args).map(|()| Ended::Done),
    };
    match done {
        Ok(Ended::Done) => ExitCode::SUCCESS,
        Ok(Ended::Interrupted) => ExitCode::from(130),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// How a command ended.
enum Ended {
    Done,
    Interrupted,
}

fn start_logging(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let ansi = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    // A second subscriber in one process (a test) is refused; the first goes on.
    let _ = match format {
        LogFormat::Text => log.with_target(false).try_init(),
        LogFormat::Json => log.json().try_init(),
    };
}

fn join_and_run(args: JoinArgs) -> Result<Ended, NodeError> {
    let options = JoinOptions {
        name: args.name.unwrap_or_else(host_name),
        listen: args.listen,
        advertise: args.advertise,
        ram_bytes: args.ram.map(|size| size.0),
        isa: Some(args.isa),
        threads: args.threads,
        discovery: !args.no_discovery,
        interface: args.interface,
        pack: args.pack.map(absolute),
        adopt: args.adopt.into_iter().map(absolute).collect(),
    };
    // Bound before the token is used up: a taken port leaves nothing behind.
    let listener = if args.no_start { None } else { Some(bind(args.listen)?) };
    let config = join(&args.token, &args.data.data, options)?;
    tracing::info!(node = config.settings.name, id = config.settings.id, "joined");
    listener.map_or(Ok(Ended::Done), |listener| start(config, listener))
}

/// The path as a later start from elsewhere finds it.
fn absolute(dir: PathBuf) -> PathBuf {
    std::path::absolute(&dir).unwrap_or(dir)
}

fn bind(address: SocketAddr) -> Result<TcpListener, NodeError> {
    TcpListener::bind(address).map_err(|source| NodeError::Listen { address: address.to_string(), source })
}

fn start(config: NodeConfig, listener: TcpListener) -> Result<Ended, NodeError> {
    let interrupted = std::sync::atomic::AtomicBool::new(false);
    run(config, listener, async {
        let by_user = stop_signal().await;
        interrupted.store(by_user, std::sync::atomic::Ordering::Relaxed);
        tracing::info!("stopping");
    })?;
    Ok(if interrupted.into_inner() { Ended::Interrupted } else { Ended::Done })
}

/// Waits for Ctrl-C (`true`) or a polite request to end (`false`).
async fn stop_signal() -> bool {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            return tokio::select! {
                _ = terminate.recv() => false,
                _ = tokio::signal::ctrl_c() => true,
            };
        }
    }
    let _ = tokio::signal::ctrl_c().await;
    true
}

fn status(args: &StatusArgs) -> Result<(), NodeError> {
    let config = NodeConfig::load(&args.data.data)?;
    let settings = &config.settings;
    let (dir, held) = match &settings.pack {
        Some(dir) => (dir.clone(), Pack::open(dir)),
        None => (config.data_dir.join("shard"), Pack::open(&config.data_dir.join("shard"))),
    };
    let sync = SyncReport::read(&config.data_dir);
    let running = matches!(FileLock::try_acquire(&config.data_dir.join("lock")), Ok(None));
    let unreachable = config.problem().filter(|_| running);
    let (experts, bytes, model) = match &held {
        Ok(pack) => (pack.ids().len(), pack.bytes(), Some(pack.fingerprint().to_string())),
        Err(_) => (0, 0, None),
    };
    let text = if args.json {
        serde_json::json!({
            "id": settings.id,
            "name": settings.name,
            "running": running,
            "coordinators": settings.coordinators,
            "listen": settings.listen,
            "records": dir,
            "experts": experts,
            "bytes": bytes,
            "model": model,
            "unreachable": unreachable,
            "adopted": settings.adopt,
            "sync": sync.filter(|_| running),
            "problem": held.err().map(|e| e.to_string()),
        })
        .to_string()
    } else {
        let adopted: String =
            settings.adopt.iter().map(|dir| format!("\nadopted {}", dir.display())).collect();
        let sync = sync.filter(|_| running).map_or(String::new(), |sync| format!("\nsync {}", sync.line()));
        let records = match &held {
            Ok(_) => format!("{experts} experts, {bytes} bytes in {}", dir.display()),
            Err(error) => error.to_string(),
        };
        let reach = unreachable.map_or(String::new(), |why| format!(", but cannot be dialled: {why}"));
        format!(
            "node {} ({})\n{}{reach}\ncoordinator {}\nlisten {}\nmodel {}\nrecords {records}{adopted}{sync}",
            settings.name,
            settings.id,
            if running { "running" } else { "not running" },
            settings.coordinators.join(", "),
            settings.listen,
            model.as_deref().unwrap_or("none yet"),
        )
    };
    // A closed stdout is the reader's choice.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "node".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from([
            "shimmer-node",
            "join",
            "shimmer1-x",
            "--data",
            "/tmp/ä b",
            "--ram",
            "2GiB",
        ]);
        let Ok(Cli { command: Command::Join(args), .. }) = cli else { panic!("join does not parse") };
        assert_eq!((args.ram, args.data.data), (Some(Size(2 << 30)), PathBuf::from("/tmp/ä b")));
    }
}
