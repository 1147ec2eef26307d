//! One thing a rank does.

use super::named::named;

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

named!(
    ActionKind,
    "action",
    [
        Forward = "F",
        Backward = "B",
        InputGrad = "I",
        WeightGrad = "W",
        SendForward = "SEND_F",
        RecvForward = "RECV_F",
        SendBackward = "SEND_B",
        RecvBackward = "RECV_B",
        Unshard = "UNSHARD",
        Reshard = "RESHARD",
        Reduce = "REDUCE",
        TiedReduce = "TIED_REDUCE",
        Optimizer = "OPTIM",
    ]
);

impl ActionKind {
    /// Forward, backward or a part of it.
    #[must_use]
    pub fn is_compute(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::InputGrad | Self::WeightGrad)
    }

    /// Sends something to another rank of the pipeline.
    #[must_use]
    pub fn is_send(self) -> bool {
        matches!(self, Self::SendForward | Self::SendBackward)
    }

    /// Receives something from another rank of the pipeline.
    #[must_use]
    pub fn is_recv(self) -> bool {
        matches!(self, Self::RecvForward | Self::RecvBackward)
    }

    /// Whether the action is for one micro-batch: compute, sends and receives.
    #[must_use]
    pub fn has_microbatch(self) -> bool {
        self <= Self::RecvBackward
    }

    /// Whether the action may carry a receive slot: receives fill one, compute reads it.
    #[must_use]
    pub fn has_slot(self) -> bool {
        self.is_recv() || matches!(self, Self::Forward | Self::Backward | Self::InputGrad)
    }
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
    /// The receive slot that this action fills (a receive) or reads (`F` its input, `B` and `I` the gradient of their
    /// output), on lowered programs; 0 elsewhere. Slots are counted apart for each stage and direction.
    pub slot: u16,
    /// The stage, counted over all chains of the [`Placement`](super::Placement).
    pub stage: u32,
    /// The micro-batch (with sequence slices: `microbatch * num_slices + slice`); 0 where the kind has none.
    pub microbatch: u32,
}

const _: () = assert!(size_of::<Action>() == 12);

impl Action {
    /// An action on its own, in slot 0.
    #[must_use]
    pub const fn new(kind: ActionKind, stage: u32, microbatch: u32) -> Self {
        Self { kind, with_next: false, slot: 0, stage, microbatch }
    }

    /// Forward of `stage` for `microbatch`.
    #[must_use]
    pub const fn forward(stage: u32, microbatch: u32) -> Self {
        Self::new(ActionKind::Forward, stage, microbatch)
    }

    /// The whole backward of `stage` for `microbatch`.
    #[must_use]
    pub const fn backward(stage: u32, microbatch: u32) -> Self {
        Self::new(ActionKind::Backward, stage, microbatch)
    }

    /// The input gradient of `stage` for `microbatch`.
    #[must_use]
    pub const fn input_grad(stage: u32, microbatch: u32) -> Self {
        Self::new(ActionKind::InputGrad, stage, microbatch)
    }

    /// The weight gradient of `stage` for `microbatch`.
    #[must_use]
    pub const fn weight_grad(stage: u32, microbatch: u32) -> Self {
        Self::new(ActionKind::WeightGrad, stage, microbatch)
    }

    /// The same action, in one composite with the action behind it.
    #[must_use]
    pub const fn joined(self) -> Self {
        Self { with_next: true, ..self }
    }

    /// The same action with a receive slot.
    #[must_use]
    pub const fn in_slot(self, slot: u16) -> Self {
        Self { slot, ..self }
    }
}
