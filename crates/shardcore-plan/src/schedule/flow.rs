//! The way of a micro-batch through the stages, flattened for the loops of the simulator and of the checker.

use super::program::Header;

/// No stage: what lies before the first one and behind the last one of a chain.
pub(crate) const NO_STAGE: u32 = u32::MAX;

/// Ranks and neighbours of all stages, and how many micro-batches pass them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) num_ranks: usize,
    /// Over all chains.
    pub(crate) num_stages: usize,
    /// Stages of one chain.
    pub(crate) chain_len: usize,
    /// Micro-batches times slices: the numbers that actions carry.
    pub(crate) num_units: u32,
    pub(crate) num_slices: u32,
    /// The rank of each stage.
    pub(crate) rank: Vec<u32>,
    /// The stage before each stage, or [`NO_STAGE`].
    pub(crate) prev: Vec<u32>,
    /// The stage behind each stage, or [`NO_STAGE`].
    pub(crate) next: Vec<u32>,
}

impl Flow {
    pub(crate) fn of(header: &Header) -> Self {
        let mut flow = Self::default();
        flow.set(header);
        flow
    }

    /// Describes another schedule in the memory of this one.
    pub(crate) fn set(&mut self, header: &Header) {
        let placement = &header.placement;
        self.rank.clear();
        self.rank.extend_from_slice(placement.ranks());
        self.num_ranks = placement.num_ranks() as usize;
        self.num_stages = self.rank.len();
        self.chain_len = self.num_stages / (placement.num_chains() as usize).max(1);
        self.num_slices = header.num_slices.max(1);
        self.num_units = header.num_microbatches.saturating_mul(self.num_slices);
        let len = self.chain_len.max(1);
        let stages = 0..u32::try_from(self.num_stages).unwrap_or(NO_STAGE);
        let is_first = |stage: u32| (stage as usize).is_multiple_of(len);
        self.prev.clear();
        self.prev.extend(stages.clone().map(|stage| if is_first(stage) { NO_STAGE } else { stage - 1 }));
        self.next.clear();
        self.next.extend(stages.map(|stage| if is_first(stage + 1) { NO_STAGE } else { stage + 1 }));
    }

    /// Where a stage's micro-batch stands in a table of all of them.
    #[inline]
    pub(crate) fn cell(&self, stage: u32, unit: u32) -> usize {
        stage as usize * self.num_units as usize + unit as usize
    }

    /// The number of entries of such a table.
    pub(crate) fn num_cells(&self) -> usize {
        self.num_stages * self.num_units as usize
    }

    /// The micro-batches that pass a stage: with two chains the first half takes the first one, which
    /// takes one more of an odd number.
    pub(crate) fn units_of(&self, stage: u32) -> std::ops::Range<u32> {
        let chains = self.num_stages / self.chain_len.max(1);
        if chains < 2 {
            return 0..self.num_units;
        }
        let half = (self.num_units / self.num_slices).div_ceil(2) * self.num_slices;
        if (stage as usize) < self.chain_len { 0..half } else { half..self.num_units }
    }

    /// Whether data between two stages crosses ranks.
    #[inline]
    pub(crate) fn crosses(&self, from: u32, to: u32) -> bool {
        self.rank[from as usize] != self.rank[to as usize]
    }
}
