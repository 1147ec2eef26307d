//! CRC-32 (that of zlib, IEEE 802.3) of every block of a piece, taken while its bytes pass.
//!
//! A CRC finds every damage within any 32 bits in a row, so every flipped byte, and any other with a chance of one in
//! 2^32 to be missed. Blocks let a reader check a part of a large piece without reading all of it.

use crc32fast::Hasher;

/// Bytes of a block; the last of a piece is shorter.
pub const BLOCK_NBYTES: u64 = 4 << 20;

/// The checksums of a stream of bytes, one for each block.
#[derive(Debug)]
pub struct Sums {
    block_nbytes: u64,
    hasher: Hasher,
    in_block: u64,
    ended: Vec<u32>,
}

impl Sums {
    /// Nothing has passed yet.
    #[must_use]
    pub fn new(block_nbytes: u64) -> Self {
        Self { block_nbytes, hasher: Hasher::new(), in_block: 0, ended: Vec::new() }
    }

    /// The next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = usize::try_from(self.block_nbytes - self.in_block).unwrap_or(usize::MAX);
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.hasher.update(now);
            self.in_block += now.len() as u64;
            bytes = rest;
            if self.in_block == self.block_nbytes {
                self.end_block();
            }
        }
    }

    /// The sums of all blocks.
    #[must_use]
    pub fn finish(mut self) -> Vec<u32> {
        if self.in_block > 0 {
            self.end_block();
        }
        self.ended
    }

    fn end_block(&mut self) {
        self.ended.push(std::mem::take(&mut self.hasher).finalize());
        self.in_block = 0;
    }
}

/// The CRC-32 of these bytes.
#[must_use]
pub fn sum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// How many blocks so many bytes have.
#[must_use]
pub fn num_blocks(nbytes: u64, block_nbytes: u64) -> u64 {
    nbytes.div_ceil(block_nbytes)
}

/// Sums as text: eight hexadecimal digits each, one behind the other.
#[must_use]
pub fn to_text(sums: &[u32]) -> String {
    sums.iter().fold(String::with_capacity(sums.len() * 8), |text, sum| text + &format!("{sum:08x}"))
}

/// The `number`-th sum of such a text.
#[must_use]
pub fn from_text(text: &str, number: u64) -> Option<u32> {
    let start = usize::try_from(number).ok()?.checked_mul(8)?;
    u32::from_str_radix(text.get(start..start.checked_add(8)?)?, 16).ok()
}
