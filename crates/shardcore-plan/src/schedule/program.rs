//! The actions of all ranks, and the header that says what they are for.

use std::fmt;

use super::action::{Action, ActionKind};
use super::lower::Lowering;
use super::named::named;
use super::placement::Placement;
use crate::error::{PlanError, Result, shortened};

/// How messages between two ranks may be delivered, from the most forgiving to the strictest; a program that is right
/// under one is right under all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommModel {
    /// A send never waits.
    Buffered,
    /// One rendezvous channel per directed edge.
    Directed,
    /// One rendezvous channel per pair of ranks, first in first out.
    PairFifo,
    /// One queue per rank for all its messages.
    OneFifo,
    /// Each send and receive waits for its partner before the rank goes on.
    Blocking,
}

named!(
    CommModel,
    "communication model",
    [Buffered = "buffered", Directed = "directed", PairFifo = "pair-fifo", OneFifo = "one-fifo", Blocking = "blocking",]
);

/// When the parts of a composite may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gating {
    /// The composite starts when the inputs of all its parts are there.
    All,
    /// Each part waits for its own input.
    Own,
}

named!(Gating, "gating", [All = "all", Own = "own"]);

/// What a schedule is for. Written first in every text and JSON form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Name of the generator, or the user's: letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Micro-batches of one step.
    pub num_microbatches: u32,
    /// Slices into which a sequence is cut (`Seq1F1B`); 1 elsewhere.
    pub num_slices: u32,
    /// Where the stages are; gives the number of ranks and of chunks per rank.
    pub placement: Placement,
    /// When the parts of a composite may start.
    pub gating: Gating,
    /// The strictest communication under which the lowered program is declared to run.
    pub comm: CommModel,
}

impl Header {
    /// A header with one slice, gating [`Gating::All`] and [`CommModel::Blocking`], which lowering always reaches.
    #[must_use]
    pub fn new(name: impl Into<String>, placement: Placement, num_microbatches: u32) -> Self {
        let (gating, comm) = (Gating::All, CommModel::Blocking);
        Self { name: name.into(), num_microbatches, num_slices: 1, placement, gating, comm }
    }

    /// How many numbers [`Action::microbatch`] counts: micro-batches times slices.
    #[must_use]
    pub fn num_units(&self) -> u32 {
        self.num_microbatches * self.num_slices
    }

    /// The chain through which the unit [`Action::microbatch`] flows.
    #[must_use]
    pub fn chain_of(&self, microbatch: u32) -> u32 {
        self.placement.chain_of(microbatch / self.num_slices, self.num_microbatches)
    }

    /// Whether a stage works on a micro-batch: whether both are in one chain.
    #[must_use]
    pub fn crosses(&self, microbatch: u32, stage: u32) -> bool {
        self.chain_of(microbatch) == self.placement.chain_of_stage(stage)
    }

    /// The stages that a micro-batch crosses, in order.
    #[must_use]
    pub fn stages_of(&self, microbatch: u32) -> std::ops::Range<u32> {
        let length = self.placement.chain_length();
        let first = self.chain_of(microbatch) * length;
        first..first + length
    }

    /// Whether a schedule may have it.
    pub(crate) fn check(&self) -> Result<()> {
        let allowed = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        if self.name.is_empty() || self.name.len() > 100 || !self.name.chars().all(allowed) {
            return Err(PlanError::BadScheduleName { name: shortened(&self.name) });
        }
        if self.num_microbatches == 0 {
            return Err(PlanError::num_microbatches(self.num_microbatches));
        }
        if self.num_slices == 0 {
            return Err(PlanError::num_slices(self.num_slices));
        }
        if self.num_microbatches.checked_mul(self.num_slices).is_none_or(|units| units > MAX_UNITS) {
            let value = i128::from(self.num_microbatches) * i128::from(self.num_slices);
            let (what, expected) = ("num_microbatches * num_slices", "at most 2^24");
            return Err(PlanError::OutOfRange { what, value, expected });
        }
        let value = u64::from(self.num_units()) * u64::from(self.placement.num_stages());
        if value > MAX_FORWARDS {
            let (what, expected) = ("num_microbatches * number of stages", "at most 2^28");
            return Err(PlanError::OutOfRange { what, value: value.into(), expected });
        }
        Ok(())
    }
}

/// More micro-batches than any step has; keeps every product of counts far from overflow.
pub(super) const MAX_UNITS: u32 = 1 << 24;

/// The most forwards in a step: 64 times those of 1,024 ranks with 4,096 micro-batches.
const MAX_FORWARDS: u64 = 1 << 28;

/// The actions of every rank, in their order.
///
/// Its shape is valid: one program a rank, every stage and micro-batch in range, composites of compute actions that
/// end. Whether the order can be executed is for the checker to say.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    header: Header,
    programs: Vec<Vec<Action>>,
    lowered: Option<Lowering>,
}

impl Schedule {
    /// A schedule of compute actions only, one program a rank.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] where an action is out of range, is no compute or leaves its composite open;
    /// [`PlanError::OutOfRange`] and [`PlanError::BadScheduleName`] for the header.
    pub fn new(header: Header, programs: Vec<Vec<Action>>) -> Result<Self> {
        Self::checked(header, programs, None)
    }

    /// A lowered schedule: with communication, and with what the sharding needs.
    ///
    /// # Errors
    /// As [`Schedule::new`], but any kind of action is allowed; [`PlanError::BadLowering`] and
    /// [`PlanError::OutOfRange`] for what it was lowered for.
    pub fn new_lowered(header: Header, programs: Vec<Vec<Action>>, lowering: Lowering) -> Result<Self> {
        Self::checked(header, programs, Some(lowering))
    }

    /// The same programs, declared to run under other communication.
    #[must_use]
    pub fn declared_for(self, comm: CommModel) -> Self {
        Self { header: Header { comm, ..self.header }, ..self }
    }

    /// The same programs as a schedule that was lowered for what they say themselves: for those that come without. See
    /// [`Lowering::inferred`].
    #[must_use]
    pub fn with_inferred_lowering(self) -> Self {
        Self { lowered: Some(Lowering::inferred(&self)), ..self }
    }

    fn checked(header: Header, programs: Vec<Vec<Action>>, lowered: Option<Lowering>) -> Result<Self> {
        header.check()?;
        lowered.as_ref().map_or(Ok(()), |lowering| lowering.check(&header.placement))?;
        let num_ranks = header.placement.num_ranks();
        if programs.len() != num_ranks as usize {
            return Err(PlanError::NumPrograms { got: programs.len(), num_ranks });
        }
        let schedule = Self { header, programs, lowered: None };
        for (rank, program) in schedule.programs.iter().enumerate() {
            for (position, &action) in program.iter().enumerate() {
                let next = program.get(position + 1).copied();
                schedule.check_action(action, next, lowered.is_some()).map_err(|reason| PlanError::BadAction {
                    rank,
                    position,
                    action: action.to_string(),
                    reason,
                })?;
            }
        }
        let lowered = lowered.map(|lowering| lowering.completed(&schedule));
        Ok(Self { lowered, ..schedule })
    }

    fn check_action(&self, action: Action, next: Option<Action>, lowered: bool) -> Result<(), String> {
        let Action { kind, stage, microbatch, .. } = action;
        let (num_stages, num_units) = (self.num_stages(), self.header.num_units());
        if stage >= num_stages {
            return Err(format!("there are stages 0 to {} only", num_stages - 1));
        }
        if kind.has_microbatch() && microbatch >= num_units {
            return Err(format!("there are micro-batches 0 to {} only", num_units - 1));
        }
        if !kind.has_microbatch() && microbatch != 0 {
            return Err(format!("{kind} is for no micro-batch: expected 0, got {microbatch}"));
        }
        if !lowered && !kind.is_compute() {
            return Err("only a lowered schedule has more than F, B, I and W; say what it is lowered for".to_owned());
        }
        if action.slot != 0 && !(kind.has_slot() && lowered) {
            return Err("only receives, F, B and I of a lowered schedule have a slot".to_owned());
        }
        if action.with_next && !(kind.is_compute() && next.is_some_and(|next| next.kind.is_compute())) {
            return Err("a composite joins compute actions: expected F, B, I or W on both sides of &".to_owned());
        }
        Ok(())
    }

    /// What the schedule is for.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Where the stages are.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.header.placement
    }

    /// The programs of all ranks.
    #[must_use]
    pub fn programs(&self) -> &[Vec<Action>] {
        &self.programs
    }

    /// The actions of one rank, in their order.
    ///
    /// # Errors
    /// [`PlanError::NoSuchRank`].
    pub fn program(&self, rank: u32) -> Result<&[Action]> {
        let program = self.programs.get(rank as usize).map(Vec::as_slice);
        program.ok_or(PlanError::NoSuchRank { rank: rank.into(), num_ranks: self.num_ranks() })
    }

    /// Number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> u32 {
        self.placement().num_ranks()
    }

    /// Number of stages over all chains.
    #[must_use]
    pub fn num_stages(&self) -> u32 {
        self.placement().num_stages()
    }

    /// The most stages that one micro-batch crosses on one rank.
    #[must_use]
    pub fn num_chunks(&self) -> u32 {
        self.placement().num_chunks()
    }

    /// Micro-batches of one step.
    #[must_use]
    pub fn num_microbatches(&self) -> u32 {
        self.header.num_microbatches
    }

    /// Number of actions over all ranks.
    #[must_use]
    pub fn num_actions(&self) -> usize {
        self.programs.iter().map(Vec::len).sum()
    }

    /// Whether the programs hold communication.
    #[must_use]
    pub fn is_lowered(&self) -> bool {
        self.lowered.is_some()
    }

    /// What the schedule was lowered for; `None` for one that is not lowered.
    #[must_use]
    pub fn lowering(&self) -> Option<&Lowering> {
        self.lowered.as_ref()
    }

    /// Whether no micro-batch goes backward: a program for evaluation.
    #[must_use]
    pub fn is_forward_only(&self) -> bool {
        let backward = |kind| matches!(kind, ActionKind::Backward | ActionKind::InputGrad | ActionKind::WeightGrad);
        !self.programs.iter().flatten().any(|action| backward(action.kind))
    }
}

/// The schedule on one line.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { name, num_microbatches, num_slices, placement, comm, .. } = &self.header;
        let plural = if *num_microbatches == 1 { "" } else { "es" };
        write!(f, "{name}: {placement}, {num_microbatches} micro-batch{plural}")?;
        if *num_slices > 1 {
            write!(f, " in {num_slices} slices")?;
        }
        if self.is_lowered() {
            write!(f, ", lowered for {comm} communication")?;
        }
        Ok(())
    }
}
