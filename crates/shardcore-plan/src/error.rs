//! Why a plan cannot be made. A message says what, where, expected and found, and what to do instead.

use thiserror::Error;

use crate::dtype::Dtype;
use crate::schedule::check::Fault;
use crate::schedule::named::nearest;

/// The result of planning.
pub type Result<T, E = PlanError> = std::result::Result<T, E>;

/// A plan cannot be made from its input, or is not valid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages document the fields.
pub enum PlanError {
    #[error("unknown dtype {dtype:?}: expected one of {}", dtype_names())]
    UnknownDtype { dtype: String },

    #[error(
        "dtype {dtype} cannot be sharded: complex parameters are not supported; store the real and the imaginary part as two real parameters (torch.view_as_real)"
    )]
    ComplexDtype { dtype: String },

    #[error("parameter {name:?}: {reason}")]
    BadParameter { name: String, reason: Box<PlanError> },

    #[error(
        "one layout holds one dtype and one trainability: {first_name:?} is {first}, {name:?} is {other}; split the parameters with plan.groups first"
    )]
    MixedLayout { first_name: String, first: Kind, name: String, other: Kind },

    #[error(
        "parameter {name:?} appears twice (positions {first} and {second}): names must be unique; give a shared parameter once"
    )]
    DuplicateParameter { name: String, first: usize, second: usize },

    #[error(
        "parameter {name:?} is in unit {first_unit:?} and in unit {second_unit:?}: each parameter belongs to exactly one unit; give a shared parameter to the first unit that uses it"
    )]
    DuplicateAcrossUnits { name: String, first_unit: String, second_unit: String },

    #[error("{what} is {value}: expected {expected}")]
    OutOfRange { what: &'static str, value: i128, expected: &'static str },

    #[error(
        "the flat buffer is too large: {numel} elements of {dtype}, padded for {num_shards} shards, do not fit into 2^63 - 1 bytes; check num_shards and the numel of {name:?}"
    )]
    TooLarge { name: String, numel: u128, dtype: Dtype, num_shards: u64 },

    #[error(
        "{num_layers} layers cannot fill {num_parts} parts: every part holds at least one layer; use fewer stages (ranks x chunks), or cut the model into more layers"
    )]
    TooFewLayers { num_layers: usize, num_parts: usize },

    #[error("layer {layer}: {reason}")]
    BadLayer { layer: usize, reason: String },

    #[error("not a partition of the layers: {reason}")]
    BadPartition { reason: String },

    #[error(
        "action {kind} is for {}",
        if *needs { "one micro-batch: give its number" } else { "no micro-batch: leave the number out" }
    )]
    ActionMicrobatch { kind: &'static str, needs: bool },

    #[error("this schedule has no form in {form}: {reason}")]
    NoSuchForm { form: &'static str, reason: String },

    #[error("interrupted")]
    Interrupted,

    #[error("not a pipeline layout: {reason}")]
    BadLayout { reason: String },

    #[error("rank {rank} is out of range: the layout has {num_shards} shards (ranks 0 to {})", num_shards - 1)]
    RankOutOfRange { rank: i128, num_shards: u64 },

    #[error("no parameter named {name:?} in this layout of {num_params} parameters")]
    UnknownParameter { name: String, num_params: usize },

    #[error(
        "cannot go from one layout to the other: {reason}; both must hold the same parameters, in any order and any number of shards"
    )]
    DifferentParameters { reason: String },

    #[error("piece {piece} of rank {rank}: {reason}")]
    BadPiece { rank: usize, piece: usize, reason: String },

    #[error("unknown phase {phase:?}: expected \"forward\" or \"backward\"")]
    UnknownPhase { phase: String },

    #[error("unknown objective {objective:?}: expected \"bytes\" or \"time\"")]
    UnknownObjective { objective: String },

    #[error("a time is {value}: expected a finite number of seconds of at least 0, and a bandwidth above 0")]
    BadTime { value: String },

    #[error("unit {name:?} appears twice (positions {first} and {second}): names must be unique")]
    DuplicateUnit { name: String, first: usize, second: usize },

    #[error("unit {name:?} has {nbytes} bytes: expected 0 to 2^63 - 1")]
    BadUnitSize { name: String, nbytes: i128 },

    #[error("use {index} of the trace: {reason}")]
    BadUse { index: usize, reason: String },

    #[error(
        "use {index} of the trace: with unit {name:?} ({nbytes} bytes) all uses together hold more than 2^63 - 1 bytes; check its size"
    )]
    TraceTooLarge { index: usize, name: String, nbytes: u64 },

    #[error(
        "the budget of {budget} bytes is too small: use {index} ({phase}) needs {sum} = {needed} bytes at once; the smallest workable budget is {smallest} bytes; raise the budget, or split the model into smaller units"
    )]
    BudgetTooSmall { budget: u64, index: usize, phase: &'static str, sum: String, needed: u64, smallest: u64 },

    #[error(
        "the budget of {budget} bytes is too small: unit {name:?} alone has {nbytes} bytes, and what is in use around it comes on top; raise the budget to {nbytes} bytes at least, or split the model into smaller units"
    )]
    UnitAboveBudget { budget: u64, name: String, nbytes: u64 },

    #[error("unit {unit} is out of range: there are {num_units} units (from 0)")]
    UnitOutOfRange { unit: i128, num_units: usize },

    #[error("unit {name:?} is used outside of a step: call begin first")]
    NoStep { name: String },

    #[error("unit {name:?} is left, but no {phase} use of it has begun: each enter has one leave")]
    NotInUse { name: String, phase: &'static str },
    #[error("rank {rank} is out of range: the schedule has {num_ranks} ranks (0 to {})", num_ranks - 1)]
    NoSuchRank { rank: i128, num_ranks: u32 },

    #[error("bad placement of stages: {reason}")]
    BadPlacement { reason: String },

    #[error("unknown {what} {name:?}: expected one of {known}{guess}")]
    UnknownName { what: &'static str, name: String, known: String, guess: String },

    #[error("schedule name {name:?}: expected 1 to 100 letters, digits, '.', '_' or '-'")]
    BadScheduleName { name: String },

    #[error(
        "schedule {name} has {expected} chunk{} per rank, not {got}: leave num_chunks out, or choose interleaved, looped-bfs or interleaved-zb, which have any number",
        if *expected == 1 { "" } else { "s" }
    )]
    ScheduleChunks { name: &'static str, expected: u32, got: u32 },

    #[error("schedule {name} has no closed form: build it with generate::build")]
    NoClosedForm { name: &'static str },

    #[error(
        "rank {rank} may hold {cap} and needs {needed} for one micro-batch: raise memory_cap, or make micro-batches or stages smaller"
    )]
    CapTooSmall { rank: usize, cap: String, needed: String },

    #[error("a bidirectional placement has two chains: synthesis takes one; use the schedule dualpipe")]
    OneChain,

    #[error("{got} programs for {num_ranks} ranks: a schedule has exactly one program a rank")]
    NumPrograms { got: usize, num_ranks: u32 },

    #[error("rank {rank}, position {position}, {action}: {reason}")]
    BadAction { rank: usize, position: usize, action: String, reason: String },

    #[error("cannot lower the schedule: {reason}")]
    BadLowering { reason: String },

    #[error(
        "receives_ahead is {given}, but this program cannot run with fewer than {needed} where a message that finds no room holds up the rank that sends it: so many receives of one stage and direction have to wait until the first of them is used; give {needed} or more, or change the order of the micro-batches"
    )]
    TooFewReceives { given: u32, needed: u32 },

    #[error("bad cost {what}: expected {expected}")]
    BadCost { what: String, expected: String },

    #[error("not a schedule: line {line}, column {column}: {reason}")]
    BadScheduleText { line: usize, column: usize, reason: String },

    #[error("schedule {name:?} has no sends and receives to check: lower it first")]
    NotLowered { name: String },

    #[error(
        "comm and capacity are two ways to deliver messages: give one of them (capacity is that of directed edges)"
    )]
    TwoDeliveries,

    #[error("{0}")]
    InvalidSchedule(Box<Fault>),

    #[error("no plan for tiles on a disk: {reason}")]
    BadSwap { reason: String },

    #[error("not a plan document: {reason}")]
    BadDocument { reason: String },
}

impl PlanError {
    /// A number of shards below 1.
    #[must_use]
    pub fn num_shards(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "num_shards", value: value.into(), expected: "at least 1" }
    }

    /// A shard alignment that is no power of two, or below [`PARAM_ALIGNMENT`](crate::layout::PARAM_ALIGNMENT).
    #[must_use]
    pub fn alignment(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "alignment", value: value.into(), expected: "a power of two of at least 16 bytes" }
    }

    /// A segment limit below 1.
    #[must_use]
    pub fn segment_nbytes(value: impl Into<i128>) -> Self {
        let expected = "at least 1 byte, or None for no limit";
        Self::OutOfRange { what: "segment_nbytes", value: value.into(), expected }
    }

    /// A limit in bytes that is negative, or beyond 64 bits.
    #[must_use]
    pub fn limit(what: &'static str, value: impl Into<i128>) -> Self {
        Self::OutOfRange { what, value: value.into(), expected: "0 to 2^64 - 1 bytes" }
    }

    /// A negative number of elements, or one beyond any buffer.
    #[must_use]
    pub fn numel(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "numel", value: value.into(), expected: "0 to 2^63 - 1 elements" }
    }

    /// A number of ranks below 1.
    #[must_use]
    pub fn num_ranks(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "num_ranks", value: value.into(), expected: "at least 1" }
    }

    /// A number of micro-batches below 1.
    #[must_use]
    pub fn num_microbatches(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "num_microbatches", value: value.into(), expected: "at least 1" }
    }

    /// A number of chunks per rank below 1.
    #[must_use]
    pub fn num_chunks(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "num_chunks", value: value.into(), expected: "at least 1" }
    }

    /// A number of sequence slices below 1.
    #[must_use]
    pub fn num_slices(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "num_slices", value: value.into(), expected: "at least 1" }
    }

    /// No stages, or more than any pipeline has.
    #[must_use]
    pub fn num_stages(value: impl Into<i128>) -> Self {
        Self::OutOfRange { what: "number of stages", value: value.into(), expected: "1 to 2^24" }
    }

    /// A name that is none of those known, with the one that it may be meant for.
    #[must_use]
    pub fn unknown_name(what: &'static str, name: &str, known: &[&str]) -> Self {
        let guess = nearest(name, known.iter().copied());
        let guess = guess.map_or(String::new(), |guess| format!("; did you mean {guess:?}?"));
        Self::UnknownName { what, name: shortened(name), known: known.join(", "), guess }
    }

    /// The same error, with the name of the parameter in front.
    #[must_use]
    pub fn in_parameter(self, name: &str) -> Self {
        Self::BadParameter { name: name.to_owned(), reason: Box::new(self) }
    }
}

/// What all parameters of one layout share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// The element type.
    pub dtype: Dtype,
    /// Whether the parameters take gradients.
    pub trainable: bool,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", if self.trainable { "trainable" } else { "frozen" }, self.dtype)
    }
}

/// The start of a text that was given, for messages.
pub(crate) fn shortened(text: &str) -> String {
    let mut letters = text.chars();
    let start: String = letters.by_ref().take(40).collect();
    if letters.next().is_some() { format!("{start}...") } else { start }
}

fn dtype_names() -> String {
    Dtype::all().map(Dtype::name).collect::<Vec<_>>().join(", ")
}
