//! The one place where a Rust error becomes a Python exception.

use pyo3::prelude::*;
use shardcore_checkpoint::CheckpointError;
use shardcore_io::StorageError;
use shardcore_kernels::KernelError;
use shardcore_link::LinkError;
use shardcore_plan::PlanError;

mod classes {
    pyo3::import_exception!(shardcore.errors, CheckpointError);
    pyo3::import_exception!(shardcore.errors, ConfigError);
    pyo3::import_exception!(shardcore.errors, PlanError);
    pyo3::import_exception!(shardcore.errors, RankMismatchError);
    pyo3::import_exception!(shardcore.errors, ShardcoreError);
    pyo3::import_exception!(shardcore.errors, StateError);
    pyo3::import_exception!(shardcore.errors, StorageError);
}

/// Whatever can go wrong behind the binding.
pub(crate) enum CoreError {
    /// A plan cannot be made, or is not valid.
    Plan(PlanError),
    /// Processes on one machine cannot exchange data, or an exchange failed.
    Link(LinkError),
    /// Host memory or a disk could not do what was asked.
    Storage(StorageError),
    /// A checkpoint is damaged, incomplete or not there.
    Checkpoint(CheckpointError),
    /// A setting cannot be honoured.
    Config(String),
    /// A tensor has no memory of the kind that Rust can use.
    Tensor(String),
    /// Numbers or slices that a kernel cannot work on.
    Kernel(KernelError),
    /// A tensor that a kernel cannot work on.
    KernelTensor(String),
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

impl From<LinkError> for CoreError {
    fn from(error: LinkError) -> Self {
        Self::Link(error)
    }
}

impl From<StorageError> for CoreError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<CheckpointError> for CoreError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Storage(error) => Self::Storage(error),
            error => Self::Checkpoint(error),
        }
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
            CoreError::Link(error @ (LinkError::Unavailable { .. } | LinkError::Closed)) => {
                classes::StateError::new_err(error.to_string())
            }
            CoreError::Link(error) => classes::RankMismatchError::new_err(error.to_string()),
            CoreError::Storage(error) => storage_error(&error),
            CoreError::Checkpoint(error) => classes::CheckpointError::new_err(error.to_string()),
            CoreError::Config(message) | CoreError::KernelTensor(message) => classes::ConfigError::new_err(message),
            CoreError::Tensor(message) => classes::StorageError::new_err(message),
            CoreError::Kernel(error) => classes::ConfigError::new_err(error.to_string()),
            CoreError::Busy(what) => classes::StateError::new_err(format!(
                "{what} is in use by another thread; let one call end before the next begins"
            )),
            CoreError::Panic(message) => classes::ShardcoreError::new_err(format!(
                "internal error in shardcore._core: {message}; this is a fault of shardcore, please report it"
            )),
        }
    }
}

/// Carries number, path and offset over, as `OSError` does.
fn storage_error(error: &StorageError) -> PyErr {
    let message = error.to_string();
    let raised = match (error.errno(), error.path()) {
        (errno, Some(path)) => classes::StorageError::new_err((errno, message, path.as_os_str().to_owned())),
        (Some(errno), None) => classes::StorageError::new_err((errno, message)),
        (None, None) => classes::StorageError::new_err(message),
    };
    if let Some(offset) = error.offset() {
        // A failure here would hide the error that matters.
        let _ = Python::attach(|py| raised.value(py).setattr("offset", offset));
    }
    raised
}
