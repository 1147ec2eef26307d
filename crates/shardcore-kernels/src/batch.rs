//! Many tensors in one call: pieces of about equal size, handed to whichever thread is free.

use std::sync::{Mutex, PoisonError};

use crate::isa::Isa;
use crate::pool;

/// Work on the elements of one tensor, which can be cut anywhere on a multiple of `QUANTUM` without changing what comes
/// out for any element. That makes results independent of the number of threads.
pub(crate) trait Piece: Send + Sized {
    const QUANTUM: usize;

    fn numel(&self) -> usize;

    fn split_at(self, mid: usize) -> (Self, Self);

    fn run(&mut self, isa: Isa);
}

/// Pieces for each thread: enough that a thread that was held up leaves its share to the others.
const PIECES_A_THREAD: usize = 4;

/// Less work than this is not worth waking a thread for.
const MIN_NUMEL: usize = 1 << 15;

/// Runs everything on at most `num_threads` threads, the caller's among them, and returns when all of it is done.
pub(crate) fn run<P: Piece>(mut work: Vec<P>, num_threads: usize, isa: Isa) {
    let total: usize = work.iter().map(P::numel).sum();
    let num_threads = num_threads.min(total / MIN_NUMEL);
    if num_threads <= 1 {
        for piece in &mut work {
            piece.run(isa);
        }
        return;
    }
    let (mut pieces, ends) = cut(work, (total / (num_threads * PIECES_A_THREAD)).max(MIN_NUMEL));
    let queue = Mutex::new(shares(&mut pieces, &ends).into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    pool::on_each_thread(num_threads, &|| {
        while let Some(share) = next() {
            for piece in share {
                piece.run(isa);
            }
        }
    });
}

/// Cuts the work into shares of about `share_numel` elements. Gives the pieces in order and where each share ends.
fn cut<P: Piece>(work: Vec<P>, share_numel: usize) -> (Vec<P>, Vec<usize>) {
    let share_numel = share_numel.next_multiple_of(P::QUANTUM);
    let mut pieces = Vec::with_capacity(work.len() + PIECES_A_THREAD);
    let mut ends = Vec::new();
    let mut room = share_numel;
    for mut rest in work {
        while rest.numel() > room.next_multiple_of(P::QUANTUM) {
            let (front, back) = rest.split_at(room.next_multiple_of(P::QUANTUM));
            pieces.push(front);
            ends.push(pieces.len());
            room = share_numel;
            rest = back;
        }
        room = room.saturating_sub(rest.numel());
        pieces.push(rest);
        if room == 0 {
            ends.push(pieces.len());
            room = share_numel;
        }
    }
    ends.push(pieces.len());
    (pieces, ends)
}

fn shares<'p, P>(mut pieces: &'p mut [P], ends: &[usize]) -> Vec<&'p mut [P]> {
    let mut start = 0;
    let mut found = Vec::with_capacity(ends.len());
    for &end in ends {
        let (share, rest) = std::mem::take(&mut pieces).split_at_mut(end - start);
        found.push(share);
        (pieces, start) = (rest, end);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A range of numbers that remembers nothing.
    #[derive(Debug, PartialEq)]
    struct Range(usize, usize);

    impl Piece for Range {
        const QUANTUM: usize = 8;

        fn numel(&self) -> usize {
            self.1 - self.0
        }

        fn split_at(self, mid: usize) -> (Self, Self) {
            (Self(self.0, self.0 + mid), Self(self.0 + mid, self.1))
        }

        fn run(&mut self, _: Isa) {}
    }

    #[test]
    fn shares_are_even_and_hold_everything_once() {
        let work = [0, 1, 7, 1000, 8, 16, 333, 0].map(|numel| Range(0, numel)).into();
        let (mut pieces, ends) = cut(work, 100);
        let total: usize = pieces.iter().map(Range::numel).sum();
        assert_eq!(total, 1365);
        let shares = shares(&mut pieces, &ends);
        let sizes: Vec<usize> = shares.iter().map(|share| share.iter().map(Range::numel).sum()).collect();
        assert_eq!(sizes.iter().sum::<usize>(), 1365);
        assert!(sizes.iter().all(|&size| size <= 112), "{sizes:?}");
        assert!(sizes.len() <= 15, "{sizes:?}");
        assert!(pieces.iter().all(|range| range.0 % 8 == 0));
    }
}
