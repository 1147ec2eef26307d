//! Pipeline schedules as plans: what each rank of a pipeline computes, sends and receives, and in which order.
//!
//! | module | what it does |
//! |---|---|
//! | [`action`] | one thing a rank does: a forward of a stage for a micro-batch, a send, an optimizer step |
//! | [`placement`] | which rank holds which stage, and which way micro-batches flow |
//! | [`program`] | the actions of all ranks, and the header that says what they are for |
//! | [`costs`] | what an action takes and what it holds, in the caller's units |
//! | [`generate`] | named schedules, and forward-only programs |
//! | [`synthesize`] | schedules made for given costs, with a certified bound |
//! | [`lower`] | sends, receives, gathers, reductions and the optimizer, in their order |
//! | [`check`] | whether a schedule can be executed, and the fewest actions that show why not |
//! | [`synthesize`](mod@synthesize) | a schedule for given costs, latency and memory, and how far it can be from the best |
//! | [`simulate`] | when each action runs, what is idle and what is held |
//! | [`render`] | pictures: text, SVG, a trace for Perfetto |
//! | [`format`](mod@format) | text, JSON, digest and table |
//! | [`torch_csv`] | the schedule files of `torch.distributed.pipelining` |
//! | [`partition`] | which consecutive layers form a stage |
//! | [`megatron`] | the layout string of Megatron Core |

pub mod action;
pub mod check;
pub mod costs;
pub mod format;
pub mod generate;
pub mod lower;
pub mod megatron;
pub mod partition;
pub mod placement;
pub mod program;
pub mod render;
pub mod simulate;
pub mod synthesize;
pub mod torch_csv;

mod flow;
mod list;
pub(crate) mod named;

pub use action::{Action, ActionKind};
pub use costs::{Amount, CostSpec, Costs};
pub use format::composite_text;
pub use generate::{ScheduleName, build, rank_program};
pub use list::Objective;
pub use lower::{Lowering, OptimizerStep, ReduceTiming};
pub use placement::Placement;
pub use program::{CommModel, Gating, Header, Schedule};
pub use synthesize::{Request, Synthesis, synthesize};
