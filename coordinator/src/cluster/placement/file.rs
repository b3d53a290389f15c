//! `placement.json` in the cluster directory: the placement in force, so that a coordinator that restarts
//! asks nobody to move anything.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shimmer_common::container::Fingerprint;
use shimmer_common::experts::{ExpertId, ExpertLayout};

use super::plan::{Placement, PlanReport};
use super::worker::Worker;

const VERSION: u32 = 1;

/// Contents of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    version: u32,
    /// Model the placement is for, hexadecimal.
    model: String,
    workers: Vec<Worker>,
    /// Per layer, the worker of each expert.
    owners: BTreeMap<u16, Vec<Option<u16>>>,
    /// Layer, expert, worker.
    replicas: Vec<(u16, u16, u16)>,
    /// What the planner said.
    pub report: PlanReport,
}

impl PlacementFile {
    /// What is written.
    pub fn new(model: Fingerprint, placement: &Placement, report: &PlanReport) -> Self {
        Self {
            version: VERSION,
            model: model.to_string(),
            workers: placement.workers.clone(),
            owners: placement.owners.clone(),
            replicas: placement.replicas.iter().map(|&(id, w)| (id.layer, id.index, w)).collect(),
            report: report.clone(),
        }
    }

    /// The placement, if it is one of this model: a file of another model, or a damaged one, is no reason
    /// to stop, only to plan anew.
    pub fn placement(&self, model: Fingerprint, layout: &ExpertLayout) -> Option<Placement> {
        let worker = |w: u16| usize::from(w) < self.workers.len();
        let expert = |layer: u16, index: u16| layout.spec(ExpertId { layer, index }).is_some();
        let fits = |(layer, owners): (&u16, &Vec<Option<u16>>)| {
            layout.layers.get(layer).is_some_and(|specs| specs.len() == owners.len())
                && owners.iter().flatten().all(|&w| worker(w))
        };
        let sound = self.version == VERSION
            && self.model == model.to_string()
            && self.owners.iter().all(fits)
            && self.replicas.iter().all(|&(layer, index, w)| expert(layer, index) && worker(w));
        sound.then(|| Placement {
            workers: self.workers.clone(),
            owners: self.owners.clone(),
            replicas: self.replicas.iter().map(|&(layer, index, w)| (ExpertId { layer, index }, w)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Demand, Rates, plan};
    use super::*;
    use shimmer_common::experts::{ExpertSpec, MatrixSpec};
    use shimmer_common::quant::Format;

    #[test]
    fn a_placement_survives_its_file_and_a_wrong_file_is_ignored() {
        let m = MatrixSpec { format: Format::Int8Row, rows: 64, cols: 64 };
        let specs = vec![ExpertSpec { gate: m, up: m, down: m }];
        let layout = ExpertLayout { hidden_size: 64, specs, layers: [(1, vec![0; 8])].into_iter().collect() };
        let worker = |id: &str| Worker {
            id: id.into(),
            name: id.into(),
            rates: Rates { link_bytes_per_s: 1e15, ..Rates::ASSUMED },
            ram_bytes: 1 << 30,
            disk_bytes: None,
        };
        let demand = Demand::new(&layout, 2, |_| 0.0, |_| Vec::new());
        let (placement, report) = plan(&demand, &[worker("a"), worker("b")], None);
        let model = Fingerprint([3; 32]);
        let text = serde_json::to_string(&PlacementFile::new(model, &placement, &report)).unwrap();
        let read: PlacementFile = serde_json::from_str(&text).unwrap();
        let back = read.placement(model, &layout).unwrap();
        assert_eq!((&back.owners, &back.replicas), (&placement.owners, &placement.replicas));
        assert!(read.placement(Fingerprint([4; 32]), &layout).is_none());
        let mut other = layout.clone();
        other.layers.insert(1, vec![0; 7]);
        assert!(read.placement(model, &other).is_none());
        let mut bad = read;
        bad.owners.insert(1, vec![Some(9); 8]);
        assert!(bad.placement(model, &layout).is_none());
    }
}
