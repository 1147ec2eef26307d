//! A stable fingerprint of a schedule.

use super::SCHEDULE_FORMAT;
use crate::digest::Encoder;
use crate::schedule::action::Action;
use crate::schedule::lower::Lowering;
use crate::schedule::program::Schedule;

impl Schedule {
    /// SHA-256 of the schedule as 64 hexadecimal digits. Equal schedules have equal digests, on every platform.
    #[must_use]
    pub fn digest(&self) -> String {
        let header = self.header();
        let mut encoder = Encoder::new(SCHEDULE_FORMAT);
        encoder.text(&header.name);
        encoder.number(header.num_microbatches.into());
        encoder.number(header.num_slices.into());
        encoder.number(header.placement.num_chains().into());
        encoder.numbers(header.placement.ranks());
        encoder.text(header.gating.name());
        encoder.text(header.comm.name());
        encoder.count(usize::from(self.is_lowered()));
        self.lowering().into_iter().for_each(|lowering| encode_lowering(&mut encoder, lowering));
        encoder.count(self.programs().len());
        for program in self.programs() {
            encoder.count(program.len());
            for actions in program.chunks(1024) {
                encoder.bytes(&actions.iter().flat_map(action_bytes).collect::<Vec<u8>>());
            }
        }
        encoder.finish()
    }
}

fn encode_lowering(encoder: &mut Encoder, lowering: &Lowering) {
    encoder.number(lowering.zero_stage.map_or(u64::MAX, u64::from));
    encoder.text(lowering.reduce.name());
    encoder.text(lowering.optimizer.name());
    encoder.count(lowering.tied.len());
    lowering.tied.iter().for_each(|group| encoder.numbers(group));
    encoder.number(lowering.most_receives_ahead().into());
    encoder.number(lowering.max_unsharded.into());
}

/// The 12 bytes of an action, little endian.
fn action_bytes(action: &Action) -> [u8; 12] {
    let [slot, stage, microbatch] = [action.slot.into(), action.stage, action.microbatch].map(u32::to_le_bytes);
    let mut bytes = [0; 12];
    bytes[0] = action.kind as u8;
    bytes[1] = action.with_next.into();
    bytes[2..4].copy_from_slice(&slot[..2]);
    bytes[4..8].copy_from_slice(&stage);
    bytes[8..].copy_from_slice(&microbatch);
    bytes
}
