//! Why ranks cannot read each other, or an exchange has failed.

use thiserror::Error;

/// The result of an exchange.
pub type Result<T> = std::result::Result<T, LinkError>;

/// An exchange cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages document the fields.
pub enum LinkError {
    #[error("this machine cannot link processes: {reason}")]
    Unavailable { reason: String },

    #[error("rank {peer} is gone: its process ended during exchange {sequence}")]
    PeerGone { peer: usize, sequence: u64 },

    #[error("rank {peer} runs another exchange than this one at number {sequence}")]
    Mismatch { peer: usize, sequence: u64 },

    #[error("reading {nbytes} bytes from rank {peer} in exchange {sequence} failed: {reason}")]
    ReadFailed { peer: usize, sequence: u64, nbytes: usize, reason: String },

    #[error("this link is closed, or was never connected")]
    Closed,
}
