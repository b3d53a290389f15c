//! `shimmer config show`: the effective values and where each came from.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Subcommand};
use serde_json::{Map, Value, json};

use super::error::CliError;
use super::layers::{self, LayerError, Layered};
use super::output;

/// Subcommands of `shimmer config`.
#[derive(Subcommand, Clone, Debug)]
pub enum ConfigCommand {
    /// Print every setting, its value and its origin
    Show(ShowArgs),
}

/// Arguments of `shimmer config show`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer config show
  shimmer config show serve --port 9000
  shimmer --config office.toml config show --json

The output has the form of shimmer.toml; the comment behind a value names its origin: flag, environment, file or default.")]
pub struct ShowArgs {
    /// One command and its flags; without it every command is shown
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Value and origin of a setting.
type Setting = (Value, &'static str);

/// Prints the settings.
///
/// # Errors
/// [`CliError::Usage`] for values that do not parse.
pub fn run(args: &ShowArgs, command: &Command, argv: &[OsString]) -> Result<(), CliError> {
    let lines = if args.command.is_empty() { every_command(command) } else { vec![args.command.clone()] };
    let mut shown = BTreeMap::new();
    let mut file = None;
    for line in lines {
        let mut full = global_part(argv);
        full.extend(line);
        let layered = layers::parse(command, &full, true).map_err(|e| match e {
            LayerError::Clap(e) => CliError::Usage(first_line(&e.to_string())),
            LayerError::File(e) => e,
        })?;
        file = layered.file.clone();
        let (name, settings) = settings(command, &layered);
        if !settings.is_empty() {
            shown.insert(name, settings);
        }
    }
    if args.json {
        let tables: Map<String, Value> = shown
            .into_iter()
            .map(|(name, settings)| {
                let values = settings.into_iter().map(|(k, (v, o))| (k, json!({ "value": v, "origin": o })));
                (name, Value::Object(values.collect()))
            })
            .collect();
        return output::emit_json(&tables);
    }
    output::note(&match file {
        Some(path) => format!("configuration file: {}", path.display()),
        None => format!("no configuration file ({} does not exist here)", layers::DEFAULT_FILE),
    });
    output::emit(&as_toml(&shown))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// `shimmer` and the global flags in front of `config`.
fn global_part(argv: &[OsString]) -> Vec<OsString> {
    let end = argv.iter().position(|a| a == "config").unwrap_or(argv.len());
    argv.iter().take(end).cloned().collect()
}

fn every_command(command: &Command) -> Vec<Vec<OsString>> {
    let mut lines = Vec::new();
    for sub in command
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && !matches!(c.get_name(), "config" | "help" | "completions"))
    {
        let inner: Vec<&Command> = sub.get_subcommands().filter(|c| c.get_name() != "help").collect();
        let name = OsString::from(sub.get_name());
        if inner.is_empty() {
            lines.push(vec![name]);
        } else {
            lines.extend(inner.iter().map(|c| vec![name.clone(), c.get_name().into()]));
        }
    }
    lines
}

/// The innermost command's dotted name and its settings.
fn settings(root: &Command, layered: &Layered) -> (String, BTreeMap<String, Setting>) {
    let (mut command, mut matches) = (root, &layered.matches);
    let mut names = Vec::new();
    while let Some((name, inner)) = matches.subcommand() {
        let Some(subcommand) = command.find_subcommand(name) else { break };
        names.push(name.to_owned());
        (command, matches) = (subcommand, inner);
    }
    let mut out = BTreeMap::new();
    for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
        let Some(long) = arg.get_long().filter(|l| !matches!(*l, "help" | "version")) else { continue };
        let source = matches.value_source(arg.get_id().as_str());
        let origin = match source {
            _ if layered.from_file.contains(long) => "file",
            Some(ValueSource::CommandLine) => "flag",
            Some(ValueSource::EnvVariable) => "environment",
            _ => "default",
        };
        out.insert(long.to_owned(), (value(matches, arg), origin));
    }
    (names.join("."), out)
}

fn value(matches: &ArgMatches, arg: &clap::Arg) -> Value {
    let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
    let texts: Vec<Value> = raw.map(|v| Value::from(v.to_string_lossy().into_owned())).collect();
    let many = matches!(arg.get_action(), clap::ArgAction::Append) && texts.len() > 1;
    if matches!(arg.get_action(), clap::ArgAction::SetTrue) {
        return Value::from(texts.first().is_some_and(|v| v == "true" || v == "1"));
    }
    if many { Value::from(texts) } else { texts.into_iter().next().unwrap_or(Value::Null) }
}

fn as_toml(shown: &BTreeMap<String, BTreeMap<String, Setting>>) -> String {
    let mut text = String::new();
    for (name, settings) in shown {
        text += &format!("[{name}]\n");
        for (key, (value, origin)) in settings {
            // Unset values stay comments, so that the output is a valid file.
            let line =
                if value.is_null() { format!("# {key} is not set") } else { format!("{key} = {value}") };
            text += &format!("{line:<44} # {origin}\n");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_valid_toml_and_names_origins() {
        let settings = BTreeMap::from([
            ("ram".to_owned(), (Value::from("1GiB"), "file")),
            ("seed".to_owned(), (Value::Null, "default")),
            ("model".to_owned(), (json!(["a", "b"]), "flag")),
        ]);
        let text = as_toml(&BTreeMap::from([("run".to_owned(), settings)]));
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["run"]["ram"].as_str(), Some("1GiB"));
        assert!(text.lines().any(|l| l.starts_with("ram") && l.ends_with("# file")));
    }

    #[test]
    fn global_flags_are_kept() {
        let argv: Vec<OsString> = ["shimmer", "--config", "x", "config", "show"].map(OsString::from).into();
        assert_eq!(global_part(&argv).len(), 3);
    }
}
