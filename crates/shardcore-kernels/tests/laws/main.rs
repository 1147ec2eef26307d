//! The laws of the kernels, as properties over random tensors. One binary: it links once.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "random numbers of small counts")]

mod accuracy;
mod given;
mod norms;
mod quantized;
mod refused;
mod same_bits;
mod small_states;
