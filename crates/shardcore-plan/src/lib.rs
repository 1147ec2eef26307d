//! What goes where: the planning half of shardcore.
//!
//! Every function here is pure. It takes names and sizes and gives back a frozen plan, and it gives the same plan on
//! every rank and every platform: no unsafe code, no I/O, no threads, no clock, no hash order.
//!
//! | module | what it decides |
//! |---|---|
//! | [`layout`] | where each parameter lies in a flat buffer, and which piece of it each rank holds |
//! | [`groups`] | which parameters share a buffer: one dtype, one trainability, a bounded size |
//! | [`bucket`] | in which order the groups' gradients are reduced |
//! | [`prefetch`] | when units are gathered and released in a step |
//! | [`shard_plan`] | all of it for a model cut into units |
//! | [`reshard`] | which elements move where when the number of shards changes |
//! | [`share`] | which rank writes which part of what several ranks hold alike |
//! | [`swap`] | when tiles of optimizer states move between a disk and host memory |
//!
//! A plan also has a digest (ranks compare it at the start), a table for people (`explain`) and a JSON document, of
//! which [`first_difference`] finds the first place where two disagree.

#![forbid(unsafe_code)]

pub mod bucket;
pub mod groups;
pub mod layout;
pub mod prefetch;
pub mod reshard;
pub mod schedule;
pub mod shard_plan;
pub mod share;
pub mod swap;

mod diff;
mod digest;
mod dtype;
mod error;
mod explain;
mod json;
mod names;
mod table;

pub use diff::first_difference;
pub use dtype::Dtype;
pub use error::{Kind, PlanError, Result};
pub use layout::{Entry, FlatLayout, Param, Sharding};
pub use shard_plan::{Group, ShardPlan, Unit};
