//! Laws of the schedules that adapt to costs: those on the V placement, those of two streams, and the synthesiser.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod bound;
mod dual;
mod laws;
mod optima;
mod v_shape;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use shardcore_plan::schedule::simulate::{Simulation, simulate};
use shardcore_plan::schedule::{CostSpec, Costs, Schedule};

/// A count of random cases: `some` in every run, `all` where `SHARDCORE_FULL=1` asks for the counts of the issue.
fn cases(some: u32, all: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "tests may ask how much to test")]
    let full = std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1");
    if full { all } else { some }
}

/// What `work` gives for every item, in their order; as many at once as there are cores.
#[expect(clippy::disallowed_methods, reason = "a test is no plan: it may use all cores")]
fn on_all_cores<T: Sync, R: Send>(items: &[T], work: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || {
        let at = next.fetch_add(1, Ordering::Relaxed);
        items.get(at).map(|item| (at, work(at, item)))
    };
    let num_threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut found: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..num_threads).map(|_| scope.spawn(|| std::iter::from_fn(take).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, result)| result).collect()
}

fn simulated(schedule: &Schedule, spec: &CostSpec) -> Simulation {
    simulate(schedule, &Costs::new(spec, schedule.placement(), 1).unwrap()).unwrap()
}

/// The most that any rank holds.
fn peak(run: &Simulation) -> f64 {
    run.peak.iter().copied().fold(0.0, f64::max)
}

/// Seeded random numbers (splitmix64): the same on every machine.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 32 random bits.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ (bits >> 31)) >> 32
    }

    /// A number in `[0, 1)`.
    fn unit(&mut self) -> f64 {
        f64::from(u32::try_from(self.next()).unwrap()) / 4_294_967_296.0
    }

    /// A whole number in `[0, bound)`.
    fn below(&mut self, bound: u32) -> u32 {
        u32::try_from((u64::from(bound) * self.next()) >> 32).unwrap()
    }

    /// Uneven stages, sometimes free ones, a latency, and sometimes a fused backward.
    fn costs(&mut self, stages: usize) -> CostSpec {
        let mut uneven = || -> Vec<f64> { (0..stages).map(|_| f64::from(1 + self.below(8)) * 0.25).collect() };
        let (forward, input, mut weight) = (uneven(), uneven(), uneven());
        if self.below(8) == 0 {
            weight[0] = 0.0;
        }
        let mut costs = CostSpec::default().with_hop(f64::from(self.below(5)) * 0.25);
        if self.below(4) == 0 {
            let fused = input.iter().zip(&weight).map(|(input, weight)| 0.9 * (input + weight));
            costs.fused_backward = Some(fused.collect::<Vec<f64>>().into());
        }
        (costs.forward, costs.input_grad, costs.weight_grad) = (forward.into(), input.into(), weight.into());
        costs
    }
}
