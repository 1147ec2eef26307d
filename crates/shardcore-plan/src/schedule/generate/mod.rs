//! Named schedules for any number of micro-batches.
//!
//! | module | schedules |
//! |---|---|
//! | [`closed`] | those whose order on a rank is a closed form: one rank's program needs no other |
//! | [`v_shape`] | those on the V placement, which adapt to the costs |
//! | [`dual`] | those that overlap two streams of micro-batches |
//! | [`evaluation`] | forward-only programs for every placement |

pub mod closed;
pub mod dual;
pub mod evaluation;
pub mod v_shape;

use super::action::Action;
use super::costs::CostSpec;
use super::named::named;
use super::placement::Placement;
use super::program::Schedule;
use crate::error::{PlanError, Result};
use closed::ClosedForm;
use v_shape::VSchedule;

/// The named schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScheduleName {
    /// All forwards, then all backwards (Huang et al., "`GPipe`", 2019, section 2.3).
    Gpipe,
    /// One forward, one backward (Narayanan et al., "`PipeDream`", 2019, section 3.2; flushed as in Narayanan et al.,
    /// "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2.1).
    OneForwardOneBackward,
    /// 1F1B with twice the warm-up, which hides the latency of a hop (Zhuang et al., "On Optimizing the Communication
    /// of Model Parallelism", 2023, section 4).
    EagerOneForwardOneBackward,
    /// Several chunks a rank (Narayanan et al., 2021, section 2.2.2).
    Interleaved,
    /// Several chunks a rank, all micro-batches through a chunk before the next (Lamy-Poirier, "Breadth-First Pipeline
    /// Parallelism", 2023, section 4).
    LoopedBfs,
    /// Split backward in the memory of 1F1B (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2.1).
    ZbH1,
    /// Split backward in twice the memory (Qi et al., 2024, section 2.2).
    ZbH2,
    /// Several chunks a rank and a split backward.
    InterleavedZb,
    /// 1F1B over slices of the sequence (Sun et al., "`Seq1F1B`", 2024, section 3).
    SeqOneForwardOneBackward,
    /// The V placement, without bubbles between a rank's first and last action at equal costs ([`v_shape`]).
    ZbV,
    /// The V placement in half the memory of 1F1B ([`v_shape`]).
    VHalf,
    /// The V placement in a third of the memory of 1F1B ([`v_shape`]).
    VMin,
    /// Two directions, two copies of the model ([`dual`]).
    DualPipe,
    /// Two streams on the V placement ([`dual`]).
    DualPipeV,
}

named!(
    ScheduleName,
    "pipeline schedule",
    [
        Gpipe = "gpipe",
        OneForwardOneBackward = "1f1b",
        EagerOneForwardOneBackward = "eager-1f1b",
        Interleaved = "interleaved",
        LoopedBfs = "looped-bfs",
        ZbH1 = "zb-h1",
        ZbH2 = "zb-h2",
        InterleavedZb = "interleaved-zb",
        SeqOneForwardOneBackward = "seq-1f1b",
        ZbV = "zb-v",
        VHalf = "v-half",
        VMin = "v-min",
        DualPipe = "dualpipe",
        DualPipeV = "dualpipe-v",
    ]
);

impl ScheduleName {
    /// Those whose order on a rank is a closed form: see [`closed`].
    pub const CLOSED: &[Self] = &[
        Self::Gpipe,
        Self::OneForwardOneBackward,
        Self::EagerOneForwardOneBackward,
        Self::Interleaved,
        Self::LoopedBfs,
        Self::ZbH1,
        Self::ZbH2,
        Self::InterleavedZb,
        Self::SeqOneForwardOneBackward,
    ];

    /// The schedule on the V placement of that name that adapts to the costs.
    fn v_schedule(self) -> Option<VSchedule> {
        match self {
            Self::ZbV => Some(VSchedule::ZeroBubble),
            Self::VHalf => Some(VSchedule::Half),
            Self::VMin => Some(VSchedule::Min),
            _ => None,
        }
    }

    /// Into how many chunks a rank's work on a micro-batch may be cut: exactly that many, or any number, by default 2.
    #[must_use]
    pub fn num_chunks(self) -> ChunkCount {
        match self {
            Self::Interleaved | Self::LoopedBfs | Self::InterleavedZb | Self::SeqOneForwardOneBackward => {
                ChunkCount::Any
            }
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => ChunkCount::Exactly(2),
            _ => ChunkCount::Exactly(1),
        }
    }

    /// The placement of this schedule's stages.
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`] for a number of ranks or chunks that it cannot have.
    pub fn placement(self, num_ranks: u32, num_chunks: Option<u32>) -> Result<Placement> {
        let num_chunks = self.resolve_chunks(num_chunks)?;
        match self {
            Self::SeqOneForwardOneBackward => Placement::looped(num_ranks, 1),
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => Placement::v_shape(num_ranks),
            Self::DualPipe => Placement::bidirectional(num_ranks),
            _ => Placement::looped(num_ranks, num_chunks),
        }
    }

    /// Refuses a number of chunks that it cannot have, and costs that do not fit its placement.
    fn check_costs(self, num_ranks: u32, num_chunks: Option<u32>, costs: Option<&CostSpec>) -> Result<()> {
        self.resolve_chunks(num_chunks)?;
        costs.map_or(Ok(()), |costs| costs.check(&self.placement(num_ranks, num_chunks)?))
    }

    /// The number of chunks asked for, or the default.
    fn resolve_chunks(self, num_chunks: Option<u32>) -> Result<u32> {
        match (self.num_chunks(), num_chunks) {
            (_, Some(0)) => Err(PlanError::num_chunks(0)),
            (ChunkCount::Any, asked) => Ok(asked.unwrap_or(2)),
            (ChunkCount::Exactly(count), asked) if asked.is_none_or(|asked| asked == count) => Ok(count),
            (ChunkCount::Exactly(expected), Some(got)) => {
                Err(PlanError::ScheduleChunks { name: self.name(), expected, got })
            }
            (ChunkCount::Exactly(count), None) => Ok(count),
        }
    }
}

/// How many chunks a schedule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkCount {
    /// This number only.
    Exactly(u32),
    /// Any number of at least 1.
    Any,
}

/// Builds a named schedule.
///
/// `num_chunks` says into how many chunks a rank's work on a micro-batch is cut: by layers into stages, for `seq-1f1b`
/// by the sequence into slices. `None` is the schedule's default. `costs` guide those schedules that adapt to them; they
/// are checked for the others too.
///
/// # Errors
/// [`PlanError::OutOfRange`] and [`PlanError::ScheduleChunks`] for counts that the schedule cannot have;
/// [`PlanError::BadCost`] for costs that do not fit it.
pub fn build(
    name: ScheduleName,
    num_ranks: u32,
    num_microbatches: u32,
    num_chunks: Option<u32>,
    costs: Option<&CostSpec>,
) -> Result<Schedule> {
    name.check_costs(num_ranks, num_chunks, costs)?;
    match (name, name.v_schedule()) {
        (_, Some(schedule)) => v_shape::build(schedule, num_ranks, num_microbatches, costs),
        (ScheduleName::DualPipe, _) => dual::dualpipe(num_ranks, num_microbatches),
        (ScheduleName::DualPipeV, _) => dual::dualpipe_v(num_ranks, num_microbatches),
        // The order of a closed form depends on counts alone.
        _ => ClosedForm::new(name, num_ranks, num_microbatches, num_chunks)?.build(),
    }
}

/// The program of one rank of a named schedule, without those of the others where its order is a closed form.
///
/// # Errors
/// As [`build`], and [`PlanError::NoSuchRank`].
pub fn rank_program(
    name: ScheduleName,
    num_ranks: u32,
    num_microbatches: u32,
    num_chunks: Option<u32>,
    costs: Option<&CostSpec>,
    rank: u32,
) -> Result<Vec<Action>> {
    if ScheduleName::CLOSED.contains(&name) {
        name.check_costs(num_ranks, num_chunks, costs)?;
        return ClosedForm::new(name, num_ranks, num_microbatches, num_chunks)?.program(rank);
    }
    let schedule = build(name, num_ranks, num_microbatches, num_chunks, costs)?;
    schedule.program(rank).map(<[Action]>::to_vec)
}
