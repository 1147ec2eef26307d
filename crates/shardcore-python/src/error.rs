//! The one place where a Rust error becomes a Python exception.

use pyo3::PyErr;
use shardcore_link::LinkError;
use shardcore_plan::PlanError;

mod classes {
    pyo3::import_exception!(shardcore.errors, PlanError);
    pyo3::import_exception!(shardcore.errors, RankMismatchError);
    pyo3::import_exception!(shardcore.errors, ShardcoreError);
    pyo3::import_exception!(shardcore.errors, StateError);
}

/// Whatever can go wrong behind the binding.
pub(crate) enum CoreError {
    /// A plan cannot be made, or is not valid.
    Plan(PlanError),
    /// Processes on one machine cannot exchange data, or an exchange failed.
    Link(LinkError),
    /// Rust code panicked: a fault of shardcore, never of the caller.
    Panic(String),
}

impl From<PlanError> for CoreError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl From<LinkError> for CoreError {
    fn from(error: LinkError) -> Self {
        Self::Link(error)
    }
}

impl From<CoreError> for PyErr {
    fn from(error: CoreError) -> Self {
        match error {
            CoreError::Plan(error) => classes::PlanError::new_err(error.to_string()),
            CoreError::Link(error @ (LinkError::Unavailable { .. } | LinkError::Closed)) => {
                classes::StateError::new_err(error.to_string())
            }
            CoreError::Link(error) => classes::RankMismatchError::new_err(error.to_string()),
            CoreError::Panic(message) => classes::ShardcoreError::new_err(format!(
                "internal error in shardcore._core: {message}; this is a fault of shardcore, please report it"
            )),
        }
    }
}
