//! `shardcore.plan`: pipeline schedules as frozen Python objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyType;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, Delivery};
use shardcore_plan::schedule::{
    Action, CommModel, CostSpec, Costs, Gating, Header, Lowering, Placement, Schedule, ScheduleName, generate,
};

use crate::action::{Programs, PyAction};
use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Number, Whole};
use crate::schedule_args::{
    Latencies, PyAmount, PyCosts, PyLowering, amount, cost_spec, count, lowering, lowering_dict, network, ranks,
};
use crate::simulation::PySimulation;
use crate::synthesis::Cap;

/// What each rank of a pipeline does, in which order.
///
/// Made by ``pipeline_schedule``, ``evaluation_schedule``, ``synthesize``, the ``from_...`` methods, or from programs
/// of your own: one list of actions (or of their texts, ``["0F0", "0B0"]``) for each rank. ``placement`` is the rank
/// of every stage. Micro-batches of a step, slices of a sequence and chains of a bidirectional pipeline are counted by
/// ``num_microbatches``, ``num_slices`` and ``num_chains``. ``gating`` says when the parts of a composite start:
/// ``"all"`` inputs are there, or each part's ``"own"``. ``comm`` is the strictest communication under which the
/// lowered program is declared to run. Programs with more than compute are lowered; ``lowering`` is what for, as the
/// property of that name gives it (``None``: what their actions say, so gathers mean ``zero_stage`` 3, sums over shared
/// weights one tied group, and the bounds are those that the programs reach).
///
/// The constructor checks that every action is in range; ``check`` whether the order can be executed. Frozen,
/// comparable, hashable and picklable.
#[pyclass(frozen, eq, hash, name = "PipelineSchedule", module = "shardcore.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyPipelineSchedule(pub(crate) Arc<Schedule>);

impl From<Schedule> for PyPipelineSchedule {
    fn from(schedule: Schedule) -> Self {
        Self(Arc::new(schedule))
    }
}

#[pymethods]
impl PyPipelineSchedule {
    #[new]
    #[pyo3(signature = (programs, placement, num_microbatches, *, name = "custom", num_slices = Whole(1), num_chains = Whole(1), gating = "all", comm = "blocking", lowering = None), text_signature = "(programs, placement, num_microbatches, *, name='custom', num_slices=1, num_chains=1, gating='all', comm='blocking', lowering=None)")]
    #[expect(clippy::too_many_arguments, reason = "one for each field of the header")]
    fn new(
        py: Python<'_>,
        programs: Programs,
        placement: Vec<Whole>,
        num_microbatches: Whole,
        name: &str,
        num_slices: Whole,
        num_chains: Whole,
        gating: &str,
        comm: &str,
        lowering: Option<PyLowering>,
    ) -> PyResult<Self> {
        let header = Header {
            name: name.to_owned(),
            num_microbatches: count(num_microbatches, PlanError::num_microbatches)?,
            num_slices: count(num_slices, PlanError::num_slices)?,
            placement: placed(placement, num_chains)?,
            gating: Gating::from_name(gating).map_err(CoreError::from)?,
            comm: CommModel::from_name(comm).map_err(CoreError::from)?,
        };
        gil::run(py, || assembled(header, programs.0, lowering.map(|given| given.0))).map(Self::from)
    }

    /// The same schedule with other programs: one list of actions (or of their texts) for each rank.
    ///
    /// Raises ``PlanError`` where an action is out of range.
    fn with_programs(&self, py: Python<'_>, programs: Programs) -> PyResult<Self> {
        let (header, lowering) = (self.0.header().clone(), self.0.lowering().cloned());
        gil::run(py, || assembled(header, programs.0, lowering)).map(Self::from)
    }

    /// Name of the generator, or the user's.
    #[getter]
    fn name(&self) -> &str {
        &self.0.header().name
    }

    /// Number of ranks.
    #[getter]
    fn num_ranks(&self) -> u32 {
        self.0.num_ranks()
    }

    /// Number of stages over all chains.
    #[getter]
    fn num_stages(&self) -> u32 {
        self.0.num_stages()
    }

    /// The most stages that one micro-batch crosses on one rank.
    #[getter]
    fn num_chunks(&self) -> u32 {
        self.0.num_chunks()
    }

    /// Micro-batches of one step.
    #[getter]
    fn num_microbatches(&self) -> u32 {
        self.0.num_microbatches()
    }

    /// Slices into which a sequence is cut (``seq-1f1b``); 1 elsewhere.
    #[getter]
    fn num_slices(&self) -> u32 {
        self.0.header().num_slices
    }

    /// Copies of the model between which the micro-batches are divided: 2 for a bidirectional pipeline, else 1.
    #[getter]
    fn num_chains(&self) -> u32 {
        self.0.placement().num_chains()
    }

    /// The rank of every stage.
    #[getter]
    fn placement(&self) -> &[u32] {
        self.0.placement().ranks()
    }

    /// When the parts of a composite may start: ``"all"`` inputs are there, or each part's ``"own"``.
    #[getter]
    fn gating(&self) -> &'static str {
        self.0.header().gating.name()
    }

    /// The strictest communication under which the lowered program is declared to run.
    #[getter]
    fn comm(&self) -> &'static str {
        self.0.header().comm.name()
    }

    /// Whether the programs hold communication.
    #[getter]
    fn is_lowered(&self) -> bool {
        self.0.is_lowered()
    }

    /// What the schedule was lowered for, as keyword arguments of ``lower``; ``None`` for one that is not lowered.
    #[getter]
    fn lowering<'py>(&self, py: Python<'py>) -> PyResult<Option<BTreeMap<String, Bound<'py, PyAny>>>> {
        self.0.lowering().map(|lowering| lowering_dict(py, lowering)?.extract()).transpose()
    }

    /// Adds communication, and what sharding and optimizer need, to a schedule of compute actions.
    ///
    /// ``zero_stage`` (0 to 3) adds reductions of gradients, at 3 also gathers of parameters; ``None`` neither.
    /// ``reduce`` is ``"once"`` behind a stage's last weight gradient or ``"per-microbatch"`` (at stages 2 and 3).
    /// ``optimizer`` is ``"absent"``, ``"barrier"`` (behind all gradients of the rank) or ``"post-validation"`` (each
    /// stage as soon as its gradients are reduced). ``tied`` has groups of stages that share weights.
    /// ``receives_ahead`` bounds the receives of a stage and direction that are posted and not yet used (``None``: 2,
    /// or as many as the programs need if those are more), ``max_unsharded`` the stages that a rank gathers at once.
    ///
    /// ``costs``, spelled as for ``pipeline_schedule``, are what a run takes: each receive is posted when its message
    /// leaves, so at these costs the lowered programs take no longer than the schedule itself, as far as the receives
    /// ahead cover the latency; and never longer than without ``costs``. By default every computation takes the same
    /// time and a hop a quarter of it.
    ///
    /// Raises ``PlanError`` for a schedule that is lowered already or cannot be executed, for fewer receives ahead than
    /// it needs, and for options that do not fit each other.
    #[pyo3(signature = (*, zero_stage = None, reduce = "once", optimizer = "absent", tied = Vec::new(), receives_ahead = None, max_unsharded = Whole(2), costs = None), text_signature = "($self, *, zero_stage=None, reduce='once', optimizer='absent', tied=(), receives_ahead=None, max_unsharded=2, costs=None)")]
    #[expect(clippy::too_many_arguments, reason = "one for each option")]
    fn lower(
        &self,
        py: Python<'_>,
        zero_stage: Option<Whole>,
        reduce: &str,
        optimizer: &str,
        tied: Vec<Vec<Whole>>,
        receives_ahead: Option<Whole>,
        max_unsharded: Whole,
        costs: Option<PyCosts>,
    ) -> PyResult<Self> {
        let options = lowering(zero_stage, reduce, optimizer, tied, receives_ahead, max_unsharded)?;
        let schedule = Arc::clone(&self.0);
        gil::run_or_leave(py, move || {
            let costs = costs.map(|spec| costs_of(&schedule, &spec.0)).transpose()?;
            costs.map_or_else(|| schedule.lower(&options), |costs| schedule.lower_for(&options, &costs))
        })
        .map(Self::from)
    }

    /// The actions of one rank, in their order. Raises ``PlanError`` for a rank out of range.
    fn program(&self, rank: Whole) -> Result<Vec<PyAction>, CoreError> {
        let num_ranks = self.0.num_ranks();
        let known = rank.fit_or(|rank| PlanError::NoSuchRank { rank, num_ranks })?;
        Ok(self.0.program(known)?.iter().copied().map(PyAction).collect())
    }

    /// The stages of one rank, ascending. Raises ``PlanError`` for a rank out of range.
    fn stages(&self, rank: Whole) -> Result<&[u32], CoreError> {
        let num_ranks = self.0.num_ranks();
        let known = u32::try_from(rank.0).ok().filter(|rank| *rank < num_ranks);
        let known = known.ok_or(PlanError::NoSuchRank { rank: rank.0, num_ranks })?;
        Ok(self.0.placement().stages_of(known))
    }

    /// Simulates the programs and says when everything runs, what is idle and what is held.
    ///
    /// A cost or size is a number, per rank and micro-batch (the stages of a rank share it evenly), or a list with
    /// one entry per stage. Times are ``forward``, ``input_grad`` and ``weight_grad``; a whole backward takes
    /// ``fused_backward``, or the sum of the two gradients. ``hop`` is the latency between two ranks. ``activation`` is
    /// held from the forward to the input gradient (or the whole backward), ``stash`` from there to the weight gradient
    /// (``None``: the same).
    ///
    /// Links may be described more closely: ``latency`` of single edges ``{(sender, receiver): time}``, the size of
    /// each stage's output in ``message`` (or of all of them) with the one ``bandwidth`` of all edges (neither goes
    /// without the other), ``overlap=False`` where a rank waits for each message that it sends or receives. A message
    /// is what one forward sends: with sequence slices (``seq-1f1b``) that of one slice, whereas times, activations and
    /// stashes are of whole micro-batches. ``composite`` scales the time of a composite against the sum of its parts.
    ///
    /// Raises ``PlanError`` for costs that do not fit or whose sum no double can hold, and for programs that cannot go
    /// on.
    #[pyo3(signature = (forward, input_grad, weight_grad, hop = Number(0.0), activation = PyAmount::ONE, stash = None, *, fused_backward = None, latency = None, message = None, bandwidth = None, overlap = true, composite = Number(1.0)), text_signature = "($self, forward, input_grad, weight_grad, hop=0.0, activation=1.0, stash=None, *, fused_backward=None, latency=None, message=None, bandwidth=None, overlap=True, composite=1.0)")]
    #[expect(clippy::too_many_arguments, reason = "one for each cost")]
    fn simulate(
        &self,
        py: Python<'_>,
        forward: PyAmount,
        input_grad: PyAmount,
        weight_grad: PyAmount,
        hop: Number,
        activation: PyAmount,
        stash: Option<PyAmount>,
        fused_backward: Option<PyAmount>,
        latency: Option<Latencies>,
        message: Option<PyAmount>,
        bandwidth: Option<Number>,
        overlap: bool,
        composite: Number,
    ) -> PyResult<PySimulation> {
        let spec = cost_spec(forward, input_grad, weight_grad, fused_backward, hop, activation, stash);
        let network = network(self.0.num_stages() as usize, latency, message, bandwidth, overlap, composite)?;
        let schedule = Arc::clone(&self.0);
        gil::run_or_leave(py, move || PySimulation::of(&schedule, &spec, &network))
    }

    /// Checks that the programs can be executed; on a fault the error shows the grid with the failing cell marked.
    ///
    /// Always: each action is there once, on its rank, behind what it needs, and no ranks wait for each other; and what
    /// the programs gather, reduce, sum over shared weights and step is what they were lowered for, each in its place.
    /// ``comm`` adds communication under one way to deliver messages: ``"buffered"`` (a send never waits),
    /// ``"directed"`` (one channel per directed edge), ``"pair-fifo"`` (one per pair of ranks), ``"one-fifo"`` (one
    /// queue per rank), ``"blocking"`` (each message waits for its partner), or ``"batched"`` (what stands between two
    /// computations is posted together; a schedule cannot declare that, only be checked for it). Instead, ``capacity``
    /// bounds the messages of an edge that have not met their receive (0: the sender waits for each). A schedule
    /// that is not lowered is lowered for that. ``None`` is what the schedule declares.
    ///
    /// With ``memory_cap`` no rank may hold more than that (a list: each rank), where ``activation`` and ``stash`` are
    /// as in ``simulate``.
    ///
    /// Raises ``PlanError`` with the first fault.
    #[pyo3(signature = (comm = None, memory_cap = None, activation = PyAmount::ONE, stash = None, *, capacity = None), text_signature = "($self, comm=None, memory_cap=None, activation=1.0, stash=None, *, capacity=None)")]
    fn check(
        &self,
        py: Python<'_>,
        comm: Option<&str>,
        memory_cap: Option<Cap>,
        activation: PyAmount,
        stash: Option<PyAmount>,
        capacity: Option<Whole>,
    ) -> PyResult<()> {
        let delivery = delivery(comm, capacity)?;
        let spec = CostSpec { activation: activation.0, stash: amount(stash), ..CostSpec::default() };
        let schedule = Arc::clone(&self.0);
        gil::run_or_leave(py, move || {
            check_under(&schedule, delivery)?;
            match memory_cap {
                Some(cap) => {
                    let caps = cap.of_ranks(schedule.num_ranks());
                    check::memory_of_ranks(&schedule, &caps, &costs_of(&schedule, &spec)?)
                }
                None => Ok(()),
            }
        })
    }

    /// SHA-256 of the schedule as 64 hexadecimal digits: equal schedules have equal digests, on every platform.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.digest())
    }

    /// The schedule as an aligned text table, one line a rank; a long one shows both ends.
    ///
    /// ``held`` is the most micro-batches that the rank's stages hold at once, one counted at each stage that holds it;
    /// ``Simulation.peak`` is in the unit of ``activation``, by default one micro-batch on all stages of a rank.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.explain())
    }

    /// The schedule as text for people and files: a header, then one line a rank. ``from_text`` reads it.
    fn to_text(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.to_text())
    }

    /// Reads exactly what ``to_text`` wrote; anything more or less is a ``PlanError`` naming its line and column.
    #[classmethod]
    fn from_text(cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        gil::run(cls.py(), || Schedule::from_text(text)).map(Self::from)
    }

    /// The schedule as a compact JSON document, which ``from_json`` and ``first_difference`` read.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.to_json())
    }

    /// Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no schedule.
    #[classmethod]
    fn from_json(cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        gil::run(cls.py(), || Schedule::from_json(text)).map(Self::from)
    }

    /// The schedule as the CSV of ``torch.distributed.pipelining``, which its ``_load_csv`` reads.
    ///
    /// Torch from 2.15 on ``waits`` for sends and reductions in the file; for torch before, pass ``waits=False``.
    ///
    /// Raises ``PlanError`` for what torch has no form for: two chains, sequence slices, forward-only programs, tied
    /// reductions and optimizer steps.
    #[pyo3(signature = (*, waits = true))]
    fn to_torch_csv(&self, py: Python<'_>, waits: bool) -> PyResult<String> {
        gil::run(py, || self.0.to_torch_csv(waits))
    }

    /// Reads the CSV of ``torch.distributed.pipelining``, with or without communication.
    ///
    /// Torch runs the parts of an overlapped pair one after the other, so the schedule has ``gating`` ``"own"``.
    ///
    /// Raises ``PlanError`` naming the line and column of the first fault.
    #[classmethod]
    #[pyo3(signature = (text, *, name = "torch"))]
    fn from_torch_csv(cls: &Bound<'_, PyType>, text: &str, name: &str) -> PyResult<Self> {
        gil::run(cls.py(), || Schedule::from_torch_csv(name, text)).map(Self::from)
    }

    fn __len__(&self) -> usize {
        self.0.num_actions()
    }

    fn __repr__(&self) -> String {
        format!("<PipelineSchedule {}>", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_text")?, (self.to_text(py)?,)))
    }
}

/// Costs on the stages of a schedule.
fn costs_of(schedule: &Schedule, spec: &CostSpec) -> Result<Costs, PlanError> {
    Costs::new(spec, schedule.placement(), schedule.header().num_slices)
}

/// The way to deliver messages; ``None`` for what the schedule declares.
fn delivery(comm: Option<&str>, capacity: Option<Whole>) -> Result<Option<Delivery>, CoreError> {
    match (comm, capacity) {
        (Some(_), Some(_)) => Err(PlanError::TwoDeliveries.into()),
        (None, Some(messages)) => Ok(Some(Delivery::Capacity(messages.fit("capacity", "0 to 2^32 - 1 messages")?))),
        (comm, None) => Ok(comm.map(Delivery::from_name).transpose()?),
    }
}

fn check_under(schedule: &Schedule, delivery: Option<Delivery>) -> Result<(), PlanError> {
    match delivery {
        None => check::check(schedule),
        Some(delivery) if schedule.is_lowered() => check::communication(schedule, delivery),
        Some(delivery) => {
            check::dependencies(schedule)?;
            check::communication(&schedule.lower(&Lowering::default())?, delivery)
        }
    }
}

/// The placement with its number of chains.
fn placed(placement: Vec<Whole>, num_chains: Whole) -> Result<Placement, CoreError> {
    let chains = count(num_chains, |value| PlanError::OutOfRange { what: "num_chains", value, expected: "1 or 2" })?;
    Ok(Placement::new(ranks(placement)?, chains)?)
}

/// Programs with more than compute are lowered ones.
fn assembled(header: Header, programs: Vec<Vec<Action>>, lowering: Option<Lowering>) -> Result<Schedule, PlanError> {
    let only_compute = programs.iter().flatten().all(|action| action.kind.is_compute());
    match lowering {
        None if only_compute => Schedule::new(header, programs),
        None => Ok(Schedule::new_lowered(header, programs, Lowering::default())?.with_inferred_lowering()),
        Some(lowering) => Schedule::new_lowered(header, programs, lowering),
    }
}

/// Builds a named schedule.
///
/// ``name`` is one of ``1f1b``, ``gpipe``, ``eager-1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``, ``zb-h2``,
/// ``interleaved-zb``, ``zb-v``, ``v-half``, ``v-min``, ``dualpipe``, ``dualpipe-v`` and ``seq-1f1b``. Any number of
/// micro-batches works, also fewer than ranks. ``num_chunks`` is the number of stages on each rank (for ``seq-1f1b``
/// the number of slices of a sequence); ``None`` is the schedule's own. ``costs`` guide the V schedules: ``(forward,
/// input_grad, weight_grad)``, or with ``hop`` as a fourth, or a mapping of the names that ``simulate`` takes. Times
/// that a mapping leaves out are 1, ``hop`` is 0, and the sizes are as in ``simulate``.
///
/// Raises ``PlanError`` for an unknown name and for counts or costs that the schedule cannot have.
#[pyfunction]
#[pyo3(signature = (name, num_ranks, num_microbatches, num_chunks = None, costs = None))]
pub(crate) fn pipeline_schedule(
    py: Python<'_>,
    name: &str,
    num_ranks: Whole,
    num_microbatches: Whole,
    num_chunks: Option<Whole>,
    costs: Option<PyCosts>,
) -> PyResult<PyPipelineSchedule> {
    let name = ScheduleName::from_name(name).map_err(CoreError::from)?;
    let num_ranks = count(num_ranks, PlanError::num_ranks)?;
    let num_microbatches = count(num_microbatches, PlanError::num_microbatches)?;
    let num_chunks = num_chunks.map(|value| count(value, PlanError::num_chunks)).transpose()?;
    let costs = costs.map(|costs| costs.0);
    gil::run_or_leave(py, move || generate::build(name, num_ranks, num_microbatches, num_chunks, costs.as_ref()))
        .map(PyPipelineSchedule::from)
}

/// The names that ``pipeline_schedule`` takes.
#[pyfunction]
pub(crate) fn schedule_names() -> Vec<&'static str> {
    ScheduleName::ALL.iter().map(|name| name.name()).collect()
}

/// Builds the forward-only program of a placement, for evaluation.
///
/// ``placement`` is the rank of every stage, in ``num_chains`` copies of the model. Any number of micro-batches works.
/// Raises ``PlanError`` for a placement that leaves a rank without a stage.
#[pyfunction]
#[pyo3(signature = (placement, num_microbatches, *, num_chains = Whole(1)), text_signature = "(placement, num_microbatches, *, num_chains=1)")]
pub(crate) fn evaluation_schedule(
    py: Python<'_>,
    placement: Vec<Whole>,
    num_microbatches: Whole,
    num_chains: Whole,
) -> PyResult<PyPipelineSchedule> {
    let placement = placed(placement, num_chains)?;
    let num_microbatches = count(num_microbatches, PlanError::num_microbatches)?;
    gil::run_or_leave(py, move || generate::evaluation::evaluation(placement, num_microbatches))
        .map(PyPipelineSchedule::from)
}
