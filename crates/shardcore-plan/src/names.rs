//! Unique names: the check and the sorted index in one.

/// The positions of `names`, sorted by name.
///
/// # Errors
/// The positions of a name that appears twice, the earlier one first.
pub(crate) fn sorted_unique(names: &[&str]) -> Result<Vec<usize>, (usize, usize)> {
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by_key(|&index| names[index]); // Stable: equal names stay in order.
    match order.windows(2).find(|pair| names[pair[0]] == names[pair[1]]) {
        Some(pair) => Err((pair[0], pair[1])),
        None => Ok(order),
    }
}
