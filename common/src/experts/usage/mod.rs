//! Learned usage: which experts are routed to, recorded, remembered from session to session, and what
//! follows from it for the experts kept in memory.

pub mod colibri;
mod counts;
pub mod file;
mod keeper;
pub mod pins;
mod record;
pub mod simulate;
mod synthetic;
mod trace;
mod varint;

pub use counts::{Counts, HORIZONS, SavedLayer, SavedUsage, Usage, UsageOptions};
pub use keeper::UsageKeeper;
pub use record::{ObservedExperts, TraceSink};
pub use synthetic::Synthetic;
pub use trace::{
    LayerShape, RouteBatch, TRACE_MAGIC, TraceError, TraceEvent, TraceReader, TraceShape, TraceWriter,
};
