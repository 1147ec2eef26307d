//! How much a search may do, in work and not in time, so that every machine finds the same.

use super::problem::Problem;

/// What a search may take.
pub(crate) struct Budget {
    /// The ops that it may place.
    pub(crate) ops: usize,
    /// The orders that it may try: for small problems that is enough.
    pub(crate) orders: usize,
}

impl Budget {
    /// The ops that it may place on a problem.
    pub(crate) fn on(&self, problem: &Problem) -> usize {
        self.ops.min(self.orders.saturating_mul(problem.num_ops()))
    }
}
