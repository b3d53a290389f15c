//! Where the time of one answer went.

use serde::Serialize;
use shimmer_common::experts::ExpertTimes;

/// `dense_s`, `wait_s`, `local_s` and `handling_s` add up to `total_s`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimeReport {
    /// Seconds of prefill and decoding.
    pub total_s: f64,
    /// Of these, seconds outside the routed experts: attention, shared experts, drafting, sampling.
    pub dense_s: f64,
    /// The routed experts' part.
    #[serde(flatten)]
    pub experts: ExpertTimes,
}

impl TimeReport {
    /// A report over `total_s` seconds in which `experts` happened.
    pub fn new(total_s: f64, experts: ExpertTimes) -> Self {
        Self { total_s, dense_s: (total_s - experts.seconds()).max(0.0), experts }
    }

    /// One line for people; `None` where no node took part.
    pub fn line(&self) -> Option<String> {
        let ExpertTimes { wait, nodes, .. } = &self.experts;
        if nodes.is_empty() || self.total_s <= 0.0 {
            return None;
        }
        let percent = |s: f64| 100.0 * s / self.total_s;
        let mut line = format!(
            "time: {:.0} % dense part, {:.0} % waiting for nodes (queue {:.0}, wire {:.0}, disk {:.0}, compute {:.0}, late {:.0}), {:.0} % experts here, {:.0} % messages",
            percent(self.dense_s),
            percent(self.experts.wait_s),
            percent(wait.queue_s),
            percent(wait.wire_s),
            percent(wait.disk_s),
            percent(wait.compute_s),
            percent(wait.late_s),
            percent(self.experts.local_s),
            percent(self.experts.handling_s),
        );
        if let Some(slowest) = nodes.values().filter(|n| n.straggled > 0).max_by_key(|n| n.straggled) {
            let calls: u64 = self.experts.layers.values().map(|layer| layer.calls).sum();
            line += &format!(", waited last for {} in {} of {calls} layers", slowest.name, slowest.straggled);
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shimmer_common::experts::times::NodeTimes;

    #[test]
    fn the_parts_add_up_and_the_line_says_who_was_waited_for() {
        let mut experts =
            ExpertTimes { wait_s: 2.0, local_s: 0.5, handling_s: 0.5, ..ExpertTimes::default() };
        experts.wait.disk_s = 2.0;
        assert_eq!(TimeReport::new(4.0, experts.clone()).line(), None, "no node took part");
        let attic = NodeTimes { name: "attic".into(), straggled: 3, ..NodeTimes::default() };
        experts.nodes.insert("a1".into(), attic);
        experts.layers.entry(5).or_default().calls = 7;
        let report = TimeReport::new(4.0, experts);
        assert_eq!(report.dense_s, 1.0);
        let line = report.line().unwrap();
        for part in ["25 % dense part", "50 % waiting", "disk 50", "last for attic in 3 of 7 layers"] {
            assert!(line.contains(part), "{part:?} is not in: {line}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["total_s"], &json["wait_s"]), (&4.0.into(), &2.0.into()));
        assert_eq!(json["nodes"]["a1"]["straggled"], 3);
    }
}
