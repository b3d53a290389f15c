//! `shimmer bench sweep`: the default settings against every other, one at a time.
//!
//! Every setting is a run of `bench decode` in a process of its own. Rounds go through all settings in turn, so
//! that what else happens on the machine meets all of them alike.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::{Args, CommandFactory};
use serde_json::{Value, json};
use shimmer_common::machine;
use shimmer_common::size::Size;

use super::stats::{Spread, percent};
use crate::cli::Cli;
use crate::cli::error::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::model_args::parse_positive;
use crate::cli::output;

/// Arguments of `shimmer bench sweep`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer bench sweep --model /tmp/zipf
  shimmer bench sweep --model /tmp/zipf --expert-ram 1620MiB --cold --tokens 16
  shimmer bench sweep --model /tmp/zipf --expert-ram 1620MiB --cold --disk-limit 200MB --json

--disk-limit needs root and Linux control groups; without them it is refused.")]
pub struct SweepArgs {
    /// Model directory
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

    /// RAM budget of cached expert records [default: all that fits]
    #[arg(long, value_name = "SIZE")]
    expert_ram: Option<Size>,

    /// Load anew for every run, from the disk
    #[arg(long)]
    cold: bool,

    /// Measured tokens per run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_positive)]
    tokens: usize,

    /// Rounds over all settings
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_positive)]
    runs: usize,

    /// Most bytes per second the model's disk may read
    #[arg(long, value_name = "SIZE")]
    disk_limit: Option<Size>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Settings to try, by flag; a flag this build does not know is left out.
const SETTINGS: [(&str, &[&str]); 6] = [
    ("io", &["uring", "pread"]),
    ("io-cache", &["direct", "buffered"]),
    ("io-depth", &["1", "4", "8", "16", "64"]),
    ("lookahead", &["0", "1", "2"]),
    ("policy", &["lru", "lfu-da", "s3-fifo", "arc", "w-tinylfu"]),
    ("prefill-chunk", &["64", "1024"]),
];

/// Below this no run would end in reasonable time.
const LEAST_LIMIT: u64 = 1_000_000;

/// Flags of one setting, empty for the defaults.
type Setting = Vec<String>;

fn settings() -> Vec<Setting> {
    let command = Cli::command();
    let decode = command.find_subcommand("bench").and_then(|bench| bench.find_subcommand("decode"));
    let knows = |flag: &str, value: &str| {
        decode.is_some_and(|decode| {
            let Some(arg) = decode.get_arguments().find(|arg| arg.get_long() == Some(flag)) else {
                return false;
            };
            let names = arg.get_possible_values();
            names.is_empty() || names.iter().any(|name| name.matches(value, false))
        })
    };
    let mut settings = vec![Vec::new()];
    let cores = machine::physical_cores();
    for threads in [1, cores.div_ceil(2), cores + 1] {
        if threads != cores {
            settings.push(vec!["--threads".to_owned(), threads.to_string()]);
        }
    }
    for (flag, values) in SETTINGS {
        for value in values.iter().filter(|value| knows(flag, value)) {
            settings.push(vec![format!("--{flag}"), (*value).to_owned()]);
        }
    }
    settings.dedup();
    settings
}

/// Runs the command.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &SweepArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let limit = args.disk_limit.map(|limit| Throttle::new(&args.model, limit.0)).transpose()?;
    let settings = settings();
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); settings.len()];
    let mut failed: Vec<Option<String>> = vec![None; settings.len()];
    for round in 0..args.runs {
        for (i, setting) in settings.iter().enumerate() {
            if interrupt.requested() {
                return Err(CliError::Interrupted);
            }
            if failed[i].is_some() {
                continue;
            }
            match measure(args, setting, limit.as_ref()) {
                Ok(rate) => {
                    output::note(&format!(
                        "round {} of {}, {}: {rate:.2} tokens/s",
                        round + 1,
                        args.runs,
                        name(setting)
                    ));
                    rates[i].push(rate);
                }
                // The defaults must run; another setting may be one this machine cannot do.
                Err(error) if i == 0 => return Err(error),
                Err(error) => failed[i] = Some(error.to_string()),
            }
        }
    }
    report(args, &settings, &rates, &failed)
}

fn name(setting: &Setting) -> String {
    if setting.is_empty() { "default".to_owned() } else { setting.join(" ") }
}

/// Tokens per second of one run in a process of its own.
fn measure(args: &SweepArgs, setting: &Setting, limit: Option<&Throttle>) -> Result<f64, CliError> {
    let program = std::env::current_exe().map_err(|e| CliError::io("cannot find this program", &e))?;
    let mut command = match limit {
        Some(limit) => limit.command(&program),
        None => Command::new(&program),
    };
    command.args(["bench", "decode", "--json", "--runs", "1", "--draft", "off", "--model"]).arg(&args.model);
    command.args(["--tokens", &args.tokens.to_string()]).args(setting);
    if let Some(ram) = args.expert_ram {
        command.args(["--expert-ram", &format!("{}B", ram.0)]);
    }
    if args.cold {
        command.arg("--cold");
    }
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| CliError::io(format!("cannot start {}", program.display()), &e))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rfind(|line| !line.is_empty()).unwrap_or("no message").to_owned();
        return Err(CliError::Failed(format!("{}: {last}", name(setting))));
    }
    let result: Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| CliError::Failed(format!("{}: no JSON came back: {e}", name(setting))))?;
    let rate = result["tokens_per_s"]["median"].as_f64();
    rate.ok_or_else(|| CliError::Failed(format!("{}: no speed came back", name(setting))))
}

fn report(
    args: &SweepArgs,
    settings: &[Setting],
    rates: &[Vec<f64>],
    failed: &[Option<String>],
) -> Result<(), CliError> {
    let spreads: Vec<Spread> = rates.iter().map(|rates| Spread::of(rates.iter().copied())).collect();
    let best = spreads.iter().map(|s| s.median).fold(0.0, f64::max);
    let default_of_best = spreads.first().map_or(0.0, |s| s.median) / best.max(f64::MIN_POSITIVE);
    if args.json {
        let lines = settings.iter().zip(&spreads).zip(failed);
        let lines: Vec<Value> = lines
            .map(|((setting, spread), failed)| {
                json!({ "setting": name(setting), "tokens_per_s": spread, "failed": failed })
            })
            .collect();
        return output::emit_json(&json!({
            "runs": args.runs,
            "tokens": args.tokens,
            "cold": args.cold,
            "expert_ram_bytes": args.expert_ram.map(|ram| ram.0),
            "disk_limit_bytes_per_s": args.disk_limit.map(|limit| limit.0),
            "lines": lines,
            "default_of_best": default_of_best,
        }));
    }
    let mut text = format!(
        "median of {} [smallest..largest]\nsetting                    tokens/s                of the best\n",
        args.runs
    );
    for ((setting, spread), failed) in settings.iter().zip(&spreads).zip(failed) {
        text += &match failed {
            Some(what) => format!("{:26} failed: {what}\n", name(setting)),
            None => format!(
                "{:26} {:.2} [{:.2}..{:.2}]      {}\n",
                name(setting),
                spread.median,
                spread.min,
                spread.max,
                percent(spread.median / best)
            ),
        };
    }
    text += &format!("the defaults reach {} of the best\n", percent(default_of_best));
    output::emit(&text)
}

/// A control group whose members read slowly from one disk; dropping it removes it.
struct Throttle {
    dir: PathBuf,
}

impl Throttle {
    /// Limits reads from the disk that holds `model`.
    fn new(model: &std::path::Path, bytes_per_s: u64) -> Result<Self, CliError> {
        let refuse = |what: &str| CliError::Usage(format!("--disk-limit: {what}"));
        if bytes_per_s < LEAST_LIMIT {
            return Err(refuse("a run would not end with less than 1MB a second; give more"));
        }
        let device =
            disk_of(model).ok_or_else(|| refuse("the model's disk cannot be told on this system"))?;
        let name = format!("shimmer-sweep-{}", std::process::id());
        let v1 = PathBuf::from("/sys/fs/cgroup/blkio");
        let (dir, file, line) = if v1.is_dir() {
            (v1.join(name), "blkio.throttle.read_bps_device", format!("{device} {bytes_per_s}"))
        } else {
            let root = PathBuf::from("/sys/fs/cgroup");
            // Without the controller the file below does not exist, which is said there.
            let _ = std::fs::write(root.join("cgroup.subtree_control"), "+io");
            (root.join(name), "io.max", format!("{device} rbps={bytes_per_s}"))
        };
        let cannot = |e: std::io::Error| {
            refuse(&format!("cannot set up the control group {} ({e}); it needs root", dir.display()))
        };
        std::fs::create_dir(&dir).map_err(cannot)?;
        let throttle = Self { dir: dir.clone() };
        std::fs::write(dir.join(file), line).map_err(cannot)?;
        Ok(throttle)
    }

    /// A command that enters the group before it becomes `program`.
    fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(self.dir.join("cgroup.procs"))
            .arg(program);
        command
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // An empty group costs nothing should it stay.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// `major:minor` of the whole disk that holds `path`: limits of partitions are refused.
fn disk_of(path: &std::path::Path) -> Option<String> {
    #[cfg(target_os = "linux")]
    {
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(path).ok()?);
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let sys = std::fs::canonicalize(format!("/sys/dev/block/{number}")).ok()?;
        if !sys.join("partition").exists() {
            return Some(number);
        }
        let whole = std::fs::read_to_string(sys.parent()?.join("dev")).ok()?;
        Some(whole.trim().to_owned())
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flags_of_this_build_are_tried_and_the_defaults_come_first() {
        let settings = settings();
        assert_eq!(name(&settings[0]), "default");
        assert!(settings.iter().any(|s| name(s) == "--prefill-chunk 64"));
        let command = Cli::command();
        let decode = command.find_subcommand("bench").unwrap().find_subcommand("decode").unwrap();
        for setting in &settings[1..] {
            let flag = setting[0].trim_start_matches('-');
            assert!(decode.get_arguments().any(|a| a.get_long() == Some(flag)), "{flag}");
        }
    }
}
