//! The one place where a Rust error becomes a Python exception.

use pyo3::PyErr;
use shardcore_kernels::KernelError;
use shardcore_plan::PlanError;

mod classes {
    pyo3::import_exception!(shardcore.errors, ConfigError);
    pyo3::import_exception!(shardcore.errors, PlanError);
    pyo3::import_exception!(shardcore.errors, ShardcoreError);
    pyo3::import_exception!(shardcore.errors, StateError);
}

/// Whatever can go wrong behind the binding.
pub(crate) enum CoreError {
    /// A plan cannot be made, or is not valid.
    Plan(PlanError),
    /// Numbers or slices that a kernel cannot work on.
    Kernel(KernelError),
    /// A tensor that a kernel cannot work on: the whole message.
    Tensor(String),
    /// Another thread is using this object.
    Busy(&'static str),
    /// Rust code panicked: a fault of shardcore, never of the caller.
    Panic(String),
}

impl From<PlanError> for CoreError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl From<KernelError> for CoreError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(error)
    }
}

impl From<CoreError> for PyErr {
    fn from(error: CoreError) -> Self {
        match error {
            CoreError::Plan(error) => classes::PlanError::new_err(error.to_string()),
            CoreError::Kernel(error) => classes::ConfigError::new_err(error.to_string()),
            CoreError::Tensor(message) => classes::ConfigError::new_err(message),
            CoreError::Busy(what) => classes::StateError::new_err(format!(
                "{what} is in use by another thread; let one call end before the next begins"
            )),
            CoreError::Panic(message) => classes::ShardcoreError::new_err(format!(
                "internal error in shardcore._core: {message}; this is a fault of shardcore, please report it"
            )),
        }
    }
}
