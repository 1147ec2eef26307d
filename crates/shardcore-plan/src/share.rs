//! Who writes what of tensors that several ranks hold: each element once, and every rank about as many bytes.

use std::collections::BTreeMap;

use crate::error::{PlanError, Result};

/// What one rank holds of one tensor: elements `[start, stop)` of it, flattened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the tensor, the same on all ranks.
    pub tensor: usize,
    /// First element.
    pub start: u64,
    /// The element after the last one.
    pub stop: u64,
}

/// A part of a rank's piece that this rank writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Number of the piece in the rank's own list.
    pub piece: usize,
    /// First element, in the flattened tensor.
    pub start: u64,
    /// The element after the last one, in the flattened tensor.
    pub stop: u64,
}

/// Below so many bytes for each holder a range is not cut: files of many tiny pieces are slow to read.
const WORTH_CUTTING: u64 = 1 << 16;

/// A range of a tensor in which no holder's piece begins or ends, with the pieces that cover it.
struct Range {
    start: u64,
    stop: u64,
    /// (rank, number of its piece), one of each rank.
    holders: Vec<(usize, usize)>,
}

/// For each rank, the parts that it writes, in the order of its own pieces.
///
/// `held[rank]` are the pieces of a rank and `itemsizes[tensor]` the bytes of an element. Every element that any rank
/// holds is written by one of those that hold it. A range held by several is divided evenly, or, where it is small,
/// given to the one with the least so far.
///
/// # Errors
/// [`PlanError::BadPiece`]: a tensor without an itemsize, or a piece that ends before it begins.
pub fn parts(held: &[Vec<Piece>], itemsizes: &[u64]) -> Result<Vec<Vec<Part>>> {
    let mut by_tensor: BTreeMap<usize, Vec<(usize, usize, Piece)>> = BTreeMap::new();
    for (rank, pieces) in held.iter().enumerate() {
        for (index, &piece) in pieces.iter().enumerate() {
            check(rank, index, piece, itemsizes)?;
            by_tensor.entry(piece.tensor).or_default().push((rank, index, piece));
        }
    }
    let mut written: Vec<Vec<Part>> = vec![Vec::new(); held.len()];
    let mut loads: Vec<u64> = vec![0; held.len()];
    for (tensor, pieces) in by_tensor {
        for range in ranges(&pieces) {
            deal(&range, itemsizes[tensor], &mut loads, &mut written);
        }
    }
    for parts in &mut written {
        join(parts);
    }
    Ok(written)
}

fn check(rank: usize, piece: usize, held: Piece, itemsizes: &[u64]) -> Result<()> {
    let reason = match itemsizes.get(held.tensor) {
        None => format!("it is of tensor {}, and there are {}", held.tensor, itemsizes.len()),
        Some(_) if held.start > held.stop => format!("it begins at {} and ends at {}", held.start, held.stop),
        Some(_) => return Ok(()),
    };
    Err(PlanError::BadPiece { rank, piece, reason })
}

/// The ranges between all beginnings and ends of the pieces of one tensor.
fn ranges(pieces: &[(usize, usize, Piece)]) -> Vec<Range> {
    let mut cuts: Vec<u64> = pieces.iter().flat_map(|(_, _, piece)| [piece.start, piece.stop]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut found: Vec<Range> =
        cuts.windows(2).map(|pair| Range { start: pair[0], stop: pair[1], holders: Vec::new() }).collect();
    for &(rank, index, piece) in pieces {
        let first = cuts.partition_point(|&cut| cut < piece.start);
        let last = cuts.partition_point(|&cut| cut < piece.stop);
        for range in &mut found[first..last] {
            if range.holders.last().is_none_or(|&(holder, _)| holder != rank) {
                range.holders.push((rank, index));
            }
        }
    }
    found.retain(|range| !range.holders.is_empty());
    found
}

fn deal(range: &Range, itemsize: u64, loads: &mut [u64], written: &mut [Vec<Part>]) {
    let (numel, count) = (range.stop - range.start, range.holders.len() as u64);
    let mut give = |(rank, piece): (usize, usize), start: u64, stop: u64, loads: &mut [u64]| {
        loads[rank] = loads[rank].saturating_add((stop - start).saturating_mul(itemsize));
        written[rank].push(Part { piece, start, stop });
    };
    if numel.saturating_mul(itemsize) < WORTH_CUTTING * count {
        // The first of equals: all ranks must choose alike.
        if let Some(&least) = range.holders.iter().min_by_key(|&&(rank, _)| loads[rank]) {
            give(least, range.start, range.stop, loads);
        }
        return;
    }
    let bound = |place: u64| range.start + numel / count * place + (numel % count).min(place);
    for (place, &holder) in (0..).zip(&range.holders) {
        give(holder, bound(place), bound(place + 1), loads);
    }
}

/// Puts parts into the order of their pieces, and joins neighbours.
fn join(parts: &mut Vec<Part>) {
    parts.sort_unstable();
    parts.dedup_by(|next, last| {
        let continues = next.piece == last.piece && next.start == last.stop;
        if continues {
            last.stop = next.stop;
        }
        continues
    });
}
