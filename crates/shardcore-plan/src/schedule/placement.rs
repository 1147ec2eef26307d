//! Which rank holds which stage.

use std::fmt;

use super::action::{Action, ActionKind};
use crate::error::{PlanError, Result};
use crate::table::counted;

/// More stages than any pipeline has; keeps every product of counts far from overflow.
const MAX_STAGES: usize = 1 << 24;

/// The rank of every stage. Stages are numbered along the flow of a micro-batch.
///
/// A bidirectional placement has two *chains* of equal length, each a copy of the whole model: stages `0..n` and
/// `n..2n`. The first half of the micro-batches flows through the first chain, the rest through the second.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    num_ranks: u32,
    num_chains: u32,
    num_chunks: u32,
    ranks: Vec<u32>,
    /// The stages of all ranks, rank after rank, each rank's ascending.
    stages: Vec<u32>,
    /// Where each rank's stages start in `stages`, and the end.
    starts: Vec<u32>,
}

impl Placement {
    /// Stage `s` on rank `s mod num_ranks`, `num_chunks` stages a rank.
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`] if either is 0 or there are too many stages.
    pub fn looped(num_ranks: u32, num_chunks: u32) -> Result<Self> {
        let num_stages = checked_num_stages(num_ranks, num_chunks)?;
        Self::new((0..num_stages).map(|stage| stage % num_ranks).collect(), 1)
    }

    /// The V: rank `r` holds the stages `r` and `2 num_ranks - 1 - r`, so the middle two and the ends share a rank.
    ///
    /// # Errors
    /// As [`Placement::looped`].
    pub fn v_shape(num_ranks: u32) -> Result<Self> {
        Self::zig_zag(num_ranks, 2)
    }

    /// Chunk after chunk up and down the ranks; with two chunks the V, with one the plain pipeline.
    ///
    /// # Errors
    /// As [`Placement::looped`].
    pub fn zig_zag(num_ranks: u32, num_chunks: u32) -> Result<Self> {
        let num_stages = checked_num_stages(num_ranks, num_chunks)?;
        let rank = |stage: u32| {
            let (chunk, step) = (stage / num_ranks, stage % num_ranks);
            if chunk.is_multiple_of(2) { step } else { num_ranks - 1 - step }
        };
        Self::new((0..num_stages).map(rank).collect(), 1)
    }

    /// Two copies of the model, one from the first rank to the last, one back.
    ///
    /// # Errors
    /// As [`Placement::looped`].
    pub fn bidirectional(num_ranks: u32) -> Result<Self> {
        checked_num_stages(num_ranks, 2)?;
        Self::new((0..num_ranks).chain((0..num_ranks).rev()).collect(), 2)
    }

    /// One chain: stage `s` on rank `ranks[s]`. Every rank up to the largest holds at least one stage.
    ///
    /// # Errors
    /// [`PlanError::BadPlacement`] and [`PlanError::OutOfRange`].
    pub fn custom(ranks: Vec<u32>) -> Result<Self> {
        Self::new(ranks, 1)
    }

    /// Stage `s` on rank `ranks[s]`, in `num_chains` chains of equal length (1 or 2).
    ///
    /// # Errors
    /// [`PlanError::BadPlacement`] if a rank below the largest holds no stage or the chains are unequal;
    /// [`PlanError::OutOfRange`] for no stages, too many, or another number of chains.
    pub fn new(ranks: Vec<u32>, num_chains: u32) -> Result<Self> {
        if ranks.is_empty() || ranks.len() > MAX_STAGES {
            return Err(PlanError::num_stages(ranks.len() as u64));
        }
        if !(1..=2).contains(&num_chains) {
            return Err(PlanError::OutOfRange { what: "num_chains", value: num_chains.into(), expected: "1 or 2" });
        }
        if !ranks.len().is_multiple_of(num_chains as usize) {
            return Err(bad_placement(format!(
                "{} stages do not make {num_chains} chains of equal length",
                ranks.len()
            )));
        }
        let num_ranks = count_ranks(&ranks)?;
        let (stages, starts) = group_by_rank(&ranks, num_ranks);
        let mut placement = Self { num_ranks, num_chains, num_chunks: 0, ranks, stages, starts };
        let counts = (0..num_ranks).flat_map(|rank| placement.counts(rank));
        placement.num_chunks = counts.max().unwrap_or(0);
        Ok(placement)
    }

    /// Number of ranks, at least 1.
    #[must_use]
    pub fn num_ranks(&self) -> u32 {
        self.num_ranks
    }

    /// Number of stages over all chains.
    #[must_use]
    pub fn num_stages(&self) -> u32 {
        index(self.ranks.len())
    }

    /// Number of chains: 2 for a bidirectional placement, else 1.
    #[must_use]
    pub fn num_chains(&self) -> u32 {
        self.num_chains
    }

    /// Number of stages that a micro-batch crosses.
    #[must_use]
    pub fn chain_length(&self) -> u32 {
        self.num_stages() / self.num_chains
    }

    /// The most stages that one micro-batch crosses on one rank: 1 for a bidirectional placement, which holds two
    /// stages a rank.
    #[must_use]
    pub fn num_chunks(&self) -> u32 {
        self.num_chunks
    }

    /// The rank of every stage.
    #[must_use]
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// The rank that holds a stage.
    ///
    /// # Panics
    /// If there is no such stage; a [`Schedule`](super::Schedule) has none.
    #[must_use]
    pub fn rank_of(&self, stage: u32) -> u32 {
        self.ranks[stage as usize]
    }

    /// The stages of a rank, ascending; none for a rank out of range.
    #[must_use]
    pub fn stages_of(&self, rank: u32) -> &[u32] {
        let rank = rank as usize;
        match (self.starts.get(rank), self.starts.get(rank + 1)) {
            (Some(&start), Some(&end)) => &self.stages[start as usize..end as usize],
            _ => &[],
        }
    }

    /// The chain to which a stage belongs.
    #[must_use]
    pub fn chain_of_stage(&self, stage: u32) -> u32 {
        stage / self.chain_length()
    }

    /// The chain through which a micro-batch flows, of `num_microbatches` in a step: of an odd number, the first chain
    /// takes one more.
    #[must_use]
    pub fn chain_of(&self, microbatch: u32, num_microbatches: u32) -> u32 {
        u32::from(self.num_chains == 2 && microbatch >= num_microbatches.div_ceil(2))
    }

    /// The stage from which the stage takes its input; `None` for the first of a chain.
    #[must_use]
    pub fn previous(&self, stage: u32) -> Option<u32> {
        if stage.is_multiple_of(self.chain_length()) { None } else { Some(stage - 1) }
    }

    /// The stage to which the stage gives its output; `None` for the last of a chain.
    #[must_use]
    pub fn next(&self, stage: u32) -> Option<u32> {
        if (stage + 1).is_multiple_of(self.chain_length()) { None } else { Some(stage + 1) }
    }

    /// The stages that hold the same weights as this one, in the other chain.
    #[must_use]
    pub fn twin(&self, stage: u32) -> Option<u32> {
        let length = self.chain_length();
        (self.num_chains == 2).then_some(if stage < length { stage + length } else { stage - length })
    }

    /// The action at the other end of a send or a receive; `None` for other kinds and at the ends of a chain.
    #[must_use]
    pub fn partner(&self, action: Action) -> Option<Action> {
        let (kind, stage) = match action.kind {
            ActionKind::SendForward => (ActionKind::RecvForward, self.next(action.stage)?),
            ActionKind::RecvForward => (ActionKind::SendForward, self.previous(action.stage)?),
            ActionKind::SendBackward => (ActionKind::RecvBackward, self.previous(action.stage)?),
            ActionKind::RecvBackward => (ActionKind::SendBackward, self.next(action.stage)?),
            _ => return None,
        };
        Some(Action::new(kind, stage, action.microbatch))
    }

    /// The rank at the other end of a send or a receive; `None` for other kinds and at the ends of a chain.
    #[must_use]
    pub fn peer(&self, action: Action) -> Option<u32> {
        self.partner(action).map(|partner| self.rank_of(partner.stage))
    }

    /// On how many stages of this stage's rank the same micro-batch is worked: what a cost given per rank is split by.
    #[must_use]
    pub fn num_chunks_beside(&self, stage: u32) -> u32 {
        self.counts(self.rank_of(stage))[self.chain_of_stage(stage) as usize]
    }

    /// How many stages of each chain a rank holds.
    fn counts(&self, rank: u32) -> [u32; 2] {
        let length = self.chain_length();
        let stages = self.stages_of(rank);
        let first = stages.partition_point(|&stage| stage < length);
        [index(first), index(stages.len() - first)]
    }
}

/// `looped, 8 ranks x 2 chunks` where it has a name, else the ranks of the stages.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let same = |other: Result<Self>| other.is_ok_and(|other| other == *self);
        let shape = if same(Self::looped(self.num_ranks, self.num_chunks)) {
            "looped"
        } else if same(Self::zig_zag(self.num_ranks, self.num_chunks)) {
            "zig-zag"
        } else if same(Self::bidirectional(self.num_ranks)) {
            "bidirectional"
        } else {
            "custom"
        };
        let (ranks, chunks) = (counted(self.num_ranks.into(), "rank"), counted(self.num_chunks.into(), "chunk"));
        write!(f, "{shape}, {ranks} x {chunks}")
    }
}

/// Counts of stages fit: [`MAX_STAGES`] is checked at construction.
#[expect(clippy::cast_possible_truncation, reason = "at most MAX_STAGES")]
fn index(count: usize) -> u32 {
    count as u32
}

fn checked_num_stages(num_ranks: u32, num_chunks: u32) -> Result<u32> {
    if num_ranks == 0 {
        return Err(PlanError::num_ranks(num_ranks));
    }
    if num_chunks == 0 {
        return Err(PlanError::num_chunks(num_chunks));
    }
    let num_stages = u64::from(num_ranks) * u64::from(num_chunks);
    match u32::try_from(num_stages) {
        Ok(count) if count as usize <= MAX_STAGES => Ok(count),
        _ => Err(PlanError::num_stages(num_stages)),
    }
}

fn count_ranks(ranks: &[u32]) -> Result<u32> {
    let largest = ranks.iter().copied().max().unwrap_or(0);
    if largest as usize >= ranks.len() {
        let reason = format!("rank {largest} is named, but {} stages cannot give a stage to every rank", ranks.len());
        return Err(bad_placement(reason));
    }
    let mut held = vec![false; largest as usize + 1];
    for &rank in ranks {
        held[rank as usize] = true;
    }
    match held.iter().position(|&held| !held) {
        Some(rank) => Err(bad_placement(format!("rank {rank} holds no stage, though rank {largest} is named"))),
        None => Ok(largest + 1),
    }
}

/// The stages of each rank, rank after rank, and where each rank starts.
fn group_by_rank(ranks: &[u32], num_ranks: u32) -> (Vec<u32>, Vec<u32>) {
    let mut stages: Vec<u32> = (0..index(ranks.len())).collect();
    stages.sort_by_key(|&stage| ranks[stage as usize]); // Stable: each rank's stages stay ascending.
    let start = |rank: u32| index(stages.partition_point(|&stage| ranks[stage as usize] < rank));
    let starts = (0..=num_ranks).map(start).collect();
    (stages, starts)
}

fn bad_placement(reason: String) -> PlanError {
    PlanError::BadPlacement { reason }
}
