//! One action of a pipeline schedule as a frozen Python object.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
#[cfg(feature = "stubs")]
use pyo3::{PyTypeCheck, inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};
use shardcore_plan::PlanError;
use shardcore_plan::schedule::{Action, ActionKind};

use crate::error::CoreError;
use crate::numbers::{Whole, quoted, shortened};

/// One thing a rank does: what, with which stage, for which micro-batch. ``str(action)`` reads ``"2F0"``.
///
/// ``kind`` is one of ``F`` (forward), ``B`` (whole backward), ``I`` (input gradient), ``W`` (weight gradient),
/// ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``, ``UNSHARD``, ``RESHARD``, ``REDUCE``, ``TIED_REDUCE`` and ``OPTIM``.
/// A receive has the stage that receives. Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, hash, name = "Action", module = "shardcore.plan")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyAction(pub(crate) Action);

#[pymethods]
impl PyAction {
    #[classattr]
    #[pyo3(name = "__match_args__")]
    const MATCH_ARGS: (&'static str, &'static str, &'static str) = ("kind", "stage", "microbatch");

    /// ``microbatch`` is ``None`` for kinds that have none. ``slot`` and ``with_next`` are as the properties.
    #[new]
    #[pyo3(signature = (kind, stage, microbatch = None, *, slot = Whole(0), with_next = false), text_signature = "(kind, stage, microbatch=None, *, slot=0, with_next=False)")]
    fn new(
        kind: &str,
        stage: Whole,
        microbatch: Option<Whole>,
        slot: Whole,
        with_next: bool,
    ) -> Result<Self, CoreError> {
        let kind = ActionKind::from_name(kind)?;
        let number = |what, value: Whole| value.fit(what, "0 to 2^32 - 1");
        let microbatch = match (kind.has_microbatch(), microbatch) {
            (true, Some(value)) => number("microbatch", value)?,
            (false, None) => 0,
            (needs, _) => return Err(PlanError::ActionMicrobatch { kind: kind.name(), needs }.into()),
        };
        let slot: u16 = slot.fit("slot", "0 to 65535")?;
        if slot != 0 && !kind.has_slot() {
            let expected = "0, because only receives, F, B and I have a slot";
            return Err(PlanError::OutOfRange { what: "slot", value: slot.into(), expected }.into());
        }
        Ok(Self(Action { kind, with_next, slot, stage: number("stage", stage)?, microbatch }))
    }

    /// What is done, such as ``"F"`` or ``"SEND_B"``.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    /// The stage, counted over all chains of the placement.
    #[getter]
    fn stage(&self) -> u32 {
        self.0.stage
    }

    /// The micro-batch (with sequence slices: ``microbatch * num_slices + slice``); ``None`` where the kind has none.
    #[getter]
    fn microbatch(&self) -> Option<u32> {
        self.0.kind.has_microbatch().then_some(self.0.microbatch)
    }

    /// The receive slot that this action fills or reads, on lowered programs; 0 elsewhere.
    #[getter]
    fn slot(&self) -> u16 {
        self.0.slot
    }

    /// Whether it runs as one composite with the action behind it (an overlapped forward and backward).
    #[getter]
    fn with_next(&self) -> bool {
        self.0.with_next
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Action {}>", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_text")?, (self.0.to_string(),)))
    }

    /// Reads what ``str`` writes: ``"2F0"``, ``"0F3@1"`` with a slot, ``"0F3&"`` joined with the action behind it.
    #[staticmethod]
    fn from_text(text: &str) -> Result<Self, CoreError> {
        Ok(Self(text.parse()?))
    }
}

/// The programs of all ranks: for each a list of actions or of their texts.
pub(crate) struct Programs(pub(crate) Vec<Vec<Action>>);

impl<'py> FromPyObject<'_, 'py> for Programs {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Iterable"),
            type_hint_union!(PyAction::TYPE_HINT, type_hint_identifier!("builtins", "str"))
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let programs = object.try_iter()?.enumerate();
        programs.map(|(rank, actions)| program(rank, &actions?)).collect::<PyResult<_>>().map(Self)
    }
}

fn program(rank: usize, actions: &Bound<'_, PyAny>) -> PyResult<Vec<Action>> {
    let refused = || {
        PyTypeError::new_err(format!(
            "rank {rank}: a program is a list of actions or of their texts such as [\"2F0\"], got {}",
            shortened(actions)
        ))
    };
    if actions.is_instance_of::<PyString>() {
        return Err(refused());
    }
    let actions = actions.try_iter().map_err(|_| refused())?.enumerate();
    actions.map(|(position, given)| action(rank, position, &given?)).collect()
}

fn action(rank: usize, position: usize, given: &Bound<'_, PyAny>) -> PyResult<Action> {
    if let Ok(action) = given.cast::<PyAction>() {
        return Ok(action.get().0);
    }
    let Ok(text) = given.extract::<&str>() else {
        return Err(PyTypeError::new_err(format!(
            "rank {rank}, position {position}: a program is a list of actions or of their texts such as \"2F0\", got {}",
            shortened(given)
        )));
    };
    let placed = |error| match error {
        PlanError::BadScheduleText { reason, .. } => {
            let action = quoted(text);
            let bare = reason.strip_prefix(&format!("{action}: ")).map(str::to_owned);
            PlanError::BadAction { rank, position, action, reason: bare.unwrap_or(reason) }
        }
        other => other,
    };
    text.parse().map_err(|error| CoreError::from(placed(error)).into())
}
