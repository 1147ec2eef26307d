//! In which order the gradients of the groups are reduced.

use crate::shard_plan::Group;

/// The indices of the trainable groups, last one first.
///
/// Backward runs through the units from the last to the first, so the last group's gradients are complete first.
/// Every rank reduces in this order, whatever the order in which its own gradients arrive.
#[must_use]
pub fn reduce_order(groups: &[Group]) -> Vec<usize> {
    (0..groups.len()).rev().filter(|&index| groups[index].layout.trainable()).collect()
}
