//! Where each parameter of a group lies in one flat buffer, and which piece of the buffer each rank holds.
//!
//! The buffer is cut into `num_shards` equal shards, one per rank, so an all-gather or a reduce-scatter runs on the
//! buffer itself. A parameter may straddle shards. Nothing is stored per rank: a rank's view is found by binary search,
//! so its cost follows what the rank holds and not how many ranks there are.

use crate::dtype::Dtype;
use crate::error::{Kind, PlanError, Result};
use crate::names;

/// Every parameter starts at a multiple of this many bytes in the flat buffer: vector loads of a parameter stay
/// aligned, and a view of it can be handed to any kernel.
pub const PARAM_ALIGNMENT: u64 = 16;

/// The default of the shard alignment, in bytes: the alignment of GPU allocations and collectives.
pub const SHARD_ALIGNMENT: u64 = 256;

/// Buffers stay addressable by signed 64-bit byte counts, as in torch.
const MAX_NBYTES: u64 = i64::MAX as u64;

/// A parameter as the caller describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Qualified name, unique.
    pub name: String,
    /// Number of elements; 0 is allowed.
    pub numel: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Whether it takes gradients.
    pub trainable: bool,
}

impl Param {
    /// What this parameter must share with its neighbours in a layout.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind { dtype: self.dtype, trainable: self.trainable }
    }
}

/// Into how many shards a buffer is cut, and how each shard is aligned. Valid by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    num_shards: u64,
    alignment: u64,
}

impl Sharding {
    /// `num_shards` is the number of ranks; `alignment` is in bytes, a power of two, at least [`PARAM_ALIGNMENT`].
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`].
    pub fn new(num_shards: u64, alignment: u64) -> Result<Self> {
        if num_shards == 0 {
            return Err(PlanError::num_shards(num_shards));
        }
        if alignment < PARAM_ALIGNMENT || !alignment.is_power_of_two() {
            return Err(PlanError::alignment(alignment));
        }
        Ok(Self { num_shards, alignment })
    }

    /// Number of shards, at least 1.
    #[must_use]
    pub fn num_shards(self) -> u64 {
        self.num_shards
    }

    /// Alignment of every shard, in bytes.
    #[must_use]
    pub fn alignment(self) -> u64 {
        self.alignment
    }
}

/// One parameter in a layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Qualified name.
    pub name: String,
    /// Number of elements.
    pub numel: u64,
    /// First element in the flat buffer, in elements.
    pub offset: u64,
}

impl Entry {
    /// The element after the last one, in the flat buffer.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.numel
    }
}

/// The piece of one parameter that one rank holds: never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamRange<'a> {
    /// Qualified name.
    pub name: &'a str,
    /// First element of the piece, in the flattened parameter.
    pub start: u64,
    /// The element after the last one, in the flattened parameter.
    pub stop: u64,
    /// Where the piece starts in the rank's shard, in elements.
    pub shard_offset: u64,
}

/// Parameters of one dtype and one trainability in one flat buffer, padded so that all shards are equal and aligned.
///
/// An empty layout has no dtype of its own; it reports frozen fp32 and holds no element.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FlatLayout {
    kind: Kind,
    sharding: Sharding,
    entries: Vec<Entry>,
    /// Positions of the entries, sorted by name: for the look-up by name.
    by_name: Vec<usize>,
    padded_numel: u64,
}

impl FlatLayout {
    /// Lays the parameters out in the given order.
    ///
    /// # Errors
    /// [`PlanError::MixedLayout`], [`PlanError::DuplicateParameter`] and [`PlanError::TooLarge`].
    pub fn new(params: Vec<Param>, sharding: Sharding) -> Result<Self> {
        let kind = common_kind(&params)?;
        let mut cursor = Cursor::new(kind.dtype);
        let mut entries = Vec::with_capacity(params.len());
        for Param { name, numel, .. } in params {
            let Some(offset) = cursor.place(numel) else {
                return Err(too_large(name, numel.into(), kind.dtype, sharding));
            };
            entries.push(Entry { name, numel, offset });
        }
        let Some(padded_numel) = cursor.padded(sharding) else {
            let largest = entries.into_iter().max_by_key(|entry| entry.numel);
            let name = largest.map(|entry| entry.name).unwrap_or_default();
            return Err(too_large(name, cursor.end.into(), kind.dtype, sharding));
        };
        let by_name = sorted_by_name(&entries)?;
        Ok(Self { kind, sharding, entries, by_name, padded_numel })
    }

    /// What all parameters share.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Element type of every parameter.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.kind.dtype
    }

    /// Whether the parameters take gradients.
    #[must_use]
    pub fn trainable(&self) -> bool {
        self.kind.trainable
    }

    /// Number of shards and their alignment.
    #[must_use]
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// Number of shards, one per rank.
    #[must_use]
    pub fn num_shards(&self) -> u64 {
        self.sharding.num_shards
    }

    /// The parameters in their order in the buffer.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Elements of all parameters, without padding.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.entries.iter().map(|entry| entry.numel).sum()
    }

    /// Elements of the whole buffer, with padding: `num_shards * shard_numel`.
    #[must_use]
    pub fn padded_numel(&self) -> u64 {
        self.padded_numel
    }

    /// Elements of one shard.
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        self.padded_numel / self.sharding.num_shards
    }

    /// Bytes of the whole buffer, with padding.
    #[must_use]
    pub fn padded_nbytes(&self) -> u64 {
        self.padded_numel * self.kind.dtype.itemsize()
    }

    /// Bytes of one shard, with padding.
    #[must_use]
    pub fn shard_nbytes(&self) -> u64 {
        self.shard_numel() * self.kind.dtype.itemsize()
    }

    /// Where a parameter starts in the flat buffer, in elements.
    ///
    /// # Errors
    /// [`PlanError::UnknownParameter`].
    pub fn offset(&self, name: &str) -> Result<u64> {
        let found = self.by_name.binary_search_by(|&index| self.entries[index].name.as_str().cmp(name));
        match found {
            Ok(place) => Ok(self.entries[self.by_name[place]].offset),
            Err(_) => Err(PlanError::UnknownParameter { name: name.to_owned(), num_params: self.entries.len() }),
        }
    }

    /// The pieces that `rank` holds, in the order of its shard. Costs two binary searches and one step a piece.
    ///
    /// # Errors
    /// [`PlanError::RankOutOfRange`].
    pub fn ranges(&self, rank: u64) -> Result<impl Iterator<Item = ParamRange<'_>>> {
        let (start, stop) = self.shard_bounds(rank)?;
        let pieces = self.overlapping(start, stop).iter().filter(|entry| entry.numel > 0);
        Ok(pieces.map(move |entry| ParamRange {
            name: &entry.name,
            start: start.saturating_sub(entry.offset),
            stop: stop.min(entry.end()) - entry.offset,
            shard_offset: entry.offset.saturating_sub(start),
        }))
    }

    /// The padding: maximal runs `(start, stop)` of the flat buffer that belong to no parameter.
    pub fn gaps(&self) -> impl Iterator<Item = (u64, u64)> {
        let filled = self.entries.iter().filter(|entry| entry.numel > 0);
        let spans = filled.map(|entry| (entry.offset, entry.end()));
        let end = std::iter::once((self.padded_numel, self.padded_numel));
        let mut previous_end = 0;
        spans.chain(end).filter_map(move |(start, stop)| {
            let gap = (previous_end, start);
            previous_end = stop;
            (gap.0 < gap.1).then_some(gap)
        })
    }

    /// The shard of `rank` as a range of the flat buffer.
    fn shard_bounds(&self, rank: u64) -> Result<(u64, u64)> {
        let num_shards = self.sharding.num_shards;
        if rank >= num_shards {
            return Err(PlanError::RankOutOfRange { rank: rank.into(), num_shards });
        }
        let start = rank * self.shard_numel();
        Ok((start, start + self.shard_numel()))
    }

    /// The entries that may meet `[start, stop)`: ends and offsets both grow along the list.
    fn overlapping(&self, start: u64, stop: u64) -> &[Entry] {
        let first = self.entries.partition_point(|entry| entry.end() <= start);
        let count = self.entries[first..].partition_point(|entry| entry.offset < stop);
        &self.entries[first..first + count]
    }
}

/// Places parameters one behind the other; all arithmetic is checked. Counts elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    itemsize: u64,
    end: u64,
}

impl Cursor {
    pub(crate) fn new(dtype: Dtype) -> Self {
        Self { itemsize: dtype.itemsize(), end: 0 }
    }

    /// Gives the parameter's offset and moves behind it; `None` when the buffer would be too large.
    pub(crate) fn place(&mut self, numel: u64) -> Option<u64> {
        let offset = self.end.checked_next_multiple_of(PARAM_ALIGNMENT / self.itemsize)?;
        let end = offset.checked_add(numel)?;
        if end > MAX_NBYTES / self.itemsize {
            return None;
        }
        self.end = end;
        Some(offset)
    }

    /// Bytes up to the end of the last parameter.
    pub(crate) fn nbytes(self) -> u64 {
        self.end * self.itemsize
    }

    /// Elements once padded to `num_shards` aligned shards; `None` when the buffer would be too large.
    fn padded(self, sharding: Sharding) -> Option<u64> {
        let quantum = sharding.num_shards.checked_mul(sharding.alignment / self.itemsize)?;
        let padded = self.end.checked_next_multiple_of(quantum)?;
        (padded <= MAX_NBYTES / self.itemsize).then_some(padded)
    }
}

fn common_kind(params: &[Param]) -> Result<Kind> {
    let Some(first) = params.first() else {
        return Ok(Kind { dtype: Dtype::Fp32, trainable: false });
    };
    match params.iter().find(|param| param.kind() != first.kind()) {
        None => Ok(first.kind()),
        Some(param) => Err(PlanError::MixedLayout {
            first_name: first.name.clone(),
            first: first.kind(),
            name: param.name.clone(),
            other: param.kind(),
        }),
    }
}

fn sorted_by_name(entries: &[Entry]) -> Result<Vec<usize>> {
    let all: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names::sorted_unique(&all).map_err(|(first, second)| PlanError::DuplicateParameter {
        name: all[first].to_owned(),
        first,
        second,
    })
}

fn too_large(name: String, numel: u128, dtype: Dtype, sharding: Sharding) -> PlanError {
    PlanError::TooLarge { name, numel, dtype, num_shards: sharding.num_shards }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work counted in entries looked at: a shard much smaller than a parameter touches one or two of 10,000.
    #[test]
    fn a_rank_looks_only_at_what_its_shard_meets() {
        let param = |index: usize| Param {
            name: index.to_string(),
            numel: if index.is_multiple_of(3) { 0 } else { 1_000_000 },
            dtype: Dtype::Bf16,
            trainable: true,
        };
        let sharding = Sharding::new(16_384, SHARD_ALIGNMENT).unwrap();
        let layout = FlatLayout::new((0..10_000).map(param).collect(), sharding).unwrap();
        for rank in [0, 1, 5_000, 16_383] {
            let (start, stop) = layout.shard_bounds(rank).unwrap();
            let seen = layout.overlapping(start, stop);
            assert!(seen.iter().filter(|entry| entry.numel > 0).count() <= 2);
            assert!(seen.len() <= 4, "empty parameters between two others: {}", seen.len());
        }
    }
}
