//! The routes of recent tokens: which experts fire together, for the planner.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use shimmer_common::experts::{ExpertWork, RoutedBatch};

use super::ring::Ring;

/// Routes kept per layer.
const KEPT: usize = 256;
/// Rows taken from one batch: neighbours in a prompt are alike.
const ROWS_PER_BATCH: usize = 2;

/// A ring of routes per layer.
#[derive(Debug, Default)]
pub(super) struct RouteLog(Mutex<BTreeMap<u16, Ring<Vec<u16>, KEPT>>>);

impl RouteLog {
    /// Notes some rows of a batch.
    pub(super) fn record(&self, batch: &RoutedBatch) {
        let rows = batch.x.rows();
        let mut layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = layers.entry(batch.layer).or_default();
        for i in 0..ROWS_PER_BATCH.min(rows) {
            let row = (i * rows / ROWS_PER_BATCH.min(rows)) as u32;
            let uses = |work: &&ExpertWork| work.rows.binary_search_by_key(&row, |entry| entry.row).is_ok();
            ring.push(batch.work.iter().filter(uses).map(|work| work.expert).collect());
        }
    }

    /// The routes of a layer.
    pub(super) fn of(&self, layer: u16) -> Vec<Vec<u16>> {
        let layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        layers.get(&layer).map(|ring| ring.values().to_vec()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_common::kernels::Activations;

    #[test]
    fn the_latest_routes_of_each_layer_are_kept() {
        let log = RouteLog::default();
        for i in 0..KEPT as u32 + 1 {
            let ids = [i % 7, 7 + i % 5, 1, 9];
            let x = Activations::from_f32(vec![0.5; 4], 2);
            let batch = RoutedBatch::from_routes(3, x, &ids.map(|id| id as _), &[0.5; 4], 2);
            log.record(&batch);
        }
        let routes = log.of(3);
        assert_eq!(routes.len(), KEPT);
        assert!(routes.iter().all(|route| route.len() == 2 && route[0] < route[1]), "{routes:?}");
        assert!(routes.contains(&vec![1, 9]));
        assert!(log.of(4).is_empty());
    }
}
