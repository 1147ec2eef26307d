//! The laws of pipeline schedules, as properties over random counts, placements and costs and as examples. One binary:
//! it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod delivery;
mod format;
mod forms;
mod given;
mod lowering;
mod mutants;
mod mutants_lowered;
mod mutants_sharding;
mod mutation;
mod named;
mod published;
mod reference;
mod simulation;
mod timed;
