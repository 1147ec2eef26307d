//! The laws of pipeline schedules, as properties over random counts, placements and costs and as examples. One binary:
//! it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod format;
mod given;
mod lowering;
mod named;
mod reference;
