//! Numbers of Python as the planner's input: of any size, without an `OverflowError`.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_union};
use shardcore_plan::PlanError;

use crate::error::CoreError;

/// An integer of any size. One beyond 128 bits is out of every range, as the largest and the smallest are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Whole(pub(crate) i128);

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "SupportsIndex");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i128>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i128::MIN } else { i128::MAX }))
            }
            Err(_) => Err(wrong("an integer", object)),
            Ok(value) => Ok(Self(value)),
        }
    }
}

impl Whole {
    /// The number as another type; else an error that says what was expected of `what`.
    pub(crate) fn fit<T: TryFrom<i128>>(self, what: &'static str, expected: &'static str) -> Result<T, PlanError> {
        self.fit_or(|value| PlanError::OutOfRange { what, value, expected })
    }

    /// The number as another type, or an error of it.
    pub(crate) fn fit_or<T: TryFrom<i128>>(self, error: impl FnOnce(i128) -> PlanError) -> Result<T, PlanError> {
        T::try_from(self.0).map_err(|_| error(self.0))
    }
}

/// Every number of a list as another type, or an error of the first one that does not fit.
pub(crate) fn fit_all<T: TryFrom<i128>>(
    values: Vec<Whole>,
    error: impl Fn(usize, i128) -> PlanError,
) -> Result<Vec<T>, PlanError> {
    values.into_iter().enumerate().map(|(at, value)| value.fit_or(|value| error(at, value))).collect()
}

/// What a float is made of; an integer too large for one is refused.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Number(pub(crate) f64);

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("typing", "SupportsFloat"),
        type_hint_identifier!("typing", "SupportsIndex")
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<f64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(too_large()),
            Err(_) => Err(wrong("a number", object)),
            Ok(value) => Ok(Self(value)),
        }
    }
}

/// What a number that no float holds is told.
pub(crate) fn too_large() -> PyErr {
    let what = "number that is too large".to_owned();
    let expected = "at most 1.8e308 in either direction: use a larger unit".to_owned();
    CoreError::from(PlanError::BadCost { what, expected }).into()
}

/// What an argument of another type is told; its name is added where it is read.
pub(crate) fn wrong(expected: &str, object: Borrowed<'_, '_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("expected {expected}, got {}", shortened(&object)))
}

/// The start of what an object is written as, for messages.
pub(crate) fn shortened(object: &Bound<'_, PyAny>) -> String {
    start(&format!("{object:?}"), 80)
}

/// The start of a text that was given, in quotes, for messages.
pub(crate) fn quoted(text: &str) -> String {
    format!("{:?}", start(text, 40))
}

fn start(text: &str, most: usize) -> String {
    let mut letters = text.chars();
    let start: String = letters.by_ref().take(most).collect();
    if letters.next().is_some() { format!("{start}...") } else { start }
}

/// Plain numbers from those of Python.
pub(crate) fn plain(numbers: Vec<Number>) -> Vec<f64> {
    numbers.into_iter().map(|number| number.0).collect()
}
