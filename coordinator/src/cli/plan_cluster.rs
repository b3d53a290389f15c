//! The cluster's part of `shimmer plan`: who would own what, and what would help.

use std::path::Path;
use std::sync::Arc;

use shimmer_common::container::Container;
use shimmer_common::experts::ExpertLayout;
use shimmer_common::experts::usage::{Usage, UsageOptions, file};
use shimmer_common::size::Size;

use super::error::CliError;
use super::output;
use crate::cluster::{
    self, Advice, ClusterState, Coordinator, ExpertDemand, PlanReport, Worker, WorkerReport,
};

/// The plan of the coordinator that runs on the directory, or one made here from what members measured last.
///
/// # Errors
/// [`CliError`] when the directory or the model cannot be read.
pub fn report(
    dir: &Path,
    container: &Container,
    layout: &ExpertLayout,
    here: Worker,
) -> Result<PlanReport, CliError> {
    let state = ClusterState::open(dir)?;
    if let Some(mut coordinator) = Coordinator::connect(&state)? {
        use shimmer_proto::v1::{Rebalance, change_request::Change};
        let change = Change::Rebalance(Rebalance { dry_run: true });
        if let (_, Some(plan)) = coordinator.change(change)? {
            return Ok(plan);
        }
    }
    let demand =
        ExpertDemand { per_token: container.config().experts_per_token(), ..learned(container, layout)? };
    Ok(cluster::plan_offline(&state, layout, &demand, Some(here), container.fingerprint()?)?)
}

/// The usage learned of a model so far.
fn learned(container: &Container, layout: &ExpertLayout) -> Result<ExpertDemand, CliError> {
    let model = container.fingerprint()?;
    let saved = file::place(container.dir(), model).and_then(|path| match file::load(&path, model) {
        Ok(saved) => saved,
        Err(error) => {
            output::note(&format!("warning: {error}; planning without learned usage"));
            None
        }
    });
    let Some(mut saved) = saved else { return Ok(ExpertDemand::unknown(1)) };
    saved.fit(layout);
    let usage = Usage::resume(saved, UsageOptions::default());
    Ok(ExpertDemand { per_token: 1, heat: Arc::new(move |id| usage.heat(id)) })
}

/// The plan as a table.
pub fn table(plan: &PlanReport) -> String {
    let mut text = format!(
        "\nExperts of {} layers on {} machines: {:.2} ms per layer and token expected; split evenly {:.2} ms\n\
         machine           experts   share  in memory   ms/layer  waited for   disk        memory rate  RAM        round trip\n",
        plan.layers,
        plan.workers.len(),
        plan.ms_per_layer,
        plan.equal_split_ms_per_layer,
    );
    for worker in &plan.workers {
        text += &line(worker);
    }
    for worker in &plan.workers {
        text += &format!("{}: {}\n", worker.worker.name, advice(worker));
    }
    if plan.homeless > 0 {
        text += &format!(
            "{} experts fit on no disk: free some space or add a machine; until then this machine reads them\n",
            plan.homeless
        );
    }
    if let Some(upgrade) = &plan.upgrade {
        text += &format!(
            "best upgrade: {} on {}, {:.0} % less time\n",
            upgrade.what,
            upgrade.name,
            upgrade.saves * 100.0
        );
    }
    text
}

fn line(report: &WorkerReport) -> String {
    let rates = &report.worker.rates;
    let hits = report.hit_rate.map_or("-".to_owned(), |hit| format!("{:.0} %", hit * 100.0));
    let copies = if report.replicas > 0 { format!("+{}", report.replicas) } else { String::new() };
    format!(
        "{:<16} {:>9} {:>5.1} % {:>9} {:>10.2} {:>9.0} %   {:<11} {:<12} {:<10} {:.2} ms\n",
        report.worker.name,
        format!("{}{copies}", report.experts),
        report.share * 100.0,
        hits,
        report.ms_per_layer,
        report.straggler * 100.0,
        format!("{}/s", Size(rates.disk_bytes_per_s as u64)),
        format!("{}/s", Size(rates.gemv_bytes_per_s as u64)),
        Size(report.worker.ram_bytes).to_string(),
        rates.round_trip_s * 1e3,
    )
}

/// What taking part does, for people.
pub fn advice(report: &WorkerReport) -> String {
    match report.advice {
        Advice::Keep { saves: None } => "cannot be done without".to_owned(),
        Advice::Keep { saves: Some(saves) } => format!("+{:.0} % time without it", saves * 100.0),
        Advice::LeaveOut { slower } => format!(
            "leave out {}: it brings nothing here; an equal share for it would be +{:.0} % time",
            report.worker.name,
            slower * 100.0
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Rates, Upgrade};

    #[test]
    fn the_table_names_shares_advice_and_the_upgrade() {
        let rates = Rates { disk_bytes_per_s: 2e9, ..Rates::ASSUMED };
        let worker =
            Worker { id: "x".into(), name: "laptop-3".into(), rates, ram_bytes: 1 << 30, disk_bytes: None };
        let report = WorkerReport {
            worker,
            experts: 0,
            bytes: 0,
            replicas: 2,
            share: 0.0,
            hit_rate: None,
            ms_per_layer: 0.0,
            straggler: 0.0,
            advice: Advice::LeaveOut { slower: 0.19 },
        };
        let upgrade =
            Upgrade { name: "kitchen".into(), what: "twice the RAM for experts".into(), saves: 0.22 };
        let plan = PlanReport {
            workers: vec![report],
            ms_per_layer: 1.0,
            equal_split_ms_per_layer: 2.0,
            layers: 3,
            homeless: 1,
            upgrade: Some(upgrade),
        };
        let text = table(&plan);
        for part in
            ["laptop-3", "0+2", "leave out laptop-3", "+19 % time", "twice the RAM", "22 %", "1 experts fit"]
        {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
}
