//! `shimmer doctor`: read-only checks of machine, model, cluster; every finding with a remedy.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use shimmer_common::kernels::{Isa, Kernels};
use shimmer_common::{disk, machine};

use super::doctor_cluster;
use super::doctor_model;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_args::LimitArgs;
use super::output;
use shimmer_common::size::Size;

/// Free bytes below which a disk counts as full.
const LOW_DISK_BYTES: u64 = 1 << 30;

/// Arguments of `shimmer doctor`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  shimmer doctor
  shimmer doctor --model /models/glm-5.2 --deep
  shimmer doctor --model /models/glm-5.2 --cluster ~/.shimmer/cluster --json

Nothing is changed. Exit code: 0 without failures, 3 for model or data, 4 for cluster or nodes, 1 for the machine.")]
pub struct DoctorArgs {
    /// Model directory; repeat it for a model spread over several disks
    #[arg(long, value_name = "DIR")]
    pub model: Vec<PathBuf>,

    /// Check this expert pack too
    #[arg(long, value_name = "DIR")]
    pub pack: Option<PathBuf>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Read every tensor and check scales, NaN and hashes
    #[arg(long)]
    pub deep: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Works, but could be better.
    Warn,
    /// Does not work.
    Fail,
}

/// What a check is about; decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    /// This computer.
    Machine,
    /// Model and data on disk.
    Model,
    /// Cluster directory and nodes.
    Cluster,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What it is about.
    pub area: Area,
    /// What was checked.
    pub what: String,
    /// The outcome.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do about it; empty when nothing is to be done.
    pub remedy: String,
}

impl Check {
    /// A check that passed.
    pub fn ok(area: Area, what: &str, found: impl Into<String>) -> Self {
        Self { area, what: what.to_owned(), state: State::Ok, found: found.into(), remedy: String::new() }
    }

    /// Something that could be better.
    pub fn warn(area: Area, what: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: State::Warn, remedy: remedy.into(), ..Self::ok(area, what, found) }
    }

    /// Something that does not work.
    pub fn fail(area: Area, what: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: State::Fail, remedy: remedy.into(), ..Self::ok(area, what, found) }
    }
}

/// Runs every check.
///
/// # Errors
/// The gravest failure's exit code; the report is printed all the same.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let interrupt = Interrupt::install();
    let mut checks = machine_checks();
    if !args.model.is_empty() {
        checks.extend(doctor_model::checks(args, &interrupt)?);
    }
    if let Some(dir) = &args.limits.cluster {
        checks.extend(doctor_cluster::checks(dir, &args.limits.expert_nodes));
    }
    if args.json {
        output::emit_json(&json!({ "checks": checks }))?;
    } else {
        for check in &checks {
            output::emit(&line(check))?;
        }
    }
    verdict(&checks)
}

fn line(check: &Check) -> String {
    let state = match check.state {
        State::Ok => "ok  ",
        State::Warn => "warn",
        State::Fail => "FAIL",
    };
    let remedy = if check.remedy.is_empty() { String::new() } else { format!(" → {}", check.remedy) };
    format!("{state}  {}: {}{remedy}\n", check.what, check.found)
}

fn verdict(checks: &[Check]) -> Result<(), CliError> {
    let failed = |area| checks.iter().filter(|c| c.area == area && c.state == State::Fail).count();
    let (machine, model, cluster) = (failed(Area::Machine), failed(Area::Model), failed(Area::Cluster));
    let total = machine + model + cluster;
    let message = format!("{total} of {} checks failed; the lines marked FAIL say what to do", checks.len());
    match (model, cluster, machine) {
        (0, 0, 0) => Ok(()),
        (0, 0, _) => Err(CliError::Failed(message)),
        (0, _, _) => Err(CliError::Unreachable(message)),
        _ => Err(CliError::Data(message)),
    }
}

/// Free space of the file system of `dir`, where the system says.
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    disk::free_bytes(dir).ok().filter(|free| *free < u64::MAX)
}

fn machine_checks() -> Vec<Check> {
    let area = Area::Machine;
    let isa = Kernels::best().isa();
    let name = super::isa_name(isa);
    let cores = machine::physical_cores();
    let memory = machine::memory();
    let limit =
        memory.cgroup_limit_bytes.map_or(String::new(), |l| format!(", limited to {} by a cgroup", Size(l)));
    let mut checks = vec![
        match isa {
            Isa::Portable => Check::warn(area, "CPU", name, "a CPU with AVX2 is several times faster"),
            _ => Check::ok(area, "CPU", name),
        },
        Check::ok(area, "cores", format!("{cores} physical cores may be used")),
        Check::ok(
            area,
            "memory",
            format!("{} of {} available{limit}", Size(memory.available_bytes), Size(memory.total_bytes)),
        ),
    ];
    checks.push(match machine::huge_page_mode().as_deref() {
        Some("never") => Check::warn(
            area,
            "huge pages",
            "switched off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled speeds up reading weights by a quarter",
        ),
        Some(mode) => Check::ok(area, "huge pages", mode),
        None => Check::ok(area, "huge pages", "unknown on this system"),
    });
    checks.push(match machine::memory_nodes() {
        1 => Check::ok(area, "memory nodes", "one: all memory is equally near"),
        nodes => Check::warn(
            area,
            "memory nodes",
            format!("{nodes}: weights lie near the core that read them, and all cores use them"),
            "start shimmer under `numactl --interleave=all`, so that every node's memory bandwidth is used",
        ),
    });
    let temp = std::env::temp_dir();
    if let Some(free) = free_bytes(&temp) {
        let found = format!("{} free in {}", Size(free), temp.display());
        checks.push(if free < LOW_DISK_BYTES {
            Check::warn(area, "temporary disk", found, "free some space or set TMPDIR")
        } else {
            Check::ok(area, "temporary disk", found)
        });
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_names_the_gravest_area() {
        let code = |checks: &[Check]| verdict(checks).map_or_else(|e| e.exit_code(), |()| 0);
        let fail = |area| Check::fail(area, "x", "y", "z");
        assert_eq!(code(&[Check::ok(Area::Model, "x", "y"), Check::warn(Area::Machine, "x", "y", "z")]), 0);
        assert_eq!(code(&[fail(Area::Machine)]), 1);
        assert_eq!(code(&[fail(Area::Machine), fail(Area::Cluster)]), 4);
        assert_eq!(code(&[fail(Area::Cluster), fail(Area::Model)]), 3);
    }

    #[test]
    fn lines_carry_the_remedy() {
        assert_eq!(
            line(&Check::fail(Area::Model, "disk", "full", "free it")),
            "FAIL  disk: full → free it\n"
        );
        assert_eq!(line(&Check::ok(Area::Model, "disk", "fine")), "ok    disk: fine\n");
    }

    #[test]
    fn this_machine_passes() {
        assert!(machine_checks().iter().all(|c| c.state != State::Fail));
    }
}
