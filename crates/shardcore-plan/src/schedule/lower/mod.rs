//! From compute programs to programs with communication and with what the sharding needs.

mod options;

pub use options::{Lowering, OptimizerStep, ReduceTiming};
