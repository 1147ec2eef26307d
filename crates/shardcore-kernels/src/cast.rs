//! Conversions between fp32, bf16 and fp16, rounded to nearest, ties to even.

use crate::batch::{self, Piece};
use crate::error::{KernelError, Result};
use crate::isa::{Isa, Work};
use crate::values::{Aligned, TILE, Values, ValuesMut};

/// A conversion that is ready to be made.
#[derive(Debug)]
pub struct Cast<'a> {
    from: Values<'a>,
    to: ValuesMut<'a>,
    scale: f32,
}

impl<'a> Cast<'a> {
    /// Each number times `scale`, in fp32, in the format of `to`.
    ///
    /// # Errors
    /// [`KernelError::LengthMismatch`].
    pub fn new(from: Values<'a>, to: ValuesMut<'a>, scale: f32) -> Result<Self> {
        if from.numel() == to.numel() {
            return Ok(Self { from, to, scale });
        }
        Err(KernelError::LengthMismatch { what: "the target of a cast", expected: from.numel(), found: to.numel() })
    }
}

/// Makes all conversions.
pub fn cast(casts: Vec<Cast<'_>>, num_threads: usize) {
    cast_with(casts, num_threads, Isa::best());
}

/// The same with a given set of instructions.
pub fn cast_with(casts: Vec<Cast<'_>>, num_threads: usize, isa: Isa) {
    batch::run(casts, num_threads, isa);
}

impl Piece for Cast<'_> {
    const QUANTUM: usize = TILE;

    fn numel(&self) -> usize {
        self.from.numel()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (from, from_back) = self.from.split_at(mid);
        let (to, to_back) = self.to.split_at(mid);
        (Self { from, to, ..self }, Self { from: from_back, to: to_back, scale: self.scale })
    }

    fn run(&mut self, isa: Isa) {
        isa.run(self);
    }
}

impl Work for &mut Cast<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let numel = self.from.numel();
        let mut tile = Aligned([0.0; TILE]);
        let mut start = 0;
        while start < numel {
            self.from.load(start, self.scale, &mut tile.0);
            self.to.store(start, &tile.0, false);
            start += TILE;
        }
    }
}
