//! Random bits from counters: the bits of an element depend on what is asked for, never on who asks first.
//!
//! The idea is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3: a keyed
//! function of a counter in place of a generator with a state. Rounding asks little of the function, so it is the
//! finaliser of `MurmurHash3` (Appleby, 2011), which vector units compute fast.

#![allow(clippy::cast_possible_truncation, reason = "halves of 64-bit words")]

/// A stream of random bits, one draw for each element of one tensor at one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The stream of one tensor at one step. Other arguments give streams that have nothing in common.
    #[must_use]
    pub fn new(seed: u64, tensor: u64, step: u64) -> Self {
        Self(mix64(mix64(mix64(seed) ^ tensor) ^ step))
    }

    /// 16 bits for each of the `2 * N` elements from `start` on, a multiple of `2 * N`: those of element `i` in the
    /// lower half of word `i`, those of element `N + i` in the upper half.
    #[inline(always)]
    pub(crate) fn fill<const N: usize>(self, start: u64, words: &mut [u32; N]) {
        let block = start / (2 * N as u64);
        let key = mix64(self.0 ^ (block >> 26));
        let counter = (block as u32).wrapping_mul(N as u32) ^ key as u32;
        for (index, word) in words.iter_mut().enumerate() {
            *word = mix32((counter ^ index as u32).wrapping_add((key >> 32) as u32));
        }
    }
}

/// `MurmurHash3`'s finaliser for 32 bits: a bijection, each output bit of which depends on each input bit.
#[inline(always)]
fn mix32(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// The same for 64 bits. The increment keeps zero from being a fixed point.
#[inline(always)]
fn mix64(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(stream: Stream, start: u64, numel: u64) -> Vec<u32> {
        let mut found = Vec::new();
        for block in (start..start + numel).step_by(64) {
            let mut words = [0; 32];
            stream.fill(block, &mut words);
            found.extend(words.iter().map(|word| word & 0xffff));
            found.extend(words.iter().map(|word| word >> 16));
        }
        found
    }

    #[test]
    fn bits_are_uniform() {
        let found = draws(Stream::new(1, 2, 3), (1 << 32) - 32_000, 64_000);
        let mean = found.iter().map(|&bits| f64::from(bits)).sum::<f64>() / 64_000.0 / 65_536.0;
        // A draw has variance 1/12: four standard deviations of the mean of 64,000.
        assert!((mean - 0.5).abs() < 0.0046, "{mean}");
        for bit in 0..16 {
            let ones = found.iter().filter(|&&bits| bits >> bit & 1 == 1).count();
            assert!(ones.abs_diff(32_000) < 510, "bit {bit}: {ones} of 64000");
        }
    }

    #[test]
    fn streams_and_far_elements_have_nothing_in_common() {
        let first = draws(Stream::new(0, 0, 0), 0, 6_400);
        for (stream, start) in [
            (Stream::new(1, 0, 0), 0),
            (Stream::new(0, 1, 0), 0),
            (Stream::new(0, 0, 1), 0),
            (Stream::new(0, 0, 0), 6_400),
            (Stream::new(0, 0, 0), 1 << 32),
        ] {
            let other = draws(stream, start, 6_400);
            let equal = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(equal < 5, "{equal} of 6400 draws are equal");
        }
    }
}
