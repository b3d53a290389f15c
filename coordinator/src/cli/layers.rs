//! The layers a value may come from: flag > environment > `shimmer.toml` > default.
//!
//! Every long flag `--some-flag` can also be set as `SHIMMER_SOME_FLAG` and as the key `some-flag` in
//! the file, either at the top (for every command that knows it) or in a table named after a command.
//! Values of the file are handed to clap as if they had been typed where no flag and no variable
//! set them, so that they pass through the same checks.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{BoolishValueParser, OsStr};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, Id};

use super::error::CliError;

/// The file read when `--config` is absent, if it exists.
pub const DEFAULT_FILE: &str = "shimmer.toml";

/// Commands whose arguments belong to somebody else.
const FOREIGN: [&str; 2] = ["node", "help"];

/// Flags that cannot stand in the file.
const NOT_IN_FILE: [&str; 3] = ["config", "help", "version"];

/// Flags that mean something else than in other commands: their variable carries the command's name
/// and only the command's own table sets them.
const OWN_MEANING: [(&str, &str); 2] = [("pack", "experts"), ("convert", "experts")];

/// Matches of a command line after all layers, and which flags came from the file.
pub struct Layered {
    /// The final matches.
    pub matches: ArgMatches,
    /// Long names set by the file.
    pub from_file: BTreeSet<String>,
    /// The file, if one was read.
    pub file: Option<PathBuf>,
}

/// Why the layers cannot be merged.
#[derive(Debug)]
pub enum LayerError {
    /// clap's own message (also `--help` and `--version`).
    Clap(Box<clap::Error>),
    /// The configuration file is unreadable or wrong.
    File(CliError),
}

impl From<clap::Error> for LayerError {
    fn from(error: clap::Error) -> Self {
        Self::Clap(Box::new(error))
    }
}

/// Parses `argv` with all layers. With `relaxed` nothing is required (for `config show`).
///
/// # Errors
/// [`LayerError`].
pub fn parse(command: &Command, argv: &[OsString], relaxed: bool) -> Result<Layered, LayerError> {
    let command = with_environment(command.clone());
    let loose = without_requirements(command.clone());
    let first = loose.try_get_matches_from_mut_clone(argv)?;
    let file = config_file(&first).map_err(LayerError::File)?;
    let table = match &file {
        Some(path) => read_table(&command, path).map_err(LayerError::File)?,
        None => toml::Table::new(),
    };
    let mut additions = Vec::new();
    let mut from_file = BTreeSet::new();
    collect(&command, &first, &table, file.as_deref(), &mut additions, &mut from_file)
        .map_err(LayerError::File)?;
    let mut full = argv.to_vec();
    let at = after_subcommands(&command, &full);
    full.splice(at..at, additions);
    let command = if relaxed { without_requirements(command) } else { command };
    let matches = command.try_get_matches_from(full)?;
    Ok(Layered { matches, from_file, file })
}

trait TryMatches {
    fn try_get_matches_from_mut_clone(&self, argv: &[OsString]) -> Result<ArgMatches, clap::Error>;
}

impl TryMatches for Command {
    fn try_get_matches_from_mut_clone(&self, argv: &[OsString]) -> Result<ArgMatches, clap::Error> {
        self.clone().try_get_matches_from(argv)
    }
}

/// Gives every long flag its environment variable.
pub fn with_environment(command: Command) -> Command {
    if FOREIGN.contains(&command.get_name()) {
        return command;
    }
    let owner = command.get_name().to_owned();
    command
        .mut_args(|arg| match arg.get_long() {
            Some(long) if !matches!(long, "help" | "version") => {
                // Names live as long as the process; clap wants them static.
                let name: &'static str = environment_name(&owner, long).leak();
                let arg = arg.env(OsStr::from(name)).hide_env(true);
                match arg.get_action() {
                    ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
                    _ => arg,
                }
            }
            _ => arg,
        })
        .mut_subcommands(with_environment)
}

/// The environment variable of a command's long flag.
pub fn environment_name(command: &str, long: &str) -> String {
    let owner = if has_own_meaning(command, long) { format!("{command}_") } else { String::new() };
    format!("SHIMMER_{owner}{long}").replace('-', "_").to_ascii_uppercase()
}

fn has_own_meaning(command: &str, long: &str) -> bool {
    OWN_MEANING.contains(&(command, long))
}

fn without_requirements(command: Command) -> Command {
    if FOREIGN.contains(&command.get_name()) {
        return command;
    }
    let groups: Vec<Id> = command.get_groups().map(|group| group.get_id().clone()).collect();
    let command = groups.into_iter().fold(command, |c, id| c.mut_group(id, |group| group.required(false)));
    command.mut_args(|arg| arg.required(false)).mut_subcommands(without_requirements)
}

/// The configuration file: named explicitly, or the default one if it exists.
fn config_file(matches: &ArgMatches) -> Result<Option<PathBuf>, CliError> {
    if let Some(path) = matches.try_get_one::<PathBuf>("config").ok().flatten() {
        return Ok(Some(path.clone()));
    }
    Ok(Path::new(DEFAULT_FILE).is_file().then(|| PathBuf::from(DEFAULT_FILE)))
}

fn read_table(command: &Command, path: &Path) -> Result<toml::Table, CliError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| CliError::Usage(format!("cannot read the configuration {}: {e}", path.display())))?;
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(0, |s| text.get(..s.start).map_or(0, |t| t.matches('\n').count() + 1));
        CliError::Usage(format!("{} line {line}: {}", path.display(), e.message()))
    })?;
    check_keys(command, &table, path, "")?;
    Ok(table)
}

/// Refuses keys that are neither a flag of `command` (or of a command below it) nor a table of one.
fn check_keys(command: &Command, table: &toml::Table, path: &Path, prefix: &str) -> Result<(), CliError> {
    let mut known = BTreeSet::new();
    long_flags(command, &mut known);
    for (key, value) in table {
        let subcommand = command.find_subcommand(key).filter(|c| !FOREIGN.contains(&c.get_name()));
        match (value, subcommand) {
            (toml::Value::Table(inner), Some(subcommand)) => {
                check_keys(subcommand, inner, path, &format!("{prefix}{key}."))?;
            }
            (toml::Value::Table(_), None) => {
                return Err(CliError::Usage(format!(
                    "{}: [{prefix}{key}] is not a command; name a table after a command, such as [serve]",
                    path.display()
                )));
            }
            _ if known.contains(&flag_name(key)) => {}
            _ => {
                return Err(CliError::Usage(format!(
                    "{}: {prefix}{key} is not a setting; `shimmer config show` lists those that exist",
                    path.display()
                )));
            }
        }
    }
    Ok(())
}

fn long_flags(command: &Command, out: &mut BTreeSet<String>) {
    if FOREIGN.contains(&command.get_name()) {
        return;
    }
    let longs = command.get_arguments().filter_map(|a| a.get_long());
    out.extend(longs.filter(|l| !NOT_IN_FILE.contains(l)).map(str::to_owned));
    command.get_subcommands().for_each(|c| long_flags(c, out));
}

fn flag_name(key: &str) -> String {
    key.replace('_', "-")
}

/// Turns what the file sets, and nothing stronger does, into arguments of the innermost command.
fn collect(
    root: &Command,
    matches: &ArgMatches,
    table: &toml::Table,
    path: Option<&Path>,
    additions: &mut Vec<OsString>,
    from_file: &mut BTreeSet<String>,
) -> Result<(), CliError> {
    // Values of outer tables first; inner ones override them.
    let mut values: BTreeMap<String, toml::Value> = BTreeMap::new();
    let (mut command, mut matches, mut table) = (root, matches, Some(table));
    loop {
        for (key, value) in table.into_iter().flatten().filter(|(_, v)| !v.is_table()) {
            values.insert(flag_name(key), value.clone());
        }
        let Some((name, inner)) = matches.subcommand() else { break };
        let Some(subcommand) = command.find_subcommand(name) else { break };
        if FOREIGN.contains(&subcommand.get_name()) {
            return Ok(());
        }
        values.retain(|key, _| !has_own_meaning(name, key));
        table = table.and_then(|t| t.get(name)).and_then(toml::Value::as_table);
        (command, matches) = (subcommand, inner);
    }
    let global = root.get_arguments().filter(|a| a.is_global_set());
    for arg in command.get_arguments().chain(global) {
        let Some(long) = arg.get_long() else { continue };
        let Some(value) = values.get(long) else { continue };
        let stronger = matches.value_source(arg.get_id().as_str());
        if matches!(stronger, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
            || from_file.contains(long)
        {
            continue;
        }
        let texts = texts_of(long, value, path)?;
        match arg.get_action() {
            ArgAction::SetTrue => match value.as_bool() {
                Some(true) => additions.push(format!("--{long}").into()),
                Some(false) => {}
                None => {
                    let file = path.unwrap_or(Path::new(DEFAULT_FILE)).display();
                    return Err(CliError::Usage(format!("{file}: {long} must be true or false")));
                }
            },
            _ => additions.extend(texts.into_iter().map(|t| format!("--{long}={t}").into())),
        }
        from_file.insert(long.to_owned());
    }
    Ok(())
}

fn texts_of(key: &str, value: &toml::Value, path: Option<&Path>) -> Result<Vec<String>, CliError> {
    let scalar = |v: &toml::Value| match v {
        toml::Value::String(s) => Some(s.clone()),
        toml::Value::Integer(n) => Some(n.to_string()),
        toml::Value::Float(x) => Some(x.to_string()),
        toml::Value::Boolean(b) => Some(b.to_string()),
        _ => None,
    };
    let texts = match value {
        toml::Value::Array(items) => items.iter().map(scalar).collect(),
        other => scalar(other).map(|s| vec![s]),
    };
    texts.ok_or_else(|| {
        let file = path.unwrap_or(Path::new(DEFAULT_FILE)).display();
        CliError::Usage(format!("{file}: {key} must be a text, a number, true, false or a list of those"))
    })
}

/// Position in `argv` right behind the innermost subcommand's name.
fn after_subcommands(root: &Command, argv: &[OsString]) -> usize {
    let mut command = root;
    let mut at = 1;
    let mut behind = argv.len().min(1);
    while let Some(token) = argv.get(at).and_then(|t| t.to_str()) {
        at += 1;
        if token.starts_with('-') {
            // A global flag before the subcommand may take its value from the next word.
            let long = token.trim_start_matches('-');
            let takes_value =
                root.get_arguments().any(|a| a.get_long() == Some(long) && a.get_action().takes_values());
            at += usize::from(takes_value);
        } else if let Some(subcommand) = command.find_subcommand(token) {
            command = subcommand;
            behind = at;
        } else {
            break;
        }
    }
    behind
}

#[cfg(test)]
mod tests {
    use clap::{Arg, value_parser};

    use super::*;

    fn command() -> Command {
        let ram = || Arg::new("ram").long("layer-test-ram");
        Command::new("shimmer")
            .arg(Arg::new("config").long("config").global(true).value_parser(value_parser!(PathBuf)))
            .subcommand(
                Command::new("run")
                    .arg(ram())
                    .arg(Arg::new("greedy").long("greedy").action(ArgAction::SetTrue))
                    .arg(Arg::new("stop").long("stop").action(ArgAction::Append))
                    .arg(Arg::new("model").long("model").required(true)),
            )
            .subcommand(Command::new("serve").arg(ram().default_value("auto")))
    }

    fn parsed(file: &str, args: &[&str]) -> Result<Layered, LayerError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("settings.toml");
        std::fs::write(&path, file).unwrap();
        let mut argv: Vec<OsString> = vec!["shimmer".into(), "--config".into(), path.into()];
        argv.extend(args.iter().map(OsString::from));
        parse(&command(), &argv, false)
    }

    fn one(layered: &Layered, id: &str) -> Option<String> {
        layered.matches.subcommand().unwrap().1.get_one::<String>(id).cloned()
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file = "layer-test-ram = \"1GiB\"\n[serve]\nlayer_test_ram = \"2GiB\"\n";
        let serve = parsed(file, &["serve"]).unwrap();
        assert_eq!(one(&serve, "ram").as_deref(), Some("2GiB"));
        assert!(serve.from_file.contains("layer-test-ram"));
        let flag = parsed(file, &["serve", "--layer-test-ram", "3GiB"]).unwrap();
        assert_eq!(one(&flag, "ram").as_deref(), Some("3GiB"));
        assert!(flag.from_file.is_empty());
        let none = parsed("", &["serve"]).unwrap();
        assert_eq!(one(&none, "ram").as_deref(), Some("auto"));
    }

    #[test]
    fn the_file_satisfies_required_flags_and_sets_switches_and_lists() {
        let run = parsed("model = \"m\"\ngreedy = true\nstop = [\"a\", \"b\"]\n", &["run"]).unwrap();
        let matches = run.matches.subcommand().unwrap().1;
        assert!(matches.get_flag("greedy"));
        assert_eq!(matches.get_many::<String>("stop").unwrap().cloned().collect::<Vec<_>>(), ["a", "b"]);
        assert!(matches!(parsed("", &["run"]), Err(LayerError::Clap(_))));
    }

    #[test]
    fn unknown_keys_and_tables_are_errors() {
        for (file, word) in
            [("rum = 1", "rum"), ("[serv]\nlayer-test-ram = 1", "serv"), ("[serve]\ngreedy = true", "greedy")]
        {
            match parsed(file, &["serve"]) {
                Err(LayerError::File(error)) => assert!(error.to_string().contains(word), "{error}"),
                _ => panic!("{file} was accepted"),
            }
        }
    }

    #[test]
    fn syntax_errors_name_the_line() {
        match parsed("a = 1\nb = = 2\n", &["serve"]) {
            Err(LayerError::File(error)) => assert!(error.to_string().contains("line 2"), "{error}"),
            _ => panic!("accepted"),
        }
    }

    #[test]
    fn every_flag_has_an_environment_variable() {
        let command = with_environment(command());
        let run = command.find_subcommand("run").unwrap();
        for arg in run.get_arguments().filter(|a| a.get_long().is_some_and(|l| l != "help")) {
            assert!(arg.get_env().is_some(), "{arg}");
        }
        assert_eq!(environment_name("run", "max-tokens"), "SHIMMER_MAX_TOKENS");
        assert_eq!(environment_name("pack", "experts"), "SHIMMER_PACK_EXPERTS");
    }
}
