//! What a rank shows its peers: the addresses it has published, and how far it has pulled.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::system;

/// Exchanges that may be under way at once.
pub(crate) const NUM_SLOTS: usize = 64;
/// What a peer reads from this rank's memory, to see whether it may.
pub(crate) const GREETING: u64 = 0x7368_6172_6463_6f72;

/// Shared memory: written by its own rank, read by all. All zeros at first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Block {
    bell: AtomicU32,
    _padding: AtomicU32,
    pulled: AtomicU64,
    slots: [Slot; NUM_SLOTS],
}

/// One published exchange. `turn` is its number plus one, written last.
#[derive(Debug)]
#[repr(C)]
struct Slot {
    turn: AtomicU64,
    tag: AtomicU64,
    address: AtomicU64,
    nbytes: AtomicU64,
}

/// What a rank gives away in one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) tag: u64,
    pub(crate) address: u64,
    pub(crate) nbytes: u64,
}

impl Block {
    /// Shows peers what exchange `sequence` reads. The slot must be free: exchange `sequence - NUM_SLOTS` is complete.
    pub(crate) fn publish(&self, sequence: u64, offer: Offer) {
        let slot = self.slot(sequence);
        slot.tag.store(offer.tag, Ordering::Relaxed);
        slot.address.store(offer.address, Ordering::Relaxed);
        slot.nbytes.store(offer.nbytes, Ordering::Relaxed);
        slot.turn.store(sequence + 1, Ordering::Release);
        system::ring(&self.bell);
    }

    /// What this rank gives away in exchange `sequence`; None if it has not come there.
    pub(crate) fn offer(&self, sequence: u64) -> Option<Offer> {
        let slot = self.slot(sequence);
        (slot.turn.load(Ordering::Acquire) == sequence + 1).then(|| Offer {
            tag: slot.tag.load(Ordering::Relaxed),
            address: slot.address.load(Ordering::Relaxed),
            nbytes: slot.nbytes.load(Ordering::Relaxed),
        })
    }

    /// Number of exchanges of which this rank has read all it needs.
    pub(crate) fn num_pulled(&self) -> u64 {
        self.pulled.load(Ordering::Acquire)
    }

    pub(crate) fn set_num_pulled(&self, count: u64) {
        self.pulled.store(count, Ordering::Release);
        system::ring(&self.bell);
    }

    pub(crate) fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below NUM_SLOTS")]
    fn slot(&self, sequence: u64) -> &Slot {
        let turn = sequence % NUM_SLOTS as u64;
        &self.slots[turn as usize]
    }
}
