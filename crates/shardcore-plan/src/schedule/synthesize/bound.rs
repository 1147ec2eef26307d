//! A certified lower bound: no schedule of the same placement, costs and caps takes less.
//!
//! The bound is the largest over all ranks of two arguments, and of the way of a single micro-batch through the
//! pipeline and back. Each holds for every order; that micro-batches keep theirs is not assumed.
//!
//! **Work and unavoidable idle time.** A rank computes all its work. Besides, it is idle
//!
//! 1. before its first input could have come (makespan only);
//! 2. between its first forward and its first backward, which some micro-batch must travel to the last stage and back
//!    to allow. Meanwhile the rank can do forwards only, at most those whose activations fit under its cap;
//! 3. after its last forward, whose micro-batch must travel to the last stage and back, and on for a makespan to the
//!    first stage. Meanwhile the rank can only do backwards of what it holds then, which fits under its cap; and after
//!    its last backward only weight gradients whose stashes do.
//!
//! If the rank cannot hold all micro-batches at once, its last forward comes after its first backward, so 2 and 3 do not
//! overlap and add up; else the larger one counts. How much work fits under a cap is bounded by the fractional knapsack.
//!
//! **Turnover of memory.** A micro-batch occupies its activations on a rank at least for its way to the last stage and
//! back, and, with a split backward, its stash at least while the weight gradient runs. All micro-batches together
//! occupy so much memory times time. The rank has its cap times the span, except while memory fills, one forward after
//! another, and while it empties, one backward after another.

use std::ops::Range;

use super::super::list::{Objective, OpKind, Problem};

/// The least that any schedule takes.
pub(super) fn lower_bound(problem: &Problem, objective: Objective) -> f64 {
    let (problem, unit) = in_units(problem);
    let bound = Bound::new(&problem, objective);
    let ranks = (0..problem.num_ranks).map(|rank| bound.of_rank(rank));
    let path = match objective {
        Objective::Makespan => bound.forward_path(0..problem.num_stages()) + bound.way_back(problem.num_stages(), 0),
        Objective::Span => 0.0,
    };
    ranks.fold(path, f64::max) * unit
}

/// More than any sum of scaled times, and far from overflow in every product.
const ENDLESS: f64 = 1e30;

/// The same problem with the longest time and each rank's largest size near 1, and the unit of its times.
fn in_units(problem: &Problem) -> (Problem, f64) {
    let mut problem = problem.clone();
    let [forward, grad, weight, fused] = &mut problem.time;
    // A backward in one piece may be much longer than all else without ever being made.
    let unit = unit_of(forward.iter().chain(&*grad).chain(&*weight).chain(&problem.hop_before));
    for times in [forward, grad, weight, &mut problem.hop_before] {
        for time in times {
            *time /= unit;
        }
    }
    for time in fused {
        *time = (*time / unit).min(ENDLESS);
    }
    for (rank, stages) in problem.stages_of.iter().enumerate() {
        let unit = unit_of(stages.iter().flat_map(|&stage| [&problem.activation[stage], &problem.stash[stage]]));
        for &stage in stages {
            problem.activation[stage] /= unit;
            problem.stash[stage] /= unit;
        }
        problem.cap[rank] /= unit;
    }
    (problem, unit)
}

/// The power of two below the largest number, as far as its inverse is one too: division by it is exact.
fn unit_of<'a>(numbers: impl Iterator<Item = &'a f64>) -> f64 {
    const MANTISSA: u32 = 52;
    const LARGEST: u64 = 1000;
    const BIAS: u64 = 1023;
    let largest = numbers.copied().fold(0.0, f64::max);
    let exponent = (largest.to_bits() >> MANTISSA).clamp(BIAS - LARGEST, BIAS + LARGEST);
    f64::from_bits(exponent << MANTISSA)
}

struct Bound<'a> {
    problem: &'a Problem,
    is_makespan: bool,
    num_microbatches: f64,
}

/// Something a rank may do while it waits: how long it takes, how much memory it needs, and how often it is there.
#[derive(Clone, Copy)]
struct Item {
    time: f64,
    memory: f64,
}

impl<'a> Bound<'a> {
    #[expect(clippy::cast_precision_loss, reason = "at most 2^24 micro-batches")]
    fn new(problem: &'a Problem, objective: Objective) -> Self {
        let num_microbatches = problem.num_microbatches as f64;
        Self { problem, is_makespan: objective == Objective::Makespan, num_microbatches }
    }

    fn of_rank(&self, rank: usize) -> f64 {
        let stages = &self.problem.stages_of[rank];
        let (Some(&first), Some(&last)) = (stages.first(), stages.last()) else { return 0.0 };
        // From the first forward's start: through the rank's own stages, on to the last stage and back.
        let to_backward = self.forward_path(first..last + 1) + self.trip(last);
        let warm_up = to_backward - self.most_work(rank, Self::forwards);
        let cool_down = self.idle_after_last_forward(rank, first, last);
        let (warm_up, cool_down) = (warm_up.max(0.0), cool_down.max(0.0));
        let all: f64 = stages.iter().map(|&stage| self.num_microbatches * self.problem.activation[stage]).sum();
        let idle = if all > self.problem.cap[rank] { warm_up + cool_down } else { warm_up.max(cool_down) };
        let head = if self.is_makespan { self.head(first) } else { 0.0 };
        head + (self.num_microbatches * self.problem.work(rank) + idle).max(self.turnover(rank))
    }

    /// When a stage's first input can be there.
    fn head(&self, stage: usize) -> f64 {
        self.forward_path(0..stage) + self.problem.hop_before[stage]
    }

    /// Time of the forwards of consecutive stages with the hops between them.
    fn forward_path(&self, stages: Range<usize>) -> f64 {
        let hops: f64 = stages.clone().skip(1).map(|stage| self.problem.hop_before[stage]).sum();
        hops + stages.map(|stage| self.problem.time_of(OpKind::Forward, stage)).sum::<f64>()
    }

    /// Time of what must be done of a stage's backward before the stage below can go on.
    fn grad(&self, stage: usize) -> f64 {
        let [_, split, _, fused] = &self.problem.time;
        split[stage].min(fused[stage])
    }

    /// From the end of a stage's forward to the start of its backward.
    fn trip(&self, stage: usize) -> f64 {
        let beyond = stage + 1..self.problem.num_stages();
        let there_and_back = |stage: usize| {
            2.0 * self.problem.hop_before[stage] + self.problem.time_of(OpKind::Forward, stage) + self.grad(stage)
        };
        beyond.map(there_and_back).sum()
    }

    /// From the start of the backward of stage `from - 1` to the end of the whole backward of stage `to`.
    fn way_back(&self, from: usize, to: usize) -> f64 {
        let above = (to + 1..from).map(|stage| self.grad(stage) + self.problem.hop_before[stage]);
        above.sum::<f64>() + self.problem.least_backward(to)
    }

    /// How long a rank idles between its last forward and its end; negative where it need not.
    fn idle_after_last_forward(&self, rank: usize, first: usize, last: usize) -> f64 {
        let to_own_end = self.trip(last) + self.way_back(last + 1, first);
        let most = self.most_work(rank, Self::backwards);
        if !self.is_makespan || first == 0 {
            return to_own_end - most;
        }
        let after = self.problem.hop_before[first] + self.way_back(first, 0);
        let to_end = to_own_end - self.problem.least_backward(first) + self.grad(first) + after;
        (to_own_end.max(to_end) - most).max(after - self.most_work(rank, Self::weight_grads))
    }

    /// The memory times time that all micro-batches occupy on a rank, and what stays empty while it fills and empties,
    /// over its cap.
    fn turnover(&self, rank: usize) -> f64 {
        let problem = self.problem;
        // Filling with all micro-batches and emptying take no longer than the work, so one ends before the other begins.
        let all: f64 = problem.stages_of[rank].iter().map(|&stage| self.most_held(stage)).sum();
        let cap = self.usable_cap(rank).min(self.num_microbatches * all);
        if !cap.is_finite() || cap <= 0.0 {
            return 0.0;
        }
        let occupied = |&stage: &usize| {
            let way = problem.time_of(OpKind::Forward, stage) + self.trip(stage);
            let (activation, stash) = (problem.activation[stage], problem.stash[stage]);
            let split = activation * (way + problem.time[1][stage]) + stash * problem.time[2][stage];
            let fused = activation * (way + problem.time[3][stage]);
            split.min(fused)
        };
        let occupied = self.num_microbatches * problem.stages_of[rank].iter().map(occupied).sum::<f64>();
        (occupied + self.ramp(rank, cap, Self::filling) + self.ramp(rank, cap, Self::emptying)) / cap
    }

    /// The most that a micro-batch holds on a stage.
    fn most_held(&self, stage: usize) -> f64 {
        self.problem.activation[stage].max(self.problem.stash[stage])
    }

    /// What a micro-batch adds on a stage at most, and in which time at least.
    fn filling(&self, stage: usize) -> [Item; 2] {
        let time = self.problem.time_of(OpKind::Forward, stage);
        [Item { time, memory: self.most_held(stage) }, Item { time: 0.0, memory: 0.0 }]
    }

    /// What is freed by the whole backward of an activation held, or by the weight gradient of a stash held, and in which
    /// time at least.
    fn emptying(&self, stage: usize) -> [Item; 2] {
        let [_, grad, weight, fused] = self.problem.time.each_ref().map(|times| times[stage]);
        let whole = Item { time: fused.min(grad + weight), memory: self.most_held(stage) };
        [whole, Item { time: weight, memory: self.problem.stash[stage] }]
    }

    /// The memory times time that stays empty until a rank holds `cap`, if it does one item after another, each of which
    /// has its memory from its start on. Read from the end, a rank that empties does the same.
    fn ramp(&self, rank: usize, cap: f64, items: impl Fn(&Self, usize) -> [Item; 2]) -> f64 {
        let stages = self.problem.stages_of[rank].iter();
        let items = stages.flat_map(|&stage| items(self, stage)).filter(|item| item.memory > 0.0);
        let (mut largest, mut smallest, mut shortest, mut pace) =
            (0.0_f64, f64::INFINITY, f64::INFINITY, f64::INFINITY);
        for Item { time, memory } in items {
            (largest, smallest) = (largest.max(memory), smallest.min(memory));
            (shortest, pace) = (shortest.min(time), pace.min(time / memory));
        }
        if smallest.total_cmp(&largest).is_eq() {
            // Steps of equal height: the k-th item starts after k of at least the shortest.
            let steps = (cap / largest).floor();
            return largest * shortest * (steps * (steps - 1.0) / 2.0).max(0.0);
        }
        let rest = (cap - largest).max(0.0);
        if pace.is_finite() { pace * rest * rest / 2.0 } else { 0.0 }
    }

    /// Of a cap, what can be used: a multiple where all sizes are equal.
    fn usable_cap(&self, rank: usize) -> f64 {
        let cap = self.problem.cap[rank];
        let stages = &self.problem.stages_of[rank];
        let mut sizes = stages.iter().flat_map(|&stage| [self.problem.activation[stage], self.problem.stash[stage]]);
        match sizes.next() {
            Some(size) if size > 0.0 && sizes.all(|other| other.total_cmp(&size).is_eq()) => {
                (cap / size).floor() * size
            }
            _ => cap,
        }
    }

    fn forwards(&self, stage: usize) -> [Item; 2] {
        let item = Item { time: self.problem.time_of(OpKind::Forward, stage), memory: self.problem.activation[stage] };
        [item, Item { time: 0.0, memory: 0.0 }]
    }

    /// A whole backward of an activation held, or the weight gradient of a stash held.
    fn backwards(&self, stage: usize) -> [Item; 2] {
        let [_, grad, weight, fused] = self.problem.time.each_ref().map(|times| times[stage]);
        let whole = fused.max(grad + weight);
        let [stashed, _] = self.weight_grads(stage);
        [Item { time: whole, memory: self.problem.activation[stage] }, stashed]
    }

    fn weight_grads(&self, stage: usize) -> [Item; 2] {
        let time = self.problem.time_of(OpKind::WeightGrad, stage);
        [Item { time, memory: self.problem.stash[stage] }, Item { time: 0.0, memory: 0.0 }]
    }

    /// The most time that a rank can spend on items whose memory fits under its cap: the fractional knapsack, with as
    /// many of each item as there are micro-batches.
    fn most_work(&self, rank: usize, items: impl Fn(&Self, usize) -> [Item; 2]) -> f64 {
        let stages = self.problem.stages_of[rank].iter();
        let mut items: Vec<Item> =
            stages.flat_map(|&stage| items(self, stage)).filter(|item| item.time > 0.0).collect();
        items.sort_by(|a, b| (b.time * a.memory).total_cmp(&(a.time * b.memory)));
        let (mut free, mut total) = (self.usable_cap(rank), 0.0);
        for Item { time, memory } in items {
            let fits = if memory > 0.0 { (free / memory).min(self.num_microbatches) } else { self.num_microbatches };
            total += fits * time;
            if memory > 0.0 {
                free = (free - fits * memory).max(0.0);
            }
        }
        total
    }
}
