//! What an action takes and what it holds.

/// Costs per stage and micro-batch, in any unit of time and of memory: what goes in comes out.
///
/// Every list has one entry per stage. From the caller's per-rank numbers a chunk takes `1 / num_chunks`.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Time of a forward.
    pub forward: Vec<f64>,
    /// Time of an input gradient.
    pub input_grad: Vec<f64>,
    /// Time of a weight gradient.
    pub weight_grad: Vec<f64>,
    /// Time of a fused backward; `None`: input and weight gradient in a row.
    pub fused_backward: Option<Vec<f64>>,
    /// Latency of one hop between two different ranks.
    pub hop: f64,
    /// Memory held from the forward to the input gradient (or the fused backward).
    pub activation: Vec<f64>,
    /// Memory held from the input gradient on to the weight gradient.
    pub stash: Vec<f64>,
}
