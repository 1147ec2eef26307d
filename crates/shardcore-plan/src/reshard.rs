//! From one set of shards to another: which bytes move where, as a list of copies.

use std::collections::BTreeMap;

use crate::error::{PlanError, Result};
use crate::layout::FlatLayout;

/// One copy: `numel` elements from a shard of the old layout into a shard of the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Rank whose old shard has the elements.
    pub src_rank: u64,
    /// First element in that shard.
    pub src_offset: u64,
    /// Rank whose new shard takes them.
    pub dst_rank: u64,
    /// First element in that shard.
    pub dst_offset: u64,
    /// Number of elements, at least 1.
    pub numel: u64,
}

/// The copies that fill every shard of `new` from those of `old`, ordered by where they go. Each element of each
/// parameter is copied once, and no padding.
///
/// # Errors
/// [`PlanError::DifferentParameters`]: the layouts do not hold the same parameters, with the same numbers of elements.
pub fn moves(old: &FlatLayout, new: &FlatLayout) -> Result<Vec<Move>> {
    check_same_parameters(old, new)?;
    let mut found: Vec<Move> = Vec::new();
    for dst_rank in 0..new.num_shards() {
        for range in new.ranges(dst_rank)? {
            let start = old.offset(range.name)? + range.start;
            let numel = range.stop - range.start;
            for (src_rank, src_offset, done, numel) in across_shards(start, numel, old.shard_numel()) {
                let next = Move { src_rank, src_offset, dst_rank, dst_offset: range.shard_offset + done, numel };
                match found.last_mut().filter(|last| continues(last, &next)) {
                    Some(last) => last.numel += numel,
                    None => found.push(next),
                }
            }
        }
    }
    Ok(found)
}

/// The parts of `[start, start + numel)` of a flat buffer by shard: (shard, offset in it, elements before, elements).
fn across_shards(start: u64, numel: u64, shard_numel: u64) -> impl Iterator<Item = (u64, u64, u64, u64)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == numel {
            return None;
        }
        let position = start + done;
        let (shard, offset) = (position / shard_numel, position % shard_numel);
        let part = (shard_numel - offset).min(numel - done);
        let found = (shard, offset, done, part);
        done += part;
        Some(found)
    })
}

fn continues(last: &Move, next: &Move) -> bool {
    (last.src_rank, last.dst_rank) == (next.src_rank, next.dst_rank)
        && last.src_offset + last.numel == next.src_offset
        && last.dst_offset + last.numel == next.dst_offset
}

fn check_same_parameters(old: &FlatLayout, new: &FlatLayout) -> Result<()> {
    let (before, after) = (by_name(old), by_name(new));
    let only = |name: &str, which: &str| different(format!("parameter {name:?} is in the {which} one only"));
    if let Some(name) = before.keys().find(|name| !after.contains_key(*name)) {
        return Err(only(name, "old"));
    }
    if let Some(name) = after.keys().find(|name| !before.contains_key(*name)) {
        return Err(only(name, "new"));
    }
    match before.iter().find(|(name, numel)| after[*name] != **numel) {
        None => Ok(()),
        Some((name, numel)) => {
            let reason =
                format!("parameter {name:?} has {numel} elements in the old one and {} in the new", after[name]);
            Err(different(reason))
        }
    }
}

fn by_name(layout: &FlatLayout) -> BTreeMap<&str, u64> {
    layout.entries().iter().map(|entry| (entry.name.as_str(), entry.numel)).collect()
}

fn different(reason: String) -> PlanError {
    PlanError::DifferentParameters { reason }
}
