//! Slices of numbers in fp32, bf16 or fp16, read and written one tile at a time.
//!
//! A full tile of fp32 is worked on where it lies; every other one passes through a buffer on the stack, which stays in
//! the first-level cache. The last, shorter tile is filled up with zeros there: it runs through the same code, so an
//! element's result never depends on where in a slice it stands.

use crate::half;
use crate::random::Stream;

/// Elements worked on before the next stream of memory is touched: eight vectors of 512 bits of each stream in a row,
/// which lets the memory controller stay within its open pages, while all buffers of a tile fit the first-level cache.
pub(crate) const TILE: usize = 128;

pub(crate) type Tile = [f32; TILE];

type HalfTile = [u16; TILE];

/// A tile on the stack. Vectors that straddled two cache lines would miss the forwarding of stores to loads.
#[repr(align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

/// Numbers to read. 16-bit numbers are given as their bits.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // The variants are their names.
pub enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
}

impl Values<'_> {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        match self {
            Self::F32(slice) => slice.len(),
            Self::Bf16(slice) | Self::F16(slice) => slice.len(),
        }
    }

    /// The elements before `mid` and those from there on.
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        fn halves<'a, T, V>(slice: &'a [T], mid: usize, variant: impl Fn(&'a [T]) -> V) -> (V, V) {
            let (front, back) = slice.split_at(mid);
            (variant(front), variant(back))
        }
        match self {
            Self::F32(slice) => halves(slice, mid, Self::F32),
            Self::Bf16(slice) => halves(slice, mid, Self::Bf16),
            Self::F16(slice) => halves(slice, mid, Self::F16),
        }
    }

    /// The tile that begins at `start`, times `scale`.
    #[inline(always)]
    pub(crate) fn load(&self, start: usize, scale: f32, tile: &mut Tile) {
        match self {
            Self::F32(slice) => {
                let mut buffer = Aligned([0.0; TILE]);
                zip(tile, whole(slice, start, &mut buffer.0), |x| x * scale);
            }
            Self::Bf16(slice) => {
                let mut buffer = Aligned([0; TILE]);
                zip(tile, whole(slice, start, &mut buffer.0), |x| half::bf16_to_f32(x) * scale);
            }
            Self::F16(slice) => {
                let mut buffer = Aligned([0; TILE]);
                zip(tile, whole(slice, start, &mut buffer.0), |x| half::f16_to_f32(x) * scale);
            }
        }
    }
}

/// Numbers to write. 16-bit numbers are given as their bits.
#[derive(Debug)]
#[allow(missing_docs)] // The variants are their names.
pub enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    F16(&'a mut [u16]),
}

impl ValuesMut<'_> {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        match self {
            Self::F32(slice) => slice.len(),
            Self::Bf16(slice) | Self::F16(slice) => slice.len(),
        }
    }

    /// The elements before `mid` and those from there on.
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::F32(slice) => halves_mut(slice, mid, Self::F32),
            Self::Bf16(slice) => halves_mut(slice, mid, Self::Bf16),
            Self::F16(slice) => halves_mut(slice, mid, Self::F16),
        }
    }

    /// The tile at `start`, to be read.
    #[inline(always)]
    pub(crate) fn load(&self, start: usize, tile: &mut Tile) {
        match self {
            Self::F32(slice) => Values::F32(slice).load(start, 1.0, tile),
            Self::Bf16(slice) => Values::Bf16(slice).load(start, 1.0, tile),
            Self::F16(slice) => Values::F16(slice).load(start, 1.0, tile),
        }
    }

    /// Writes the tile at `start`, rounded to nearest; the part of it beyond the end is dropped. `streaming` sends
    /// 16-bit numbers to memory past the caches.
    #[inline(always)]
    pub(crate) fn store(&mut self, start: usize, tile: &Tile, streaming: bool) {
        match self {
            Self::F32(slice) => put(slice, start, tile),
            Self::Bf16(slice) => put_half(slice, start, &mapped(tile, half::f32_to_bf16).0, streaming),
            Self::F16(slice) => put_half(slice, start, &mapped(tile, half::f32_to_f16).0, streaming),
        }
    }
}

/// How a number becomes a bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// To either neighbour at random, so that the mean is right; the bits come from this stream.
    Stochastic(Stream),
}

/// One state of an optimizer.
#[derive(Debug)]
pub enum StateMut<'a> {
    /// In full.
    F32(&'a mut [f32]),
    /// The bits of bf16 numbers, and how they are rounded when they are written back.
    Bf16(&'a mut [u16], Rounding),
}

impl StateMut<'_> {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        match self {
            Self::F32(slice) => slice.len(),
            Self::Bf16(slice, _) => slice.len(),
        }
    }

    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::F32(slice) => halves_mut(slice, mid, Self::F32),
            Self::Bf16(slice, rounding) => halves_mut(slice, mid, |part| Self::Bf16(part, rounding)),
        }
    }

    /// The tile at `start`, to be worked on: in place, or in `buffer`, which `close` then writes back.
    #[inline(always)]
    pub(crate) fn open<'t>(&'t mut self, start: usize, buffer: &'t mut Tile) -> &'t mut Tile {
        match self {
            Self::F32(slice) => open(slice, start, buffer),
            Self::Bf16(slice, _) => {
                let mut bits = Aligned([0; TILE]);
                zip(buffer, whole(slice, start, &mut bits.0), half::bf16_to_f32);
                buffer
            }
        }
    }

    /// Ends what `open` began. `index` is the place of `start` in the whole tensor.
    #[inline(always)]
    pub(crate) fn close(&mut self, start: usize, buffer: &Tile, index: u64) {
        match self {
            Self::F32(slice) => close(slice, start, buffer),
            Self::Bf16(slice, Rounding::Nearest) => put(slice, start, &mapped(buffer, half::f32_to_bf16).0),
            Self::Bf16(slice, Rounding::Stochastic(stream)) => {
                let mut random = Aligned([0; TILE / 2]);
                stream.fill(index, &mut random.0);
                let mut bits = Aligned([0; TILE]);
                let (lower, upper) = bits.0.split_at_mut(TILE / 2);
                let (lower_values, upper_values) = buffer.split_at(TILE / 2);
                for (index, &word) in random.0.iter().enumerate() {
                    lower[index] = half::f32_to_bf16_stochastic(lower_values[index], word & 0xffff);
                    upper[index] = half::f32_to_bf16_stochastic(upper_values[index], word >> 16);
                }
                put(slice, start, &bits.0);
            }
        }
    }
}

/// The parameter, in the form in which its full precision is kept.
#[derive(Debug)]
pub enum ParamMut<'a> {
    /// fp32 numbers, and a 16-bit copy of them that is written in the same pass.
    F32 {
        /// The parameter.
        values: &'a mut [f32],
        /// Where the copy goes; rounded to nearest.
        copy: Option<ValuesMut<'a>>,
    },
    /// A bf16 parameter and the 16 bits that it lacks: see [`half::split`].
    Split {
        /// The bf16 numbers, as their bits.
        high: &'a mut [u16],
        /// What they lack.
        low: &'a mut [u16],
    },
}

impl ParamMut<'_> {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        match self {
            Self::F32 { values, .. } => values.len(),
            Self::Split { high, .. } => high.len(),
        }
    }

    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::F32 { values, copy } => {
                let (values, values_back) = values.split_at_mut(mid);
                let (copy, copy_back) = copy.map(|copy| copy.split_at(mid)).unzip();
                (Self::F32 { values, copy }, Self::F32 { values: values_back, copy: copy_back })
            }
            Self::Split { high, low } => {
                let (high, high_back) = high.split_at_mut(mid);
                let (low, low_back) = low.split_at_mut(mid);
                (Self::Split { high, low }, Self::Split { high: high_back, low: low_back })
            }
        }
    }

    /// As [`StateMut::open`].
    #[inline(always)]
    pub(crate) fn open<'t>(&'t mut self, start: usize, buffer: &'t mut Tile) -> &'t mut Tile {
        match self {
            Self::F32 { values, .. } => open(values, start, buffer),
            Self::Split { high, low } => {
                let (mut high_bits, mut low_bits) = (Aligned([0; TILE]), Aligned([0; TILE]));
                let (high, low) = (whole(high, start, &mut high_bits.0), whole(low, start, &mut low_bits.0));
                for ((slot, &high), &low) in buffer.iter_mut().zip(high).zip(low) {
                    *slot = half::join(high, low);
                }
                buffer
            }
        }
    }

    /// As [`StateMut::close`]; also writes the copy.
    #[inline(always)]
    pub(crate) fn close(&mut self, start: usize, buffer: &mut Tile, streaming: bool) {
        match self {
            Self::F32 { values, copy } => {
                close(values, start, buffer);
                if let Some(copy) = copy {
                    copy.store(start, open(values, start, buffer), streaming);
                }
            }
            Self::Split { high, low } => {
                let (mut high_bits, mut low_bits) = (Aligned([0; TILE]), Aligned([0; TILE]));
                for ((high, low), &value) in high_bits.0.iter_mut().zip(&mut low_bits.0).zip(buffer.iter()) {
                    (*high, *low) = half::split(value);
                }
                put(high, start, &high_bits.0);
                put(low, start, &low_bits.0);
            }
        }
    }
}

fn halves_mut<'a, T, V>(slice: &'a mut [T], mid: usize, variant: impl Fn(&'a mut [T]) -> V) -> (V, V) {
    let (front, back) = slice.split_at_mut(mid);
    (variant(front), variant(back))
}

/// The tile at `start` where it lies, or, of a shorter rest, a copy of it.
#[inline(always)]
fn whole<'t, T: Copy>(slice: &'t [T], start: usize, buffer: &'t mut [T; TILE]) -> &'t [T; TILE] {
    let rest = &slice[start..];
    if let Some(tile) = rest.first_chunk() {
        return tile;
    }
    buffer[..rest.len()].copy_from_slice(rest);
    buffer
}

#[inline(always)]
fn open<'t>(slice: &'t mut [f32], start: usize, buffer: &'t mut Tile) -> &'t mut Tile {
    let rest = &mut slice[start..];
    if rest.len() < TILE {
        *buffer = [0.0; TILE];
        buffer[..rest.len()].copy_from_slice(rest);
        return buffer;
    }
    rest.first_chunk_mut().unwrap_or(buffer)
}

/// Writes a shorter rest back from the buffer that [`open`] gave out for it.
#[inline(always)]
fn close(slice: &mut [f32], start: usize, buffer: &Tile) {
    if slice.len() - start < TILE {
        put(slice, start, buffer);
    }
}

/// Writes as much of the tile as fits.
#[inline(always)]
fn put<T: Copy>(slice: &mut [T], start: usize, tile: &[T; TILE]) {
    let rest = &mut slice[start..];
    if let Some(place) = rest.first_chunk_mut() {
        *place = *tile;
    } else {
        let numel = rest.len();
        rest.copy_from_slice(&tile[..numel]);
    }
}

#[inline(always)]
fn put_half(slice: &mut [u16], start: usize, tile: &HalfTile, streaming: bool) {
    #[cfg(target_arch = "x86_64")]
    if streaming && let Some(place) = slice[start..].first_chunk_mut() {
        return stream(place, tile);
    }
    put(slice, start, tile);
}

/// Writes past the caches: a copy that nobody reads soon need not push out what is read next, and its lines need not be
/// fetched before they are overwritten. Whoever streams calls [`fence`] before others may read.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(clippy::cast_ptr_alignment, reason = "checked, or loaded unaligned")]
fn stream(place: &mut HalfTile, tile: &HalfTile) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let target = place.as_mut_ptr().cast::<__m128i>();
    if !target.is_aligned() {
        *place = *tile;
        return;
    }
    let source = tile.as_ptr().cast::<__m128i>();
    for vector in 0..size_of::<HalfTile>() / size_of::<__m128i>() {
        // SAFETY: both arrays hold that many vectors, `target` is aligned, and SSE2 is part of x86-64. No one reads
        // `place` before the fence: the borrow lasts until the pass, which ends with one, is over.
        unsafe { _mm_stream_si128(target.add(vector), _mm_loadu_si128(source.add(vector))) };
    }
}

/// Makes streamed writes visible to other threads in order.
pub(crate) fn fence() {
    // SAFETY: SSE is part of x86-64, and the instruction touches no memory.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[inline(always)]
fn zip<T: Copy>(tile: &mut Tile, source: &[T; TILE], function: impl Fn(T) -> f32) {
    for (slot, &value) in tile.iter_mut().zip(source) {
        *slot = function(value);
    }
}

#[inline(always)]
fn mapped(tile: &Tile, function: impl Fn(f32) -> u16) -> Aligned<HalfTile> {
    let mut bits = Aligned([0; TILE]);
    for (slot, &value) in bits.0.iter_mut().zip(tile) {
        *slot = function(value);
    }
    bits
}
