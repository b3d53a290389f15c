//! The model's part of `shimmer doctor`: headers, memory, text files; with `--deep` every byte.

use std::ops::ControlFlow;

use shimmer_common::container::{Container, TensorShape};
use shimmer_common::experts::pack::Pack;
use shimmer_common::experts::{ExpertLayout, ExpertSource};
use shimmer_common::ffn::FfnRef;
use shimmer_common::mem::AlignedBuf;

use super::doctor::{Area, Check, DoctorArgs, free_bytes};
use super::error::CliError;
use super::interrupt::Interrupt;
use super::memory::{self, Needs};
use super::output;
use crate::text::TextModel;
use shimmer_common::size::Size;

/// Most damaged items listed one by one.
const MAX_LISTED: usize = 20;

/// Checks the model `args` names.
///
/// # Errors
/// [`CliError::Interrupted`].
pub fn checks(args: &DoctorArgs, interrupt: &Interrupt) -> Result<Vec<Check>, CliError> {
    let area = Area::Model;
    let container = match Container::open(&args.model) {
        Ok(container) => container,
        Err(error) => {
            return Ok(vec![Check::fail(
                area,
                "model",
                error.to_string(),
                "restore or download the files named",
            )]);
        }
    };
    let mut checks = vec![Check::ok(area, "model", container.summary().line.clone())];
    for warning in &container.summary().warnings {
        checks.push(Check::warn(area, "model", warning.clone(), "see docs/formats.md"));
    }
    checks.push(match TextModel::open(container.dir(), container.config().vocab_size()) {
        Ok(_) => Check::ok(area, "tokenizer and template", "readable"),
        Err(error) => Check::fail(
            area,
            "tokenizer and template",
            error.to_string(),
            "copy the file from the original checkpoint",
        ),
    });
    let source = container.experts();
    checks.push(memory_check(args, &Needs::of(&container, source.layout(), &args.limits)));
    for dir in &args.model {
        if let Some(free) = free_bytes(dir) {
            checks.push(Check::ok(area, "model disk", format!("{} free in {}", Size(free), dir.display())));
        }
    }
    if args.deep {
        checks.push(dense_check(&container, interrupt)?);
        checks.push(expert_check(&*source, interrupt)?);
    }
    if let Some(dir) = &args.pack {
        checks.extend(pack_checks(dir, &container, args.deep, interrupt)?);
    }
    Ok(checks)
}

fn memory_check(args: &DoctorArgs, needs: &Needs) -> Check {
    match memory::divide(&args.limits, needs) {
        // Too little memory is the machine's fault, not the model's.
        Err(error) => Check::fail(Area::Machine, "RAM for this model", error.to_string(), "add nodes or RAM"),
        Ok(plan) => {
            let percent = plan.expert_bytes as f64 * 100.0 / plan.all_experts_bytes.max(1) as f64;
            let found = format!("dense part {}, {percent:.0} % of the experts fit", Size(plan.dense_bytes));
            Check::ok(Area::Machine, "RAM for this model", found)
        }
    }
}

/// Reads every dense tensor; the reader checks scales and NaN codes.
fn dense_check(container: &Container, interrupt: &Interrupt) -> Result<Check, CliError> {
    let bar = output::bytes_bar("dense tensors", container.dense_bytes());
    let mut problems = Vec::new();
    let mut tensors = 0;
    for tensor in container.dense_tensors() {
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        let read = match tensor.shape {
            TensorShape::Matrix { .. } => container.load_matrix(&tensor.name).map(drop),
            TensorShape::Vector { .. } => container.load_vector(&tensor.name).map(drop),
        };
        problems.extend(read.err().map(|e| e.to_string()));
        tensors += 1;
        bar.inc(tensor.bytes);
    }
    bar.finish_and_clear();
    Ok(verdict("dense tensors", tensors, &problems))
}

/// Reads every expert record and checks its scales.
fn expert_check(source: &dyn ExpertSource, interrupt: &Interrupt) -> Result<Check, CliError> {
    let layout = source.layout();
    let ids: Vec<_> = layout.ids().filter(|id| source.contains(*id)).collect();
    let bar = output::count_bar("experts", ids.len() as u64);
    let mut buffer = AlignedBuf::zeroed(layout.max_record_bytes())
        .map_err(|e| CliError::io("no memory for one expert record", &e))?;
    let mut problems = Vec::new();
    for id in &ids {
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        let length = layout.record_bytes(*id).unwrap_or(0);
        let Some(record) = buffer.get_mut(..length) else { continue };
        match source.read(*id, record) {
            Err(error) => problems.push(error.to_string()),
            Ok(()) => problems.extend(scale_problem(layout, *id, record).map(|what| format!("{id}: {what}"))),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(verdict("experts", ids.len(), &problems))
}

fn scale_problem(
    layout: &ExpertLayout,
    id: shimmer_common::experts::ExpertId,
    record: &[u8],
) -> Option<String> {
    let FfnRef { gate, up, down } = layout.spec(id)?.view(record)?;
    for (name, matrix) in [("gate_proj", gate), ("up_proj", up), ("down_proj", down)] {
        if let Some(at) = matrix.scales.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
            return Some(format!("scale {at} of {name} is not a finite, positive number"));
        }
    }
    None
}

fn pack_checks(
    dir: &std::path::Path,
    container: &Container,
    deep: bool,
    interrupt: &Interrupt,
) -> Result<Vec<Check>, CliError> {
    let area = Area::Model;
    let again = "write the pack again with `shimmer pack`";
    let pack = match Pack::open(dir) {
        Ok(pack) => pack,
        Err(error) => return Ok(vec![Check::fail(area, "pack", error.to_string(), again)]),
    };
    let mut checks = vec![match container.fingerprint() {
        Ok(fingerprint) if fingerprint == pack.fingerprint() => {
            Check::ok(area, "pack", format!("{} experts, {}", pack.ids().len(), Size(pack.bytes())))
        }
        Ok(_) => Check::fail(area, "pack", "belongs to another model", again),
        Err(error) => Check::fail(area, "model fingerprint", error.to_string(), "restore the file named"),
    }];
    if !pack.is_sealed() {
        checks.push(Check::warn(area, "pack", "is unfinished", "run the same `shimmer pack` again"));
    }
    if deep {
        let bar = output::bytes_bar("pack", pack.bytes());
        let report = pack.verify_all(&mut |done, _| {
            bar.set_position(done);
            if interrupt.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        bar.finish_and_clear();
        if interrupt.requested() {
            return Err(CliError::Interrupted);
        }
        let problems: Vec<String> = report.damaged.iter().map(ToString::to_string).collect();
        checks.push(verdict("pack records", report.records, &problems));
    }
    Ok(checks)
}

fn verdict(what: &str, count: usize, problems: &[String]) -> Check {
    if problems.is_empty() {
        return Check::ok(Area::Model, what, format!("{count} read and sound"));
    }
    let more = problems.len().saturating_sub(MAX_LISTED);
    let mut found = problems.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join("; ");
    if more > 0 {
        found += &format!("; and {more} more");
    }
    Check::fail(Area::Model, what, found, "restore the files named")
}

#[cfg(test)]
mod tests {
    use super::super::doctor::State;
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        let problems: Vec<String> = (0..25).map(|i| format!("p{i}")).collect();
        let check = verdict("experts", 30, &problems);
        assert_eq!(check.state, State::Fail);
        assert!(
            check.found.contains("p19")
                && !check.found.contains("p20")
                && check.found.ends_with("and 5 more")
        );
        assert_eq!(verdict("experts", 30, &[]).state, State::Ok);
    }
}
