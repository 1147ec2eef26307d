//! The laws of plans, as properties over random parameters and as examples. One binary: it links once.

mod given;
mod groups;
mod layout;
mod shard_plan;
