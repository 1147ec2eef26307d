//! List scheduling of pipelines: orders from reference patterns, their timing, and the search for good patterns.
//!
//! Within a rank, all forwards of one stage run in the order of their micro-batches, and so do its input gradients and
//! its weight gradients: micro-batches are alike, and all named schedules do the same. An order is then a plain list of
//! (kind, chunk) per rank, small and cheap to time. The V generators and the synthesiser share this machinery.

mod budget;
mod greedy;
mod improve;
mod pattern;
mod problem;
mod rng;
mod search;
mod timing;

pub(crate) use budget::Budget;
pub(crate) use greedy::Rule;
pub(crate) use improve::Improver;
pub(crate) use pattern::Pattern;
pub(crate) use problem::{Op, OpKind, Order, Problem};
pub(crate) use search::{Found, PatternSearch, Ranked};
pub use timing::Objective;
pub(crate) use timing::{Goal, Timing, Workspace};
