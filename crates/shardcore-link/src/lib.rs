//! Ranks on one machine read each other's memory, so that a collective is one copy by the kernel and no socket.
//!
//! Over a socket each byte is copied twice and wakes threads on both sides. Here a rank *publishes* the address of what
//! it gives away, in a small block of memory that its peers have mapped, and each peer *pulls* what it needs straight
//! into its own buffer with `process_vm_readv`. All collectives of flat buffers come down to that: an all-gather pulls
//! every peer's shard, an all-to-all pulls one's own part of every peer's buffer.
//!
//! | module | what it does |
//! |---|---|
//! | `link` | the ranks' common order of exchanges: publish, pull, wait |
//! | `block` | what a rank shows its peers: the addresses it published, and how far it has pulled |
//! | `system` | the kernel calls, and all unsafe code |
//!
//! Only for processes that may read each other (one user, one machine, one process namespace); [`Link::connect`] says
//! why where that is refused. A rank that has died, and a rank that runs another exchange, are errors and never a hang
//! or wrong data: each exchange carries a tag that the reader compares before it reads.

#[cfg(target_os = "linux")]
mod block;
#[cfg(target_os = "linux")]
mod link;
#[cfg(target_os = "linux")]
mod system;

#[cfg(not(target_os = "linux"))]
mod elsewhere;

mod error;

#[cfg(not(target_os = "linux"))]
pub use elsewhere::Link;
pub use error::{LinkError, Result};
#[cfg(target_os = "linux")]
pub use link::Link;

/// One read of an exchange: `nbytes` at `offset` of what `peer` gives away, into this process's memory at `into`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Position of the rank that is read from.
    pub peer: usize,
    /// Where to start in what the peer published, in bytes.
    pub offset: usize,
    /// Address in this process.
    pub into: usize,
    /// How much.
    pub nbytes: usize,
}
