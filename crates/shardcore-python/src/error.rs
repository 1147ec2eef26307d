//! The one place where a Rust error becomes a Python exception.

use pyo3::PyErr;
use shardcore_plan::PlanError;

mod classes {
    pyo3::import_exception!(shardcore.errors, PlanError);
    pyo3::import_exception!(shardcore.errors, ShardcoreError);
}

/// Whatever can go wrong behind the binding.
pub(crate) enum CoreError {
    /// A plan cannot be made, or is not valid.
    Plan(PlanError),
    /// Rust code panicked: a fault of shardcore, never of the caller.
    Panic(String),
}

impl From<PlanError> for CoreError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl From<CoreError> for PyErr {
    fn from(error: CoreError) -> Self {
        match error {
            CoreError::Plan(error) => classes::PlanError::new_err(error.to_string()),
            CoreError::Panic(message) => classes::ShardcoreError::new_err(format!(
                "internal error in shardcore._core: {message}; this is a fault of shardcore, please report it"
            )),
        }
    }
}
