//! One thing a rank does.

/// What an action does. The order is that of a table: compute, communication, then what the sharding needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ActionKind {
    /// Forward of a stage for a micro-batch.
    Forward,
    /// The whole backward: input gradient and weight gradient in one.
    Backward,
    /// The gradient with respect to the stage's input.
    InputGrad,
    /// The gradient with respect to the stage's weights; needs `InputGrad` before it.
    WeightGrad,
    /// Sends the stage's output to the next stage's rank.
    SendForward,
    /// Receives the stage's input from the previous stage's rank.
    RecvForward,
    /// Sends the gradient of the stage's input to the previous stage's rank.
    SendBackward,
    /// Receives the gradient of the stage's output from the next stage's rank.
    RecvBackward,
    /// Gathers the stage's parameters.
    Unshard,
    /// Releases the stage's gathered parameters.
    Reshard,
    /// Reduces the stage's gradients over the data-parallel ranks.
    Reduce,
    /// Sums the gradients of weights that the stage shares with others.
    TiedReduce,
    /// Steps the optimizer of the stage's parameters.
    Optimizer,
}

/// One thing a rank does: what, with which stage, for which micro-batch.
///
/// 12 bytes, because a plan for thousands of ranks holds tens of millions of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// What is done.
    pub kind: ActionKind,
    /// Runs as one composite with the action behind it (an overlapped forward and backward).
    pub with_next: bool,
    /// The receive slot that this action fills or reads, on lowered programs; 0 elsewhere.
    pub slot: u16,
    /// The stage, counted over all chains of the [`Placement`](super::Placement).
    pub stage: u32,
    /// The micro-batch (with sequence slices: `microbatch * num_slices + slice`); 0 where the kind has none.
    pub microbatch: u32,
}
