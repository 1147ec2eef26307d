//! The one place where the GIL is released.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

use crate::error::CoreError;

/// Runs `work` without the GIL, so that other Python threads go on meanwhile.
///
/// Its error, and a panic as well, becomes a Python exception. A signal that came meanwhile (Ctrl-C) is raised here.
pub(crate) fn run<T, E>(py: Python<'_>, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<CoreError> + Send,
{
    // AssertUnwindSafe: `work` sees frozen plans, and engines whose locks hold no state that a panic could leave half
    // changed; and the numbers of tensors, of which a panic may leave some updated and some not: the message says that
    // the library is at fault.
    let outcome = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    py.check_signals()?;
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.into().into()),
        Err(payload) => Err(CoreError::Panic(panic_message(payload.as_ref())).into()),
    }
}

/// [`run`] for work that cannot fail.
pub(crate) fn run_infallible<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    run(py, || Ok::<T, CoreError>(work()))
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
}
