//! The actions of all ranks, and the header that says what they are for.

use super::action::Action;
use super::placement::Placement;

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

/// When the parts of a composite may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gating {
    /// The composite starts when the inputs of all its parts are there.
    All,
    /// Each part waits for its own input.
    Own,
}

/// What a schedule is for. Written first in every text and JSON form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Name of the generator, or the user's.
    pub name: String,
    /// Micro-batches of one step.
    pub num_microbatches: u32,
    /// Slices into which a sequence is cut (Seq1F1B); 1 elsewhere.
    pub num_slices: u32,
    /// Where the stages are; gives the number of ranks and of chunks per rank.
    pub placement: Placement,
    /// When the parts of a composite may start.
    pub gating: Gating,
    /// The strictest communication under which the lowered program is declared to run.
    pub comm: CommModel,
}

/// The actions of every rank, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    header: Header,
    programs: Vec<Vec<Action>>,
    lowered: bool,
}
