//! Which parameters share a flat buffer.

use std::num::NonZeroU64;

use crate::error::{Kind, PlanError, Result};
use crate::layout::{Cursor, FlatLayout, Param, Sharding};
use crate::names;

/// Splits parameters into layouts of one dtype and one trainability each, and those into segments.
///
/// Kinds stand in the order of their first parameter; inside a kind the caller's order is kept. A segment ends
/// before the parameter that would carry it past `segment_nbytes` (counted to the end of its last parameter, without
/// the padding at the end); a parameter larger than that gets a segment of its own and is never split.
///
/// # Errors
/// Those of [`FlatLayout::new`], with duplicate names found across all layouts.
pub fn split(params: Vec<Param>, sharding: Sharding, segment_nbytes: Option<NonZeroU64>) -> Result<Vec<FlatLayout>> {
    check_unique(&params)?;
    split_unique(params, sharding, segment_nbytes)
}

/// [`split`] for parameters whose names are known to be unique.
pub(crate) fn split_unique(
    params: Vec<Param>,
    sharding: Sharding,
    segment_nbytes: Option<NonZeroU64>,
) -> Result<Vec<FlatLayout>> {
    let segments = by_kind(params).into_iter().flat_map(|kind| segments(kind, segment_nbytes));
    segments.map(|segment| FlatLayout::new(segment, sharding)).collect()
}

fn by_kind(params: Vec<Param>) -> Vec<Vec<Param>> {
    // At most two kinds a dtype: a scan of the list is the fastest map.
    let mut kinds: Vec<(Kind, Vec<Param>)> = Vec::new();
    for param in params {
        let kind = param.kind();
        match kinds.iter_mut().find(|(seen, _)| *seen == kind) {
            Some((_, members)) => members.push(param),
            None => kinds.push((kind, vec![param])),
        }
    }
    kinds.into_iter().map(|(_, members)| members).collect()
}

fn segments(params: Vec<Param>, segment_nbytes: Option<NonZeroU64>) -> Vec<Vec<Param>> {
    let (Some(limit), Some(first)) = (segment_nbytes, params.first()) else {
        return vec![params];
    };
    let empty = Cursor::new(first.dtype);
    let (mut segments, mut open, mut cursor) = (Vec::new(), Vec::new(), empty);
    for param in params {
        let fits = cursor.place(param.numel).is_some() && cursor.nbytes() <= limit.get();
        if !fits && !open.is_empty() {
            segments.push(std::mem::take(&mut open));
            cursor = empty;
            cursor.place(param.numel); // Too large for any buffer: `FlatLayout::new` reports it.
        }
        open.push(param);
    }
    segments.push(open);
    segments
}

fn check_unique(params: &[Param]) -> Result<()> {
    let all: Vec<&str> = params.iter().map(|param| param.name.as_str()).collect();
    names::sorted_unique(&all).map(drop).map_err(|(first, second)| PlanError::DuplicateParameter {
        name: all[first].to_owned(),
        first,
        second,
    })
}
