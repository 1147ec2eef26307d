//! Every generated schedule passes the checker and equals its closed form, in exact arithmetic.

#![allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]

use proptest::prelude::*;
use shardcore_plan::schedule::check;
use shardcore_plan::schedule::generate::{ChunkCount, ScheduleName};
use shardcore_plan::schedule::simulate::peaks;
use shardcore_plan::schedule::{CostSpec, Schedule};

use crate::timed::{built, costs_of, count, simulated};

/// The shape and the costs of one case: whole numbers that the number of chunks divides.
#[derive(Clone, Debug)]
struct Case {
    name: ScheduleName,
    ranks: u32,
    microbatches: u32,
    chunks: u32,
    forward: u32,
    input: u32,
    weight: u32,
}

impl Case {
    fn schedule(&self) -> Schedule {
        let any = self.name.num_chunks() == ChunkCount::Any;
        built(self.name, self.ranks, self.microbatches, any.then_some(self.chunks))
    }

    fn spec(&self) -> CostSpec {
        let [forward, input, weight] = [self.forward, self.input, self.weight].map(f64::from);
        CostSpec::uniform(forward, input, weight)
    }

    /// The bubble over makespan (over span for ZB-H2), where the form is valid.
    ///
    /// The form of ZB-H1 has a floor that the papers leave out: no rank behind the first starts at once, so the
    /// makespan has (p-1) tF of bubble even if the weight gradients would fill more.
    fn bubble(&self) -> Option<u32> {
        let Self { ranks, microbatches, chunks, forward, input, weight, .. } = *self;
        let whole = forward + input + weight;
        let floor = forward + input.saturating_sub(forward.min(weight));
        let rounds = microbatches.is_multiple_of(ranks);
        let (per_rank, valid) = match self.name {
            ScheduleName::Gpipe | ScheduleName::OneForwardOneBackward | ScheduleName::EagerOneForwardOneBackward => {
                return Some((ranks - 1) * whole);
            }
            ScheduleName::Interleaved => (whole, rounds),
            ScheduleName::LoopedBfs => {
                // With fewer micro-batches than ranks, each chunk waits for the round to come back.
                let waits = (chunks - 1) * ranks.saturating_sub(microbatches);
                return Some((ranks - 1 + waits) * whole / chunks);
            }
            ScheduleName::ZbH1 => return (microbatches >= ranks).then_some((ranks - 1) * floor),
            ScheduleName::InterleavedZb => (floor, rounds),
            ScheduleName::ZbH2 => {
                let bubble = (forward + input).saturating_sub(2 * forward.min(weight));
                return (microbatches >= 2 * ranks - 1).then_some((ranks - 1) * bubble);
            }
            _ => (whole, true),
        };
        valid.then_some((ranks - 1) * per_rank / chunks)
    }

    /// Whether the peaks are reached: a short last group of an interleaved schedule may take less.
    fn is_tight(&self) -> bool {
        let grouped = matches!(self.name, ScheduleName::Interleaved | ScheduleName::InterleavedZb);
        !grouped || self.microbatches.is_multiple_of(self.ranks)
    }

    /// The peak of a rank in chunks.
    fn peak(&self, rank: u32) -> u32 {
        let Self { ranks, microbatches, chunks, .. } = *self;
        let behind = ranks - 1 - rank;
        let all = microbatches * chunks;
        match self.name {
            ScheduleName::Gpipe => microbatches,
            ScheduleName::LoopedBfs => all,
            ScheduleName::OneForwardOneBackward => microbatches.min(behind + 1),
            ScheduleName::EagerOneForwardOneBackward => microbatches.min(2 * behind + 1),
            ScheduleName::Interleaved => all.min(2 * behind + (chunks - 1) * ranks + 1),
            ScheduleName::ZbH1 => microbatches.min(ranks),
            ScheduleName::InterleavedZb => all.min(chunks * ranks),
            ScheduleName::ZbH2 => microbatches.min(2 * ranks - 1),
            _ => all.min(behind + chunks),
        }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let name = prop::sample::select(ScheduleName::CLOSED.to_vec());
    // Nothing, equal, and ratios of a thousand.
    let cost = prop::sample::select(vec![0_u32, 1, 1, 2, 3, 7, 1000]);
    let counts = (1_u32..=9, 1_u32..=24, 1_u32..=4);
    (name, counts, (cost.clone(), cost.clone(), cost)).prop_map(|(name, counts, costs)| {
        let (ranks, microbatches, chunks) = counts;
        let chunks = if name.num_chunks() == ChunkCount::Any { chunks } else { 1 };
        let [forward, input, weight] = [costs.0, costs.1, costs.2].map(|cost| cost * chunks);
        Case { name, ranks, microbatches, chunks, forward, input, weight }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(count(1_000, 20_000)) })]

    #[test]
    fn generated_schedules_equal_their_closed_forms(case in any_case()) {
        let schedule = case.schedule();
        prop_assert!(check::check(&schedule).is_ok(), "{}", check::check(&schedule).unwrap_err());
        let run = simulated(&schedule, &case.spec());
        let work = f64::from(case.microbatches * (case.forward + case.input + case.weight));
        let total = if case.name == ScheduleName::ZbH2 { run.span } else { run.makespan };
        if let Some(bubble) = case.bubble() {
            prop_assert_eq!(total - work, f64::from(bubble));
        }
        prop_assert!(run.makespan >= run.span && run.span >= work);
        prop_assert!(run.busy.iter().all(|&busy| busy == work));
        let costs = costs_of(&schedule, &case.spec());
        prop_assert_eq!(&run.peak, &peaks(&schedule, &costs).unwrap());
        for (rank, &peak) in (0..).zip(&run.peak) {
            let expected = f64::from(case.peak(rank)) / f64::from(case.chunks);
            prop_assert!(peak <= expected + 1e-12, "rank {}: {} and {}", rank, peak, expected);
            if case.is_tight() {
                prop_assert!((peak - expected).abs() < 1e-12, "rank {}: {} and {}", rank, peak, expected);
            }
        }
        let highest = run.peak.iter().copied().fold(0.0, f64::max);
        prop_assert!(check::memory(&schedule, highest, &costs).is_ok());
        prop_assert!(check::memory(&schedule, highest - 0.1, &costs).is_err());
    }
}

#[test]
fn a_hop_adds_what_the_oracle_says() {
    let hop = 0.25; // Small, and exact in binary like all that follows.
    let unit = CostSpec::uniform(48.0, 48.0, 48.0);
    let added = |name, ranks, microbatches, chunks| {
        let schedule = built(name, ranks, microbatches, chunks);
        simulated(&schedule, &unit.clone().with_hop(hop)).makespan - simulated(&schedule, &unit).makespan
    };
    for ranks in 2..=8_u32 {
        for rounds in 2..=4_u32 {
            let microbatches = ranks * rounds;
            let case = format!("p={ranks} m={microbatches}");
            let hops = |count: u32| f64::from(count) * hop;
            let ends = hops(2 * (ranks - 1));
            assert_eq!(added(ScheduleName::Gpipe, ranks, microbatches, None), ends, "gpipe {case}");
            assert_eq!(
                added(ScheduleName::EagerOneForwardOneBackward, ranks, microbatches, None),
                ends,
                "eager {case}"
            );
            assert_eq!(added(ScheduleName::ZbH1, ranks, microbatches, None), 2.0 * ends, "zb-h1 {case}");
            let turns = hops(2 * rounds * (ranks - 1) + 2 * (ranks - 2));
            assert_eq!(added(ScheduleName::OneForwardOneBackward, ranks, microbatches, None), turns, "1f1b {case}");
            for chunks in 2..=4 {
                let rounds = hops(2 * (ranks * chunks - 1));
                let found = added(ScheduleName::Interleaved, ranks, microbatches, Some(chunks));
                assert_eq!(found, rounds, "interleaved {case} v={chunks}");
            }
        }
    }
}
