//! Schedules as text and as JSON documents, for files, ranks and people.

mod action;
mod digest;
mod explain;
mod json;
mod text;

pub use action::composite_text;
pub(super) use action::split_number;

/// Kind and version of a document, text or JSON.
pub const SCHEDULE_FORMAT: &str = "shardcore.pipeline_schedule.v1";
