//! Host memory and disk: exactly sized buffers, and an engine that moves them while others compute.
//!
//! | module | what it holds |
//! |---|---|
//! | [`engine`] | requests in, bytes moved, a handle for each: on an `io_uring` or on threads |
//! | [`memory`], [`pool`] | mappings of exactly the size asked for, whole or handed out in pieces |
//! | [`limits`] | what the machine, a container and `ulimit -l` leave, and the sum when that is too little |
//! | [`lend`] | blocks of memory that go to a request and come back: for safe code that computes on what it reads |
//! | [`swap`] | preallocated files that leave nothing behind, striped over several disks |
//! | [`seam`] | where tests inject faults |
//!
//! No size or offset is special: whole blocks go past the page cache (`O_DIRECT`), unaligned ends through it, in an
//! order in which neither sees stale bytes of the other. A request gives exact data or an error with path, offset and
//! number; it owns its memory until the kernel has let go of it. Linux only.

pub mod engine;
pub mod lend;
pub mod limits;
pub mod memory;
pub mod pool;
pub mod seam;
pub mod swap;

mod completion;
mod error;
mod file;
mod queue;
mod request;
mod target;
mod threads;
mod uring;

pub use completion::Handle;
pub use engine::{Backend, IoEngine, Options, Place};
pub use error::{Result, StorageError};
pub use file::Direct;
pub use lend::{Block, Loan};
pub use memory::{HostBuffer, HostOptions, HostSlice, IoMemory};
pub use pool::HostPool;
pub use seam::{Faults, Kind};
pub use swap::{SwapFile, reserve};
