//! Sums of squares that do not depend on the number of threads or on the vector width.
//!
//! Floating-point addition is not associative, so the order is fixed: a tensor is cut into blocks, a block is summed in
//! 32 lanes (element `i` goes to lane `i mod 32`), the lanes are added pairwise, and the blocks one after the other. All
//! in fp64, in which the square of no fp32 overflows: the sum is finite exactly when all elements are.

use crate::batch::{self, Piece};
use crate::isa::{Isa, Work};
use crate::values::{Aligned, TILE, Values};

const LANES: usize = 32;
const BLOCK: usize = 64 * TILE;

/// The sum of squares of each slice; inf or NaN where one of its elements is.
#[must_use]
pub fn sums_of_squares(slices: &[Values<'_>], num_threads: usize) -> Vec<f64> {
    sums_with(slices, num_threads, Isa::best())
}

/// The same with a given set of instructions.
#[must_use]
pub fn sums_with(slices: &[Values<'_>], num_threads: usize, isa: Isa) -> Vec<f64> {
    let num_blocks = |values: &Values<'_>| values.numel().div_ceil(BLOCK);
    let mut blocks = vec![0.0; slices.iter().map(num_blocks).sum()];
    let mut rest = blocks.as_mut_slice();
    let mut work = Vec::with_capacity(slices.len());
    for &values in slices {
        let (sums, others) = std::mem::take(&mut rest).split_at_mut(num_blocks(&values));
        work.push(Blocks { values, sums });
        rest = others;
    }
    batch::run(work, num_threads, isa);
    let mut sums = blocks.iter();
    slices.iter().map(|values| sums.by_ref().take(num_blocks(values)).sum()).collect()
}

struct Blocks<'a> {
    values: Values<'a>,
    sums: &'a mut [f64],
}

impl Piece for Blocks<'_> {
    const QUANTUM: usize = BLOCK;

    fn numel(&self) -> usize {
        self.values.numel()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (values, values_back) = self.values.split_at(mid);
        let (sums, sums_back) = self.sums.split_at_mut(mid / BLOCK);
        (Self { values, sums }, Self { values: values_back, sums: sums_back })
    }

    fn run(&mut self, isa: Isa) {
        isa.run(self);
    }
}

impl Work for &mut Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let numel = self.values.numel();
        let mut tile = Aligned([0.0; TILE]);
        for (block, sum) in self.sums.iter_mut().enumerate() {
            let mut lanes = Aligned([0.0; LANES]);
            let mut start = block * BLOCK;
            while start < numel.min((block + 1) * BLOCK) {
                self.values.load(start, 1.0, &mut tile.0);
                add_squares(&mut lanes.0, &tile.0);
                start += TILE;
            }
            *sum = pairwise(lanes.0);
        }
    }
}

#[inline(always)]
fn add_squares(lanes: &mut [f64; LANES], tile: &[f32; TILE]) {
    for row in tile.as_chunks::<LANES>().0 {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            let value = f64::from(value);
            *lane += value * value;
        }
    }
}

#[inline(always)]
fn pairwise(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
