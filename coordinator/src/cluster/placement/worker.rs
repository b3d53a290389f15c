//! What a machine can do, as measured.

use serde::{Deserialize, Serialize};

/// Id of the coordinator's own machine as a worker.
pub const LOCAL: &str = "local";

/// Speeds of a machine and of the way to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Random reads of whole records, several at once, bytes per second.
    pub disk_bytes_per_s: f64,
    /// Weights multiplied with one row, bytes per second.
    pub gemv_bytes_per_s: f64,
    /// A small message there and back, seconds; 0 on the coordinator's machine.
    pub round_trip_s: f64,
    /// Payload of the link, bytes per second; beyond measure on the coordinator's machine.
    pub link_bytes_per_s: f64,
}

impl Rates {
    /// A common spare PC on gigabit Ethernet: what is assumed until something has been measured.
    pub const ASSUMED: Self = Self {
        disk_bytes_per_s: 1.5e9,
        gemv_bytes_per_s: 15e9,
        round_trip_s: 400e-6,
        link_bytes_per_s: 110e6,
    };

    /// What stands for no link at all.
    pub const NO_LINK: f64 = 1e15;

    /// The rates with everything that cannot be a rate replaced by what is assumed.
    pub fn sane(self) -> Self {
        let or = |value: f64, other: f64| if value.is_finite() && value > 0.0 { value } else { other };
        let assumed = Self::ASSUMED;
        Self {
            disk_bytes_per_s: or(self.disk_bytes_per_s, assumed.disk_bytes_per_s),
            gemv_bytes_per_s: or(self.gemv_bytes_per_s, assumed.gemv_bytes_per_s),
            round_trip_s: if self.round_trip_s.is_finite() {
                self.round_trip_s.max(0.0)
            } else {
                assumed.round_trip_s
            },
            link_bytes_per_s: if self.link_bytes_per_s > 0.0 {
                self.link_bytes_per_s
            } else {
                assumed.link_bytes_per_s
            },
        }
    }

    /// Seconds to compute a resident expert of `bytes`.
    pub(in super::super) fn resident_s(&self, bytes: f64) -> f64 {
        bytes / self.gemv_bytes_per_s
    }

    /// Seconds to read and compute one that is not.
    pub(in super::super) fn cold_s(&self, bytes: f64) -> f64 {
        bytes / self.disk_bytes_per_s + self.resident_s(bytes)
    }

    /// Seconds a dispatch costs before any expert is computed; `wire_bytes` there and back.
    pub(super) fn dispatch_s(&self, wire_bytes: f64) -> f64 {
        self.round_trip_s + wire_bytes / self.link_bytes_per_s
    }
}

/// A machine that may own experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Node id, or [`LOCAL`].
    pub id: String,
    /// Name for people.
    pub name: String,
    /// How fast it is.
    pub rates: Rates,
    /// RAM for experts in bytes.
    pub ram_bytes: u64,
    /// Bytes of records it can keep: held and free; `None` = all of the model is there already.
    pub disk_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_replaced_by_what_is_assumed() {
        let bad = Rates {
            disk_bytes_per_s: 0.0,
            gemv_bytes_per_s: f64::NAN,
            round_trip_s: -1.0,
            link_bytes_per_s: Rates::NO_LINK,
        };
        let sane = bad.sane();
        assert_eq!(sane.disk_bytes_per_s, Rates::ASSUMED.disk_bytes_per_s);
        assert_eq!(sane.gemv_bytes_per_s, Rates::ASSUMED.gemv_bytes_per_s);
        assert_eq!((sane.round_trip_s, sane.link_bytes_per_s), (0.0, Rates::NO_LINK));
        assert_eq!(Rates::ASSUMED.sane(), Rates::ASSUMED);
    }
}
