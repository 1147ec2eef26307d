//! Why a checkpoint cannot be written or read. A message says what, where, expected and found, and what to do.

use std::path::{Path, PathBuf};

use shardcore_io::StorageError;
use thiserror::Error;

/// The result of working on a checkpoint.
pub type Result<T> = std::result::Result<T, CheckpointError>;

/// A checkpoint could not be written, is damaged, or is not there.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages document the fields.
pub enum CheckpointError {
    #[error(transparent)]
    Storage(#[from] StorageError),

    #[error(
        "bytes {start} to {stop} of {} are damaged: {what}; this checkpoint cannot be trusted, load an earlier one (see `shardcore ckpt ls`)", path.display()
    )]
    Damaged { path: PathBuf, start: u64, stop: u64, what: String },

    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    Incomplete { path: PathBuf, reason: String },

    #[error("{} holds no complete checkpoint{}", path.display(), others(skipped))]
    NoneComplete { path: PathBuf, skipped: Vec<String> },

    #[error("the index of a checkpoint does not hold together: {0}")]
    BadIndex(String),

    #[error("tag {tag:?} cannot name a checkpoint: {reason}")]
    BadTag { tag: String, reason: &'static str },

    #[error("{0}; this is a fault of shardcore, please report it")]
    Internal(String),
}

impl CheckpointError {
    pub(crate) fn damaged(path: &Path, bytes: std::ops::Range<u64>, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), start: bytes.start, stop: bytes.end, what: what.into() }
    }

    pub(crate) fn incomplete(path: &Path, reason: impl Into<String>) -> Self {
        Self::Incomplete { path: path.to_owned(), reason: reason.into() }
    }
}

fn others(skipped: &[String]) -> String {
    match skipped {
        [] => "; check the path, or give a tag".to_owned(),
        _ => format!("; there are incomplete ones: {}", skipped.join(", ")),
    }
}
