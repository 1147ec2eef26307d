//! A stable fingerprint of a plan: SHA-256 over a canonical binary encoding, the same on every platform.

use std::fmt::Write as _;
use std::num::NonZeroU64;

use sha2::{Digest as _, Sha256};

use crate::layout::FlatLayout;
use crate::shard_plan::ShardPlan;

/// Feeds a plan to the hash. Numbers are 8 bytes, little endian; a string or a list stands behind its length, so no
/// two plans have the same encoding.
pub(crate) struct Encoder(Sha256);

impl Encoder {
    pub(crate) fn new(kind: &str) -> Self {
        let mut encoder = Self(Sha256::new());
        encoder.text(kind);
        encoder
    }

    pub(crate) fn number(&mut self, value: u64) {
        self.0.update(value.to_le_bytes());
    }

    pub(crate) fn count(&mut self, value: usize) {
        self.number(value as u64);
    }

    pub(crate) fn text(&mut self, value: &str) {
        self.count(value.len());
        self.0.update(value.as_bytes());
    }

    pub(crate) fn numbers(&mut self, values: &[u32]) {
        self.count(values.len());
        for &value in values {
            self.number(value.into());
        }
    }

    /// Bytes whose number is known from what stands before.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn layout(&mut self, layout: &FlatLayout) {
        self.text(layout.dtype().name());
        self.number(layout.trainable().into());
        self.number(layout.num_shards());
        self.number(layout.sharding().alignment());
        self.number(layout.padded_numel());
        self.count(layout.entries().len());
        for entry in layout.entries() {
            self.text(&entry.name);
            self.number(entry.numel);
            self.number(entry.offset);
        }
    }

    pub(crate) fn finish(self) -> String {
        self.0.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}"); // Writing to a String cannot fail.
            hex
        })
    }
}

impl FlatLayout {
    /// SHA-256 of the layout as 64 hexadecimal digits. Equal layouts have equal digests, on every platform.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut encoder = Encoder::new(crate::json::LAYOUT_FORMAT);
        encoder.layout(self);
        encoder.finish()
    }
}

impl ShardPlan {
    /// SHA-256 of the plan as 64 hexadecimal digits. Equal plans have equal digests, on every platform.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut encoder = Encoder::new(crate::json::PLAN_FORMAT);
        encoder.number(self.sharding().num_shards());
        encoder.number(self.sharding().alignment());
        encoder.number(self.segment_nbytes().map_or(0, NonZeroU64::get));
        encoder.count(self.units().len());
        self.units().iter().for_each(|name| encoder.text(name));
        encoder.count(self.groups().len());
        for group in self.groups() {
            encoder.count(group.unit);
            encoder.layout(&group.layout);
        }
        encoder.count(self.reduce_order().len());
        self.reduce_order().iter().for_each(|&index| encoder.count(index));
        encoder.finish()
    }
}
