//! Python arguments as the planner's input.

use std::num::NonZeroU64;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript};
use shardcore_io::StorageError;
use shardcore_plan::{Dtype, Param, PlanError, Sharding, Unit};

use crate::error::CoreError;
use crate::numbers::Whole;

#[cfg(feature = "stubs")]
const PARAM_TYPE: PyStaticExpr = type_hint_subscript!(
    type_hint_identifier!("builtins", "tuple"),
    type_hint_identifier!("builtins", "str"),
    type_hint_identifier!("builtins", "int"),
    type_hint_identifier!("builtins", "str"),
    type_hint_identifier!("builtins", "bool")
);

/// An iterable of `(name, numel, dtype, trainable)`.
pub(crate) struct Params(pub(crate) Vec<Param>);

impl<'py> FromPyObject<'_, 'py> for Params {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr =
        type_hint_subscript!(type_hint_identifier!("collections.abc", "Iterable"), PARAM_TYPE);

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.try_iter()?.map(|item| param(&item?)).collect::<PyResult<_>>().map(Self)
    }
}

/// An iterable of `(unit_name, params)`.
pub(crate) struct Units(pub(crate) Vec<Unit>);

impl<'py> FromPyObject<'_, 'py> for Units {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_subscript!(
            type_hint_identifier!("builtins", "tuple"),
            type_hint_identifier!("builtins", "str"),
            type_hint_subscript!(type_hint_identifier!("collections.abc", "Iterable"), PARAM_TYPE)
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.try_iter()?.map(|item| unit(&item?)).collect::<PyResult<_>>().map(Self)
    }
}

fn unit(object: &Bound<'_, PyAny>) -> PyResult<Unit> {
    let [name, params] = fields(object, "a unit is (name, [(name, numel, dtype, trainable), ...])")?;
    Ok(Unit { name: name.extract()?, params: params.extract::<Params>()?.0 })
}

fn param(object: &Bound<'_, PyAny>) -> PyResult<Param> {
    let [name, count, dtype, trainable] = fields(object, "a parameter is (name, numel, dtype, trainable)")?;
    let name: String = name.extract()?;
    let checked = |error: PlanError| CoreError::from(error.in_parameter(&name));
    let numel = numel(&count)?.map_err(checked)?;
    let dtype = Dtype::parse(dtype.extract()?).map_err(checked)?;
    Ok(Param { name, numel, dtype, trainable: trainable.extract()? })
}

/// The fields of a tuple or list of exactly `N`.
fn fields<'py, const N: usize>(object: &Bound<'py, PyAny>, expected: &str) -> PyResult<[Bound<'py, PyAny>; N]> {
    object.extract().map_err(|_| PyTypeError::new_err(format!("{expected}, got {object:?}")))
}

/// Outer error: not an integer. Inner error: an integer that counts nothing.
fn numel(object: &Bound<'_, PyAny>) -> PyResult<Result<u64, PlanError>> {
    match object.extract::<u64>() {
        Ok(numel) => Ok(Ok(numel)),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
            Ok(Err(PlanError::numel(object.extract::<Whole>()?.0)))
        }
        Err(error) => Err(error),
    }
}

/// Checks the two numbers that describe shards.
pub(crate) fn sharding(num_shards: Whole, alignment: Whole) -> Result<Sharding, PlanError> {
    let count = num_shards.fit_or(PlanError::num_shards)?;
    let align = alignment.fit_or(PlanError::alignment)?;
    Sharding::new(count, align)
}

/// Checks the limit on a segment.
pub(crate) fn segment_limit(segment_nbytes: Option<Whole>) -> Result<Option<NonZeroU64>, PlanError> {
    let limit = |value: Whole| {
        let nbytes = u64::try_from(value.0).ok().and_then(NonZeroU64::new);
        nbytes.ok_or_else(|| PlanError::segment_nbytes(value.0))
    };
    segment_nbytes.map(limit).transpose()
}

/// A count or an offset in bytes, from whatever integer Python gave.
pub(crate) fn u64_of(what: &'static str, value: i128, expected: &str) -> Result<u64, StorageError> {
    u64::try_from(value).map_err(|_| StorageError::out_of_range(what, value, expected))
}

/// [`u64_of`] for what is in memory.
pub(crate) fn usize_of(what: &'static str, value: i128, expected: &str) -> Result<usize, StorageError> {
    usize::try_from(value).map_err(|_| StorageError::out_of_range(what, value, expected))
}
