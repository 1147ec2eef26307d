//! The one place where the GIL is released.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

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
    finish(py, outcome)
}

fn finish<T, E: Into<CoreError>>(py: Python<'_>, outcome: thread::Result<Result<T, E>>) -> PyResult<T> {
    py.check_signals()?;
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.into().into()),
        Err(payload) => Err(CoreError::Panic(panic_message(payload.as_ref())).into()),
    }
}

/// [`run`] for work that may take long: it asks `interrupted` now and then, and gives up when a signal has come.
pub(crate) fn run_interruptible<T, E>(
    py: Python<'_>,
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, E> + Send,
) -> PyResult<T>
where
    T: Send,
    E: Into<CoreError> + Send,
{
    // Only the main thread learns of signals, so the work goes to another one and this one looks out for them.
    let (outcome, signal) = py.detach(move || {
        let (stop, mut signal) = (AtomicBool::new(false), Ok(()));
        let interrupted = || stop.load(Ordering::Relaxed);
        let (done, finished) = mpsc::channel();
        let outcome = thread::scope(|scope| {
            scope.spawn(move || {
                // The receiver outlives this thread.
                let _ = done.send(catch_unwind(AssertUnwindSafe(|| work(&interrupted))));
            });
            loop {
                match finished.recv_timeout(LOOKOUT) {
                    Ok(outcome) => return outcome,
                    Err(RecvTimeoutError::Disconnected) => return Err(Box::new("a thread is lost") as Payload),
                    Err(RecvTimeoutError::Timeout) if signal.is_ok() => {
                        signal = check_signals();
                        stop.store(signal.is_err(), Ordering::Relaxed);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
        });
        (outcome, signal)
    });
    signal?;
    finish(py, outcome)
}

/// [`run`] for work on data of its own that may take seconds: a signal is raised at once, and the work ends unseen.
pub(crate) fn run_or_leave<T, E>(py: Python<'_>, work: impl FnOnce() -> Result<T, E> + Send + 'static) -> PyResult<T>
where
    T: Send + 'static,
    E: Into<CoreError> + Send + 'static,
{
    let (done, finished) = mpsc::channel();
    let started = thread::Builder::new().spawn(move || {
        // Nobody receives it after a signal.
        let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
    });
    started?; // Python's OSError
    let outcome: PyResult<_> = py.detach(move || {
        loop {
            match finished.recv_timeout(LOOKOUT) {
                Ok(outcome) => return Ok(outcome),
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(Box::new("a thread is lost") as Payload)),
                Err(RecvTimeoutError::Timeout) => check_signals()?,
            }
        }
    });
    finish(py, outcome?)
}

#[expect(clippy::redundant_closure_for_method_calls, reason = "the method is of one lifetime only")]
fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// What a panic carries.
type Payload = Box<dyn Any + Send>;

/// How long a signal waits at most.
const LOOKOUT: Duration = Duration::from_millis(50);

/// [`run`] for work that cannot fail.
pub(crate) fn run_infallible<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    run(py, || Ok::<T, CoreError>(work()))
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
}
