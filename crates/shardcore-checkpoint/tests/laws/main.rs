//! The laws of checkpoints on disk, as properties over random contents and as examples. One binary: it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod across_rows;
mod damage;
mod folders;
mod given;
mod round_trip;
