//! The laws of plans, as properties over random parameters and as examples. One binary: it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod coordinator;
mod given;
mod groups;
mod layout;
mod megatron;
mod partition;
mod prefetch;
mod reshard;
mod shard_plan;
mod swap;
