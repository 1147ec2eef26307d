//! The laws of storage: exact data or an error, on both back ends. One binary: it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod faults;
mod given;
mod lifetime;
mod model;
mod swap;
