//! Parts of a tensor that are cut across its rows: a tensor-parallel rank's columns of a weight.

use serde::{Deserialize, Serialize};

/// Equal runs of a flattened tensor, one behind the other: element `i` of the part is element
/// `first + i / length * stride + i % length` of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runs {
    /// First element of the first run.
    pub first: u64,
    /// Elements of a run.
    pub length: u64,
    /// From the start of a run to the start of the next.
    pub stride: u64,
}

/// Elements `[start, stop)` of something, and where they are in something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) stop: u64,
    pub(crate) at: u64,
}

impl Runs {
    /// Elements of the part, in a tensor of `numel` elements; None if the tensor does not consist of such rows.
    #[must_use]
    pub fn numel(&self, numel: u64) -> Option<u64> {
        let end = self.first.checked_add(self.length)?;
        if self.length == 0 || end > self.stride || !numel.is_multiple_of(self.stride) {
            return None;
        }
        Some(numel / self.stride * self.length)
    }

    /// The elements `[start, stop)` of the part as spans of the tensor; `at` counts from `start`.
    pub(crate) fn spans(self, start: u64, stop: u64) -> impl Iterator<Item = Span> {
        let mut next = start;
        std::iter::from_fn(move || {
            (next < stop).then(|| {
                let (row, column) = (next / self.length, next % self.length);
                let count = (self.length - column).min(stop - next);
                let begin = self.first + row * self.stride + column;
                let span = Span { start: begin, stop: begin + count, at: next - start };
                next += count;
                span
            })
        })
    }

    /// What a span of the tensor and the part have in common, as spans of the part.
    pub(crate) fn common(self, with: Span) -> impl Iterator<Item = Span> {
        (with.start / self.stride..with.stop.div_ceil(self.stride)).filter_map(move |row| {
            let begin = row * self.stride + self.first;
            let (start, stop) = (begin.max(with.start), (begin + self.length).min(with.stop));
            let here = row * self.length;
            (start < stop).then(|| Span {
                start: here + start - begin,
                stop: here + stop - begin,
                at: with.at + start - with.start,
            })
        })
    }
}

/// Whether these parts are each there once and make up rows of `stride` elements.
pub(crate) fn tile(parts: &[Runs]) -> bool {
    let mut covered = 0;
    for part in parts {
        if part.first != covered || part.stride != parts[0].stride {
            return false;
        }
        covered += part.length;
    }
    parts.is_empty() || covered == parts[0].stride
}
