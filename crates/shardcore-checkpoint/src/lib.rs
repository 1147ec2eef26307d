//! Checkpoints on disk: never half-written, any damage found, readable by others.
//!
//! A run folder holds one folder for each checkpoint, called by its tag:
//!
//! ```text
//! run/latest                       the tag of the newest one
//! run/step100/rank-00000.safetensors ...   pieces of tensors, under their unsharded names
//! run/step100/index.json           what there is, where it lies, and a checksum for every block of it
//! run/step100/complete             size and checksum of the index, and its own: written last
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`safetensors`] | headers of the files |
//! | [`index`] | the index, and whether its pieces cover each tensor once |
//! | [`checksum`] | CRC-32 of blocks, taken while bytes pass |
//! | [`write`] | one file from a stream of bytes: past the page cache, synced, checked |
//! | [`folder`] | tags: write aside, rename, mark, point at, remove old ones |
//! | [`read`] | any range of any tensor, checked as it is read |
//! | [`verify`] | where a checkpoint is damaged |

#![forbid(unsafe_code)]

pub mod checksum;
pub mod folder;
pub mod index;
pub mod read;
pub mod safetensors;
pub mod verify;
pub mod write;

mod error;
mod files;
mod marker;
mod runs;

pub use error::{CheckpointError, Result};
pub use index::Index;
pub use read::{Checkpoint, Want};
pub use runs::Runs;
pub use verify::Damage;
pub use write::{FileWriter, Written};
