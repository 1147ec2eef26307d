//! CPU arithmetic on slices: the optimizer steps, norms and casts of shardcore.
//!
//! | module | what it computes |
//! |---|---|
//! | [`rule`] | how one element moves: `AdamW`, Adam, Lion, Adagrad, gradient descent |
//! | [`update`] | one step of whole tensors in one pass: unscale, clip, update, 16-bit copy |
//! | [`norm`] | sums of squares |
//! | [`cast`] | fp32, bf16 and fp16 into each other |
//! | [`quantize`] | int8 and int4 codes with a scale per block, and back |
//! | [`half`] | single bf16 and fp16 numbers |
//!
//! Results are the same bits for every set of vector instructions, every number of threads and every way in which
//! tensors are cut. A step is bound by memory, so what counts is how many bytes it moves and how often: everything that
//! happens to a tensor in a step happens in one pass, and states may be kept in fewer bytes ([`StateMut`],
//! [`ParamMut`]).

#![allow(clippy::inline_always, reason = "loops are compiled once for each set of vector instructions: see `isa`")]

pub mod cast;
pub mod half;
pub mod norm;
pub mod quantize;
pub mod rule;
pub mod update;

mod batch;
mod error;
mod isa;
mod pool;
mod random;
mod values;

pub use cast::Cast;
pub use error::{KernelError, Result};
pub use isa::Isa;
pub use quantize::{Bits, Dequantize, Quantize};
pub use random::Stream;
pub use rule::{Options, Rule};
pub use update::Update;
pub use values::{ParamMut, Rounding, StateMut, Values, ValuesMut};
