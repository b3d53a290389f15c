//! Intermediate values recorded for tests and `score --trace`.

use std::collections::BTreeMap;

use super::rows::Rows;

/// One recorded tensor; rows are appended chunk by chunk.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceTensor {
    /// f32 values.
    F32 {
        /// Row length.
        width: usize,
        /// Values.
        data: Vec<f32>,
    },
    /// i32 values; rows may have different lengths, padded with -1 when written.
    I32 {
        /// Rows.
        rows: Vec<Vec<i32>>,
    },
    /// f32 values of one row per position, as long as the positions it sees (`index_scores`).
    F32Causal {
        /// Rows.
        rows: Vec<Vec<f32>>,
    },
}

/// How much is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TraceLevel {
    /// What `score --trace` writes: `hidden.{l}`, `router_ids.{l}`, `router_weights.{l}`,
    /// `index_topk.{l}` and `mtp_logits`.
    #[default]
    Score,
    /// Everything a reference can be compared with: also `embed`, `final_norm`, `attn_out.{l}`,
    /// `mlp_out.{l}`, `router_logits.{l}`, `index_scores.{l}`, the cache rows of every layer, and
    /// the same of the MTP layer under `mtp_…`.
    Full,
}

/// Tensors by name (`hidden.3`, `router_ids.3`, …).
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The recorded tensors.
    pub tensors: BTreeMap<String, TraceTensor>,
    level: TraceLevel,
}

impl Trace {
    /// An empty trace of the given level.
    pub fn new(level: TraceLevel) -> Self {
        Self { tensors: BTreeMap::new(), level }
    }
}

/// Which part of the model is recorded; decides the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Outside the layers: `embed`.
    Model,
    /// A main layer: `hidden.3`.
    Layer(usize),
    /// The MTP layer: `mtp_hidden`.
    Mtp,
}

/// Writes to a trace if there is one; without one every call is a no-op.
pub(super) struct Recorder<'a> {
    trace: Option<&'a mut Trace>,
    scope: Scope,
}

impl<'a> Recorder<'a> {
    /// Records into `trace`, if any, under `scope`.
    pub fn new(trace: Option<&'a mut Trace>, scope: Scope) -> Self {
        Self { trace, scope }
    }

    /// Changes the scope of the following records.
    pub fn enter(&mut self, scope: Scope) {
        self.scope = scope;
    }

    /// Whether `what` would be recorded, to spare making it.
    pub fn wants(&self, what: &str) -> bool {
        let Some(trace) = &self.trace else { return false };
        match (trace.level, self.scope) {
            (TraceLevel::Full, _) => true,
            (TraceLevel::Score, Scope::Model) => false,
            (TraceLevel::Score, Scope::Layer(_)) => {
                matches!(what, "hidden" | "router_ids" | "router_weights" | "index_topk")
            }
            (TraceLevel::Score, Scope::Mtp) => what == "logits",
        }
    }

    /// Appends f32 rows.
    pub fn rows(&mut self, what: &str, rows: &Rows) {
        self.f32(what, rows.width, &rows.data);
    }

    /// Appends f32 rows of `width` values.
    pub fn f32(&mut self, what: &str, width: usize, values: &[f32]) {
        let empty = || TraceTensor::F32 { width, data: Vec::new() };
        if let Some(TraceTensor::F32 { data, .. }) = self.tensor(what, empty) {
            data.extend_from_slice(values);
        }
    }

    /// Appends one row of integers.
    pub fn i32_row(&mut self, what: &str, values: impl Iterator<Item = i32>) {
        let empty = || TraceTensor::I32 { rows: Vec::new() };
        if let Some(TraceTensor::I32 { rows }) = self.tensor(what, empty) {
            rows.push(values.collect());
        }
    }

    /// Appends one row of positions.
    pub fn positions(&mut self, what: &str, positions: &[u32]) {
        self.i32_row(what, positions.iter().map(|&p| p as i32));
    }

    /// Appends one row that has a value per visible position.
    pub fn causal_row(&mut self, what: &str, values: &[f32]) {
        let empty = || TraceTensor::F32Causal { rows: Vec::new() };
        if let Some(TraceTensor::F32Causal { rows }) = self.tensor(what, empty) {
            rows.push(values.to_vec());
        }
    }

    fn tensor(&mut self, what: &str, empty: impl FnOnce() -> TraceTensor) -> Option<&mut TraceTensor> {
        if !self.wants(what) {
            return None;
        }
        let name = match self.scope {
            Scope::Model => what.to_owned(),
            Scope::Layer(layer) => format!("{what}.{layer}"),
            Scope::Mtp => format!("mtp_{what}"),
        };
        Some(self.trace.as_deref_mut()?.tensors.entry(name).or_insert_with(empty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_appended_under_the_name_of_their_scope() {
        let mut trace = Trace::new(TraceLevel::Full);
        let mut recorder = Recorder::new(Some(&mut trace), Scope::Model);
        recorder.f32("embed", 2, &[1.0, 2.0]);
        recorder.enter(Scope::Layer(3));
        recorder.i32_row("router_ids", [4, 5].into_iter());
        recorder.i32_row("router_ids", [6].into_iter());
        recorder.enter(Scope::Mtp);
        recorder.causal_row("index_scores", &[0.5]);
        let names: Vec<&str> = trace.tensors.keys().map(String::as_str).collect();
        assert_eq!(names, ["embed", "mtp_index_scores", "router_ids.3"]);
        assert_eq!(trace.tensors["router_ids.3"], TraceTensor::I32 { rows: vec![vec![4, 5], vec![6]] });
    }

    #[test]
    fn the_score_level_records_only_what_the_command_names() {
        let mut trace = Trace::default();
        let mut recorder = Recorder::new(Some(&mut trace), Scope::Model);
        recorder.f32("embed", 1, &[1.0]);
        recorder.enter(Scope::Layer(0));
        recorder.f32("attn_out", 1, &[1.0]);
        recorder.f32("hidden", 1, &[1.0]);
        recorder.enter(Scope::Mtp);
        recorder.f32("hidden", 1, &[1.0]);
        recorder.f32("logits", 1, &[1.0]);
        let names: Vec<&str> = trace.tensors.keys().map(String::as_str).collect();
        assert_eq!(names, ["hidden.0", "mtp_logits"]);
    }
}
