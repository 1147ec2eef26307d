//! Numbers as small whole numbers times a scale per block: symmetric, by the largest magnitude of the block.
//!
//! A block of [`BLOCK`] numbers has the scale `largest / 127` (int8) or `largest / 7` (int4), and a number becomes
//! `round(number x (127 / largest))`, ties to even. A block that holds an inf or NaN has the scale NaN: all of it reads
//! back as NaN, so that nothing non-finite is lost. Two int4 codes share a byte, the even element in the low half.
//!
//! What rounding takes away may be kept in a residual, which the next call adds to its numbers (error feedback: Seide et
//! al., "1-bit stochastic gradient descent", 2014, section 3).

use crate::batch::{self, Piece};
use crate::error::{KernelError, Result};
use crate::isa::{Isa, Work};
use crate::values::{Aligned, TILE, Tile, Values, ValuesMut};

/// Numbers that share a scale.
pub const BLOCK: usize = 2 * TILE;

type Block = [f32; BLOCK];

/// Added to a number below 2^22 and taken off again, it leaves the nearest whole number, ties to even; in between, the
/// low bits of the sum are that number in two's complement.
const ROUNDER: f32 = 12_582_912.0;

/// How many bits a code has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// -7 to 7, two codes in a byte.
    Four,
    /// -127 to 127.
    Eight,
}

impl Bits {
    /// Bytes of `numel` codes.
    #[must_use]
    pub fn code_nbytes(self, numel: usize) -> usize {
        if self == Self::Four { numel.div_ceil(2) } else { numel }
    }

    #[inline(always)]
    fn largest_code(self) -> f32 {
        if self == Self::Four { 7.0 } else { 127.0 }
    }
}

/// Scales of `numel` numbers.
#[must_use]
pub fn num_scales(numel: usize) -> usize {
    numel.div_ceil(BLOCK)
}

fn check(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(KernelError::QuantizedLength { what, expected, found }) }
}

/// Numbers that are ready to be quantised.
#[derive(Debug)]
pub struct Quantize<'a> {
    from: Values<'a>,
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    residual: Option<&'a mut [u16]>,
    bits: Bits,
}

impl<'a> Quantize<'a> {
    /// `from`, plus the bf16 `residual` where there is one, into `codes` and `scales`; the residual becomes what
    /// rounding took away (zero in a block that is not finite).
    ///
    /// # Errors
    /// [`KernelError::QuantizedLength`].
    pub fn new(
        from: Values<'a>,
        bits: Bits,
        codes: &'a mut [u8],
        scales: &'a mut [f32],
        residual: Option<&'a mut [u16]>,
    ) -> Result<Self> {
        check("the codes", bits.code_nbytes(from.numel()), codes.len())?;
        check("the scales", num_scales(from.numel()), scales.len())?;
        if let Some(residual) = &residual {
            check("the residuals", from.numel(), residual.len())?;
        }
        Ok(Self { from, codes, scales, residual, bits })
    }

    /// One block, of which `numel` numbers are real.
    #[inline(always)]
    fn block(&mut self, index: usize, block: &mut Block) {
        let start = index * BLOCK;
        let (tiles, _) = block.as_chunks_mut::<TILE>();
        let mut residual = Aligned([0.0; TILE]);
        for (tile, at) in tiles.iter_mut().zip([start, start + TILE]) {
            load(&self.from, at, tile);
            if let Some(bits) = &self.residual {
                load(&Values::Bf16(bits), at, &mut residual.0);
                for (value, &rest) in tile.iter_mut().zip(&residual.0) {
                    *value += rest;
                }
            }
        }
        let largest = largest_magnitude(block);
        let (scale, factor) = scale_of(largest, self.bits.largest_code());
        self.scales[index] = scale;
        let codes = codes_of(block, factor);
        put_codes(self.bits, self.codes, start, &codes.0);
        if let Some(bits) = &mut self.residual {
            for (value, &code) in block.iter_mut().zip(&codes.0) {
                let rest = *value - f32::from(code) * scale;
                *value = if scale.is_nan() { 0.0 } else { rest };
            }
            for (tile, at) in block.as_chunks::<TILE>().0.iter().zip([start, start + TILE]) {
                if at < bits.len() {
                    ValuesMut::Bf16(bits).store(at, tile, false);
                }
            }
        }
    }
}

/// Quantised numbers that are ready to be read back.
#[derive(Debug)]
pub struct Dequantize<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    bits: Bits,
    to: ValuesMut<'a>,
    add: bool,
}

impl<'a> Dequantize<'a> {
    /// Each code times the scale of its block, rounded to the format of `to`.
    ///
    /// # Errors
    /// [`KernelError::QuantizedLength`].
    pub fn new(bits: Bits, codes: &'a [u8], scales: &'a [f32], to: ValuesMut<'a>) -> Result<Self> {
        check("the codes", bits.code_nbytes(to.numel()), codes.len())?;
        check("the scales", num_scales(to.numel()), scales.len())?;
        Ok(Self { codes, scales, bits, to, add: false })
    }

    /// Adds to what the target holds.
    #[must_use]
    pub fn adding(self, add: bool) -> Self {
        Self { add, ..self }
    }
}

/// Quantises everything.
pub fn quantize(work: Vec<Quantize<'_>>, num_threads: usize) {
    quantize_with(work, num_threads, Isa::best());
}

/// The same with a given set of instructions.
pub fn quantize_with(work: Vec<Quantize<'_>>, num_threads: usize, isa: Isa) {
    batch::run(work, num_threads, isa);
}

/// Reads everything back.
pub fn dequantize(work: Vec<Dequantize<'_>>, num_threads: usize) {
    dequantize_with(work, num_threads, Isa::best());
}

/// The same with a given set of instructions.
pub fn dequantize_with(work: Vec<Dequantize<'_>>, num_threads: usize, isa: Isa) {
    batch::run(work, num_threads, isa);
}

impl Piece for Quantize<'_> {
    const QUANTUM: usize = BLOCK;

    fn numel(&self) -> usize {
        self.from.numel()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let bits = self.bits;
        let (from, from_back) = self.from.split_at(mid);
        let (codes, codes_back) = self.codes.split_at_mut(bits.code_nbytes(mid));
        let (scales, scales_back) = self.scales.split_at_mut(num_scales(mid));
        let (residual, residual_back) = self.residual.map(|residual| residual.split_at_mut(mid)).unzip();
        (
            Self { from, codes, scales, residual, bits },
            Self { from: from_back, codes: codes_back, scales: scales_back, residual: residual_back, bits },
        )
    }

    fn run(&mut self, isa: Isa) {
        isa.run(self);
    }
}

impl Work for &mut Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut block = Aligned([0.0; BLOCK]);
        for index in 0..self.scales.len() {
            self.block(index, &mut block.0);
        }
    }
}

impl Piece for Dequantize<'_> {
    const QUANTUM: usize = BLOCK;

    fn numel(&self) -> usize {
        self.to.numel()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let Self { bits, add, .. } = self;
        let (codes, codes_back) = self.codes.split_at(bits.code_nbytes(mid));
        let (scales, scales_back) = self.scales.split_at(num_scales(mid));
        let (to, to_back) = self.to.split_at(mid);
        (Self { codes, scales, bits, to, add }, Self { codes: codes_back, scales: scales_back, bits, to: to_back, add })
    }

    fn run(&mut self, isa: Isa) {
        isa.run(self);
    }
}

impl Work for &mut Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let numel = self.to.numel();
        let mut tile = Aligned([0.0; TILE]);
        let mut before = Aligned([0.0; TILE]);
        let mut start = 0;
        while start < numel {
            get_codes(self.bits, self.codes, start, &mut tile.0);
            let scale = self.scales[start / BLOCK];
            for value in &mut tile.0 {
                *value *= scale;
            }
            if self.add {
                self.to.load(start, &mut before.0);
                for (value, &old) in tile.0.iter_mut().zip(&before.0) {
                    *value += old;
                }
            }
            self.to.store(start, &tile.0, false);
            start += TILE;
        }
    }
}

/// The tile at `start`; zeros beyond the end.
#[inline(always)]
fn load(values: &Values<'_>, start: usize, tile: &mut Tile) {
    if start < values.numel() {
        values.load(start, 1.0, tile);
    } else {
        *tile = [0.0; TILE];
    }
}

/// The bits of the largest magnitude. As whole numbers they are ordered as the magnitudes are, with infinity above all
/// numbers and NaN above infinity.
#[inline(always)]
fn largest_magnitude(block: &Block) -> f32 {
    let mut lanes = [0_u32; 32];
    for row in block.as_chunks::<32>().0 {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane = (*lane).max(value.to_bits() & 0x7fff_ffff);
        }
    }
    f32::from_bits(lanes.into_iter().fold(0, u32::max))
}

/// The scale, and the factor that makes codes. The factor of numbers too small for it to be finite is the largest
/// number, so that zero stays zero.
#[inline(always)]
fn scale_of(largest: f32, largest_code: f32) -> (f32, f32) {
    if largest < f32::INFINITY {
        (largest / largest_code, (largest_code / largest).min(f32::MAX))
    } else {
        (f32::NAN, 0.0)
    }
}

#[inline(always)]
fn codes_of(block: &Block, factor: f32) -> Aligned<[i8; BLOCK]> {
    let mut codes = Aligned([0; BLOCK]);
    for (code, &value) in codes.0.iter_mut().zip(block) {
        // Of a block that is not finite, the low bits of NaN are dropped with the factor: its codes are zero.
        let value = if factor == 0.0 { 0.0 } else { value * factor };
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "the low byte is the code")]
        let low = (value + ROUNDER).to_bits() as i8;
        *code = low;
    }
    codes
}

#[inline(always)]
fn put_codes(bits: Bits, target: &mut [u8], start: usize, codes: &[i8; BLOCK]) {
    match bits {
        Bits::Eight => {
            let target = &mut target[start..];
            let count = target.len().min(BLOCK);
            for (byte, &code) in target[..count].iter_mut().zip(codes) {
                *byte = code.cast_unsigned();
            }
        }
        Bits::Four => {
            let target = &mut target[start / 2..];
            let count = target.len().min(BLOCK / 2);
            for (byte, pair) in target[..count].iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = (pair[0].cast_unsigned() & 15) | (pair[1].cast_unsigned() << 4);
            }
        }
    }
}

#[inline(always)]
fn get_codes(bits: Bits, codes: &[u8], start: usize, tile: &mut Tile) {
    match bits {
        Bits::Eight => {
            for (value, &byte) in tile.iter_mut().zip(&codes[start..]) {
                *value = f32::from(byte.cast_signed());
            }
        }
        Bits::Four => {
            for (pair, &byte) in tile.as_chunks_mut::<2>().0.iter_mut().zip(&codes[start / 2..]) {
                *pair = [f32::from((byte << 4).cast_signed() >> 4), f32::from(byte.cast_signed() >> 4)];
            }
        }
    }
}
