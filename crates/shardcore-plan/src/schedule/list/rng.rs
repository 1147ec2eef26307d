//! A small seeded generator of random numbers: the same numbers on every platform.

/// The xorshift64* generator (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled", 2016).
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number in `0..bound`; 0 for no bound.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let bound = u32::try_from(bound).unwrap_or(u32::MAX);
        ((u64::from(bound) * (self.next() >> 32)) >> 32) as usize
    }

    /// A number in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        let [_, _, _, high @ ..] = self.next().to_le_bytes();
        let [a, b, c, d, _] = high;
        f64::from(u32::from_le_bytes([a, b, c, d])) / 4_294_967_296.0
    }
}
