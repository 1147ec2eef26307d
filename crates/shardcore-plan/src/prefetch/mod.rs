//! When units are gathered and released: the program of a step, and the coordinator that follows it.
//!
//! | module | what it does |
//! |---|---|
//! | `trace` | what a step uses, in which order |
//! | `keep` | which units stay gathered between two uses |
//! | `plan` | when each gather starts |
//! | `simulate` | how long the step would take |
//! | `coordinator` | answers the hooks of a running step: start, wait, release |

mod coordinator;
mod document;
mod explain;
mod keep;
mod plan;
mod simulate;
mod trace;

pub use coordinator::{Answer, Coordinator, Recorded};
pub use plan::{Gather, Limits, Objective, PrefetchPlan};
pub use simulate::{Cost, Simulation};
pub use trace::{GatherUnit, Phase, Seconds, Trace, Use};
