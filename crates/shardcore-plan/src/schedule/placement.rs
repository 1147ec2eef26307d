//! Which rank holds which stage.

/// The rank of every stage. Stages are numbered along the flow of a micro-batch.
///
/// A bidirectional placement has two *chains* of equal length, each a copy of the whole model: stages `0..n` and
/// `n..2n`. The first half of the micro-batches flows through the first chain, the rest through the second.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    num_ranks: u32,
    num_chains: u32,
    ranks: Vec<u32>,
}
