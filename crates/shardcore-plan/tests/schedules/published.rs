//! Bubbles that were published, and which schedule wins.

use shardcore_plan::schedule::CostSpec;
use shardcore_plan::schedule::generate::ScheduleName;

use crate::timed::{built, simulated};

/// p, m, (tF, tI, tW, c) in milliseconds, and the bubble rates of 1F1B, ZB-H1 and ZB-H2 over the span (Qi et al., "Zero
/// Bubble Pipeline Parallelism", 2024, table 5).
type Row = (u32, u32, [f64; 4], [f64; 3]);

const PUBLISHED: [Row; 6] = [
    (8, 24, [18.522, 18.086, 9.337, 0.601], [0.2431, 0.1585, 0.1083]),
    (8, 32, [18.513, 18.086, 9.331, 0.626], [0.1985, 0.1242, 0.0837]),
    (8, 64, [18.546, 18.097, 9.321, 0.762], [0.1240, 0.0674, 0.0444]),
    (16, 48, [11.347, 11.248, 8.132, 0.377], [0.2552, 0.1397, 0.0672]),
    (16, 64, [11.307, 11.254, 8.101, 0.379], [0.2082, 0.1088, 0.0516]),
    (16, 128, [11.325, 11.308, 8.109, 0.378], [0.1251, 0.0576, 0.0266]),
];

#[test]
fn published_bubble_rates_to_four_digits() {
    let names = [ScheduleName::OneForwardOneBackward, ScheduleName::ZbH1, ScheduleName::ZbH2];
    for (ranks, microbatches, [forward, input, weight, hop], expected) in PUBLISHED {
        let spec = CostSpec::uniform(forward, input, weight).with_hop(hop);
        for (name, rate) in names.into_iter().zip(expected) {
            let run = simulated(&built(name, ranks, microbatches, None), &spec);
            let work = f64::from(microbatches) * (forward + input + weight);
            let found = (run.span - work) / run.span;
            assert!((found - rate).abs() <= 0.000_05, "{} p={ranks} m={microbatches}: {found:.5}", name.name());
            assert!((found - run.bubble_span).abs() < 1e-9);
        }
    }
}

/// A column of the table of winners: a schedule, its chunks, and per case the bubbles over span and makespan in per
/// cent.
type Column = (ScheduleName, Option<u32>, [(f64, f64); 3]);

const fn both(percent: f64) -> (f64, f64) {
    (percent, percent)
}

const COLUMNS: [Column; 7] = [
    (ScheduleName::OneForwardOneBackward, None, [both(17.9), both(20.3), both(17.9)]),
    (ScheduleName::EagerOneForwardOneBackward, None, [both(17.9), both(18.4), both(17.9)]),
    (ScheduleName::Interleaved, Some(2), [both(9.9), both(11.1), both(9.9)]),
    (ScheduleName::Interleaved, Some(4), [both(5.2), both(8.0), both(5.2)]),
    (ScheduleName::ZbH1, None, [both(6.8), both(8.0), both(12.7)]),
    (ScheduleName::ZbH2, None, [(0.0, 6.8), (0.7, 7.1), both(9.9)]),
    (ScheduleName::InterleavedZb, Some(2), [both(3.5), both(5.2), both(6.8)]),
];

#[test]
fn which_schedule_wins_to_a_tenth_of_a_point() {
    let cases = [
        CostSpec::uniform(1.0, 1.0, 1.0),
        CostSpec::uniform(1.0, 1.0, 1.0).with_hop(0.05),
        CostSpec::uniform(2.0, 3.0, 1.0),
    ];
    let mut wrong = Vec::new();
    for (name, chunks, expected) in COLUMNS {
        for (case, (spec, (span, makespan))) in cases.iter().zip(expected).enumerate() {
            let run = simulated(&built(name, 8, 32, chunks), spec);
            let found = [100.0 * run.bubble_span, 100.0 * run.bubble_makespan];
            if (found[0] - span).abs() > 0.1 || (found[1] - makespan).abs() > 0.1 {
                wrong.push(format!("{} {chunks:?} case {case}: {found:.2?}, expected {span}/{makespan}", name.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
