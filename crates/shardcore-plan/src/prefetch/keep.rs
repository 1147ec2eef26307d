//! Which units stay gathered between two uses.
//!
//! A gap is a stretch of the trace over which a unit is not used, between two stretches over which it is. Keeping the
//! unit saves one gather and takes its bytes in every place of the gap. So this is a packing of intervals into what
//! memory is left in each place, for the most bytes saved.
//!
//! With equal sizes the sweep below is optimal: it is Belady's rule (L. A. Belady, "A study of replacement algorithms
//! for a virtual-storage computer", IBM Systems Journal 5(2), 1966), which evicts what is used again last. With
//! different sizes the problem is NP-hard (M. Chrobak, G. Woeginger, K. Makino, H. Xu, "Caching is hard, even in the
//! fault model", Algorithmica 63, 2012): several orders of packing are tried, and each result is improved by exchange.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Places that the exchanges may look at, a few milliseconds: a bound on their time that depends on the input only.
const SEARCH_WORK: u64 = 2_000_000;

/// A stretch `start..stop` of places over which a unit of `nbytes` could be kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gap {
    pub(crate) start: usize,
    pub(crate) stop: usize,
    pub(crate) nbytes: u64,
    /// Kept before all others, wherever it fits.
    pub(crate) persistent: bool,
}

/// For each gap whether it is kept, so that the kept ones fit into `room` (bytes left in each place).
pub(crate) fn choose(gaps: &[Gap], room: &[u64]) -> Vec<bool> {
    let mut base = Packing::new(gaps, room);
    let mut persistent: Vec<usize> = (0..gaps.len()).filter(|&gap| gaps[gap].persistent).collect();
    persistent.sort_by_key(|&gap| gaps[gap].nbytes);
    base.fill(&persistent);
    let free: Vec<usize> = (0..gaps.len()).filter(|&gap| !gaps[gap].persistent && base.fits(gap)).collect();

    let mut best = base.clone();
    best.sweep(&free);
    let orders = orders(gaps, &free);
    best.improve(&free, &orders);
    for order in &orders {
        let mut other = base.clone();
        other.work = best.work;
        other.fill(order);
        other.improve(&free, &orders);
        best.work = other.work;
        if other.saved > best.saved {
            best = other;
        }
    }
    best.kept
}

/// Orders in which gaps are tried: each is the best one for some inputs.
fn orders(gaps: &[Gap], free: &[usize]) -> [Vec<usize>; 3] {
    let length = |gap: usize| gaps[gap].stop - gaps[gap].start;
    let sorted = |by: &dyn Fn(usize) -> (u128, usize)| {
        let mut order = free.to_vec();
        order.sort_by_key(|&gap| by(gap));
        order
    };
    // Bytes saved for a byte held over one place are 1 / length: the shortest gaps are the best value.
    let by_length = sorted(&|gap| (length(gap) as u128, gap));
    let by_nbytes = sorted(&|gap| (u128::from(u64::MAX - gaps[gap].nbytes), length(gap)));
    let by_both =
        sorted(&|gap| ((u128::from(u64::MAX) << 32) / (u128::from(gaps[gap].nbytes) + 1) * length(gap) as u128, gap));
    [by_length, by_nbytes, by_both]
}

/// A set of gaps that fit together.
#[derive(Clone)]
struct Packing<'a> {
    gaps: &'a [Gap],
    room: Vec<u64>,
    kept: Vec<bool>,
    saved: u64,
    /// What the search may still look at.
    work: u64,
}

impl<'a> Packing<'a> {
    fn new(gaps: &'a [Gap], room: &[u64]) -> Self {
        Self { gaps, room: room.to_vec(), kept: vec![false; gaps.len()], saved: 0, work: SEARCH_WORK }
    }

    fn fits(&self, gap: usize) -> bool {
        let Gap { start, stop, nbytes, .. } = self.gaps[gap];
        !self.kept[gap] && self.room[start..stop].iter().all(|&room| room >= nbytes)
    }

    fn add(&mut self, gap: usize) {
        let Gap { start, stop, nbytes, .. } = self.gaps[gap];
        self.room[start..stop].iter_mut().for_each(|room| *room -= nbytes);
        self.kept[gap] = true;
        self.saved += nbytes;
    }

    fn remove(&mut self, gap: usize) {
        let Gap { start, stop, nbytes, .. } = self.gaps[gap];
        self.room[start..stop].iter_mut().for_each(|room| *room += nbytes);
        self.kept[gap] = false;
        self.saved -= nbytes;
    }

    /// Adds what fits, in this order.
    fn fill(&mut self, order: &[usize]) {
        for &gap in order {
            self.work = self.work.saturating_sub((self.gaps[gap].stop - self.gaps[gap].start) as u64);
            if self.fits(gap) {
                self.add(gap);
            }
        }
    }

    /// Belady's rule: walks through the places, keeps everything, and where that is too much gives up what ends last.
    fn sweep(&mut self, free: &[usize]) {
        let mut begins = free.to_vec();
        begins.sort_by_key(|&gap| self.gaps[gap].start); // Stable.
        let mut begins = begins.into_iter().peekable();
        let mut active: BTreeSet<(usize, u64, usize)> = BTreeSet::new(); // The end, the bytes, the gap.
        let (mut held, mut chosen) = (0, Vec::new());
        for place in 0..self.room.len() {
            while let Some(&(_, nbytes, gap)) = active.first().filter(|(stop, ..)| *stop <= place) {
                active.pop_first();
                held -= nbytes;
                chosen.push(gap);
            }
            while let Some(gap) = begins.next_if(|&gap| self.gaps[gap].start <= place) {
                active.insert((self.gaps[gap].stop, self.gaps[gap].nbytes, gap));
                held += self.gaps[gap].nbytes;
            }
            while held > self.room[place] {
                let Some((_, nbytes, _)) = active.pop_last() else { break };
                held -= nbytes;
            }
        }
        // A gap ends where its unit is used again, so none is active at the last place.
        for gap in chosen {
            self.add(gap);
        }
    }

    /// Exchanges until none of them saves more, or the work is used up: force a gap in, or take one out, and fill up.
    fn improve(&mut self, free: &[usize], orders: &[Vec<usize>]) {
        let mut improved = true;
        while improved && self.work > 0 {
            improved = false;
            self.fill(&orders[0]);
            for &gap in free {
                for order in orders {
                    if self.work == 0 {
                        return;
                    }
                    let mut other = self.clone();
                    other.work = other.work.saturating_sub((self.room.len() + self.kept.len()) as u64);
                    if self.kept[gap] {
                        other.exclude(gap, order);
                    } else {
                        other.force(gap, order);
                    }
                    self.work = other.work;
                    if other.saved > self.saved {
                        *self = other;
                        improved = true;
                    }
                }
            }
        }
    }

    /// Takes a gap out and fills up with others.
    fn exclude(&mut self, gap: usize, order: &[usize]) {
        self.remove(gap);
        let others: Vec<usize> = order.iter().copied().filter(|&other| other != gap).collect();
        self.fill(&others);
    }

    /// Makes room for a gap, adds it and fills up with others.
    fn force(&mut self, gap: usize, order: &[usize]) {
        let Gap { start, stop, nbytes, .. } = self.gaps[gap];
        for place in start..stop {
            while self.room[place] < nbytes {
                let lacking = nbytes - self.room[place];
                let Some(victim) = self.victim(order, place, lacking) else { return };
                self.remove(victim);
            }
        }
        self.add(gap);
        self.fill(order);
    }

    /// The kept gap over `place` to give up for `lacking` bytes: the smallest that is enough, else the largest.
    fn victim(&mut self, order: &[usize], place: usize, lacking: u64) -> Option<usize> {
        self.work = self.work.saturating_sub(order.len() as u64);
        let over = |gap: &Gap| gap.start <= place && place < gap.stop;
        let there = order.iter().copied().filter(|&gap| self.kept[gap] && over(&self.gaps[gap]));
        there.min_by_key(|&gap| {
            let nbytes = self.gaps[gap].nbytes;
            if nbytes >= lacking { (false, nbytes, Reverse(0)) } else { (true, 0, Reverse(nbytes)) }
        })
    }
}
