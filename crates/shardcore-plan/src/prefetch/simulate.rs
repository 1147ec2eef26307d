//! How long a step would take, and how much of it would wait for gathers.

use crate::error::Result;
use crate::prefetch::plan::Gather;
use crate::prefetch::trace::{Seconds, Trace};

/// What a gather takes: a latency and a time for each byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Seconds before the first byte.
    pub latency: Seconds,
    /// Seconds for each byte of the gathered unit.
    pub per_byte: Seconds,
}

impl Cost {
    /// The cost for when none is known: gathering a unit of average size takes as long as an average use.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate of time")]
    pub fn balanced(trace: &Trace) -> Self {
        let seconds: f64 = trace.uses().iter().map(|used| used.seconds.get()).sum();
        let nbytes: u64 = trace.uses().iter().map(|used| trace.nbytes(used.unit)).sum();
        let per_byte = if nbytes == 0 { 0.0 } else { seconds / nbytes as f64 };
        Self { latency: Seconds::ZERO, per_byte: Seconds::saturating(per_byte) }
    }

    /// A cost of `latency` seconds and `bandwidth` bytes a second.
    ///
    /// # Errors
    /// [`PlanError::BadTime`](crate::PlanError::BadTime) unless the latency is finite and not negative, and the
    /// bandwidth above 0.
    pub fn new(latency: f64, bandwidth: f64) -> Result<Self> {
        Ok(Self { latency: Seconds::new(latency)?, per_byte: Seconds::new(1.0 / bandwidth)? })
    }

    #[expect(clippy::cast_precision_loss, reason = "an estimate of time")]
    fn of(self, nbytes: u64) -> f64 {
        self.latency.get() + self.per_byte.get() * nbytes as f64
    }
}

/// How a step runs: one stream computes, another runs the gathers one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Simulation {
    /// For each use how long it waits for its unit.
    pub stalls: Vec<Seconds>,
    /// From the start of the first gather to the end of the last use.
    pub makespan: Seconds,
}

impl Simulation {
    /// All waiting: the part of the gathers that computation does not hide.
    #[must_use]
    pub fn exposed(&self) -> f64 {
        self.stalls.iter().map(|stall| stall.get()).sum()
    }
}

/// Runs a step with these gathers.
pub(crate) fn simulate(trace: &Trace, cost: Cost, gathers: &[Gather]) -> Simulation {
    let mut stalls = Vec::with_capacity(trace.uses().len());
    let (mut now, mut stream_free) = (0.0_f64, 0.0_f64);
    let mut done = Vec::with_capacity(gathers.len());
    let mut needed = gathers.iter().enumerate().peekable();
    for (index, used) in trace.uses().iter().enumerate() {
        while let Some(gather) = gathers.get(done.len()).filter(|gather| gather.start <= index) {
            stream_free = stream_free.max(now) + cost.of(trace.nbytes(gather.unit));
            done.push(stream_free);
        }
        let ready = needed.next_if(|(_, gather)| gather.need == index).map_or(now, |(gather, _)| done[gather]);
        let stall = (ready - now).max(0.0);
        stalls.push(Seconds::saturating(stall));
        now += stall + used.seconds.get();
    }
    Simulation { stalls, makespan: Seconds::saturating(now) }
}
